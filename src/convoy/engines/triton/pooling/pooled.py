"""triton.pooled: convolution, bias, residual, activation and pooling at the speed of the dense kernels (docs/kernels/triton.md).

The dense kernels of `triton.split_fp32` (strict fp32), `triton.swapped`, `triton.persistent` (half types, TF32) and `triton.stem`
(few channels), with the pooling where their sums are:

- in registers, where windows do not overlap and divide the tile's box;
- where the parts of a split reduction are added, for any window;
- else by one pass over the convolution's result, as dense as the kernel made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from convoy.engines.base import Engine, Executable
from convoy.engines.gpu.device_tensors import descriptor
from convoy.engines.gpu.gpu_support_checks import is_strict
from convoy.engines.triton import persistent, triton_igemm_swap_ab, triton_implicit_gemm, triton_split_fp32, triton_stem
from convoy.engines.triton.igemm_swap_ab_launch import TritonSwapABExecutable, box_type
from convoy.engines.triton.marking_executables import UNMARKED
from convoy.engines.triton.persistent import PersistentExecutable, PersistentTile
from convoy.engines.triton.pooling.conv_then_pool import ConvThenPool, conv_then_pool_scratch
from convoy.engines.triton.pooling.pool_pass import ReduceWindows, window_support
from convoy.engines.triton.pooling.pool_windows import fits, tiles_windows, unpooled, window_box
from convoy.engines.triton.triton_build import KernelBuild
from convoy.engines.triton.triton_split_fp32 import TritonSplitFp32Executable
from convoy.engines.triton.triton_stem import TritonStemExecutable
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, conv_view
from convoy.problem import ConvProblem, Knobs, Pool, Problem
from convoy.support import Support
from convoy.target import Target

_NOT_HERE = ("SPLIT", "SWAPPED", "PARTS", *UNMARKED)
"""Constants of the dense kernels that the pooled ones do not have."""

_MANY = 128 * 128
"""Results a multiprocessor from which blocks that stay are tried: on an H100 they won at batch 32 from 14x14x512 on."""

_FORMS = 12
"""Settings tried of `triton.persistent`: the best of the first four is 2.5 % behind the best of twelve."""

_PASS_US, _PASS_BYTES_US = 1.2, 2.2e6
"""A pass over memory: its launch, and bytes a microsecond."""


class _PoolingPass(TritonSwapABExecutable):
    """Changes a dense executable so that it pools: at the kernel's end, or where the partial sums are added."""

    problem: ConvProblem

    @property
    def pool(self) -> Pool:
        """The pooling; problems without are refused."""
        assert self.problem.epilogue.pool is not None
        return self.problem.epilogue.pool

    @property
    def pooled_box(self) -> list[int]:
        """Block of y's descriptor where the box is pooled in registers."""
        tile, pool = self.tile, self.pool
        return [tile.block_n, tile.block_h // pool.window_h, tile.block_w // pool.window_w, tile.block_k]

    def _build(self, engine: str, dtype: str) -> KernelBuild:
        build = super()._build(engine, dtype)
        if self.splits > 1:
            return build
        from convoy.engines.triton.kernels.persistent_kernel import persistent_conv  # pyright: ignore[reportUnknownVariableType]
        from convoy.engines.triton.kernels.pooled_kernels import pooled_persistent, pooled_split, pooled_swapped  # pyright: ignore[reportUnknownVariableType]
        from convoy.engines.triton.kernels.split_fp32_kernels import split_conv  # pyright: ignore[reportUnknownVariableType]

        pool = self.pool
        constants = {name: value for name, value in build.constants.items() if name not in _NOT_HERE}
        constants |= {"WINDOW_H": pool.window_h, "WINDOW_W": pool.window_w, "AVERAGE": pool.kind == "avg"}
        configs: dict[Any, Any] = {
            split_conv: pooled_split,
            persistent_conv: pooled_persistent,
        }
        function = configs.get(build.function, pooled_swapped)
        signature = {**build.signature, "y": box_type(dtype, self.pooled_box)}
        return replace(build, function=function, signature=signature, constants=constants)

    def reduction(self, engine: str, target: Target) -> Any:
        """Adds the parts and pools."""
        n, k, p, q = self.problem.conv_spec.shape
        return ReduceWindows(engine, (n, k, p, q), self.splits, ("fp32", self.dtype), self.epilogue, target)

    def y_descriptor(self, y: torch.Tensor) -> Any:
        """The result after the pooling."""
        view = self.view
        height, width = self.pool.size(view.p, view.q)
        return descriptor(y, [view.n, height, width, view.k], self.pooled_box)

    def marks_written(self) -> None:
        """None: marks describe a convolution's result, not a pooled one."""

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Writes dense results."""
        del result, pitch, offset
        return False


class _PooledSwapped(_PoolingPass):
    def __init__(self, engine: str, problem: ConvProblem, tile: TritonTile, target: Target) -> None:
        self.problem = problem
        super().__init__(engine, conv_view(problem), tile, problem.x_dtype, problem.epilogue, target)


class _PooledSplit(_PoolingPass, TritonSplitFp32Executable):
    def __init__(self, engine: str, problem: ConvProblem, tile: TritonTile, target: Target) -> None:
        self.problem = problem
        TritonSplitFp32Executable.__init__(
            self, engine, problem, tile, target, _view(problem, triton_split_fp32.ENGINE)
        )


class _PooledPersistent(_PoolingPass, PersistentExecutable):
    def __init__(self, engine: str, problem: ConvProblem, config: PersistentTile, target: Target) -> None:
        self.problem = problem
        view, dtype = conv_view(problem), problem.x_dtype
        PersistentExecutable.__init__(self, engine, view, config, dtype, problem.epilogue, target)


class _PooledStem(_PoolingPass, TritonStemExecutable):
    def __init__(self, engine: str, problem: ConvProblem, tile: TritonTile, target: Target) -> None:
        TritonStemExecutable.__init__(self, engine, problem, tile, target)


def dense_engines(problem: ConvProblem, target: Target) -> list[Engine]:
    """Whose kernels are pooled; `triton.implicit_gemm`, where no other takes the problem without its pooling."""
    plain = unpooled(problem)
    dense: list[Engine] = [triton_igemm_swap_ab.ENGINE, triton_stem.ENGINE]
    strict: list[Engine] = [triton_split_fp32.ENGINE]
    wanted = strict if is_strict(problem) else dense
    found: list[Engine] = [engine for engine in wanted if engine.supports(plain, target)][:1]
    many = problem.conv_spec.elements >= target.units * _MANY
    if found == [triton_igemm_swap_ab.ENGINE] and many and persistent.ENGINE.supports(plain, target):
        found.append(persistent.ENGINE)
    return found or [triton_implicit_gemm.ENGINE]


def _named(problem: ConvProblem, knobs: Knobs) -> Engine:
    """The engine of `dense_engines` that made these knobs."""
    if "flat" in knobs:
        return triton_implicit_gemm.ENGINE
    if "blocks" in knobs:
        return persistent.ENGINE
    if is_strict(problem):
        return triton_split_fp32.ENGINE
    return (
        triton_igemm_swap_ab.ENGINE if triton_igemm_swap_ab.tensor_support(conv_view(problem)) else triton_stem.ENGINE
    )


def _view(problem: ConvProblem, dense: Engine) -> ConvView:
    """The convolution as its kernel sees it, pixel by pixel in rows and columns."""
    if dense is triton_stem.ENGINE:
        return triton_stem.stem_view(problem)
    view = conv_view(problem)
    return replace(view, bytes_each=2) if dense is triton_split_fp32.ENGINE else view


def way_of(problem: ConvProblem, knobs: Knobs) -> str:
    """Where the pooling happens: in `registers`, where the `parts` of the sum are added, or in a `pass` of its own."""
    pool, dense = problem.epilogue.pool, _named(problem, knobs)
    assert pool is not None
    if dense is triton_implicit_gemm.ENGINE:
        return "pass"
    if dense is persistent.ENGINE:
        config = PersistentTile.of(knobs)
        tile, whole = config.tile, config.swapped and config.parts == 1
    else:
        tile, whole = TritonTile.of(knobs), True
    if tile.splits(_view(problem, dense))[0] > 1:
        return "parts"
    return "registers" if whole and tiles_windows(pool, problem.p, problem.q) and fits(tile, pool) else "pass"


def _in_windows(problem: ConvProblem, dense: Engine, knobs: Knobs) -> Knobs:
    """The same tile on a box of whole windows, where its sum is not split."""
    pool, view = problem.epilogue.pool, _view(problem, dense)
    assert pool is not None
    config = PersistentTile.of(knobs) if dense is persistent.ENGINE else None
    tile = TritonTile.of(knobs) if config is None else config.tile
    if tile.splits(view)[0] > 1 or fits(tile, pool):
        return knobs
    box = window_box(view, tile.pixels, pool) or (tile.block_n, tile.block_h, tile.block_w)
    tile = replace(tile, block_n=box[0], block_h=box[1], block_w=box[2])
    return tile.knobs if config is None else replace(config, tile=tile).knobs


class PooledEngine(Engine):
    """Convolution + pooling, fp32, TF32, fp16 and bf16."""

    id = "triton.pooled"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """NHWC convolutions with a pooling of small windows, which one of the dense kernels takes."""
        if not isinstance(problem, ConvProblem):
            return Support.no("computes convolutions only")
        pool = problem.epilogue.pool
        if pool is None:
            return Support.no("is for convolutions with a pooling, got none")
        if not (found := window_support(pool)):
            return found
        if target.capability < 90:
            return Support.no(f"needs a CUDA device of capability 9.0 or newer, got {target.name}")
        return triton_implicit_gemm.ENGINE.supports(unpooled(problem), target)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The dense kernel's tiles by rising estimated time; if windows divide boxes, only boxes of whole windows."""
        assert isinstance(problem, ConvProblem)
        pool = problem.epilogue.pool
        assert pool is not None
        whole = tiles_windows(pool, problem.p, problem.q)
        spaces: list[list[Knobs]] = []
        for dense in dense_engines(problem, target):
            given: Sequence[Knobs] = dense.space(unpooled(problem), target)
            given = given[:_FORMS] if dense is persistent.ENGINE else given
            if whole and dense is not triton_implicit_gemm.ENGINE:
                given = list(dict.fromkeys(_in_windows(problem, dense, knobs) for knobs in given))
            spaces.append(sorted(given, key=lambda knobs: self.estimate_us(problem, knobs, target)))
        # Interleaved: the estimates of two cost models are not comparable.
        return [knobs for turn in zip_longest(*spaces) for knobs in turn if knobs is not None]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The dense kernel's workspace, and the convolution's result if a separate pass pools it."""
        assert isinstance(problem, ConvProblem)
        needed = _named(problem, knobs).workspace_bytes(unpooled(problem), knobs)
        return conv_then_pool_scratch(problem, needed).size_bytes if way_of(problem, knobs) == "pass" else needed

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The dense kernel's model, and a pass over memory where there is one."""
        assert isinstance(problem, ConvProblem)
        guess = _named(problem, knobs).estimate_us(unpooled(problem), knobs, target) or 0.0
        if way_of(problem, knobs) != "pass":
            return guess
        return guess + _PASS_US + (problem.conv_spec.size_bytes + problem.y_spec.size_bytes) / _PASS_BYTES_US

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        dense = _named(problem, knobs)
        if way_of(problem, knobs) == "pass":
            return ConvThenPool(self.id, problem, dense.build(unpooled(problem), knobs, target), target)
        if dense is triton_split_fp32.ENGINE:
            return _PooledSplit(self.id, problem, TritonTile.of(knobs), target)
        if dense is persistent.ENGINE:
            return _PooledPersistent(self.id, problem, PersistentTile.of(knobs), target)
        made = _PooledStem if dense is triton_stem.ENGINE else _PooledSwapped
        return made(self.id, problem, TritonTile.of(knobs), target)


ENGINE = PooledEngine()
