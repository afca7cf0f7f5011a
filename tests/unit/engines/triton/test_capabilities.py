"""GPUs that need not be there: what compiles for each compute capability, within its shared memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from convoy.engines.manifest import load_engine
from convoy.engines.triton.triton_build import shared_limit
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.target import Target

pytest.importorskip("triton")

HALF = ConvProblem(32, 256, 28, 28, 256, 3, 3, 1, 1, layout="nhwc", x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16")
POINTWISE = replace(HALF, r=1, s=1, pad_h=0, pad_w=0)
DEPTHWISE = replace(HALF, groups=256)
GRADIENT = replace(HALF, direction="dgrad")
WEIGHT_GRADIENT = replace(HALF, direction="wgrad")
BY_TMA = {
    "triton.swapped": HALF,
    "triton.persistent": HALF,
    "triton.pointwise": POINTWISE,
    "triton.dgrad": GRADIENT,
    "triton.wgrad": WEIGHT_GRADIENT,
}
GENERAL = {"triton.implicit_gemm": HALF, "triton.depthwise": DEPTHWISE}
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one block may have (CUDA C++ Programming Guide, technical specifications)."""


def gpu(capability: int) -> Target:
    return Target("cuda", f"a GPU of capability {capability}", f"sm_{capability}", 108, 40 << 30, 40 << 20)


def bytes_of(problem: Problem, knobs: Knobs) -> int:
    """The least bytes of a tile's operands, over all stages of its pipeline."""
    assert isinstance(problem, ConvProblem)
    sides = ("block_p",) if "block_p" in knobs else ("block_n", "block_h", "block_w")
    pixels = math.prod(knobs.integer(side) for side in sides)
    filters, channels = knobs.integer("block_k"), knobs.integer("block_c")
    rows, depth = (filters + channels, pixels) if problem.direction == "wgrad" else (filters + pixels, channels)
    return knobs.integer("stages") * rows * depth * 2


@pytest.mark.parametrize(("capability", "kib"), LIMITS.items())
def test_the_shared_memory_of_a_block_is_the_devices(capability: int, kib: int) -> None:
    assert shared_limit(gpu(capability)) == kib << 10


@pytest.mark.parametrize("capability", LIMITS)
def test_the_general_engine_competes_on_every_capability_and_those_by_tma_from_9_0_on(capability: int) -> None:
    target = gpu(capability)
    assert all(load_engine(name).supports(problem, target) for name, problem in GENERAL.items())
    for name, problem in BY_TMA.items():
        support = load_engine(name).supports(problem, target)
        assert bool(support) == (capability >= 90)
        assert support or "capability 9.0 or newer" in support.reason


@pytest.mark.parametrize("capability", LIMITS)
def test_every_tile_fits_the_shared_memory(capability: int) -> None:
    target = gpu(capability)
    for name, problem in ({"triton.implicit_gemm": HALF} | (BY_TMA if capability >= 90 else {})).items():
        sizes = [bytes_of(problem, knobs) for knobs in load_engine(name).space(problem, target)]
        assert sizes, name
        assert max(sizes) <= LIMITS[capability] << 10, name


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (80, "triton.implicit_gemm"),
        (86, "triton.implicit_gemm"),
        (89, "triton.implicit_gemm"),
        (80, "triton.depthwise"),
        (100, "triton.swapped"),
        (120, "triton.swapped"),
        (120, "triton.persistent"),
        (120, "triton.wgrad"),
    ],
)
def test_a_tile_compiles_the_one_with_the_most_shared_memory_if_by_tma(capability: int, name: str) -> None:
    target, engine = gpu(capability), load_engine(name)
    problem = (BY_TMA | GENERAL)[name]
    space = engine.space(problem, target)
    general = name in GENERAL  # its largest tiles take seconds to compile
    largest = space[0] if general else max(space, key=lambda knobs: bytes_of(problem, knobs))
    kernel = engine.build(problem, largest, target).kernel  # pyright: ignore[reportAttributeAccessIssue]
    assert 0 < kernel.shared_bytes <= LIMITS[capability] << 10
    assert f".target sm_{capability}" in kernel.compiled.asm["ptx"]
