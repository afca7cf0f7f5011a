"""Data whose sums are exact, an oracle that loops would agree with, bounds that are what they say, guards that notice."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Executable
from convoy.engines.manifest import load_engine
from convoy.errors import InputError
from convoy.measurement.accuracy import (
    GuardedBuffer,
    bound,
    check,
    checksum,
    in_layout,
    is_exact,
    judge,
    make_data,
    oracle,
    overrun,
    relative_error,
    run_guarded,
    tf32_bound,
)
from convoy.measurement.data import Data, result_specs, tensor_specs
from convoy.measurement.device.detect import detect_target
from convoy.measurement.guards import GUARD_BYTES
from convoy.measurement.oracle import terms_norm
from convoy.problem import ConvProblem, Epilogue, Knobs, LayoutProblem, LinearProblem, SubgraphProblem, TensorSpec

BIASED = Epilogue(bias=True, residual=True, activation="relu")
LIMITS = {"fp32": 2**24, "fp16": 2**11, "bf16": 2**8}

EXACT_CASES = [
    ConvProblem(1, 4096, 3, 3, 8, 3, 3, 1, 1, epilogue=BIASED),
    ConvProblem(2, 6, 9, 9, 4, 3, 2, 1, 1, 2, 1, groups=2, epilogue=BIASED),
    ConvProblem(1, 16, 5, 5, 512, 5, 5, 2, 2, groups=4, direction="dgrad"),
    ConvProblem(4, 3, 40, 40, 4, 3, 3, 1, 1, direction="wgrad"),
    LinearProblem(3, 5000, 4, epilogue=BIASED),
]


def of_dtype(problem, dtype):
    if isinstance(problem, LinearProblem):
        return replace(problem, dtype=dtype)
    return replace(problem, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("problem", EXACT_CASES, ids=str)
def test_integer_sums_are_exact_in_any_order(problem, dtype):
    problem = of_dtype(problem, dtype)
    data = make_data(problem, 3, "integer")
    operands = (*data.args, *data.constants)
    assert all(torch.equal(t, t.round()) for t in operands)
    magnitudes = type(data)(tuple(t.abs() for t in data.args), tuple(t.abs() for t in data.constants))
    largest = max(float(t.max()) for t in oracle(problem, magnitudes))
    assert 0 < largest <= LIMITS[dtype]
    assert all(torch.equal(t, t.to(data.args[0].dtype).double()) for t in oracle(problem, data))


def test_integer_sums_come_near_the_limit_and_use_every_tap():
    data = make_data(of_dtype(EXACT_CASES[0], "bf16"), 3, "integer")
    used = (data.constants[0] != 0).float()
    assert float(used.flatten(1).sum(1).min()) >= 20
    assert float(used.sum(1).amax(0).min()) > 0
    plain = make_data(ConvProblem(1, 64, 3, 3, 8, 3, 3), 3, "integer")
    assert bool((plain.constants[0] != 0).all())


@pytest.mark.parametrize("kind", ["integer", "normal", "cancelling"])
@pytest.mark.parametrize("problem", EXACT_CASES, ids=str)
def test_data_depends_on_the_seed_alone(problem, kind):
    first, again, other = (make_data(problem, seed, kind) for seed in (1, 1, 2))
    assert all(
        torch.equal(a, b) for a, b in zip((*first.args, *first.constants), (*again.args, *again.constants), strict=True)
    )
    assert not torch.equal(first.args[0], other.args[0])
    args, constants = tensor_specs(problem)
    assert [tuple(t.shape) for t in first.args] == [s.shape for s in args]
    assert [tuple(t.shape) for t in first.constants] == [s.shape for s in constants]


@pytest.mark.parametrize("kind", ["integer", "normal", "cancelling"])
def test_data_has_the_same_values_in_every_layout(kind):
    problem = EXACT_CASES[1]
    plain, last, blocked = (make_data(problem.with_layout(layout), 1, kind) for layout in ("nchw", "nhwc", "blocked"))
    assert last.args[0].is_contiguous(memory_format=torch.channels_last)
    assert blocked.args[0].is_mkldnn
    for a, b, c in zip(plain.args, last.args, blocked.args, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c.to_dense())


def test_normal_results_have_about_unit_variance():
    problem = ConvProblem(1, 64, 20, 20, 32, 3, 3)
    for direction in ("fprop", "dgrad", "wgrad"):
        turned = replace(problem, direction=direction)
        (exact,) = oracle(turned, make_data(turned, 1))
        assert 0.2 < float(exact.std()) < 2


def test_cancelling_sums_are_a_small_part_of_their_terms():
    for problem in (ConvProblem(1, 64, 8, 8, 8, 3, 3), ConvProblem(1, 64, 8, 8, 64, 3, 3, 1, 1, direction="dgrad")):
        data = make_data(problem, 1, "cancelling")
        assert float(oracle(problem, data)[0].norm()) < 0.1 * terms_norm(problem, data, 0, 1)


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="kind: got 'random'"):
        make_data(ConvProblem(1, 1, 1, 1, 1, 1, 1), 0, "random")


def naive(problem, x, weight):
    """y by loops over Python numbers."""
    y = torch.zeros(problem.y_spec.shape, dtype=torch.float64)
    per_group, outputs = problem.c // problem.groups, problem.k // problem.groups
    for n, k, p, q in itertools.product(*map(range, y.shape)):
        for c, r, s in itertools.product(range(per_group), range(problem.r), range(problem.s)):
            row = p * problem.stride_h - problem.pad_h + r * problem.dilation_h
            column = q * problem.stride_w - problem.pad_w + s * problem.dilation_w
            if 0 <= row < problem.h and 0 <= column < problem.w:
                y[n, k, p, q] += x[n, k // outputs * per_group + c, row, column] * weight[k, c, r, s]
    return y


LOOPS = [
    ConvProblem(2, 2, 4, 5, 3, 3, 2, 1, 0),
    ConvProblem(1, 4, 5, 6, 4, 2, 3, 2, 1, 2, 1, 1, 2, groups=2),
    ConvProblem(1, 2, 3, 7, 2, 1, 1, 1, 1, 2, 3, groups=2),
]


@pytest.mark.parametrize("problem", LOOPS, ids=str)
def test_the_oracle_agrees_with_loops(problem):
    x, weight = (torch.randint(-3, 4, s.shape).double() for s in (problem.x_spec, problem.weight_spec))
    bias, residual = torch.randint(-3, 4, (problem.k,)).double(), torch.randint(-3, 4, problem.y_spec.shape).double()
    expected = (naive(problem, x, weight) + bias[:, None, None] + residual).relu()
    data = replace(make_data(problem, 0), args=(x, residual), constants=(weight, bias))
    assert torch.equal(oracle(replace(problem, epilogue=BIASED), data)[0], expected)


@pytest.mark.parametrize("problem", LOOPS, ids=str)
def test_the_oracles_gradients_are_the_transposes_of_loops(problem):
    x, weight, dy = (
        torch.randint(-3, 4, s.shape).double() for s in (problem.x_spec, problem.weight_spec, problem.y_spec)
    )
    data = make_data(problem, 0)
    (dx,) = oracle(replace(problem, direction="dgrad"), replace(data, args=(dy, weight)))
    wgrad = replace(problem, direction="wgrad", epilogue=Epilogue(bias=True))
    dweight, dbias = oracle(wgrad, replace(data, args=(x, dy)))
    other_x, other_weight = torch.randint_like(x, -3, 4), torch.randint_like(weight, -3, 4)
    assert float((dx * other_x).sum()) == float((dy * naive(problem, other_x, weight)).sum())
    assert float((dweight * other_weight).sum()) == float((dy * naive(problem, x, other_weight)).sum())
    assert torch.equal(dbias, dy.sum((0, 2, 3)))


def test_the_oracle_runs_graphs_and_copies():
    text = (
        "graph 1\ninput %x: fp32[1,2,4,4]\n%y: fp32[1,2,2,2] = aten.avg_pool2d.default(%x, (2, 2), (2, 2))\nreturn %y\n"
    )
    pool, copy = SubgraphProblem(text), LayoutProblem(TensorSpec((1, 2, 3, 4), "fp16"), "nchw", "nhwc")
    data = make_data(pool, 1)
    expected = torch.nn.functional.avg_pool2d(data.args[0].double(), 2)
    assert torch.equal(oracle(pool, data)[0], expected)
    data = make_data(copy, 1)
    assert torch.equal(oracle(copy, data)[0], data.args[0].double())


STRICT = ConvProblem(1, 512, 7, 7, 8, 3, 3, numerics="strict")


def test_the_strict_bound_is_the_designs():
    assert bound(STRICT, "direct") == 0.6 * 2.0**-23 * math.sqrt(4608)
    assert bound(replace(STRICT, c=1, r=1, s=1), "direct") == 2.0**-22
    assert bound(STRICT, "winograd") == bound(STRICT, "fft") == bound(STRICT, "direct")


def test_methods_that_transform_tiles_are_allowed_more_where_numerics_are_not_strict():
    as_torch = replace(STRICT, numerics="as_torch")
    assert bound(as_torch, "winograd") == 4 * bound(as_torch, "direct")
    assert bound(as_torch, "fft") == 2 * bound(as_torch, "direct")


def test_bounds_follow_what_may_be_rounded():
    direct = bound(STRICT, "direct")
    as_torch, half = replace(STRICT, numerics="as_torch"), replace(STRICT, numerics="half")
    assert direct < bound(as_torch, "direct") < bound(as_torch, "direct", tf32=True) == tf32_bound()
    assert bound(STRICT, "direct", tf32=True) == direct
    assert bound(of_dtype(half, "fp16"), "direct") < bound(of_dtype(half, "bf16"), "direct")
    assert bound(half, "direct") > tf32_bound()
    assert bound(of_dtype(STRICT, "fp64"), "direct") < 1e-13
    assert bound(replace(STRICT, epilogue=Epilogue(activation="gelu")), "direct") > direct
    assert bound(LayoutProblem(TensorSpec((1, 2, 3, 4), "fp32"), "nchw", "nhwc"), "library") == 0


def judged(result, problem=STRICT, kind="normal", family="direct", seed=1):
    """The verdict on a change of the exact result."""
    data = make_data(problem, seed, kind)
    exact = oracle(problem, data)
    return check(problem, family, [result(exact[0])], exact, kind, data=data)


def test_a_rounded_result_passes_and_a_larger_error_does_not():
    assert judged(lambda y: y.float()).ok
    assert judged(lambda y: (y * (1 + 4e-6)).float()).ok
    verdict = judged(lambda y: (y * (1 + 6e-6)).float())
    assert not verdict.ok
    assert 5e-6 < verdict.error < 7e-6


@pytest.mark.parametrize("kind", ["integer", "normal", "cancelling"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(value, kind):
    relu = replace(STRICT, epilogue=Epilogue(activation="relu"))

    def poison(y):
        y = y.float().clone()
        y[y == 0] = value
        return y

    verdict = judged(poison, relu, kind)
    assert not verdict.ok
    assert "result 0 is " in verdict.reason


def test_the_first_wrong_index_is_named():
    def change(y):
        y = y.float().clone()
        y[0, 3, 2, 1] += 1
        y[0, 5, 0, 0] += 1
        return y

    verdict = judged(change, kind="integer")
    assert "at (0, 3, 2, 1), expected" in verdict.reason
    assert "2 of 200 places differ" in verdict.reason
    assert verdict.bound == 0


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda y: None, "was not written"),
        (lambda y: y.float()[..., 1:], "has shape (1, 8, 5, 4), expected (1, 8, 5, 5)"),
    ],
)
def test_results_that_are_missing_or_misshapen_fail(result, words):
    assert words in judged(result).reason


def test_integers_must_be_exact_for_direct_methods_only():
    def nudge(y):
        return (y + 1e-3).float()

    loose = replace(STRICT, numerics="half")
    assert not judged(nudge, loose, "integer", "direct").ok
    assert judged(nudge, loose, "integer", "winograd").ok
    silu = replace(loose, epilogue=Epilogue(activation="silu"))
    assert judged(nudge, silu, "integer", "direct").ok
    assert is_exact(STRICT, "library", "integer", "cpu")
    assert not is_exact(STRICT, "library", "integer", "cuda")
    assert is_exact(replace(STRICT, r=1, s=1), "library", "integer", "cuda")


POSITIONS = """\
graph 1
input %x: {dtype}[4,16,32,32]
input %w: fp32[16]
input %b: fp32[16]
%y: {dtype}[4,16,32,32], %mean: fp32[16], %std: fp32[16] = \
aten.native_batch_norm.default(%x, %w, %b, None, None, True, 0.1, 1e-05)
%z: {dtype}[4,16,32,32] = aten.relu.default(%y)
%p: {dtype}[4,16,16,16], %at: i64[4,16,16,16] = aten.max_pool2d_with_indices.default(%z, (3, 3), (2, 2), (1, 1))
return %p, %at, %mean, %std
"""


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_positions_may_move_as_far_as_rounding_moves_them(dtype):
    problem = SubgraphProblem(POSITIONS.format(dtype=dtype))
    data = make_data(problem, 1)
    executable = load_engine("aten").build(problem, Knobs(), detect_target("cpu"))
    trial, exact = run_guarded(executable, problem, data), oracle(problem, data)
    assert check(problem, "library", trial.results, exact, "normal").ok
    shifted = [trial.results[0], trial.results[1] + 1, *trial.results[2:]]
    assert "result 1 is" in check(problem, "library", shifted, exact, "normal").reason
    half = trial.results[1].clone()
    half[:, :8] += 1  # planted: every second channel's positions are off by one
    assert not check(problem, "library", [trial.results[0], half, *trial.results[2:]], exact, "normal").ok


NORM = """\
graph 1
input %dy: fp32[8,4,32,32]
input %x: fp32[8,4,32,32]
input %w: fp32[4]
input %mean: fp32[4]
input %std: fp32[4]
%dx: fp32[8,4,32,32], %dw: fp32[4], %db: fp32[4] = \
aten.native_batch_norm_backward.default(%dy, %x, %w, None, None, %mean, %std, True, 1e-05, (True, True, True))
%bias: fp32[4] = aten.sum.dim_IntList(%dx, (0, 2, 3))
return %dx, %dw, %db, %bias
"""


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_piece_may_be_as_far_off_as_pytorch_is(layout):
    problem = SubgraphProblem(NORM, layout)
    data = make_data(problem, 1)
    mean, variance = data.args[1].mean((0, 2, 3)), data.args[1].var((0, 2, 3), correction=0)
    true = Data(
        (*data.args[:3], mean, (variance + 1e-5).rsqrt()), ()
    )  # statistics of x itself: the bias's gradient vanishes
    exact = oracle(problem, true)
    results = load_results(problem, true)
    verdict = check(problem, "library", results, exact, "normal", data=true)
    assert verdict.ok, verdict.reason
    assert not check(problem, "library", results, exact, "normal").ok  # by its bound alone it would be taken for wrong
    for index in range(4):
        planted = list(results)
        planted[index] = planted[index] + 1e-2 * (1 + planted[index].abs())
        assert f"result {index}" in check(problem, "library", planted, exact, "normal", data=true).reason
    unfinished = [results[0].clone(), *results[1:]]
    unfinished[0][0, 0, 0, 0] = float("nan")
    assert not check(problem, "library", unfinished, exact, "normal", data=true).ok


def load_results(problem, data):
    executable = load_engine("aten").build(problem, Knobs(), detect_target("cpu"))
    return run_guarded(executable, problem, data).results


def test_numbers_that_are_drawn_need_only_be_there():
    text = "graph 1\ninput %x: fp32[8,8]\n%y: fp32[8,8], _ = aten.native_dropout.default(%x, 0.5, True)\nreturn %y\n"
    problem = SubgraphProblem(text)
    data = make_data(problem, 1)
    exact = oracle(problem, data)
    assert check(problem, "library", [torch.zeros(8, 8)], exact, "normal").ok
    assert not check(problem, "library", [torch.zeros(8, 9)], exact, "normal").ok
    assert not check(problem, "library", [None], exact, "normal").ok


def test_results_that_vanish_by_chance_are_measured_against_what_such_sums_amount_to():
    problem = ConvProblem(1, 1000, 1, 1, 1, 1, 1, numerics="strict")
    data = make_data(problem, 1)
    x = data.args[0].clone()
    weight = data.constants[0]
    x[0, 0] -= oracle(problem, data)[0][0, 0, 0, 0].float() / weight[0, 0, 0, 0] * (1 - 1e-6)
    data = replace(data, args=(x,))
    exact = oracle(problem, data)
    off = [exact[0].float() + 2e-6]
    assert relative_error(off[0], exact[0]) > 0.01
    assert check(problem, "direct", off, exact, "normal", data=data).ok
    assert not check(problem, "direct", [exact[0].float() + 1e-3], exact, "normal", data=data).ok
    assert not check(problem, "direct", off, exact, "normal").ok


@pytest.mark.parametrize("kind", ["integer", "normal", "cancelling"])
def test_methods_that_transform_tiles_may_leave_rounding_where_only_padding_is_seen(kind):
    problem = ConvProblem(1, 8, 1, 2, 3, 1, 2, 2, 1, dilation_w=3)
    data = make_data(problem, 1, kind)
    exact = oracle(problem, data)
    assert exact[0][0, 0, 0, 0] == 0
    off = [(exact[0] + 1e-8).float()]
    assert not check(problem, "direct", off, [exact[0] * 0], "normal", data=data).ok
    assert check(problem, "fft", off, exact, kind, data=data).ok
    assert not check(problem, "fft", [(exact[0] + 1e-2).float()], exact, kind, data=data).ok
    strict = replace(problem, numerics="strict")
    by_fft, by_sum = (check(strict, family, off, exact, "cancelling", data=data) for family in ("fft", "direct"))
    assert by_fft == by_sum


def test_cancelling_data_needs_its_operands():
    data = make_data(STRICT, 1, "cancelling")
    exact = oracle(STRICT, data)
    with pytest.raises(ValueError, match="data"):
        check(STRICT, "direct", exact, exact, "cancelling")
    rounded = [exact[0].float() * (1 + 1e-4)]
    assert check(STRICT, "direct", rounded, exact, "cancelling", data=data).ok
    assert not check(STRICT, "direct", [exact[0].float() * 1.1], exact, "cancelling", data=data).ok


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "i64", "u8", "bool"])
def test_a_guarded_buffer_is_aligned_unreadable_and_watched(layout, dtype):
    guarded = GuardedBuffer(TensorSpec((2, 3, 4, 5), dtype), layout, "cpu", "the buffer")
    tensor = guarded.tensor
    assert tensor.data_ptr() % 256 == 0
    assert tensor.is_contiguous(memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format)
    assert not tensor.is_floating_point() or bool(torch.isnan(tensor).all())
    tensor.copy_(torch.ones(2, 3, 4, 5))
    assert guarded.intact()
    assert overrun([guarded]) == ""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    size = tensor.numel() * tensor.element_size()
    for place in (start - 1, start + size, start - GUARD_BYTES, start + size + GUARD_BYTES - 1):
        before = whole[place].item()
        whole[place] = before ^ 1
        assert overrun([guarded]) == "the buffer"
        whole[place] = before
    assert guarded.intact()


def test_an_empty_buffer_can_be_guarded():
    assert GuardedBuffer(TensorSpec((0, 3, 4, 5), "fp32"), "nhwc", "cpu").tensor.shape == (0, 3, 4, 5)
    assert GuardedBuffer(TensorSpec((0,), "u8"), "any", "cpu").intact()


@pytest.mark.parametrize("layout", ["nchw", "nhwc", "blocked"])
def test_the_checksum_shows_any_change(layout):
    tensor = torch.randn(2, 8, 16, 16)
    before = checksum([in_layout(tensor, layout)])
    assert all(torch.equal(a, b) for a, b in zip(before, checksum([in_layout(tensor, layout)]), strict=True))
    for change in (lambda t: t.view(-1)[-1].add_(1e-6), lambda t: t[0, 0, 0].copy_(t[0, 0, 0].flip(0)), torch.relu_):
        changed = tensor.clone()
        change(changed)
        after = checksum([in_layout(changed, layout)])
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_checksum_of_a_large_tensor_shows_what_changes_in_any_part_and_between_them():
    tensor = torch.arange(5 << 20, dtype=torch.float32)  # 20 MiB: three parts
    before = checksum([tensor])
    for first, second in ((0, 1024), (5, (3 << 20) + 5), ((2 << 20) - 1, 2 << 20), ((5 << 20) - 1, 7)):
        changed = tensor.clone()
        changed[first], changed[second] = tensor[second], tensor[first]
        assert any(not torch.equal(a, b) for a, b in zip(before, checksum([changed]), strict=True))
        changed = tensor.clone()
        changed[first] += 1
        assert any(not torch.equal(a, b) for a, b in zip(before, checksum([changed]), strict=True))


class Copies(Executable):
    """A layout change in the given buffer."""

    def launch(self, buffers, workspace):
        assert workspace is None
        buffers.results[0].copy_(buffers.args[0])


def test_a_guarded_run_gives_results_and_no_fault():
    problem = LayoutProblem(TensorSpec((2, 3, 4, 5), "fp32"), "nchw", "nhwc")
    data = make_data(problem, 1)
    trial = run_guarded(Copies(), problem, data)
    assert trial.fault == ""
    assert torch.equal(trial.results[0], data.args[0])
    assert judge(Copies(), "library", problem, data, "normal").ok
    assert result_specs(problem) == [problem.spec]


class CopiesMost(Copies):
    def launch(self, buffers, workspace):
        buffers.results[0][:, :-1].copy_(buffers.args[0][:, :-1])


def test_a_guarded_run_shows_what_was_not_written():
    problem = LayoutProblem(TensorSpec((2, 3, 4, 5), "fp32"), "nchw", "nhwc")
    verdict = judge(CopiesMost(), "library", problem, make_data(problem, 1), "normal")
    assert not verdict.ok
    assert "nan (never written?) at (0, 2, 0, 0)" in verdict.reason
