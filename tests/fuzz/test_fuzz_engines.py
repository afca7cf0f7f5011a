"""Every engine on random problems: where it says yes it must be right.

Problems are drawn freely, and, so that each engine for GPUs meets its own, by family (`problem_families`).
The seed is printed; CONVOY_FUZZ_SEED=N repeats it or tries another, CONVOY_FUZZ_CASES=N tries more. A failure names the
smallest problem found that still fails, by its key.
"""

import random
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch
from torch.nn.functional import conv2d as torch_conv2d

from convoy import UnsupportedError, conv2d
from convoy.engines.base import Engine
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import CompileError
from convoy.measurement.accuracy import Data, check, judge, make_data, oracle
from convoy.measurement.data_with_zeros import with_zeros
from convoy.measurement.device.detect import detect_target as detect
from convoy.problem import ConvProblem, Epilogue, SubgraphProblem
from convoy.settings import Settings
from tests.fuzz.problem_families import LEAST_OWN, TRIES, claims, own_problems
from tests.fuzz.random_problems import CASES, SEED, random_problem, shrink

detect_target = cache(detect)  # nothing changes it here, and it takes a millisecond

CHUNK = 100
GPU_CHUNK = 40
GPU_SHARE = 10  # kernels compiled for each problem cost a second: fewer problems there

MOST_OWN = max(LEAST_OWN, CASES // 100)  # of an engine's own problems in a direction
OWN = [
    pytest.param(name, direction, "cuda", id=f"{name}-{direction}-cuda", marks=pytest.mark.gpu)
    for name in MANIFEST
    for direction in claims(name)
]
OWN += [
    pytest.param(name, "fprop", "cpu", id=f"{name}-fprop-cpu")
    for name in ("cpu.grouped", "pruned.c", "pruned.channels")
]
OWN += [
    pytest.param(name, "piece", "cpu", id=f"{name}-piece-cpu")
    for name in (
        "cpu.pooling",
        "cpu.concat",
        "cpu.scale",
        "cpu.layer_norm",
        "cpu.group_norm",
        "cpu.banded",
        "cpu.gated_1x1",
        "cpu.depthwise_mean",
    )
]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def show_seed(tmp_path, monkeypatch):
    """Shown with a failure; and the user's database stays out of it."""
    print(f"CONVOY_FUZZ_SEED={SEED}")
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))


def fault(engine, problem, device, seed):
    """The fault of an engine on a problem, with knobs and kind of data drawn from the seed; empty where there is none."""
    target = detect_target(device)
    if not engine.accepts(problem, target):
        return ""
    draw = random.Random(seed)
    space = list(engine.space(problem, target))
    knobs = space[0] if draw.random() < 0.5 else draw.choice(space)
    kind = draw.choice(("integer", "integer", "normal", "cancelling"))
    try:
        knobs, executable = built(engine, problem, [knobs, space[0]], target)
    except CompileError as error:
        return f"[{space[0]}] {error}"
    data = make_data(problem, seed, kind, device)
    if engine.skips_zeros and draw.random() < 0.7:
        data = with_zeros(data, draw.choice((0, 30, 60, 90, 100)), seed, engine.zeros_kind)
    tf32 = device == "cuda" and getattr(problem, "numerics", "") == "as_torch"
    verdict = judge(executable, engine.family, problem, data, kind, tf32=tf32)
    return "" if verdict.ok else f"[{knobs}] on {kind} data: {verdict.reason}"


def built(engine, problem, choices, target):
    """The first choice of knobs that compiles; the last one, the default, has to."""
    for knobs in choices[:-1]:
        try:
            return knobs, build(engine, problem, knobs, target)
        except CompileError:
            continue
    return choices[-1], build(engine, problem, choices[-1], target)


def check_case(engine, device, index, problem):
    found = fault(engine, problem, device, index)
    if found:
        smallest = shrink(problem, lambda candidate: bool(fault(engine, candidate, device, index)))
        said = fault(engine, smallest, device, index)
        pytest.fail(
            f"{engine.id}, CONVOY_FUZZ_SEED={SEED}, case {index}: {named(problem)}: {found}\n"
            f"smallest: {named(smallest)}: {said}"
        )


def named(problem):
    """The key, and what it gives the digest of alone."""
    mask = getattr(problem, "mask", None)
    return (
        f"{problem}\n{problem.text}"
        if isinstance(problem, SubgraphProblem)
        else f"{problem}" + (f" {mask.text}" if mask is not None and mask.positions <= 4096 else "")
    )


def check_chunk(engine, device, cases):
    for index in cases:
        check_case(engine, device, index, asked(engine, random_problem(SEED, index), device))


def asked(engine, problem, device):
    """The problem, or where it asks for `strict` and the engine refuses that, the same as torch does it."""
    if getattr(problem, "numerics", "") != "strict" or engine.accepts(problem, detect_target(device)):
        return problem
    return replace(problem, numerics="as_torch")


def accepted_on_cpu():
    """(engine, cases that it takes on this CPU, `CHUNK` at a time): it says no to all others, which needs no test."""
    target = detect_target("cpu")
    problems = [random_problem(SEED, index) for index in range(CASES)]
    for name in MANIFEST:
        engine = load_engine(name)
        taken = [i for i, p in enumerate(problems) if engine.accepts(asked(engine, p, "cpu"), target)]
        for first in range(0, len(taken), CHUNK):
            cases = taken[first : first + CHUNK]
            yield pytest.param(name, "cpu", cases, id=f"{name}-{cases[0]}-cpu")


