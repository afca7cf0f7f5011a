"""cuda.depthwise_tile: what it takes and refuses, its arithmetic on an emulated device, and what NVRTC makes of it."""

import ctypes
import math
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.hopper import depthwise_shared
from convoy.engines.hopper.depthwise_shared import ENGINE, Tile
from convoy.engines.hopper.depthwise_shared import DepthwiseSharedTile as Form
from convoy.errors import InputError
from convoy.problem import Epilogue, Knobs
from convoy.target import Target
from tests.unit.engines.emulated_cuda import address, conv, emulated_map, hopper_libraries
from tests.unit.engines.spills import assert_no_spills

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FULL = Epilogue(bias=True, residual=True, activation="relu6")
SILU = Epilogue(bias=True, activation="silu")
EFFICIENT = conv(32, 672, 14, 14, 672, 5, 5, 2, 2, groups=672, epilogue=SILU)
MOBILE = conv(1, 144, 56, 56, 144, 3, 3, 1, 1, groups=144, epilogue=SILU)
CONVNEXT = conv(1, 96, 56, 56, 96, 7, 7, 3, 3, groups=96, epilogue=Epilogue(bias=True))
SMALL = conv(32, 1152, 7, 7, 1152, 5, 5, 2, 2, groups=1152, epilogue=SILU)
RUN = """
extern "C" int run(const TensorMap* x, const Floats* w, u32* y, const u32* residual, const u32* bias, int grid) {
  return launch(grid, 32 * WARPS, 1, %d + 16 + 96 + 1024, [=] { depthwise_shared(*x, w, y, residual, bias); });
}
"""


pytestmark = pytest.mark.usefixtures("libraries_are_there")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    build = hopper_libraries(tmp_path_factory.mktemp("depthwise_shared"))

    def of(tile, without=None):
        changes = [(without, "")] if without else []
        return build("depthwise_shared", tile.parameters(1), RUN % tile.shared_bytes, tile.problem.x_dtype, changes)

    return of


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "nchw"}, "needs layout nhwc"),
        ({"groups": 336}, "needs groups = c = k"),
        ({"c": 668, "k": 668, "groups": 668}, "a multiple of 8, got 668"),
        ({"r": 9, "s": 7, "pad_h": 4, "pad_w": 3}, "at most 49 taps, got 9 x 7"),
        ({"dilation_w": 2}, "dilation 1"),
        ({"w": 400}, "a row of 400 results and the pixels that it reads do not fit"),
        (dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), "fp32"), "needs fp16 or bf16, got fp32"),
    ],
)
def test_refusals_say_why(change, reason):
    support = ENGINE.accepts(replace(EFFICIENT, **change), GPU)
    assert not support
    assert reason in support.reason


def test_other_devices_are_refused():
    assert "capability 9.0 alone" in ENGINE.accepts(EFFICIENT, replace(GPU, arch="sm_100")).reason


@pytest.mark.parametrize("problem", [EFFICIENT, MOBILE, SMALL, CONVNEXT, replace(EFFICIENT, stride_h=2, stride_w=2)])
def test_spaces_are_finite_distinct_and_ordered_by_their_guess(problem):
    assert ENGINE.accepts(problem, GPU)
    space = list(ENGINE.space(problem, GPU))
    assert 0 < len(space) == len(set(space)) <= 24
    guesses = [ENGINE.estimate_us(problem, knobs, GPU) for knobs in space]
    assert guesses == sorted(guesses)
    assert all(0 < guess < math.inf for guess in guesses)
    assert [Form.of(knobs).knobs for knobs in space] == space
    assert all(Tile(problem, Form.of(knobs)).fits for knobs in space)


@pytest.mark.parametrize("name", ["tile", "images", "strip", "rows"])
def test_knobs_that_make_no_kernel_are_refused(name):
    with pytest.raises(InputError, match="at least 1"):
        Form.of(Knobs.of(**{"tile": 7, "images": 1, "strip": 7, "rows": 7, name: 0}))


def test_a_form_without_room_is_refused():
    with pytest.raises(InputError, match="a smaller tile"):
        ENGINE.build(MOBILE, Form(56, 1, 8, 14).knobs, GPU)


