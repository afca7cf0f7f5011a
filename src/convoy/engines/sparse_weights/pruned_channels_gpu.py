"""pruned.channels_gpu: what `pruned.channels` does, on a GPU: a dense convolution of the filters and channels that are left.

The inner convolution is PyTorch's, cuDNN's best plan or a kernel of ours, in its favourite setting that wants no workspace.
"""

from __future__ import annotations

from convoy.engines.sparse_weights.pruned_channels import PrunedChannels


class PrunedChannelsGpu(PrunedChannels):
    """Any forward convolution without groups whose mask has dead filters or channels."""

    id = "pruned.channels_gpu"
    devices = ("cuda",)
    trusted = False
    inner = ("aten", "cudnn", "triton.persistent", "cuda.implicit_gemm", "triton.swapped", "triton.split_fp32")


ENGINE = PrunedChannelsGpu()
