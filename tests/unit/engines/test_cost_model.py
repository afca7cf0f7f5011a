"""The cost model: orders what theory orders, scales with the machine."""

from dataclasses import replace

from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.manifest import load_engine
from convoy.problem import ConvProblem
from convoy.target import Target

CPU = Target("cpu", "test", "avx512", 1, 16 << 30, 0)
GPU = Target("cuda", "test", "sm_90", 132, 80 << 30, 50 << 20)


def guess(name, problem, target=CPU):
    engine = load_engine(name)
    return min(engine.estimate_us(problem, knobs, target) for knobs in engine.space(problem, target))


def test_more_work_takes_longer_and_more_cores_take_less():
    small, large = KernelWork(1e9, 1e6, 10), KernelWork(2e9, 2e6, 10)
    assert estimate_us(small, CPU) < estimate_us(large, CPU) < 2 * estimate_us(small, CPU)
    assert estimate_us(large, replace(CPU, units=4)) < estimate_us(large, CPU) / 3
    assert estimate_us(large, replace(CPU, arch="generic")) > 5 * estimate_us(large, CPU)
    assert estimate_us(large, replace(GPU, units=66)) > estimate_us(large, GPU)
    assert estimate_us(replace(large, half=True), GPU) < estimate_us(large, GPU)


def test_calls_set_a_floor():
    assert estimate_us(KernelWork(0, 0, 10), CPU) == 30
    assert estimate_us(KernelWork(0, 0, 10), GPU) == 20


def test_winograd_beats_gemm_where_channels_are_many_and_loses_where_they_are_few():
    deep, shallow = ConvProblem(1, 256, 56, 56, 256, 3, 3, 1, 1), ConvProblem(1, 8, 14, 14, 8, 3, 3, 1, 1)
    assert guess("winograd4", deep) < guess("winograd2", deep) < guess("gemm", deep)
    assert guess("gemm", shallow) < guess("winograd2", shallow) < guess("winograd4", shallow)


def test_fft_has_no_hope_for_1x1_and_some_for_large_filters():
    point, large = ConvProblem(1, 256, 56, 56, 64, 1, 1), ConvProblem(1, 64, 56, 56, 64, 11, 11, 5, 5)
    assert guess("fft", point) > 4 * guess("pointwise", point)
    assert guess("fft_tiled", large) < guess("gemm", large)


def test_small_tiles_are_not_guessed_to_be_free():
    problem = ConvProblem(1, 64, 224, 224, 64, 3, 3, 1, 1)
    engine = load_engine("fft_tiled")
    guesses = {k.integer("tile"): engine.estimate_us(problem, k, CPU) for k in engine.space(problem, CPU)}
    assert guesses[16] < guesses[8]
