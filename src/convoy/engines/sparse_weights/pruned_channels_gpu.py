"""pruned.channels_gpu: `pruned.channels` on a GPU: a dense convolution of the remaining filters and channels.

The smaller convolution is computed by PyTorch, cuDNN's best plan or one of Convoy's kernels, each with its first knobs that
need no workspace.
"""

from __future__ import annotations

from convoy.engines.hopper import igemm
from convoy.engines.library import aten, cudnn
from convoy.engines.sparse_weights.pruned_channels import PrunedChannels
from convoy.engines.triton import persistent, triton_igemm_swap_ab, triton_split_fp32


class PrunedChannelsGpu(PrunedChannels):
    """Any forward convolution without groups whose mask has dead filters or channels."""

    id = "pruned.channels_gpu"
    devices = ("cuda",)
    trusted = False
    inner = tuple(
        engine.ENGINE.id for engine in (aten, cudnn, persistent, igemm, triton_igemm_swap_ab, triton_split_fp32)
    )


ENGINE = PrunedChannelsGpu()
