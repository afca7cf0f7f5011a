"""Every engine on random problems: where it says yes it must be right.

The seed is printed; CONVOY_FUZZ_SEED=N repeats it or tries another, CONVOY_FUZZ_CASES=N tries more. A failure names the
smallest problem found that still fails, by its key.
"""

import os
import random

import pytest
import torch
from random_problems import random_problem, shrink
from torch.nn.functional import conv2d as torch_conv2d

from convoy import UnsupportedError, conv2d
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import CompileError
from convoy.measurement.accuracy import Data, check, judge, make_data, oracle
from convoy.measurement.detect import detect_target
from convoy.problem import ConvProblem, Epilogue
from convoy.settings import Settings

SEED = int(os.environ.get("CONVOY_FUZZ_SEED", "20261121"))
CASES = int(os.environ.get("CONVOY_FUZZ_CASES", "1200"))
CHUNK = 100
GPU_SHARE = 10  # kernels compiled for each problem cost a second: fewer problems there

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def show_seed(tmp_path, monkeypatch):
    """Shown with a failure; and the user's database stays out of it."""
    print(f"CONVOY_FUZZ_SEED={SEED}")
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))


def fault(engine, problem, device, seed):
    """What is wrong with an engine on a problem, with knobs and kind of data drawn from the seed; empty: nothing."""
    target = detect_target(device)
    if not engine.supports(problem, target):
        return ""
    draw = random.Random(seed)
    space = list(engine.space(problem, target))
    knobs = space[0] if draw.random() < 0.5 else draw.choice(space)
    kind = draw.choice(("integer", "integer", "normal", "cancelling"))
    try:
        executable = engine.build(problem, knobs, target)
    except CompileError as error:
        return "" if knobs != space[0] else f"[{knobs}] {error}"
    data = make_data(problem, seed, kind, device)
    tf32 = device == "cuda" and problem.numerics == "as_torch"
    verdict = judge(executable, engine.family, problem, data, kind, tf32=tf32)
    return "" if verdict.ok else f"[{knobs}] on {kind} data: {verdict.reason}"


def check_chunk(engine, device, cases):
    for index in cases:
        problem = random_problem(SEED, index)
        found = fault(engine, problem, device, index)
        if found:
            smallest = shrink(problem, lambda candidate, seed=index: bool(fault(engine, candidate, device, seed)))
            said = fault(engine, smallest, device, index)
            pytest.fail(
                f"{engine.id}, CONVOY_FUZZ_SEED={SEED}, case {index}: {problem}: {found}\nsmallest: {smallest}: {said}"
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
@pytest.mark.parametrize("name", MANIFEST)
def test_engines_on_random_problems(name, first, device):
    last = min(first + CHUNK, CASES)
    check_chunk(load_engine(name), device, range(first, last, GPU_SHARE if device == "cuda" else 1))


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


class DropsTheLastRow:
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
