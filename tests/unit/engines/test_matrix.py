"""Every engine over one list of problems: where it says yes it is right, and where it says no it says why."""

import threading
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.engines.torch_operators import DTYPES
from convoy.measurement.accuracy import judge, make_data, oracle
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs
from convoy.support import Support
from convoy.target import Target
from tests.unit.engines.conv_cases import (
    BIAS_RELU,
    LINEAR,
    ODD,
    OTHERS,
    POOLED,
    SHAPES,
    VOLUMES,
    of_dtype,
    pooled,
    variants,
    volume_variants,
)
from tests.unit.engines.planted_faults import FAULTS, AccumulatesInHalf, Right

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.13.0"),))
CPU = detect_target("cpu")


@lru_cache(maxsize=4096)
def data_and_oracle(problem, kind):
    data = make_data(problem, 1, kind)
    return data, oracle(problem, data)


def engines():
    return [pytest.param(load_engine(name), id=name) for name in MANIFEST]


@lru_cache(maxsize=1 << 14)
def as_torch(problem):
    """The same under numerics `as_torch`."""
    return replace(problem, numerics="as_torch")


def asked(engine, problem):
    """The problem as an engine takes it: under `strict` if it can, else as torch does it; None where it says no to both."""
    if engine.accepts(problem, CPU):
        return problem
    if getattr(problem, "numerics", "") == "strict" and engine.accepts(as_torch(problem), CPU):
        return as_torch(problem)
    return None


def faults_of(engine, problem, kinds=("integer", "normal")):
    """The faults of an engine on a problem, in words: each knob setting built, checked on each kind of data."""
    found = []
    for knobs in engine.space(problem, CPU):
        executable = engine.build(problem, knobs, CPU)
        if executable.workspace_bytes != engine.workspace_bytes(problem, knobs):
            found.append(f"{problem} [{knobs}] workspace {executable.workspace_bytes}, announced otherwise")
        for kind in kinds:
            data, exact = data_and_oracle(problem, kind)
            verdict = judge(executable, engine.family, problem, data, kind, exact=exact)
            if not verdict.ok:
                found.append(f"{problem} [{knobs}] on {kind} data: {verdict.reason}")
    return found


def pairs(groups):
    """(engine, name of a group) where the engine takes a problem of the group: a test for each of the others would prove nothing.

    That they say no, and why, is `test_support_is_a_value_with_a_reason`.
    """
    for engine in (load_engine(name) for name in MANIFEST):
        for name, problems in groups.items():
            if any(asked(engine, problem) for problem in problems):
                yield pytest.param(engine, name, id=f"{engine.id}-{name}")


CONVOLUTIONS = {name: list(variants(shape)) for name, shape in SHAPES.items()}
POOLINGS = {name: list(pooled(shape)) for name, shape in POOLED.items()}
THREE_DIMENSIONAL = {name: list(volume_variants(shape)) for name, shape in VOLUMES.items()}
REST = {"rest": [problem for problem in (*LINEAR, *OTHERS, *ODD[:-2]) if not getattr(problem, "weight_mask", "")]}
CANCELLING = {
    shape: [of_dtype(SHAPES[shape], "fp32"), of_dtype(SHAPES[shape], "fp16").with_layout("nhwc")]
    for shape in ("3x3 long reduction", "3x3 padded", "grouped 5x5", "1x1")
}


def faults_in(engine, problems, kinds=("integer", "normal")):
    """The faults of an engine on those of some problems that it takes."""
    taken = [found for problem in problems if (found := asked(engine, problem))]
    return [fault for problem in taken for fault in faults_of(engine, problem, kinds)]


@pytest.mark.parametrize(("engine", "shape"), pairs(CONVOLUTIONS))
def test_yes_is_kept_on_convolutions(engine, shape):
    faults = faults_in(engine, CONVOLUTIONS[shape])
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("engine", "shape"), pairs(POOLINGS))
def test_yes_is_kept_on_poolings(engine, shape):
    faults = faults_in(engine, POOLINGS[shape])
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("engine", "shape"), pairs(THREE_DIMENSIONAL))
def test_yes_is_kept_on_volumes(engine, shape):
    faults = faults_in(engine, THREE_DIMENSIONAL[shape])
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("engine", "group"), pairs(REST))
def test_yes_is_kept_on_everything_else(engine, group):
    faults = faults_in(engine, REST[group])
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("engine", "shape"), pairs(CANCELLING))
def test_cancelling_sums_keep_the_bound_against_their_terms(engine, shape):
    faults = faults_in(engine, CANCELLING[shape], ("cancelling",))
    assert not faults, "\n".join(faults)


def test_every_engine_for_a_cpu_is_tried():
    tried = {param.values[0].id for param in pairs(CONVOLUTIONS)}
    everywhere = {"aten", "reference", "gemm", "pointwise", "winograd2", "winograd4", "fft", "fft_tiled"}
    assert everywhere <= tried
    if CPU.version("cxx"):
        assert {"cpu.direct", "cpu.depthwise", "cpu.grouped", "cpu.winograd", "zeroskip.cpu"} <= tried


