"""Every engine that takes numerics `strict` on this CPU keeps its promise: each value is as exact as an fp32 sum of its terms.

An fp32 sum of K products, in any order, with or without fused multiply-adds, is off by at most gamma(K) times the sum of the
products' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). Methods that transform tiles are not: their
rounding follows the largest value of a tile.
"""

from dataclasses import replace

import pytest
import torch

from convoy.capture.weight_masks import mask_of
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.measurement.accuracy import Data, judge, make_data, oracle, relative_error, run_guarded
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem
from tests.unit.engines.conv_cases import SHAPES, of_dtype

CPU = detect_target("cpu")
NAMES = ("3x3 padded", "3x3 long reduction", "grouped 5x5", "1x1", "depthwise", "3x3 over-padded")
TRANSFORMING = ("winograd2", "winograd4", "fft", "fft_tiled", "cpu.winograd")
PLAIN = ConvProblem(1, 16, 12, 12, 16, 3, 3, 1, 1, layout="nhwc")


def mixed(problem, seed):
    """Numbers of either sign whose magnitudes lie between 1e-6 and 1e6, each drawn by itself, in x and in the weight."""
    plain, generator = make_data(problem, seed), torch.Generator().manual_seed(seed)

    def drawn(tensor):
        exponents = torch.rand(tensor.shape, generator=generator) * 12 - 6
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        return (10.0**exponents * signs * (tensor != 0)).to(tensor.dtype).contiguous(memory_format=_format(tensor))

    return Data(tuple(map(drawn, plain.args)), tuple(map(drawn, plain.constants)))


def _format(tensor):
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def largest_excess(problem, data, result):
    """The largest error of an element, over what an fp32 sum of its terms may be off by."""
    (exact,) = oracle(problem, data)
    (terms,) = oracle(problem, Data(tuple(t.abs() for t in data.args), tuple(t.abs() for t in data.constants)))
    roundings = problem.reduction_length + 2
    allowed = roundings * 2.0**-24 / (1 - roundings * 2.0**-24) * terms
    error = (result.double() - exact).abs()
    return float((error / allowed.clamp_min(1e-300)).nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def problems():
    """Shapes in both layouts, forward and backward, and one with a mask for engines that want one."""
    for name in NAMES:
        for layout in ("nchw", "nhwc"):
            for direction in ("fprop", "dgrad", "wgrad"):
                yield replace(of_dtype(SHAPES[name], "fp32", "strict").with_layout(layout), direction=direction)
    masked = ConvProblem(1, 16, 9, 9, 16, 3, 3, 1, 1, numerics="strict")
    keep = torch.rand(16, 16, 3, 3, generator=torch.Generator().manual_seed(3)) > 0.7
    keep[:8] = False
    keep[:, :8] = False
    for layout in ("nchw", "nhwc"):
        yield masked.with_mask(mask_of(keep)).with_layout(layout)


def accepted():
    found = [(load_engine(name), problem) for name in MANIFEST for problem in problems()]
    return [(engine, problem) for engine, problem in found if engine.accepts(problem, CPU)]


ACCEPTED = accepted()


def test_many_engines_take_strict_and_none_that_transforms_tiles_does():
    names = {engine.id for engine, _ in ACCEPTED}
    assert {"aten", "gemm", "pointwise"} <= names
    assert len(ACCEPTED) > 40
    assert not names & set(TRANSFORMING)


@pytest.mark.parametrize("name", sorted({engine.id for engine, _ in ACCEPTED}))
def test_every_value_is_as_exact_as_an_fp32_sum_of_its_terms(name):
    faults = []
    for engine, problem in ACCEPTED:
        if engine.id != name:
            continue
        for knobs in list(engine.space(problem, CPU))[:3]:
            executable = build(engine, problem, knobs, CPU)
            for kind, data in (("mixed", mixed(problem, 5)), ("cancelling", make_data(problem, 5, "cancelling"))):
                excess = largest_excess(problem, data, run_guarded(executable, problem, data).results[0])
                if not excess <= 1:
                    faults.append(f"{problem} [{knobs}] on {kind} data: {excess:.3g} times what is allowed")
            verdict = judge(executable, engine.family, problem, data, "cancelling")
            if not verdict.ok:
                faults.append(f"{problem} [{knobs}]: {verdict.reason}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", TRANSFORMING)
def test_methods_that_transform_tiles_break_that_and_are_refused(name):
    engine = load_engine(name)
    if not (support := engine.supports(PLAIN, CPU)):
        pytest.skip(support.reason)
    data = mixed(PLAIN, 5)
    executable = build(engine, PLAIN, engine.space(PLAIN, CPU)[0], CPU)
    assert largest_excess(PLAIN, data, run_guarded(executable, PLAIN, data).results[0]) > 10
    strict = of_dtype(PLAIN, "fp32", "strict")
    assert "strict" in engine.supports(strict, CPU).reason


@pytest.mark.parametrize("name", TRANSFORMING)
def test_a_transform_overflows_where_the_sum_is_finite(name):
    """docs/kernels/cpu.md says so of large numbers: the reason for a no under `strict`, and a caution elsewhere."""
    engine = load_engine(name)
    if not (support := engine.supports(PLAIN, CPU)):
        pytest.skip(support.reason)
    x = torch.zeros(PLAIN.x_spec.shape).contiguous(memory_format=torch.channels_last)
    x[:, 0] = 1e38 * (1 - 2 * (torch.arange(12) % 2))
    weight = torch.zeros(PLAIN.weight_spec.shape)
    weight[:, 0, 1, 1] = 1e-3
    data = Data((x,), (weight,))
    (exact,) = oracle(PLAIN, data)
    finite = {}
    for each in ("aten", name):
        found = load_engine(each)
        executable = build(found, PLAIN, found.space(PLAIN, CPU)[0], CPU)
        finite[each] = bool(torch.isfinite(run_guarded(executable, PLAIN, data).results[0]).all())
    assert bool(torch.isfinite(exact).all())
    assert finite == {"aten": True, name: False}


def test_an_fp32_sum_passes_and_one_wrong_term_does_not():
    problem = of_dtype(SHAPES["3x3 padded"], "fp32", "strict")
    data = mixed(problem, 7)
    (exact,) = oracle(problem, data)
    assert largest_excess(problem, data, exact.float()) <= 1
    wrong = exact.float()
    wrong[0, 0, 0, 0] *= 1 + 1e-3
    assert largest_excess(problem, data, wrong) > 1
    assert relative_error(wrong, exact) < 1e-3
