"""reference: the oracle against definitions written out loop by loop, in every direction, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.reference import ENGINE
from convoy.engines.torch_operators import DTYPES
from convoy.problem import ConvProblem, Epilogue, Knobs, LayoutProblem, LinearProblem, SubgraphProblem, TensorSpec
from convoy.target import Target
from tests.unit.engines.conv_cases import EPILOGUES, OTHERS, SHAPES, of_dtype

CPU = Target("cpu", "CPU", "generic", 1, 1 << 30, 1 << 20)
SMALL = [
    ConvProblem(2, 2, 4, 5, 3, 3, 2, 1, 0),
    ConvProblem(1, 4, 5, 6, 4, 2, 3, 2, 1, 2, 3, 1, 1, 2),
    ConvProblem(2, 3, 7, 5, 6, 3, 2, 1, 2, 1, 2, 2, 3, 3),
    ConvProblem(1, 2, 3, 3, 2, 1, 1, 1, 1, 2, 2),
    ConvProblem(0, 2, 3, 3, 2, 1, 1),
]
"""Small enough for loops; between them every size differs on both axes."""

ACTIVATIONS = {
    "none": lambda v: v,
    "relu": lambda v: v.clamp(min=0),
    "relu6": lambda v: v.clamp(0, 6),
    "silu": lambda v: v / (1 + (-v).exp()),
    "hardswish": lambda v: v * (v + 3).clamp(0, 6) / 6,
    "hardsigmoid": lambda v: (v + 3).clamp(0, 6) / 6,
    "sigmoid": lambda v: 1 / (1 + (-v).exp()),
    "gelu": lambda v: v * 0.5 * (1 + torch.erf(v / 2**0.5)),
}


def numbers(shape: tuple[int, ...], seed: int, dtype: str = "fp32", *, integer: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-4, 5, shape, generator=generator) if integer else torch.randn(shape, generator=generator)
    return made.to(DTYPES[dtype])


def launched(problem, args, constants=(), *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The values that it writes into results full of rubbish."""
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    built = ENGINE.build(problem, Knobs(), CPU)
    for result in results:
        result.fill_(float("nan") if result.is_floating_point() else 77)
    built.launch(Buffers(tuple(args), list(results), built.pack(constants)), None)
    return results


def products(problem: ConvProblem):
    """Every (output index, weight index, input index) whose product the definition sums."""
    c_group, k_group = problem.c // problem.groups, problem.k // problem.groups
    spaces = (problem.n, problem.k, problem.p, problem.q, c_group, problem.r, problem.s)
    for n, k, p, q, c, r, s in itertools.product(*map(range, spaces)):
        h = p * problem.stride_h - problem.pad_h + r * problem.dilation_h
        w = q * problem.stride_w - problem.pad_w + s * problem.dilation_w
        if 0 <= h < problem.h and 0 <= w < problem.w:
            yield (n, k, p, q), (k, c, r, s), (n, k // k_group * c_group + c, h, w)


def by_loops(problem: ConvProblem, of: str, **given: torch.Tensor) -> torch.Tensor:
    """y, x or weight (gradients) from the other two, in whole numbers."""
    shapes = {"y": problem.y_spec.shape, "x": problem.x_spec.shape, "weight": problem.weight_spec.shape}
    total = torch.zeros(shapes[of], dtype=torch.int64)
    for y_at, weight_at, x_at in products(problem):
        at = {"y": y_at, "weight": weight_at, "x": x_at}
        value = 1
        for name, tensor in given.items():
            value *= int(tensor[at[name]])
        total[at[of]] += value
    return total


@pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem.key.split(":")[2])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_all_directions_are_their_definitions_to_the_bit(problem: ConvProblem, layout: str) -> None:
    laid = problem.with_layout(layout)
    x, weight, dy = (
        numbers(spec.shape, seed, integer=True)
        for seed, spec in enumerate((problem.x_spec, problem.weight_spec, problem.y_spec))
    )
    if layout == "nhwc":
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    (y,) = launched(laid, (x,), (weight,), torch.empty_like(dy))
    assert torch.equal(y.long(), by_loops(problem, "y", x=x, weight=weight))
    (dx,) = launched(replace(laid, direction="dgrad"), (dy, weight), (), torch.empty_like(x))
    assert torch.equal(dx.long(), by_loops(problem, "x", y=dy, weight=weight))
    biased = replace(laid, direction="wgrad", epilogue=Epilogue(bias=True))
    dweight, dbias = launched(biased, (x, dy), (), torch.empty_like(weight), torch.empty(problem.k))
    assert torch.equal(dweight.long(), by_loops(problem, "weight", y=dy, x=x))
    assert torch.equal(dbias.long(), dy.sum((0, 2, 3)).long())