@pytest.mark.parametrize("target", [CPU, H100], ids=["cpu", "cuda"])
@pytest.mark.parametrize("engine", engines())
def test_support_is_a_value_with_a_reason(engine, target):
    plain = [p for shape in SHAPES.values() for p in variants(shape) if p.epilogue in (Epilogue(), BIAS_RELU)]
    plain += [p for found in THREE_DIMENSIONAL.values() for p in found]
    for problem in plain + LINEAR + OTHERS + ODD + [p for found in POOLINGS.values() for p in found]:
        support = engine.supports(problem, target)
        assert isinstance(support, Support)
        if support:
            knobs = list(engine.space(problem, target))
            assert knobs, f"{engine.id} does {problem} but offers no knobs"
            assert len(set(knobs)) == len(knobs)
            assert all(Knobs.parse(str(k)) == k for k in knobs)
            assert knobs == list(engine.space(problem, target))
            assert all(engine.workspace_bytes(problem, k) >= 0 for k in knobs)
            guesses = [engine.estimate_us(problem, k, target) for k in knobs]
            assert all(guess is None or guess > 0 for guess in guesses)
        else:
            assert "\n" not in support.reason
            assert 8 <= len(support.reason) <= 200, support.reason


def test_the_baseline_does_every_problem_of_the_list():
    baseline = load_engine("aten")
    problems = [p for shape in SHAPES.values() for p in variants(shape)] + LINEAR + OTHERS
    problems += [p for shape in POOLED.values() for p in pooled(shape)]
    problems += [p for found in THREE_DIMENSIONAL.values() for p in found]
    assert [p for p in problems if not baseline.supports(p, CPU)] == []


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("gemm", 29),
        ("pointwise", 4),
        ("winograd2", 8),
        ("winograd4", 8),
        ("fft", 29),
        ("fft_tiled", 15),
        ("onednn", 25),
    ],
)
def test_an_engine_does_what_it_is_for(name, least):
    engine = load_engine(name)
    if name == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch was built without oneDNN")
    assert sum(bool(asked(engine, of_dtype(shape, "fp32"))) for shape in SHAPES.values()) >= least


@pytest.mark.parametrize(
    "engine", list(dict.fromkeys(param.values[0] for param in pairs(CONVOLUTIONS))), ids=lambda e: e.id
)
def test_launches_repeat_to_the_bit_and_share_no_state_between_threads(engine):
    problem = next(
        q for found in CONVOLUTIONS.values() for p in found if (q := asked(engine, p)) and q.direction == "fprop"
    )
    executable = engine.build(problem, engine.space(problem, CPU)[0], CPU)
    inputs = [make_data(problem, seed) for seed in (1, 2)]
    packed = [executable.pack(data.constants) for data in inputs]

    def launch(index):
        empty = torch.empty(problem.y_spec.shape, dtype=DTYPES[problem.y_spec.dtype])
        results = [None if executable.allocates_results else empty.contiguous(memory_format=_format(problem))]
        size = executable.workspace_bytes
        buffers = Buffers(inputs[index].args, results, packed[index])
        executable.launch(buffers, torch.empty(size, dtype=torch.uint8) if size else None)
        return buffers.results[0]

    alone = [launch(0), launch(1)]
    assert executable.resident_bytes(packed[0]) >= 0
    wrong = []

    def work(index):
        same = [torch.equal(launch(index), alone[index]) for _ in range(20)]
        wrong.extend(index for right in same if executable.deterministic and not right)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _format(problem):
    return torch.channels_last if problem.layout == "nhwc" else torch.contiguous_format


BIASED = Epilogue(bias=True, residual=True, activation="relu")
FAULTY = [
    ConvProblem(2, 6, 14, 13, 8, 3, 3, 1, 1, epilogue=BIASED, numerics="strict"),
    ConvProblem(2, 6, 14, 13, 8, 3, 3, 2, 1, 1, 2, 2, 1, epilogue=BIASED, numerics="strict"),
    ConvProblem(2, 6, 14, 13, 8, 3, 3, 1, 1, groups=2, epilogue=BIASED, numerics="strict"),
    ConvProblem(1, 256, 7, 7, 8, 3, 3, 1, 1, epilogue=BIASED, numerics="strict"),
]
"""Between them they have what the planted faults get wrong."""


def caught(executable, family, problem, kinds=("integer", "normal", "cancelling")):
    """The kinds of data on which a fault shows."""
    return [k for k in kinds if not judge(executable, family, problem, make_data(problem, 5, k), k).ok]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_without_a_fault_nothing_is_caught(layout, dtype):
    for problem in FAULTY:
        laid = of_dtype(problem, dtype).with_layout(layout)
        assert caught(Right(laid), "direct", laid) == []


@pytest.mark.parametrize("family", ["direct", "winograd"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_planted_fault_is_caught(fault, layout, family):
    problems = [problem.with_layout(layout) for problem in FAULTY]
    applicable = [p for p in problems if p.groups == 1 or fault.__name__ != "AccumulatesInHalf"]
    assert any(caught(fault(p), family, p, ("integer", "normal")) for p in applicable)


def test_sums_in_fp16_are_caught_on_fp16_tensors_too():
    problem = of_dtype(ConvProblem(1, 512, 7, 7, 8, 3, 3, 1, 1), "fp16")
    assert caught(AccumulatesInHalf(problem), "implicit_gemm", problem, ("normal",))