CASES = {
    "5x5": (Form(4, 1, 4, 4), conv(2, 72, 9, 7, 72, 5, 5, 2, 2, groups=72, epilogue=FULL)),
    "5x5, two bands": (Form(5, 1, 7, 3), conv(1, 64, 8, 14, 64, 5, 5, 2, 2, groups=64, dtype="bf16", epilogue=FULL)),
    "5x5, images together": (Form(6, 2, 3, 6), conv(3, 16, 6, 7, 16, 5, 5, 2, 2, groups=16, epilogue=FULL)),
    "3x3": (Form(3, 1, 4, 2), conv(2, 136, 7, 9, 136, 3, 3, 1, 1, groups=136, epilogue=FULL)),
    "3x3 stride 2": (Form(2, 1, 4, 2), conv(2, 40, 11, 12, 40, 3, 3, 1, 1, 2, 2, groups=40, epilogue=FULL)),
    "5x5 stride 2, bands": (Form(3, 1, 2, 2), conv(1, 64, 13, 12, 64, 5, 5, 2, 2, 2, 2, groups=64)),
    "7x7": (Form(4, 1, 4, 4), conv(2, 72, 9, 7, 72, 7, 7, 3, 3, groups=72, epilogue=FULL)),
    "7x7, two bands": (Form(5, 1, 4, 3), conv(1, 136, 8, 14, 136, 7, 7, 3, 3, groups=136, dtype="bf16", epilogue=FULL)),
    "7x7, one row, images together": (Form(6, 2, 2, 1), conv(3, 16, 6, 7, 16, 7, 7, 3, 3, groups=16, epilogue=FULL)),
    "7x7 stride 2": (Form(3, 1, 4, 2), conv(1, 64, 13, 12, 64, 7, 7, 3, 3, 2, 2, groups=64)),
    "3x9": (Form(2, 1, 4, 2), conv(1, 8, 8, 12, 8, 3, 9, 1, 4, groups=8)),
    "unlike sides": (Form(2, 1, 2, 2), conv(2, 8, 8, 9, 8, 2, 3, 0, 2, 3, 1, groups=8)),
    "stride over filter": (Form(2, 1, 2, 1), conv(1, 8, 11, 12, 8, 1, 2, 0, 0, 3, 4, groups=8)),
    "filter over image": (Form(2, 1, 7, 2), conv(1, 8, 2, 2, 8, 5, 5, 2, 2, groups=8)),
}


def run(library, problem, form, without=None):
    """The kernel's own text on integers, the exact result, and faults seen."""
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
    epilogue, tile = problem.epilogue, Tile(problem, form)
    given = (packed, y, residual if epilogue.residual else None, bias if epilogue.bias else None)
    described = emulated_map(x, tile.map())
    faults = library(tile, without).run(ctypes.byref(described), *map(address, given), tile.grid)
    stride, pad = (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w)
    expected = F.conv2d(
        x.double(), weight.double(), bias.double() if epilogue.bias else None, stride, pad, groups=problem.c
    )
    expected = F.relu6(expected + residual.double()) if epilogue.residual else expected
    assert (room[:guard] == 99).all()
    assert (room[-guard:] == 99).all()
    return y, expected.to(dtype), faults


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    form, problem = CASES[name]
    y, expected, faults = run(library, problem, form)
    assert faults == 0
    assert torch.equal(y, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
def test_a_planted_fault_is_seen(library):
    """A row that is read twice."""
    form, problem = CASES["5x5, two bands"]
    y, expected, _ = run(library, problem, form, without="at += COLUMNS * 128;")
    assert not torch.equal(y, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
def test_a_planted_fault_in_the_weights_is_seen(library):
    """All taps lie in one place."""
    form, problem = CASES["7x7"]
    y, expected, _ = run(library, problem, form, without=" + tap * TAP_BYTES")
    assert not torch.equal(y, expected)


@pytest.mark.parametrize("problem", [EFFICIENT, MOBILE, SMALL, CONVNEXT])
def test_first_forms_compile_without_spills(problem):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    for knobs in ENGINE.space(problem, GPU)[:2]:
        executable = ENGINE.build(problem, knobs, GPU)
        assert_no_spills(executable.log)


def test_a_tile_has_room_for_its_barrier():
    for form, problem in CASES.values():
        _, columns, lines, images = Tile(problem, form).box
        assert Tile(problem, form).shared_bytes >= columns * lines * images * 128 + 8
    assert depthwise_shared.CHANNELS == 64
