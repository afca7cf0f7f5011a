"""Every engine's id and the module that holds it. Imports no engine: an id is enough to list, store and compare.

What an engine can do, and when it competes, it says itself (`convoy.engines.base.Engine`).

Ids are never reused: one that is withdrawn moves to `RETIRED`, with the reason, and rows and plans that name it fall back
to the baseline with that reason in the report.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache
from typing import Final

from convoy.engines.base import Engine
from convoy.errors import InputError, unknown_name

MANIFEST: Final[dict[str, str]] = {
    "aten": "convoy.engines.library.aten",
    "reference": "convoy.engines.reference",
    "inductor": "convoy.engines.library.inductor",
    "inductor.whole": "convoy.engines.library.inductor_whole",
    "cudnn": "convoy.engines.library.cudnn",
    "foreach": "convoy.engines.library.foreach",
    "onednn": "convoy.engines.library.onednn",
    "gemm": "convoy.engines.algorithms.gemm",
    "pointwise": "convoy.engines.library.pointwise",
    "winograd2": "convoy.engines.algorithms.winograd2",
    "winograd4": "convoy.engines.algorithms.winograd4",
    "fft": "convoy.engines.algorithms.fft",
    "fft_tiled": "convoy.engines.algorithms.fft_tiled",
    "zeroskip.cpu": "convoy.engines.sparse_activations.zeroskip_cpu",
    "zeroskip.channels": "convoy.engines.sparse_activations.zeroskip_channels",
    "zeroskip.ecr": "convoy.engines.sparse_activations.zeroskip_ecr",
    "zeroskip.gather": "convoy.engines.sparse_activations.zeroskip_gather",
    "zeroskip.blocks": "convoy.engines.sparse_activations.zeroskip_blocks",
    "cpu.direct": "convoy.engines.cpu.cpu_direct",
    "cpu.direct_bf16": "convoy.engines.cpu.bf16.cpu_direct_bf16",
    "cpu.depthwise": "convoy.engines.cpu.cpu_depthwise",
    "cpu.grouped": "convoy.engines.cpu.grouped.cpu_grouped",
    "cpu.pooling": "convoy.engines.cpu.cpu_pooling",
    "cpu.concat": "convoy.engines.cpu.cpu_concat",
    "cpu.layout": "convoy.engines.cpu.cpu_layout",
    "cpu.scale": "convoy.engines.cpu.cpu_scale",
    "cpu.layer_norm": "convoy.engines.cpu.cpu_layer_norm",
    "cpu.group_norm": "convoy.engines.cpu.cpu_group_norm",
    "cpu.winograd": "convoy.engines.cpu.cpu_winograd",
    "cpu.banded": "convoy.engines.cpu.chains.cpu_banded",
    "cpu.gated_1x1": "convoy.engines.cpu.chains.cpu_gated_1x1",
    "cpu.depthwise_mean": "convoy.engines.cpu.chains.cpu_depthwise_mean",
    "pruned.c": "convoy.engines.sparse_weights.pruned_c",
    "pruned.csr": "convoy.engines.sparse_weights.pruned_csr",
    "pruned.channels": "convoy.engines.sparse_weights.pruned_channels",
    "pruned.cuda": "convoy.engines.sparse_weights.pruned_cuda",
    "pruned.sparse24": "convoy.engines.sparse_weights.sparse24",
    "pruned.blocks": "convoy.engines.sparse_weights.block_sparse",
    "pruned.channels_gpu": "convoy.engines.sparse_weights.pruned_channels_gpu",
    "pruned.direct": "convoy.engines.sparse_weights.pruned_direct",
    "triton.implicit_gemm": "convoy.engines.triton.triton_implicit_gemm",
    "triton.conv3d": "convoy.engines.triton.volumes.triton_conv3d",
    "triton.swapped": "convoy.engines.triton.triton_igemm_swap_ab",
    "triton.pointwise": "convoy.engines.triton.triton_pointwise",
    "triton.pooled": "convoy.engines.triton.pooling.pooled",
    "triton.pooling": "convoy.engines.triton.pooling.triton_pooling",
    "triton.pool_backward": "convoy.engines.triton.pooling.pool_backward",
    "triton.batch_norm": "convoy.engines.triton.batch_norm",
    "triton.group_norm": "convoy.engines.triton.triton_group_norm",
    "triton.stem": "convoy.engines.triton.triton_stem",
    "triton.depthwise": "convoy.engines.triton.triton_depthwise",
    "triton.gemv": "convoy.engines.triton.gemv",
    "triton.split_fp32": "convoy.engines.triton.triton_split_fp32",
    "triton.persistent": "convoy.engines.triton.persistent",
    "triton.merged": "convoy.engines.triton.merged",
    "triton.dgrad": "convoy.engines.triton.triton_dgrad",
    "triton.wgrad": "convoy.engines.triton.triton_wgrad",
    "triton.stem_wgrad": "convoy.engines.triton.stem_wgrad",
    "triton.depthwise_gradients": "convoy.engines.triton.depthwise_gradients",
    "cuda.implicit_gemm": "convoy.engines.hopper.igemm",
    "cuda.swapped": "convoy.engines.hopper.igemm_swap_ab",
    "cuda.split_fp32": "convoy.engines.hopper.igemm_split_fp32",
    "cuda.fresh": "convoy.engines.hopper.igemm_dynamic_weight",
    "cuda.dgrad": "convoy.engines.hopper.igemm_dgrad",
    "cuda.bottleneck": "convoy.engines.hopper.chains.bottleneck",
    "cuda.inverted_residual": "convoy.engines.hopper.chains.inverted_residual",
    "cuda.expand_depthwise": "convoy.engines.hopper.chains.expand_depthwise",
    "cuda.squeeze_excitation": "convoy.engines.gates.squeeze_excitation",
    "cuda.gated_1x1": "convoy.engines.gates.gated_1x1",
    "cuda.fusion": "convoy.engines.fusion.fusion",
    "cuda.layout": "convoy.engines.fusion.layout_copy",
    "cuda.wgrad": "convoy.engines.hopper.igemm_wgrad",
    "cuda.first_layer": "convoy.engines.hopper.first_layer",
    "cuda.first_layer_tf32": "convoy.engines.hopper.first_layer_tf32",
    "cuda.depthwise": "convoy.engines.hopper.depthwise_registers",
    "cuda.depthwise_tile": "convoy.engines.hopper.depthwise_shared",
    "batches": "convoy.engines.delegating.micro_batched",
}
"""Engine id → module with an `ENGINE`; the order in which engines are listed."""

RETIRED: Final[dict[str, str]] = {
    "cuda.stem": "cuda.first_layer, cuda.first_layer_tf32 or triton.stem is faster on every layer measured on an H100",
    "padded": "other kernels are faster on every layer measured on an H100",
}
"""Withdrawn id → why. An engine retires when no device's rows show it more than 3 % ahead of the others."""

