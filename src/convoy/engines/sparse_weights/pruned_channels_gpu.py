"""pruned.channels_gpu: `pruned.channels` on a GPU: a dense convolution of the remaining filters and channels.

The smaller convolution is computed by PyTorch, cuDNN's best plan or one of Convoy's kernels, each with its first knobs that
need no workspace.
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
