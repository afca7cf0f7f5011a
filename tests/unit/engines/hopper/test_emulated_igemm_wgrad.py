"""`wgrad.cu` on the CPU, as `test_emulated_swapped` runs its kernels: exact on integers."""

import ctypes
import shutil

import pytest
import torch

from convoy.engines.hopper.igemm_wgrad_tile_config import IgemmWgradTile as Form
from convoy.engines.hopper.nvrtc_kernel import structure
from tests.unit.engines.emulated_cuda import address, conv, emulated_map, hopper_libraries

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

RUN = """
extern "C" int run(const TensorMap* x, const TensorMap* dy, Value* dweight, const Sizes* sizes, int grid) {
  return launch(grid, 128 * (CONSUMERS + 1), SPLIT, STAGES * (STAGE_BYTES + 16) + 96 + 1024,
                [=] { igemm_wgrad(*x, *dy, dweight, *sizes); });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Parameters and a dtype → the kernel as a library of the host; `changes` are faults that are planted in its text."""
    build = hopper_libraries(tmp_path_factory.mktemp("wgrad"))
    return lambda parameters, dtype, changes: build("igemm_wgrad", parameters, RUN, dtype, changes)


def integers(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-2, 3, shape, generator=generator).to(DTYPES[dtype])
    return drawn.contiguous(memory_format=torch.channels_last)


def gradient(problem, x, dy):
    """The gradient in float64."""
    return torch.nn.grad.conv2d_weight(
        x.double(), problem.weight_spec.shape, dy.double(), (problem.stride_h, problem.stride_w),
        (problem.pad_h, problem.pad_w), (problem.dilation_h, problem.dilation_w),
    )  # fmt: skip


def run(library, problem, form, blocks=2, changes=(), seed=3):
    """Launch, on `blocks` blocks where tiles are not split; the gradient, the exact one, and faults seen."""
    assert Form.of(form.knobs) == form
    x, dy = integers(problem.x_spec.shape, problem.x_dtype, seed), integers(problem.y_spec.shape, problem.x_dtype, 7)
    k, c, r, s = problem.weight_spec.shape
    shares = () if form.shares == 1 else (form.shares,)
    dtype = torch.float32 if shares else DTYPES[problem.x_dtype]
    out = torch.full((*shares, k, r, s, c), float("nan"), dtype=dtype)
    x_map, dy_map = emulated_map(x, form.x_map(problem)), emulated_map(dy, form.dy_map(problem))
    grid = form.units(problem) * form.split if form.split > 1 else min(blocks, form.units(problem))
    faults = library(form.parameters(problem), problem.x_dtype, changes).run(
        ctypes.byref(x_map), ctypes.byref(dy_map), address(out), ctypes.byref(structure("Sizes", form.sizes(problem))),
        grid,
    )  # fmt: skip
    total = out.sum(0) if shares else out
    return total.permute(0, 3, 1, 2).double(), gradient(problem, x, dy), faults


def wgrad(*sizes, **rest):
    return conv(*sizes, direction="wgrad", **rest)


CASES = {
    "1x1": (Form(64, 64, 64, 3, 1), wgrad(2, 64, 8, 9, 64, 1, 1)),
    "1x1, stride 2": (Form(64, 64, 64, 2, 1), wgrad(2, 72, 9, 11, 40, 1, 1, 0, 0, 2, 2)),
    "3x3, stride 2": (Form(64, 64, 64, 2, 1), wgrad(2, 16, 13, 12, 40, 3, 3, 1, 1, 2, 2)),
    "1x1, padding": (Form(64, 64, 64, 2, 1), wgrad(2, 72, 5, 6, 40, 1, 1, 2, 1)),
    "3x3, columns of several taps, several tiles a block": (
        Form(64, 128, 64, 3, 2),
        wgrad(2, 40, 7, 6, 136, 3, 3, 1, 1, 1, 1),
    ),
    "3x3, wide, bf16": (Form(64, 256, 64, 3, 1), wgrad(1, 72, 9, 8, 24, 3, 3, 1, 1, 1, 1, dtype="bf16")),
    "tall tiles": (Form(128, 64, 64, 4, 2), wgrad(1, 64, 10, 9, 200, 1, 1)),
    "three warpgroups, 192 columns": (Form(64, 192, 64, 3, 3), wgrad(1, 200, 6, 7, 136, 1, 1)),
    "unlike sides, stride, dilation": (
        Form(64, 128, 64, 3, 1),
        wgrad(2, 16, 13, 14, 24, 3, 2, 2, 1, 2, 3, 2, 3, dtype="bf16"),
    ),
    "128 pixels": (Form(64, 64, 128, 3, 1), wgrad(2, 24, 11, 9, 56, 3, 3, 1, 1, 1, 1)),
    "split in two": (Form(64, 128, 64, 3, 2, 2), wgrad(3, 72, 8, 9, 72, 1, 1)),
    "split in three, unequal shares": (Form(64, 64, 64, 2, 2, 3), wgrad(5, 24, 9, 9, 136, 3, 3, 1, 1, 1, 1)),
    "split in five, tall tiles, bf16": (Form(128, 64, 64, 3, 1, 5), wgrad(5, 40, 8, 9, 88, 1, 1, dtype="bf16")),
    "split in eight, an owner of nothing": (Form(64, 64, 64, 2, 1, 8), wgrad(8, 64, 8, 8, 64, 1, 1)),
    "split in four, 192 columns": (Form(64, 192, 64, 3, 1, 4), wgrad(4, 8, 9, 9, 16, 3, 3, 2, 1, 1, 1)),
    "shares": (Form(64, 64, 64, 3, 1, 1, 3), wgrad(4, 24, 8, 8, 24, 3, 3, 1, 1, 1, 1)),
    "shares of splits, two blocks": (Form(64, 128, 64, 2, 2, 2, 3, 2), wgrad(7, 200, 9, 8, 72, 1, 1)),
    "more shares than there is work": (Form(64, 64, 64, 2, 1, 1, 4), wgrad(2, 16, 6, 6, 16, 1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    form, problem = CASES[name]
    dweight, expected, faults = run(library, problem, form)
    assert faults == 0
    assert torch.equal(dweight, expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("3x3, wide, bf16", ("smem_desc_low_transposed(stages, BOX_BYTES)", "smem_desc_low_transposed(stages, 1024)")),
        ("1x1", ("step16 * 128)", "step16 * 64)")),
        (
            "split in three, unequal shares",
            ("first = part * sizes.each + (part < sizes.more ? part : sizes.more)", "first = part * sizes.each"),
        ),
        (
            "unlike sides, stride, dilation",
            ("right = (tap - row * sizes.s) * sizes.dilation_w", "right = tap - row * sizes.s"),
        ),
    ],
    ids=[
        "the leading offset",
        "the rows of a product",
        "a share's beginning",
        "a tap's place",
    ],
)
def test_a_planted_fault_is_seen(library, name, change):
    form, problem = CASES[name]
    dweight, expected, _ = run(library, problem, form, changes=[change])
    assert not torch.equal(dweight, expected)
