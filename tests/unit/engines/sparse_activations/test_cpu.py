"""zeroskip.cpu: right on any share of zeros, on both of its ways, with what is not finite, and at a bounded cost of looking."""

import itertools
from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.sparse_activations import zeroskip_cpu
from convoy.engines.sparse_activations.zeroskip_cpu import ENGINE, ZeroskipPartition
from convoy.measurement.accuracy import judge, make_data, oracle
from convoy.measurement.data import Data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs
from convoy.target import Target
from tests.unit.engines import sanitized
from tests.unit.engines.conv_cases import POOLED, POOLS, of_dtype, pooled

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")

BASE = ConvProblem(
    2, 100, 11, 9, 70, 3, 3, 1, 1, layout="nhwc", numerics="strict", epilogue=Epilogue(True, activation="relu")
)
WAYS = ("auto", "always", "never")


def build(problem, skip="auto"):
    return ENGINE.build(problem, Knobs.of(skip=skip), CPU)


def run(problem, args, constants, skip="auto"):
    executable = build(problem, skip)
    y = torch.full(problem.y_spec.shape, torch.nan).contiguous(memory_format=torch.channels_last)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers(args, [y], executable.pack(constants)), workspace)
    return y


def thinned(data, density, seed=0):
    x = data.args[0]
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < density
    return Data(((x * kept).contiguous(memory_format=torch.channels_last), *data.args[1:]), data.constants)


@pytest.mark.parametrize("skip", WAYS)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 0.7, 1.0])
def test_integers_are_exact_at_any_share_of_zeros_whichever_way_is_taken(density, skip):
    for problem in (BASE, replace(BASE, stride_h=2, pad_w=0, k=17, c=5), replace(BASE, r=1, s=1, pad_h=0, pad_w=0)):
        data = thinned(make_data(problem, 3, "integer"), density)
        verdict = judge(build(problem, skip), ENGINE.family, problem, data, "integer")
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("skip", WAYS)
@pytest.mark.parametrize("shape", [name for name, problem in POOLED.items() if problem.groups == 1])
def test_poolings_are_right_whichever_way_is_taken(shape, skip):
    for problem in pooled(POOLED[shape]):
        if ENGINE.supports(problem, CPU):
            for kind in ("integer", "cancelling"):
                data = thinned(make_data(problem, 4, kind), 0.5) if kind == "integer" else make_data(problem, 4, kind)
                verdict = judge(build(problem, skip), ENGINE.family, problem, data, kind)
                assert verdict.ok, f"{problem}: {verdict.reason}"


def test_dead_channels_dead_rows_and_an_image_without_zeros_in_one_batch():
    data = make_data(replace(BASE, n=3), 5, "integer")
    x = data.args[0].clone(memory_format=torch.preserve_format)
    x[0, ::2], x[1, :, 3:8], x[2] = 0, 0, x[2] + 9
    problem = replace(BASE, n=3)
    found = Data((x, *data.args[1:]), data.constants)
    assert torch.equal(run(problem, found.args, found.constants).double(), oracle(problem, found)[0])


@pytest.mark.parametrize("skip", WAYS)
def test_nan_and_infinity_in_the_input_are_treated_as_pytorch_does(skip):
    for pool in (None, POOLS["3x3 stride 2, padded"], POOLS["average"]):
        problem = replace(BASE, epilogue=replace(BASE.epilogue, pool=pool))
        data = thinned(make_data(problem, 6), 0.4)
        x = data.args[0].clone(memory_format=torch.preserve_format)
        x[0, 3, 4, 4], x[0, 99, 8, 2], x[1, 50, 0, 0] = torch.nan, torch.inf, -torch.inf
        found = run(problem, (x,), data.constants, skip)
        (wanted,) = oracle(problem, Data((x,), data.constants))
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.isinf(), wanted.isinf())
        torch.testing.assert_close(found.double(), wanted, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_zeros_are_not_skipped_where_a_weight_is_not_finite():
    data = thinned(make_data(BASE, 7), 0.2)
    weight = data.constants[0].clone()
    weight[3, 7, 1, 1] = torch.inf
    found = run(BASE, data.args, (weight, data.constants[1]), "always")
    wanted = torch.relu(torch.conv2d(data.args[0], weight, data.constants[1], padding=1))
    assert wanted.isnan().any(), "the case shows something"
    assert torch.equal(found.isnan(), wanted.isnan())


def test_a_negative_zero_is_a_zero():
    data = make_data(BASE, 8, "integer")
    x = -torch.zeros(BASE.x_spec.shape).contiguous(memory_format=torch.channels_last)
    found = run(BASE, (x,), data.constants, "always")
    assert torch.equal(found, torch.relu(data.constants[1]).reshape(1, -1, 1, 1).expand_as(found))


def test_one_program_serves_calls_of_different_shares_of_zeros_with_the_same_bits_each_time():
    executable, data = build(BASE), make_data(BASE, 9)
    packed = executable.pack(data.constants)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8)

    def launch(x):
        y = torch.empty(BASE.y_spec.shape).contiguous(memory_format=torch.channels_last)
        executable.launch(Buffers((x,), [y], packed), workspace)
        return y

    inputs = [thinned(data, density).args[0] for density in (1.0, 0.1, 0.6, 0.0)]
    first = [launch(x) for x in inputs]
    assert all(torch.equal(launch(x), y) for x, y in zip(inputs, first, strict=True))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_any_number_of_threads_gives_the_same_bits(threads):
    problem = replace(BASE, n=1, h=7, w=7, k=200, epilogue=replace(BASE.epilogue, pool=POOLS["2x2"]))
    data = thinned(make_data(problem, 10), 0.5)
    before = torch.get_num_threads()
    alone = run(problem, data.args, data.constants)
    try:
        torch.set_num_threads(threads)
        assert build(problem).workspace_bytes == ENGINE.workspace_bytes(problem, Knobs.of(skip="auto"))
        assert torch.equal(run(problem, data.args, data.constants), alone)
    finally:
        torch.set_num_threads(before)


