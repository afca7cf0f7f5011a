"""The 2:4 sparse kernel on the CPU, as `test_emulated` runs the dense one: exact on integers."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from emulated_cuda import address, compiled, conv, emulated_map

from convoy.capture.masks import mask_of
from convoy.engines.cuda.compiled import structure
from convoy.engines.cuda.maps import PixelMap
from convoy.engines.cuda.source import defines, text
from convoy.engines.pruned.pairs import Packing
from convoy.engines.pruned.sparse24 import Form
from convoy.engines.pruned.walk import positions
from convoy.problem import Epilogue

HERE = Path(__file__).parent
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FULL = Epilogue(bias=True, residual=True, activation="relu")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Settings → the kernel as a library of the host."""
    build = compiled(tmp_path_factory.mktemp("sparse"))

    def kernel(macros):
        content = defines({**macros, "BYTES": 2}) + (HERE / "emulated.h").read_text()
        content += (HERE / "emulated_sparse.h").read_text() + text("activation.cuh") + text("exchange.cuh")
        return build(content + text("sparse24.cu") + (HERE / "launch_sparse.h").read_text())

    return kernel


def sparse_weight(shape, generator):
    """Integers of which every four channels have two at most: often two, at times one or none."""
    k, c, r, s = shape
    weight = torch.randint(-2, 3, (k, -(-c // 4), 4, r, s), generator=generator)
    order = torch.rand(weight.shape, generator=generator).argsort(dim=2)
    return torch.where(order < 2, weight, 0).reshape(k, -1, r, s)[:, :c]


def run(library, problem, form, blocks, sliced=0):
    """Launch on `blocks` clusters; the result, how much beside it was written, the exact result, and faults seen."""
    generator = torch.Generator().manual_seed(11)
    dtype = DTYPES[problem.x_dtype]

    def integers(shape):
        drawn = torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return drawn.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else drawn

    x, weight = integers(problem.x_spec.shape), sparse_weight(problem.weight_spec.shape, generator).to(dtype)
    packed = Packing(positions(mask_of(weight)), form.filters, form.cluster).pack(weight)
    bias = integers((problem.k,)) if problem.epilogue.bias else None
    residual = integers(problem.y_spec.shape) if problem.epilogue.residual else None
    n, k, p, q = problem.y_spec.shape
    whole = torch.full((n, p, q, k + 2 * sliced), float("nan"), dtype=dtype).permute(0, 3, 1, 2)
    y = whole.narrow(1, sliced, k)
    pixels = emulated_map(x, PixelMap.of(problem, form.pixels // form.cluster))
    sizes = structure("Sizes", form.sizes(problem, k + 2 * sliced))
    kernel = library(form.macros(problem))
    faults = kernel.run(
        ctypes.byref(pixels), address(packed), address(y), address(residual), address(bias), ctypes.byref(sizes),
        blocks * form.cluster,
    )  # fmt: skip
    expected = F.conv2d(
        x.double(), weight.double(), None if bias is None else bias.double(), (problem.stride_h, problem.stride_w),
        (problem.pad_h, problem.pad_w), (problem.dilation_h, problem.dilation_w),
    )  # fmt: skip
    expected = expected if residual is None else expected + residual.double()
    if problem.epilogue.activation == "relu":
        expected = expected.relu()
    outside = int(whole.isnan().sum()) - 2 * sliced * n * p * q
    return y, expected.to(dtype), outside, faults


ONE = Form(64, 16, 3, 1, 1)
TWO = Form(64, 24, 2, 2, 1)
TALL = Form(128, 8, 3, 1, 1)
PAIR = Form(64, 32, 6, 1, 2)
FOUR = Form(64, 32, 2, 1, 4)
CASES = {
    "3x3": (ONE, conv(2, 8, 9, 8, 24, 3, 3, 1, 1, epilogue=FULL)),
    "even and odd blocks of channels": (ONE, conv(1, 136, 6, 5, 72, 1, 1)),
    "stride 2, dilation": (TWO, conv(1, 16, 13, 14, 72, 3, 2, 2, 1, 2, 3, 2, 3, epilogue=FULL)),
    "tall tiles, bf16": (TALL, conv(1, 72, 5, 7, 128, 3, 1, 1, 0, dtype="bf16", epilogue=FULL)),
    "pair": (PAIR, conv(2, 72, 5, 7, 72, 3, 1, 1, 0, epilogue=FULL)),
    "four, some without filters": (FOUR, conv(1, 8, 7, 9, 144, 3, 1, 1, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    form, problem = CASES[name]
    y, expected, _, faults = run(library, problem, form, 1 if form.cluster == 4 else 2)
    assert faults == 0
    assert torch.equal(y, expected)


def test_a_slice_of_a_larger_tensor_is_written_and_nothing_beside_it(library):
    form, problem = CASES["3x3"]
    y, expected, outside, faults = run(library, problem, form, 2, sliced=16)
    assert faults == 0
    assert torch.equal(y, expected)
    assert outside == 0


def test_a_planted_fault_is_seen(library, monkeypatch):
    """Metadata of the lanes of a product changed about: that the comparison can fail."""
    form, problem = CASES["3x3"]
    right = Packing.pack

    def wrong(self, weight):
        chunks = right(self, weight)
        values = self.filters * 64
        chunks[..., values:] = chunks[..., values:].reshape(*chunks.shape[:2], -1, 2, 4).flip(3).flatten(2)
        return chunks

    monkeypatch.setattr(Packing, "pack", wrong)
    y, expected, _, _ = run(library, problem, form, 1)
    assert not torch.equal(y, expected)
