"""The first layer's kernel on the CPU, as `test_emulated` runs others: exact on integers, with and without a pooling."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.hopper.first_layer_tile_config import FirstLayerTile as Form
from convoy.engines.hopper.first_layer_tile_config import Layer, in_slices
from convoy.problem import Epilogue, Pool
from tests.unit.engines.emulated_cuda import address, conv, hopper_libraries

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PADDED, BARE, CEILED = (
    Pool("max", 3, 3, 2, 2, 1, 1), Pool("max", 3, 3, 2, 2), Pool("max", 3, 3, 2, 2, ceil_mode=True)
)  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

RUN = """
extern "C" int run(const Value* x, const unsigned char* weights, Value* y, const Value* bias, int pitch, int grid) {
  return launch(grid, THREADS, 1, %d + 16 + 96 + 1024, [=] { first_layer(x, weights, y, bias, pitch); });
}
"""


def full(pool=None, activation="relu"):
    return Epilogue(bias=True, activation=activation, pool=pool)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A kernel's settings → the kernel as a library of the host."""
    build = hopper_libraries(tmp_path_factory.mktemp("first"))

    def kernel(layer, without=None):
        changes = [(without, "")] if without else []
        run = RUN % layer.shared_bytes
        return build("first_layer", layer.parameters(), run, layer.problem.x_dtype, changes)

    return kernel


def run(library, problem, form, sliced=0, without=None, x=None):
    """Launch; the result, how much beside it was written, the exact result, and faults seen."""
    generator = torch.Generator().manual_seed(7)
    dtype, pool = DTYPES[problem.x_dtype], problem.epilogue.pool

    def integers(shape):
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    drawn = integers(problem.x_spec.shape).contiguous(memory_format=torch.channels_last)
    x = drawn if x is None else x
    weight = integers(problem.weight_spec.shape)
    bias = integers((problem.k,)) if problem.epilogue.bias else None
    layer = Layer(problem, form)
    n, k, p, q = problem.y_spec.shape
    whole = torch.full((n, p, q, k + 2 * sliced), float("nan"), dtype=dtype).permute(0, 3, 1, 2)
    y = whole.narrow(1, sliced, k)
    packed = in_slices(weight, layer)
    faults = library(layer, without).run(
        address(x), address(packed), address(y), address(bias), k + 2 * sliced, n * layer.tiles
    )
    expected = F.conv2d(
        x.double(), weight.double(), None if bias is None else bias.double(), (problem.stride_h, problem.stride_w),
        (problem.pad_h, problem.pad_w),
    )  # fmt: skip
    expected = {"relu": torch.relu, "relu6": F.relu6, "none": lambda v: v}[problem.epilogue.activation](expected)
    if pool is not None:
        expected = F.max_pool2d(expected, 3, 2, pool.pad_h, ceil_mode=pool.ceil_mode)
    outside = int(whole.isnan().sum()) - 2 * sliced * n * p * q
    return y, expected.to(dtype), outside, faults