def test_a_program_built_for_fewer_threads_than_there_are_now_stays_in_its_workspace():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        executable = build(BASE)
        torch.set_num_threads(4)
        for kind in ("integer", "normal"):
            assert judge(executable, ENGINE.family, BASE, make_data(BASE, 11, kind), kind).ok
    finally:
        torch.set_num_threads(before)


def test_images_are_cut_so_that_every_thread_has_work_and_weights_are_reused():
    large = ZeroskipPartition.of(replace(BASE, n=1, c=64, h=224, w=224, k=64), 2)
    assert large.band * 224 >= zeroskip_cpu.BAND_PIXELS
    assert large.slot_bytes <= zeroskip_cpu.BAND_BYTES
    small = ZeroskipPartition.of(replace(BASE, n=1, c=512, h=7, w=7, k=512), 4)
    tiles = -(-512 // (zeroskip_cpu.VECTORS * zeroskip_cpu.lanes()))
    assert -(-7 // small.band) * -(-tiles // small.tiles_a_unit) >= 4
    assert ZeroskipPartition.of(BASE, 1).tiles_a_unit == -(-70 // (zeroskip_cpu.VECTORS * zeroskip_cpu.lanes()))
    for problem in pooled(POOLED["3x3 stride 2, one image"]):
        assert ZeroskipPartition.of(problem, 3).slot_bytes % 256 == 0


def test_few_channels_and_few_filters_are_not_worth_a_list():
    assert zeroskip_cpu.skip_under(replace(BASE, c=3), 3) == 0.0
    assert zeroskip_cpu.skip_under(replace(BASE, r=1, s=1, k=zeroskip_cpu.lanes()), 96) == 0.0
    assert 0.7 < zeroskip_cpu.skip_under(replace(BASE, k=64), 96) < 0.8
    shares = [zeroskip_cpu.skip_under(replace(BASE, r=1, s=1, k=k), 96) for k in (16, 64, 512)]
    assert shares == sorted(shares)


def test_the_sizes_are_those_of_the_source():
    assert sanitized.sizes_of(zeroskip_cpu.SOURCE) == [name for name, _ in zeroskip_cpu._ZeroskipSizes._fields_]
    assert f"#define VECTORS {zeroskip_cpu.VECTORS}\n" in zeroskip_cpu.SOURCE.read_text()
    assert f"#define ROOM {zeroskip_cpu.ROOM} " in zeroskip_cpu.SOURCE.read_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "nchw"}, "needs layout nhwc, got nchw"),
        ({"groups": 2}, "needs groups = 1, got 2"),
        ({"epilogue": Epilogue(activation="gelu")}, "none, relu, relu6, got gelu"),
    ],
)
def test_refusals_say_what_was_needed(change, reason):
    assert reason in ENGINE.supports(replace(BASE, **change), CPU).reason
    assert ENGINE.supports(BASE, CPU)


def test_other_dtypes_and_devices_are_refused():
    gpu = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.13.0"),))
    assert "CPU" in ENGINE.supports(BASE, gpu).reason
    assert "fp32" in ENGINE.supports(of_dtype(BASE, "fp16"), CPU).reason


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(host_compiler, "compiler", lambda: "")
    assert "C compiler" in ENGINE.supports(BASE, CPU).reason


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_width_of_vector_register_is_right(lanes, monkeypatch):
    monkeypatch.setattr(zeroskip_cpu, "lanes", lambda: lanes)
    problems = (BASE, replace(BASE, k=5, epilogue=replace(BASE.epilogue, pool=POOLS["overlapping, uneven"])))
    for problem, skip in itertools.product(problems, WAYS):
        data = thinned(make_data(problem, 12, "integer"), 0.5)
        verdict = judge(build(problem, skip), ENGINE.family, problem, data, "integer")
        assert verdict.ok, verdict.reason
