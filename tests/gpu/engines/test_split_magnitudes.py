"""Split products on tensor cores, where one tensor holds magnitudes that lie far apart.

x has one power of two as its scale, so a value's digits depend on its ratio to the tensor's largest: all of them down to 2^-28
(docs/kernels/strict-fp32.md).
"""

import pytest
import torch

from convoy.engines.manifest import load_engine
from convoy.measurement.accuracy import Data, bound, oracle, run_guarded
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem

pytestmark = pytest.mark.gpu

ENGINES = ("triton.split_fp32", "cuda.split_fp32")
LONG = ConvProblem(8, 64, 14, 14, 64, 3, 3, 1, 1, layout="nhwc", numerics="strict")
SHORT = ConvProblem(8, 8, 14, 14, 64, 1, 1, layout="nhwc", numerics="strict")


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def results(engine_id, problem, target, data):
    """(knobs, result) of the first settings, and of one that splits the reduction where there is one."""
    engine = load_engine(engine_id)
    if not (support := engine.supports(problem, target)):
        pytest.skip(support.reason)
    space = list(engine.space(problem, target))
    for knobs in dict.fromkeys([*space[:2], *[k for k in space if k.get("split", 1) != 1][:1]]):
        trial = run_guarded(engine.build(problem, knobs, target), problem, data)
        assert not trial.fault, trial.fault
        yield knobs, trial.results[0]


def data_of(problem, x, weight):
    return Data((x.contiguous(memory_format=torch.channels_last),), (weight.contiguous(),))


def terms(problem, data):
    """The sums of |x||weight|."""
    return oracle(problem, Data(tuple(t.abs() for t in data.args), tuple(t.abs() for t in data.constants)))[0]


@pytest.mark.parametrize("problem", [LONG, SHORT], ids=str)
@pytest.mark.parametrize("engine_id", ENGINES)
def test_each_image_keeps_the_bound_beside_images_that_are_much_larger(engine_id, problem, target):
    """Image i is 2^-3i times as large: the last one 2^-21."""
    factors = 2.0 ** (-3 * torch.arange(problem.n, device="cuda"))
    x = drawn(problem.x_spec.shape, 1) * factors[:, None, None, None]
    data = data_of(problem, x, drawn(problem.weight_spec.shape, 2))
    exact, scale = oracle(problem, data)[0], terms(problem, data)
    for knobs, y in results(engine_id, problem, target, data):
        for image in range(problem.n):
            error = float((y[image].double() - exact[image]).norm() / scale[image].norm())
            assert error <= bound(problem, "implicit_gemm"), (knobs, image, error)


@pytest.mark.parametrize("problem", [LONG, SHORT], ids=str)
@pytest.mark.parametrize("engine_id", ENGINES)
def test_each_filter_keeps_the_bound_beside_filters_that_are_much_larger(engine_id, problem, target):
    """Filters between 1 and 1e-30 times as large: each has a scale of its own."""
    factors = torch.logspace(0, -30, problem.k, device="cuda")
    weight = drawn(problem.weight_spec.shape, 2) * factors[:, None, None, None]
    data = data_of(problem, drawn(problem.x_spec.shape, 1), weight)
    exact, scale = oracle(problem, data)[0], terms(problem, data)
    for knobs, y in results(engine_id, problem, target, data):
        error = (y.double() - exact).square().sum((0, 2, 3)).sqrt() / scale.square().sum((0, 2, 3)).sqrt()
        assert float(error.max()) <= bound(problem, "implicit_gemm"), (knobs, int(error.argmax()), float(error.max()))


@pytest.mark.parametrize("decades", [6, 12, 30])
@pytest.mark.parametrize("problem", [LONG, SHORT], ids=str)
@pytest.mark.parametrize("engine_id", ENGINES)
def test_the_whole_keeps_the_bound_whatever_the_range(engine_id, problem, decades, target):
    """Each value of x has a magnitude of its own."""
    uniform = torch.rand(
        problem.x_spec.shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda", dtype=torch.float64
    )
    x = drawn(problem.x_spec.shape, 1) * (10.0 ** (-decades * uniform)).float()
    data = data_of(problem, x, drawn(problem.weight_spec.shape, 2))
    exact, scale = oracle(problem, data)[0], terms(problem, data)
    for knobs, y in results(engine_id, problem, target, data):
        error = float((y.double() - exact).norm() / scale.norm())
        assert error <= bound(problem, "implicit_gemm"), (knobs, error)


@pytest.mark.parametrize("engine_id", ENGINES)
def test_below_the_range_the_error_is_that_of_the_largest_value(engine_id, target):
    """An image 2^-40 times as large loses digits, and no more than 2^-50 of the largest |x| for each |weight|."""
    factors = torch.ones(LONG.n, device="cuda")
    factors[1:] = 2.0**-40
    x = drawn(LONG.x_spec.shape, 1) * factors[:, None, None, None]
    weight = drawn(LONG.weight_spec.shape, 2)
    data = data_of(LONG, x, weight)
    exact, scale = oracle(LONG, data)[0], terms(LONG, data)
    most = 2.0**-50 * float(x.abs().max()) * weight.double().abs().sum((1, 2, 3))[:, None, None]
    for knobs, y in results(engine_id, LONG, target, data):
        error = (y[1:].double() - exact[1:]).abs()
        assert bool((error <= most + 1e-4 * scale[1:]).all()), knobs
