"""Three-dimensional convolutions computed by 2-D engines on views: every direction, against the oracle of the 3-D problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.graph.text import parse_graph
from convoy.measurement.accuracy import make_data
from convoy.measurement.data import result_specs
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.problem import Conv3dProblem, ConvProblem, Epilogue, Problem
from convoy.program.adapted_executables import adapted, packed_constants
from convoy.program.eager import empty
from convoy.regions import Region, propose

CPU = detect_target("cpu")
FULL = Epilogue(bias=True, residual=True, activation="relu")

FLAT = Conv3dProblem(2, 4, (3, 5, 6), 6, (1, 3, 3), (0, 1, 1), (1, 2, 1), groups=2, layout="ndhwc")
TALL = Conv3dProblem(2, 4, (5, 3, 4), 6, (3, 1, 1), (1, 0, 0), (2, 1, 1))
POINT = Conv3dProblem(2, 4, (3, 3, 4), 6, (1, 1, 1))
SHAPES = {
    "1x3x3": FLAT,
    "3x1x1": TALL,
    "3x1x1 channels last": TALL.with_layout("ndhwc"),
    "1x1x1": POINT,
    "1x1x1 channels last": POINT.with_layout("ndhwc"),
    "one slice": replace(FLAT, size=(1, 5, 6)),
    "one channel": Conv3dProblem(2, 1, (3, 5, 6), 1, (1, 3, 3), layout="ndhwc"),
}

GRAPHS = {
    "fprop": "input %x: {x}\nconstant %w: {w}\n%y: {y} = conv3d(%x, %w, None, {sizes})\nreturn %y\n",
    "dynamic": "input %x: {x}\ninput %w: {w}\n%y: {y} = conv3d(%x, %w, None, {sizes})\nreturn %y\n",
    "dgrad": "input %dy: {y}\ninput %w: {w}\n%dx: {x} = conv3d_dgrad(%dy, %w, {size}, {sizes})\nreturn %dx\n",
    "transposed": "input %dy: {y}\nconstant %w: {w}\n%dx: {x} = conv3d_dgrad(%dy, %w, {size}, {sizes})\nreturn %dx\n",
    "wgrad": "input %x: {x}\ninput %dy: {y}\n%dw: {w} = conv3d_wgrad(%x, %dy, {window}, {sizes})\nreturn %dw\n",
}


def region_of(case: str, problem: Conv3dProblem) -> tuple[Region, Conv3dProblem, ConvProblem]:
    """A graph's region, its problem in the layout of `problem`, and the 2-D problem that computes the same."""
    sizes = f"{problem.stride}, {problem.pad}, {problem.dilation}, {problem.groups}"
    specs = {"x": problem.x_spec, "w": problem.weight_spec, "y": problem.y_spec}
    text = GRAPHS[case].format(sizes=sizes, size=problem.size, window=problem.window, **specs)
    layout = "nhwc" if problem.layout == "ndhwc" else "nchw"
    (region, *_) = propose(parse_graph("graph 1\n" + text), layouts=(layout,), numerics="as_torch")
    volume, plane = region.problems
    assert isinstance(volume, Conv3dProblem)
    assert isinstance(plane, ConvProblem)
    return region, volume, plane


def launched(executable: Executable, volume: Problem, args: Sequence[torch.Tensor], packed: tuple[object, ...]):
    given: list[torch.Tensor | None] = [
        None if executable.allocates_results else empty(spec, volume.layout, torch.device("cpu"))
        for spec in result_specs(volume)
    ]
    buffers = Buffers(tuple(args), given, packed)
    size = executable.workspace_bytes
    executable.launch(buffers, torch.empty(size, dtype=torch.uint8) if size else None)
    return buffers.results


def engines_for(problem: ConvProblem) -> list[Engine]:
    """The baseline, one that writes to given results, and one that packs weights."""
    return [
        engine
        for name in ("aten", "reference", "gemm", "onednn")
        if (engine := load_engine(name)).accepts(problem, CPU)
    ]


@pytest.mark.parametrize("case", GRAPHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_views_give_the_results_of_the_three_dimensional_convolution(shape: str, case: str):
    region, volume, plane = region_of(case, SHAPES[shape])
    data = make_data(volume, 3, "integer")
    constants = data.constants
    args = data.args
    if case == "transposed":
        args, constants = args[:1], args[1:]
    graph = parse_graph("graph 1\n" + "input %x: fp32[1]\nreturn %x\n")
    for engine in engines_for(plane):
        inner = build(engine, plane, engine.space(plane, CPU)[0], CPU)
        packed = packed_constants(inner, plane, constants)
        found = launched(adapted(inner, plane, region, graph), volume, args, packed)
        for have, want in zip(found, oracle(volume, data), strict=True):
            assert have is not None
            assert torch.equal(have.double(), want)
            last = torch.channels_last_3d if volume.layout == "ndhwc" else torch.contiguous_format
            assert have.is_contiguous(memory_format=last)