def chosen_for_gpu():
    """(engine, cases): some of all, a few tests an engine."""
    cases = range(0, CASES, GPU_SHARE)
    for name in MANIFEST:
        for first in range(0, len(cases), GPU_CHUNK):
            part = cases[first : first + GPU_CHUNK]
            yield pytest.param(name, "cuda", part, id=f"{name}-{part[0]}-cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("name", "device", "cases"), [*accepted_on_cpu(), *chosen_for_gpu()])
def test_engines_on_random_problems(name, device, cases):
    check_chunk(load_engine(name), device, cases)


@pytest.mark.timeout(900)  # a kernel for each problem, and many where one has to be made smaller
@pytest.mark.parametrize(("name", "direction", "device"), OWN)
def test_engines_on_problems_of_their_own(name, direction, device):
    engine, target = load_engine(name), detect_target(device)
    problems = list(islice(own_problems(engine, target, SEED, TRIES, (direction,)), MOST_OWN))
    able = target.capability == 90 if device == "cuda" else target.version("cxx")
    if not problems and not able:
        pytest.skip(f"{name} is not for {target.name}")
    assert len(problems) >= LEAST_OWN
    for index, problem in enumerate(problems):
        check_case(engine, device, index, problem)


STRIDES = (
    lambda x: x,
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: x.repeat_interleave(2, 3)[..., ::2],
    lambda x: x[:, :1].expand_as(x),
    lambda x: x[:1].expand_as(x) if len(x) else x,
    lambda x: torch.cat((x, x))[len(x) :],
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", range(0, CASES // 4, CHUNK))
def test_conv2d_on_random_calls(first, device):
    for index in range(first, min(first + CHUNK, CASES // 4)):
        problem = random_problem(SEED, f"call {index}")
        if not isinstance(problem, ConvProblem):
            continue
        draw = random.Random(index)
        problem = ConvProblem.parse(problem.key.replace(f":{problem.epilogue}", f":{Epilogue(draw.random() < 0.5)}"))
        problem = ConvProblem.parse(problem.key.replace(f":{problem.direction}:", ":fprop:"))
        data = make_data(problem, index, "normal", device)
        data = Data((draw.choice(STRIDES)(data.args[0]), *data.args[1:]), data.constants)
        name = draw.choice(["auto", *MANIFEST])
        sizes = ((problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w))
        sizes += ((problem.dilation_h, problem.dilation_w), problem.groups)
        weight, *bias = data.constants
        settings = Settings(numerics=problem.numerics)
        try:
            y = conv2d(data.args[0], weight, bias[0] if bias else None, *sizes, name, settings=settings)
        except UnsupportedError as error:
            assert error.reason  # noqa: PT017 - whether it refuses is the matrix's question
            continue
        family = load_engine("aten" if name == "auto" else name).family
        tf32 = device == "cuda" and problem.numerics == "as_torch"
        verdict = check(problem, family, [y], oracle(problem, data), "normal", tf32=tf32, data=data)
        assert verdict.ok, f"CONVOY_FUZZ_SEED={SEED}, call {index}: conv2d by {name}: {problem}: {verdict.reason}"
        assert torch_conv2d(data.args[0], weight, None, *sizes).shape == y.shape


class DropsTheLastRow(Engine):
    """gemm, with a fault that only some problems show."""

    family, id = "gemm", "planted"

    def __init__(self):
        self.gemm = load_engine("gemm")

    def supports(self, problem, target):
        return self.gemm.supports(problem, target)

    def space(self, problem, target):
        return self.gemm.space(problem, target)

    def build(self, problem, knobs, target):
        executable = self.gemm.build(problem, knobs, target)
        launch = executable.launch

        def faulty(buffers, workspace):
            launch(buffers, workspace)
            if isinstance(problem, ConvProblem) and problem.dilation_h > 1 and problem.direction == "fprop":
                buffers.results[0][:, :, -1] = 0

        executable.launch = faulty
        return executable


def test_a_planted_fault_is_found_and_made_small():
    with pytest.raises(pytest.fail.Exception) as caught:
        check_chunk(DropsTheLastRow(), "cpu", range(60))
    message = str(caught.value)
    assert f"planted, CONVOY_FUZZ_SEED={SEED}, case " in message
    smallest = ConvProblem.parse(message.split("smallest: ")[1].split(": ", maxsplit=1)[0])
    assert smallest.dilation_h > 1
    assert (smallest.n, smallest.c, smallest.k, smallest.groups, smallest.layout) == (1, 1, 1, 1, "nchw")


def test_the_same_seed_gives_the_same_problems_and_they_are_various():
    first = [random_problem(SEED, index) for index in range(400)]
    assert first == [random_problem(SEED, index) for index in range(400)]
    assert first != [random_problem(SEED + 1, index) for index in range(400)]
    convolutions = [p for p in first if isinstance(p, ConvProblem)]
    assert len(convolutions) < len(first)
    traits = {
        "empty batch": lambda p: p.n == 0,
        "one channel": lambda p: p.c == 1,
        "1x1 with padding": lambda p: p.r == p.s == 1 and p.pad_h > 0,
        "stride over filter": lambda p: p.stride_h > p.r,
        "filter over image": lambda p: p.r > p.h,
        "depthwise": lambda p: p.is_depthwise,
        "dilation over 8": lambda p: p.dilation_h > 8,
        "different axes": lambda p: (p.stride_h, p.pad_h) != (p.stride_w, p.pad_w),
        **{
            name: (lambda p, n=name: n in p.key)
            for name in ("nhwc", "fp16", "bf16", "fp64", "dgrad", "wgrad", "residual")
        },
    }
    assert [name for name, trait in traits.items() if sum(map(trait, convolutions)) < 3] == []
