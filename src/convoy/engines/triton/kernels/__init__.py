"""The Triton kernels; each module imports triton, so engines import these modules only when they build."""
