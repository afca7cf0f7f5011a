"""Tensors of more than 2^31 elements: every engine is right on them, or refuses them."""

from dataclasses import replace
from math import prod

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import CompileError
from convoy.measurement.accuracy import bound, is_exact, relative_error
from convoy.measurement.data import make_data, result_specs, tensor_specs
from convoy.measurement.device.detect import detect_target
from convoy.measurement.failure import is_out_of_memory
from convoy.measurement.oracle import oracle
from convoy.measurement.output_buffers import OutputBuffers
from convoy.problem import ConvProblem

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("large")]

IMAGES = 8
"""Images that are repeated."""

MANY = 2680
"""Times 64 channels of 112x112: 2.15e9 elements, and 2^31 are 2.147e9."""

ROOM = 24 << 30
"""A workspace of more is not tried."""


def half(c: int, k: int, side: int, **rest: object) -> ConvProblem:
    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), "fp16")
    return ConvProblem(MANY, c, 112, 112, k, side, side, side // 2, side // 2, **types, numerics="half", **rest)  # type: ignore[arg-type]


CASES = {
    "1x1 of much": half(64, 8, 1),
    "1x1 to much": half(8, 64, 1),
    "3x3 of much": half(64, 8, 3),
    "dgrad to much": half(64, 8, 3, direction="dgrad"),
    "wgrad of much": half(64, 8, 3, direction="wgrad"),
}
ENGINES = [name for name in MANIFEST if name not in ("reference", "onednn")]


def repeated(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same images again and again, in a memory format."""
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    whole = torch.empty((MANY, *tensor.shape[1:]), dtype=tensor.dtype, device="cuda", memory_format=form)
    for first in range(0, MANY, IMAGES):
        whole[first : first + IMAGES].copy_(tensor)
    return whole


def launched(engine, problem, target):
    """(results, expected of one period), or the words of a refusal."""
    if not (support := engine.accepts(problem, target)):
        return support.reason
    knobs = engine.space(problem, target)[0]
    if (wanted := engine.workspace_bytes(problem, knobs)) > ROOM:
        return f"wants {wanted} bytes of workspace"
    few = replace(problem, n=IMAGES)
    data = make_data(few, 5, "integer", "cuda")
    specs, _ = tensor_specs(problem)
    args = [
        repeated(tensor, problem.layout) if spec.shape[0] == MANY else tensor
        for tensor, spec in zip(data.args, specs, strict=True)
    ]
    if problem.direction == "wgrad":
        args[1][:-IMAGES] = 0  # so that the sum over all images is that of the last ones
    executable = engine.build(problem, knobs, target)
    form = torch.channels_last if problem.layout == "nhwc" else torch.contiguous_format
    (spec,) = result_specs(problem)
    made = (
        None if executable.allocates_results else torch.full(spec.shape, float("nan"), dtype=torch.half, device="cuda")
    )
    made = made if made is None else made.contiguous(memory_format=form)
    packed = executable.pack(data.constants)
    buffers = Buffers(tuple(args), [made], packed)
    executable.launch(buffers, OutputBuffers(problem, "cuda").workspace(executable.workspace_bytes))
    torch.cuda.synchronize()
    return buffers.results[0], oracle(few, data)[0].half()


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine_id", ENGINES)
def test_more_than_two_to_the_31_elements_are_right_or_refused(engine_id, name, layout):
    problem, target = replace(CASES[name], layout=layout), detect_target("cuda")
    assert max(prod(spec.shape) for spec in (problem.x_spec, problem.y_spec)) > 1 << 31
    torch.cuda.empty_cache()
    try:
        outcome = launched(load_engine(engine_id), problem, target)
    except CompileError as error:
        pytest.skip(f"does not build: {error.summary}")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        pytest.skip("no room for it here")
    if isinstance(outcome, str):
        assert outcome  # refused, with a reason
        return
    result, expected = outcome
    if problem.direction == "wgrad":
        assert is_right(result, expected, load_engine(engine_id).family, problem)
        return
    periods = range(0, MANY, IMAGES)
    family = load_engine(engine_id).family
    wrong = [at for at in periods if not is_right(result[at : at + IMAGES], expected, family, problem)]
    assert not wrong, f"images from {wrong[0]} on"


def is_right(result: torch.Tensor, expected: torch.Tensor, family: str, problem: ConvProblem) -> bool:
    """Equal, or within the bound of a method that does not only add."""
    if is_exact(problem, family, "integer", "cuda"):
        return torch.equal(result, expected)
    return relative_error(result, expected.double()) <= bound(problem, family)
