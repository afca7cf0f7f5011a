"""cuDNN's plans on the GPU: right in every direction, dtype and layout, the same bits again, the same in a graph."""

from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.library import cudnn
from convoy.engines.library.cudnn import ENGINE, library, surveys
from convoy.errors import CompileError, InputError
from convoy.measurement.accuracy import in_layout, judge, make_data, result_specs
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FULL = Epilogue(bias=True, residual=True, activation="relu")
KINDS = [("fp16", "half"), ("bf16", "half"), ("fp32", "as_torch"), ("fp32", "strict")]
DIRECTIONS = ("fprop", "dgrad", "wgrad")
LAYOUTS = ("nchw", "nhwc")
TRIED = 4
"""Settings tried of each problem: the first, and others evenly from the rest."""

SHAPES = {
    "3x3": ConvProblem(1, 64, 14, 14, 96, 3, 3, 1, 1),
    "3x3 stride 2": ConvProblem(2, 64, 28, 28, 64, 3, 3, 1, 1, 2, 2),
    "3x3 odd": ConvProblem(3, 40, 13, 11, 72, 3, 3, 1, 1),
    "3x3 odd channels": ConvProblem(2, 5, 13, 11, 7, 3, 3, 1, 1),
    "1x1": ConvProblem(2, 256, 14, 14, 64, 1, 1),
    "1x1 stride 2": ConvProblem(1, 64, 15, 15, 128, 1, 1, 0, 0, 2, 2),
    "dilated": ConvProblem(1, 32, 17, 17, 32, 3, 3, 4, 4, 1, 1, 4, 4),
    "stem 7x7": ConvProblem(1, 3, 56, 56, 64, 7, 7, 3, 3, 2, 2),
    "grouped": ConvProblem(2, 64, 9, 9, 32, 3, 3, 1, 1, groups=4),
    "depthwise": ConvProblem(2, 96, 14, 14, 96, 3, 3, 1, 1, groups=96),
    "one pixel": ConvProblem(4, 96, 1, 1, 24, 1, 1),
}
EPILOGUES = (
    FULL,
    Epilogue(bias=True, activation="relu"),
    Epilogue(bias=True, activation="relu6"),
    Epilogue(bias=True, activation="silu"),
    Epilogue(residual=True, activation="relu6"),
    Epilogue(bias=True, residual=True, activation="hardswish"),
    Epilogue(bias=True, activation="gelu"),
    Epilogue(activation="sigmoid"),
)


def typed(problem, dtype, numerics, **rest):
    return replace(problem, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, numerics=numerics, **rest)


@pytest.fixture(scope="module")
def target():
    found = detect_target("cuda")
    if reason := library.absence():
        pytest.skip(reason)
    return found