def test_the_loops_see_a_shifted_pad_a_swapped_stride_and_a_forgotten_group() -> None:
    problem = SMALL[1]
    x, weight = (numbers(spec.shape, 5, integer=True) for spec in (problem.x_spec, problem.weight_spec))
    right = by_loops(problem, "y", x=x, weight=weight)
    for fault in (
        {"pad_h": problem.pad_w, "pad_w": problem.pad_h},
        {"stride_h": problem.stride_w, "stride_w": problem.stride_h},
        {"groups": 1, "c": problem.c // problem.groups},
    ):
        wrong = replace(problem, **fault)
        found = by_loops(wrong, "y", x=x, weight=weight)
        assert found.shape != right.shape or not torch.equal(found, right), fault


@pytest.mark.parametrize("shape", SHAPES)
def test_fprop_and_gradients_are_torchs_in_float64(shape: str) -> None:
    problem = of_dtype(SHAPES[shape], "fp64")
    x, weight = (numbers(s.shape, i, "fp64") for i, s in enumerate((problem.x_spec, problem.weight_spec)))
    x.requires_grad_()
    weight.requires_grad_()
    strides, pads = (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w)
    dilations = (problem.dilation_h, problem.dilation_w)
    wanted = torch.nn.functional.conv2d(x, weight, None, strides, pads, dilations, problem.groups)
    dy = numbers(problem.y_spec.shape, 2, "fp64")
    wanted.backward(dy)
    x, weight, wanted, dx, dweight = (t.detach() for t in (x, weight, wanted, x.grad, weight.grad))
    (y,) = launched(problem, (x,), (weight,), torch.empty_like(wanted))
    (found_dx,) = launched(replace(problem, direction="dgrad"), (dy, weight), (), torch.empty_like(x))
    (found_dw,) = launched(replace(problem, direction="wgrad"), (x, dy), (), torch.empty_like(weight))
    for found, want in ((y, wanted), (found_dx, dx), (found_dw, dweight)):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues_come_in_order_bias_residual_activation(epilogue: Epilogue) -> None:
    problem = replace(SMALL[0], epilogue=epilogue)
    args = [numbers(problem.x_spec.shape, 1), numbers(problem.y_spec.shape, 3)][: 1 + epilogue.residual]
    constants = [numbers(problem.weight_spec.shape, 2), numbers((problem.k,), 4)][: 1 + epilogue.bias]
    (plain,) = launched(
        of_dtype(SMALL[0], "fp64"),
        (args[0].double(),),
        (constants[0].double(),),
        torch.empty(*problem.y_spec.shape).double(),
    )
    if epilogue.bias:
        plain = plain + constants[1].double().reshape(-1, 1, 1)
    if epilogue.residual:
        plain = plain + args[1].double()
    wanted = ACTIVATIONS[epilogue.activation](plain)
    (found,) = launched(problem, args, constants, torch.empty(problem.y_spec.shape))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_types_are_rounded_once_at_the_end(dtype: str) -> None:
    problem = of_dtype(ConvProblem(1, 64, 5, 5, 3, 3, 3, 1, 1), dtype)
    x, weight = numbers(problem.x_spec.shape, 1, dtype), numbers(problem.weight_spec.shape, 2, dtype)
    (found,) = launched(problem, (x,), (weight,), torch.empty(problem.y_spec.shape, dtype=DTYPES[dtype]))
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    assert torch.equal(found, exact.to(DTYPES[dtype]))
    assert not torch.equal(found.double(), exact)


def test_dtypes_may_be_mixed() -> None:
    problem = replace(SMALL[0], x_dtype="fp16", weight_dtype="bf16", y_dtype="fp32")
    x = numbers(problem.x_spec.shape, 1, "fp16", integer=True)
    weight = numbers(problem.weight_spec.shape, 2, "bf16", integer=True)
    (found,) = launched(problem, (x,), (weight,), torch.empty(problem.y_spec.shape))
    assert torch.equal(found.long(), by_loops(problem, "y", x=x, weight=weight))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_linear_layers(n: int) -> None:
    problem = LinearProblem(n, 5, 4, epilogue=Epilogue(bias=True, residual=True, activation="relu"))
    x, weight, bias = numbers((n, 5), 1, integer=True), numbers((4, 5), 2, integer=True), numbers((4,), 3, integer=True)
    residual = numbers((n, 4), 4, integer=True)
    (found,) = launched(problem, (x, residual), (weight, bias), torch.empty(n, 4))
    for row, column in itertools.product(range(n), range(4)):
        total = sum(int(x[row, c]) * int(weight[column, c]) for c in range(5))
        assert int(found[row, column]) == max(0, total + int(bias[column]) + int(residual[row, column]))


def test_pieces_are_computed_in_float64_and_rounded_at_the_end() -> None:
    text = (
        "graph 1\ninput %x: fp16[1,2,2,2]\n"
        "%a: fp16[1,2,2,2] = aten.add.Scalar(%x, 2048.0)\n"
        "%b: fp16[1,2,2,2] = aten.sub.Scalar(%a, 2048.0)\nreturn %b\n"
    )
    x = torch.full((1, 2, 2, 2), 0.25, dtype=torch.float16)
    assert not torch.equal((x + 2048.0) - 2048.0, x)  # in half types the quarter is lost on the way
    (found,) = launched(SubgraphProblem(text), (x,), (), torch.empty_like(x))
    assert torch.equal(found, x)


def test_a_change_of_layout_moves_every_element() -> None:
    x = numbers((2, 3, 4, 5), 1)
    into = torch.empty_like(x).contiguous(memory_format=torch.channels_last)
    problem = LayoutProblem(TensorSpec((2, 3, 4, 5), "fp32"), "nchw", "nhwc")
    (found,) = launched(problem, (x,), (), into)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, x)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (LayoutProblem(TensorSpec((2, 3, 4, 5), "fp32"), "nchw", "blocked"), "nchw and nhwc tensors, got blocked"),
        (SubgraphProblem(OTHERS[0].text, "blocked"), "nchw and nhwc tensors, got blocked"),
        (ConvProblem(1, 4, 6, 6, 4, 3, 3, layout="blocked"), "blocked"),
        (ConvProblem(1, 2048, 512, 512, 2048, 3, 3, 1, 1), "is slow"),
        (LinearProblem(1 << 14, 1 << 12, 1 << 12), "is slow"),
        (LinearProblem(1, 1 << 17, 1 << 13), "float64 values"),
        (SubgraphProblem(OTHERS[0].text.replace("2,3,", "2000,3000,")), "float64 values"),
    ],
)
def test_a_no_says_why(problem, reason: str) -> None:
    support = ENGINE.supports(problem, CPU)
    assert not support
    assert reason in support.reason
