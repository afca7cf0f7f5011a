"""cuda.depthwise: what it takes and refuses, its arithmetic on an emulated device, and what NVRTC makes of it."""

import ctypes
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.hopper import depthwise_registers
from convoy.engines.hopper.depthwise_registers import ENGINE, THREADS, candidates
from convoy.engines.hopper.depthwise_registers import DepthwiseRegistersTile as Form
from convoy.engines.hopper.nvrtc_kernel import SpillError, structure
from convoy.errors import CompileError, InputError
from convoy.problem import Epilogue, Knobs
from convoy.target import Target
from tests.unit.engines.emulated_cuda import address, conv, hopper_libraries
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FULL = Epilogue(bias=True, residual=True, activation="relu6")
MOBILE = conv(32, 144, 56, 56, 144, 3, 3, 1, 1, groups=144, epilogue=Epilogue(bias=True, activation="relu6"))
EFFICIENT = conv(32, 240, 28, 28, 240, 5, 5, 2, 2, groups=240, epilogue=Epilogue(bias=True, activation="silu"))
SMALL = conv(1, 40, 15, 15, 40, 5, 5, 2, 2, 2, 2, groups=40)


RUN = """
extern "C" void run(const Value* x, const Floats* w, Value* y, const Value* residual, const Value* bias,
                    const Sizes* sizes, int grid) {
  launch_alone(grid, THREADS, [=] { depthwise_registers(x, w, y, residual, bias, *sizes); });
}
"""


@pytest.fixture(autouse=True)
def _libraries_are_there(monkeypatch):
    """These tests do not ask whether the libraries of a GPU are installed here."""
    monkeypatch.setattr(depthwise_registers, "absence", lambda: "")
    monkeypatch.setattr("convoy.engines.triton.triton_build.installed", lambda: True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    build = hopper_libraries(tmp_path_factory.mktemp("depthwise"))

    def of(problem, form):
        return build("depthwise_registers", form.parameters(problem), RUN, problem.x_dtype)

    return of


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"groups": 72}, "needs groups = c = k"),
        ({"c": 146, "k": 146, "groups": 146}, "a multiple of 4, got 146"),
        ({"r": 7, "s": 7, "pad_h": 3, "pad_w": 3}, "at most 25 taps, got 7 x 7"),
        ({"dilation_w": 2}, "dilation 1"),
        ({"n": 30000}, "fewer than 2^31 elements"),
    ],
)
def test_refusals_say_why(change, reason):
    support = ENGINE.supports(replace(MOBILE, **change), GPU)
    assert not support
    assert reason in support.reason