CASES = {
    "7x7": (Form(2, 1), conv(2, 3, 20, 26, 64, 7, 7, 3, 3, 2, 2, epilogue=full())),
    "7x7, padded pooling": (Form(2, 1), conv(2, 3, 20, 26, 64, 7, 7, 3, 3, 2, 2, epilogue=full(PADDED))),
    "7x7, two warpgroups, few rows left": (
        Form(2, 2),
        conv(1, 3, 37, 34, 40, 7, 7, 3, 3, 2, 2, dtype="bf16", epilogue=full(PADDED, "none")),
    ),
    "7x7, pooling without padding, odd width": (
        Form(3, 1),
        conv(2, 3, 25, 39, 64, 7, 7, 3, 3, 2, 2, epilogue=full(BARE, "relu6")),
    ),
    "7x7, pooling up to the last": (Form(1, 2), conv(1, 3, 27, 36, 24, 7, 7, 3, 3, 2, 2, epilogue=full(CEILED))),
    "3x3, one channel, no bias": (Form(3, 2), conv(2, 1, 15, 18, 32, 3, 3, 1, 1, 2, 2)),
    "3x3, two channels, odd width": (Form(2, 1), conv(1, 2, 15, 19, 8, 3, 3, 0, 0, 2, 2, epilogue=full())),
    "3x3, four channels, rows one by one": (Form(4, 1), conv(1, 4, 9, 22, 16, 3, 3, 1, 1, 1, 2, epilogue=full())),
    "11x11 with a stride of four": (Form(1, 1), conv(1, 3, 31, 47, 64, 11, 11, 2, 2, 4, 4, epilogue=full())),
    "11x11, pooled": (Form(2, 1), conv(1, 3, 43, 51, 64, 11, 11, 2, 2, 4, 4, dtype="bf16", epilogue=full(BARE))),
    "7x7, four warpgroups": (Form(1, 4), conv(2, 3, 20, 26, 64, 7, 7, 3, 3, 2, 2, epilogue=full(PADDED))),
    "3x3, two rows at once": (Form(4, 1, True), conv(2, 3, 23, 26, 32, 3, 3, 1, 1, 2, 2, epilogue=full())),
    "3x3, two rows at once, an odd number, few filters": (
        Form(2, 2, True),
        conv(2, 3, 25, 31, 24, 3, 3, 0, 0, 2, 2, dtype="bf16", epilogue=full(activation="relu6")),
    ),
    "7x5, two rows at once, a stride of four": (
        Form(6, 1, True),
        conv(1, 4, 37, 44, 32, 7, 5, 3, 2, 3, 4, epilogue=full()),
    ),
    "fp32, 7x7": (Form(2, 1), conv(2, 3, 20, 25, 64, 7, 7, 3, 3, 2, 2, dtype="fp32", epilogue=full())),
    "fp32, 7x7, padded pooling, two warpgroups": (
        Form(2, 2),
        conv(2, 3, 37, 34, 40, 7, 7, 3, 3, 2, 2, dtype="fp32", epilogue=full(PADDED)),
    ),
    "fp32, 11x11, pooled": (
        Form(3, 1),
        conv(1, 3, 43, 51, 64, 11, 11, 2, 2, 4, 4, dtype="fp32", epilogue=full(BARE, "relu6")),
    ),
    "fp32, 5x5, pooling up to the last": (
        Form(1, 1),
        conv(2, 2, 27, 36, 24, 5, 5, 2, 2, 2, 2, dtype="fp32", epilogue=full(CEILED, "none")),
    ),
    "fp32, 3x3, two rows at once": (
        Form(4, 1, True),
        conv(2, 3, 23, 27, 32, 3, 3, 0, 0, 2, 2, dtype="fp32", epilogue=full()),
    ),
    "fp32, 3x3 with a stride of one": (Form(3, 1), conv(1, 3, 9, 14, 64, 3, 3, 1, 1, dtype="fp32", epilogue=full())),
    "fp32, four channels, a stride of four": (
        Form(2, 1),
        conv(1, 4, 30, 41, 16, 5, 5, 2, 2, 3, 4, dtype="fp32", epilogue=full()),
    ),
    "rows between that nothing reads": (Form(5, 1), conv(1, 3, 27, 18, 24, 1, 3, 0, 1, 3, 2, epilogue=full())),
    "5x5 with a stride of four": (Form(2, 2), conv(1, 3, 30, 41, 16, 5, 5, 2, 2, 3, 4, epilogue=full())),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    form, problem = CASES[name]
    y, expected, outside, faults = run(library, problem, form)
    assert faults == 0
    assert torch.equal(y, expected)
    assert outside == 0


@pytest.mark.parametrize("name", ["7x7, padded pooling", "fp32, 7x7, padded pooling, two warpgroups"])
def test_a_slice_of_a_larger_tensor_is_written_and_nothing_beside_it(library, name):
    form, problem = CASES[name]
    y, expected, outside, faults = run(library, problem, form, sliced=8)
    assert faults == 0
    assert torch.equal(y, expected)
    assert outside == 0


def test_rows_of_two_at_once_are_written_to_a_slice_too(library):
    form, problem = CASES["3x3, two rows at once, an odd number, few filters"]
    y, expected, outside, faults = run(library, problem, form, sliced=8)
    assert faults == 0
    assert torch.equal(y, expected)
    assert outside == 0


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_nan_is_over_every_number(library, dtype):
    form, problem = CASES["7x7, padded pooling"]
    problem = replace(problem, **dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype))
    x = torch.zeros(problem.x_spec.shape, dtype=DTYPES[dtype]).contiguous(memory_format=torch.channels_last)
    x[1, 0, 12, 8] = float("nan")
    y, expected, _, _ = run(library, problem, form, x=x)
    assert expected.isnan().any()
    assert y.isnan()[expected.isnan()].all()
    assert y[0].isfinite().all()


def test_a_planted_fault_is_seen(library, monkeypatch):
    """A weight whose units are changed about."""
    form, problem = CASES["7x7"]
    right = in_slices
    monkeypatch.setitem(globals(), "in_slices", lambda *given: right(*given).flip(2).contiguous())
    y, expected, _, _ = run(library, problem, form)
    assert not torch.equal(y, expected)


def test_a_column_that_a_row_of_fp32_has_not_is_left_out_too(library):
    form, problem = CASES["fp32, 5x5, pooling up to the last"]
    x = torch.full(problem.x_spec.shape, -2.0).contiguous(memory_format=torch.channels_last)
    assert torch.equal(*run(library, problem, form, x=x)[:2])
    planted = "|| i / 4 * 8 + thread % 4 * 2 + i % 2 >= CONV_Q"
    assert not torch.equal(*run(library, problem, form, x=x, without=planted)[:2])


def test_what_the_row_has_not_is_left_out_of_a_largest_value(library):
    """A column beyond the last, of which the last window has one, would be the largest here and there."""
    form, problem = CASES["7x7, pooling up to the last"]
    x = torch.full(problem.x_spec.shape, -2.0, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    assert torch.equal(*run(library, problem, form, x=x)[:2])
    planted = "if (!inside || column >= CONV_Q) word = word & 0xffff0000 | LEAST;"
    assert not torch.equal(*run(library, problem, form, x=x, without=planted)[:2])


def test_shared_memory_is_what_the_kernel_lays_out():
    """The emulated device has as much as the host asks for: one byte less is a fault of the host's."""
    for form, problem in CASES.values():
        layer = Layer(problem, form)
        settings = layer.parameters()
        ring = (settings["FILTER_ROWS"] + settings["STRIDE_H"]) * settings["PHASES"] * settings["CHUNKS"] * 16
        assert layer.ring_bytes == ring
        assert layer.shared_bytes >= form.warpgroups * ring + 32 * -(-layer.columns // 32) - layer.columns
        assert layer.fits