def some(knobs):
    return knobs[:1] + knobs[1 :: max(1, len(knobs) // (TRIED - 1))]


def known(problem, target, most=24):
    """The first settings, without those plans beyond the heuristics that cuDNN does not have."""
    found = []
    for knobs in ENGINE.space(problem, target)[:most]:
        try:
            ENGINE.workspace_bytes(problem, knobs)
        except InputError:
            continue
        found.append(knobs)
    return found


def test_another_process_reads_the_list_and_the_workspaces(target, monkeypatch):
    problem = typed(SHAPES["3x3"], "fp16", "half", layout="nhwc", epilogue=FULL)
    found = ENGINE.space(problem, target)
    sizes = [ENGINE.workspace_bytes(problem, knobs) for knobs in known(problem, target)]
    cudnn.offered_plans.cache_clear()
    surveys.known_workspaces.cache_clear()
    monkeypatch.setattr(surveys, "recommending", lambda *_: pytest.fail("asked cuDNN again"))
    assert ENGINE.space(problem, target) == found
    assert [ENGINE.workspace_bytes(problem, knobs) for knobs in known(problem, target)] == sizes


def built(problem, target, chosen):
    """Settings with their executables. The first must build; a later one that cuDNN offers and cannot build is left out."""
    for position, knobs in enumerate(chosen):
        if position == 0:
            yield knobs, ENGINE.build(problem, knobs, target)
            continue
        try:
            executable = ENGINE.build(problem, knobs, target)
        except CompileError:
            continue
        yield knobs, executable


def wrong(problem, target, kinds=("integer", "normal")):
    """The faults of a problem's plans, in words; those that transform tiles may miss a direct sum's bound."""
    found, right = [], 0
    tf32 = problem.numerics == "as_torch"
    for knobs, executable in built(problem, target, some(ENGINE.space(problem, target))):
        if executable.workspace_bytes != ENGINE.workspace_bytes(problem, knobs):
            found.append(f"[{knobs}] wants {executable.workspace_bytes} bytes of workspace, announced otherwise")
        for kind in kinds:
            verdict = judge(executable, ENGINE.family, problem, make_data(problem, 1, kind, "cuda"), kind, tf32=tf32)
            if not verdict.ok and not {"winograd", "fft"} & set(ENGINE.notes(problem, knobs)):
                found.append(f"{problem} [{knobs}] on {kind} data: {verdict.reason}")
            right += verdict.ok
    assert right, f"no plan of {problem} is right"
    return found


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_are_right(shape, direction, layout, kind, target):
    problem = typed(SHAPES[shape], *kind, direction=direction, layout=layout)
    support = ENGINE.supports(problem, target)
    if not support:
        pytest.skip(support.reason)
    faults = wrong(problem, target)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues_are_right_inside_and_outside_of_the_graph(epilogue, layout, kind, target):
    problem = typed(SHAPES["3x3"], *kind, epilogue=epilogue, layout=layout)
    assert ENGINE.supports(problem, target), ENGINE.supports(problem, target).reason
    faults = wrong(problem, target)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_some_graph_holds_a_whole_epilogue(dtype, target):
    problem = typed(SHAPES["3x3"], dtype, "half" if dtype == "fp16" else "as_torch", epilogue=FULL, layout="nhwc")
    assert {knobs["fused"] for knobs in ENGINE.space(problem, target)} == {True, False}


def test_the_bias_gradient_follows_a_weight_gradient(target):
    problem = typed(SHAPES["3x3"], "fp16", "half", direction="wgrad", layout="nhwc", epilogue=Epilogue(bias=True))
    assert wrong(problem, target) == []


@pytest.mark.parametrize("shape", ["3x3", "1x1", "3x3 stride 2"])
def test_strict_plans_keep_their_bound_on_cancelling_sums(shape, target):
    """TF32 would miss it by a factor of a thousand, and so it does where it is allowed."""
    problem = typed(SHAPES[shape], "fp32", "strict", layout="nhwc")
    assert wrong(problem, target, ("normal", "cancelling")) == []
    for knobs in known(problem, target):
        assert not {"tensor_core", "down_convert_inputs", "reduced_precision_reduction"} & set(
            ENGINE.notes(problem, knobs)
        )


def test_the_strict_filter_catches_a_tf32_plan(target):
    strict = typed(SHAPES["3x3"], "fp32", "strict", layout="nhwc")
    loose = replace(strict, numerics="as_torch")
    fast = [k for k in known(loose, target) if "tensor_core" in ENGINE.notes(loose, k)]
    assert fast, "no TF32 plan to test with"
    with pytest.raises(CompileError, match="rounds operands"):
        ENGINE.build(strict, fast[0], target)
    executable = ENGINE.build(loose, fast[0], target)
    verdict = judge(executable, ENGINE.family, strict, make_data(strict, 1, "normal", "cuda"), "normal")
    assert not verdict.ok


@pytest.mark.parametrize(
    ("name", "says"), [("eng9999", "eng9999"), ("eng0_k2-12345", "eng0_k2-12345"), ("eng46_b2-4_b5-999", "recommend")]
)
def test_a_plan_that_is_not_there_is_a_compile_error(name, says, target):
    problem = typed(SHAPES["3x3"], "fp16", "half", layout="nhwc")
    with pytest.raises(CompileError, match=says):
        ENGINE.build(problem, Knobs.of(plan=name, fused=False), target)


class Case:
    """Buffers of a problem for launches of its executable."""

    def __init__(self, problem, executable, seed=1):
        data = make_data(problem, seed, "normal", "cuda")
        specs = result_specs(problem)
        empty = [torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cuda") for spec in specs]
        self.results = [in_layout(t, problem.layout) for t in empty]
        self.buffers = Buffers(data.args, list(self.results), executable.pack(data.constants))
        self.executable, size = executable, executable.workspace_bytes
        self.workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None

    def launch(self):
        self.executable.launch(self.buffers, self.workspace)

    def outcome(self):
        for result in self.results:
            result.fill_(float("nan"))
        if self.workspace is not None:
            self.workspace.fill_(255)
        self.launch()
        return [result.clone() for result in self.results]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_deterministic_plans_give_the_same_bits(direction, dtype, target):
    problem = typed(SHAPES["3x3 stride 2"], dtype, "half" if dtype == "fp16" else "as_torch", direction=direction)
    problem = replace(problem, n=8, layout="nhwc")
    for knobs, executable in built(problem, target, known(problem, target)):
        assert executable.deterministic == ("nondeterministic" not in ENGINE.notes(problem, knobs))
        if not executable.deterministic:
            continue
        case = Case(problem, executable)
        first = case.outcome()
        for _ in range(100):
            assert all(torch.equal(a, b) for a, b in zip(case.outcome(), first, strict=True)), knobs


@pytest.mark.parametrize(("direction", "fused"), [("fprop", True), *((direction, False) for direction in DIRECTIONS)])
def test_a_captured_graph_equals_eager_launches(direction, fused, target):
    epilogue = FULL if direction == "fprop" else Epilogue()
    problem = typed(SHAPES["3x3"], "fp16", "half", direction=direction, layout="nhwc", epilogue=epilogue)
    space = [k for k in ENGINE.space(problem, target) if k["fused"] == fused]
    assert space
    for knobs, executable in built(problem, target, space[:4]):
        if not executable.deterministic:
            continue
        case = Case(problem, executable)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            case.launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                allocated = torch.cuda.memory_allocated()
                for _ in range(3):
                    case.launch()
                assert torch.cuda.memory_allocated() == allocated, "a launch allocates"
        for seed in range(5):
            fresh = make_data(problem, seed, "normal", "cuda")
            for held, new in zip(case.buffers.args, fresh.args, strict=True):
                held.copy_(new)
            graph.replay()
            replayed = [result.clone() for result in case.results]
            eager = case.outcome()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True)), (knobs, seed)


def test_launches_follow_torchs_current_stream(target):
    """A long wait on one stream holds back a launch on it, and none on another."""
    problem = typed(SHAPES["3x3"], "fp16", "half", layout="nhwc")
    case = Case(problem, ENGINE.build(problem, ENGINE.space(problem, target)[0], target))
    right = case.outcome()[0]
    blocked, free = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    case.results[0].fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(blocked):
        torch.cuda._sleep(400_000_000)
        case.launch()
        done = torch.cuda.Event()
        done.record()
    with torch.cuda.stream(free):
        early = case.results[0].clone()
        free.synchronize()
    assert not done.query(), "the sleep was too short to tell"
    assert early.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(case.results[0], right)