@pytest.mark.parametrize("problem", [MOBILE, EFFICIENT, replace(MOBILE, n=1, stride_h=2, stride_w=2)])
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(problem):
    assert ENGINE.supports(problem, GPU)
    space = list(ENGINE.space(problem, GPU))
    assert 0 < len(space) == len(set(space)) <= 24
    guesses = [ENGINE.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses == sorted(guesses)
    assert [Form.of(knobs).knobs for knobs in space] == space
    assert all(guess >= problem.bytes_min / 3.35e6 for guess in guesses)


@pytest.mark.parametrize("name", ["strip", "rows", "ahead"])
def test_knobs_that_make_no_kernel_are_refused(name):
    with pytest.raises(InputError, match="at least 1"):
        Form.of(Knobs.of(**{"strip": 2, "rows": 4, "ahead": 3, name: 0}))


def test_knobs_without_channels_are_of_four():
    assert Form.of(Knobs.of(strip=2, rows=4, ahead=3)) == Form(2, 4, 3, 4)
    assert "channels" not in Form(2, 4, 3).knobs
    with pytest.raises(InputError, match="2 or 4 channels"):
        Form.of(Knobs.of(strip=2, rows=4, ahead=3, channels=3))


@pytest.mark.parametrize("form", [Form(2, 4, 2), Form(40, 4, 1)], ids=["rows ahead", "columns"])
def test_forms_that_a_problem_cannot_have_are_compile_errors(form):
    with pytest.raises(CompileError, match="no kernel with"):
        ENGINE.build(MOBILE, form.knobs, GPU)


CASES = {
    "3x3": (Form(2, 3, 1), conv(2, 8, 7, 9, 8, 3, 3, 1, 1, groups=8, epilogue=FULL)),
    "3x3, rows ahead": (Form(4, 7, 3), conv(1, 12, 9, 10, 12, 3, 3, 1, 1, groups=12, epilogue=FULL)),
    "3x3 stride 2, bf16": (
        Form(2, 4, 2),
        conv(3, 8, 9, 11, 8, 3, 3, 1, 1, 2, 2, groups=8, dtype="bf16", epilogue=FULL),
    ),
    "5x5 stride 2": (Form(3, 2, 3), conv(1, 8, 11, 12, 8, 5, 5, 2, 2, 2, 2, groups=8, epilogue=FULL)),
    "5x5, fp32": (Form(1, 5, 5), conv(1, 4, 6, 7, 4, 5, 5, 2, 2, groups=4, dtype="fp32", epilogue=FULL)),
    "5x5, two channels": (Form(2, 3, 1, 2), conv(2, 12, 9, 8, 12, 5, 5, 2, 2, groups=12, epilogue=FULL)),
    "5x5 stride 2, two channels, fp32": (
        Form(4, 2, 3, 2),
        conv(1, 4, 13, 12, 4, 5, 5, 2, 2, 2, 2, groups=4, dtype="fp32", epilogue=FULL),
    ),
    "3x3, two channels, bf16": (Form(7, 4, 3, 2), conv(1, 8, 7, 15, 8, 3, 3, 1, 1, groups=8, dtype="bf16")),
    "unlike sides": (Form(2, 3, 1), conv(2, 8, 8, 9, 8, 2, 3, 0, 2, 3, 1, groups=8)),
    "stride over filter": (Form(2, 2, 3), conv(1, 8, 11, 12, 8, 1, 2, 0, 0, 3, 4, groups=8)),
    "filter over image": (Form(7, 4, 1), conv(1, 4, 2, 2, 4, 5, 5, 2, 2, groups=4)),
}


def run(library, problem, form):
    """The kernel's own text on integers, and the exact result."""
    generator = torch.Generator().manual_seed(3)
    dtype = DTYPES[problem.x_dtype]
    shapes = problem.x_spec.shape, problem.weight_spec.shape, (problem.k,), problem.y_spec.shape
    x, weight, bias, residual = (torch.randint(-2, 3, s, generator=generator).to(dtype) for s in shapes)
    x, residual = (t.contiguous(memory_format=torch.channels_last) for t in (x, residual))
    guard = 64
    room = torch.full((problem.y_spec.elements + 2 * guard,), 99.0).to(dtype)
    n, k, p, q = problem.y_spec.shape
    y = room[guard:-guard].fill_(float("nan")).view(n, p, q, k).permute(0, 3, 1, 2)
    packed = weight.float().reshape(problem.c, -1).t().contiguous()
    epilogue, sizes = problem.epilogue, form.sizes(problem)
    given = (x, packed, y, residual if epilogue.residual else None, bias if epilogue.bias else None)
    blocks = -(-sizes["threads"] // THREADS)
    library(problem, form).run(*map(address, given), ctypes.byref(structure("Sizes", sizes)), blocks)
    stride, pad = (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w)
    expected = F.conv2d(
        x.double(), weight.double(), bias.double() if epilogue.bias else None, stride, pad, groups=problem.c
    )
    expected = F.relu6(expected + residual.double()) if epilogue.residual else expected
    assert (room[:guard] == 99).all()
    assert (room[-guard:] == 99).all()
    return y, expected.to(dtype)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    form, problem = CASES[name]
    y, expected = run(library, problem, form)
    assert torch.equal(y, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
def test_a_planted_fault_is_seen(library, monkeypatch):
    form, problem = CASES["3x3"]
    right = Form.sizes
    monkeypatch.setattr(Form, "sizes", lambda self, problem: {**right(self, problem), "pad_w": 0})
    y, expected = run(library, problem, form)
    assert not torch.equal(y, expected)


FIRST = {
    "3x3": MOBILE,
    "3x3, few pixels": replace(MOBILE, n=2, h=14, w=14),
    "5x5": EFFICIENT,
    "5x5 stride 2, few pixels": SMALL,
}


@pytest.fixture
def nvrtc():
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("name", FIRST)
def test_the_first_guesses_compile_without_spills(name, dtype, nvrtc):
    problem = replace(FIRST[name], x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype)
    executable = ENGINE.build(problem, ENGINE.space(problem, GPU)[0], GPU)  # one that spills is refused
    assert_no_spills(executable.log)


def test_weights_of_large_filters_are_loaded_anew_in_each_row(nvrtc):
    """Kept from row to row they are 100 registers more: with three blocks and 25 taps that spilled 100 bytes."""
    problem = replace(SMALL, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32")
    executable = ENGINE.build(problem, Form(1, 14, 1).knobs, GPU)
    assert int(re.search(r"Used (\d+) registers", executable.log)[1]) <= 168


@pytest.mark.parametrize("roomy", [3, 2])
def test_a_kernel_that_spills_gets_room_for_fewer_blocks(roomy, monkeypatch):
    tried = []

    def compiler(engine, source, target, options):
        tried.append(
            int(re.search(r"MIN_BLOCKS_PER_SM = (\d+)", dict(source.headers)["depthwise_registers_config.cuh"])[1])
        )
        if tried[-1] > roomy:
            raise SpillError(engine, "the kernel spills registers")
        return b"", "a log"

    monkeypatch.setattr(depthwise_registers, "compile_cubin", compiler)
    form = Form(1, 4, 3)
    assert form.blocks(MOBILE) == 4
    assert ENGINE.build(MOBILE, form.knobs, GPU).log == "a log"
    assert tried == list(range(4, roomy - 1, -1))


def test_a_kernel_that_always_spills_is_refused(monkeypatch):
    def compiler(engine, source, target, options):
        raise SpillError(engine, "the kernel spills registers", "its log")

    monkeypatch.setattr(depthwise_registers, "compile_cubin", compiler)
    with pytest.raises(SpillError, match="its log"):
        ENGINE.build(MOBILE, Form(1, 4, 3).knobs, GPU)


def test_every_candidate_keeps_to_its_period():
    for form in candidates(EFFICIENT):
        assert form.period(EFFICIENT) % form.ahead == 0
        assert form.columns(EFFICIENT) <= 32