LISTED_BY: Final = "`convoy engines` lists them."
"""What an error says to somebody who named no engine."""

BASELINE: Final = "aten"
"""What PyTorch does today: always competes."""


def engine_ids(extra: Iterable[str] = ()) -> list[str]:
    """All ids, those of `extra` entries (`id=module:Class`) last."""
    return list(dict.fromkeys([*MANIFEST, *(entry.partition("=")[0] for entry in extra)]))


def entry(engine: str) -> str:
    """`id=module:ENGINE`: an entry of `Settings.engines`, by which an engine competes that is not offered by default."""
    return f"{engine}={MANIFEST[engine]}:ENGINE"


@cache
def load_engine(engine: str, extra: tuple[str, ...] = ()) -> Engine:
    """Import an engine by id; raises InputError for an unknown or withdrawn one, and for an extra one that is no engine."""
    for entry in extra:
        name, _, location = entry.partition("=")
        if name == engine:
            return _load_extra(engine, location)
    if engine in RETIRED:
        raise InputError("engine", engine, "an engine that is still there", f"It was withdrawn: {RETIRED[engine]}")
    if engine not in MANIFEST:
        raise unknown_name("engine", engine, engine_ids(extra), LISTED_BY)
    found = importlib.import_module(MANIFEST[engine]).ENGINE
    if not isinstance(found, Engine) or found.id != engine:
        raise InputError("engine", engine, f"an ENGINE with that id in {MANIFEST[engine]}")
    return found


def _load_extra(engine: str, location: str) -> Engine:
    """An engine of the user's own: `module:Class` (or `module:INSTANCE`)."""
    module, _, attribute = location.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        made = found() if isinstance(found, type) else found
    except Exception as error:  # the user's own code may fail in any way; the traceback stays attached as the cause
        expected, says = "an engine that can be imported", f"{type(error).__name__}: {error}"
        raise InputError("engine", engine, expected, f"Importing {location} says {says}.") from error
    if not isinstance(made, Engine):
        raise InputError("engine", engine, f"an Engine at {location}, not a {type(made).__name__}")
    if made.id != engine and engine not in MANIFEST:  # a stand-in for one of Convoy's own may be any engine
        raise InputError("engine", engine, f"the id that {location} has, {made.id!r}", "Rows and plans go by it.")
    return made
