"""The kernels whose rows are filters on the CPU, as `test_emulated` runs the other one: exact on integers."""

import ctypes
import shutil
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

from convoy.capture.weight_masks import mask_of
from convoy.engines.hopper.igemm_dgrad import BOX, turned
from convoy.engines.hopper.igemm_split_fp32 import of_planes, planes_in_blocks
from convoy.engines.hopper.igemm_swap_ab import in_blocks
from convoy.engines.hopper.igemm_swap_ab_tensor_maps import pixel_map, result_map
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile as DenseForm
from convoy.engines.hopper.igemm_swap_ab_variants import PlanesForm, TurnedForm, UnpackedForm, WideForm
from convoy.engines.hopper.nvrtc_kernel import structure
from convoy.engines.hopper.tensor_maps import FilterMap
from convoy.engines.sparse_weights import block_sparse
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.sparse24_packing import Packing
from convoy.engines.sparse_weights.sparse24_tile import Sparse24Tile
from convoy.engines.sparse_weights.weight_blocks import Lists
from convoy.engines.triton.split_planes import split_weight
from convoy.problem import Epilogue
from tests.unit.engines.emulated_cuda import address, conv, emulated_map, hopper_libraries

X_SCALE = 4.0
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FULL = Epilogue(bias=True, residual=True, activation="relu")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")


SWAP_AB_RUN = """
extern "C" int run(const TensorMap* x, const unsigned char* weights, Value* y, const Value* residual, const Value* bias,
                   const Sizes* sizes, const TensorMap* y_map, const TensorMap* residual_map, const float* x_scale,
                   const float* scales, int grid) {
#if WEIGHT_LAYOUT
#define AT *(const TensorMap*)weights
#else
#define AT weights
#endif
  auto kernel = [=] {
#if FP32_RESULTS
    igemm_swap_ab(*x, AT, y, residual, bias, *sizes, x_scale, scales);
#elif STAGED_STORE
    igemm_swap_ab(*x, AT, y, residual, bias, *sizes, *y_map, *residual_map);
#else
    igemm_swap_ab(*x, AT, y, residual, bias, *sizes);
#endif
  };
  const int shared_bytes = STAGES * (STAGE_BYTES + 16) + INBOX_BYTES + STAGED_BYTES + HALOS_BYTES + 96 + 1024;
  return launch(grid, 128 * (CONSUMERS + 1), CLUSTER * SPLIT, shared_bytes, kernel);
}
"""
BLOCK_SPARSE_RUN = """
extern "C" int run(const Value* x, const Tile* tiles, const int* pieces, const unsigned char* weights, Value* y,
                   const Value* residual, const Value* bias, const Sizes* sizes, int grid) {
  return launch(grid, 128 * (CONSUMERS + 1), 1, STAGES * (STAGE_BYTES + 16) + 96 + 1024,
                [=] { block_sparse(x, tiles, pieces, weights, y, residual, bias, *sizes); });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A kernel's name, its parameters and a dtype → the kernel as a library of the host."""
    build = hopper_libraries(tmp_path_factory.mktemp("swap_ab"))
    run_of = {"igemm_swap_ab": SWAP_AB_RUN, "block_sparse": BLOCK_SPARSE_RUN}

    def kernel(name, parameters, dtype, without=None):
        return build(name, parameters, run_of[name], dtype, [(without, "")] if without else [])

    return kernel


def sparse_weight(shape, generator):
    """Integers of which every four channels have two at most: often two, at times one or none."""
    k, c, r, s = shape
    weight = torch.randint(-2, 3, (k, -(-c // 4), 4, r, s), generator=generator)
    order = torch.rand(weight.shape, generator=generator).argsort(dim=2)
    return torch.where(order < 2, weight, 0).reshape(k, -1, r, s)[:, :c]


def blocky_weight(shape, generator):
    """Integers of which a tap's eight channels are zero for eight filters, at seven places of ten; the first tile has none."""
    k, c, r, s = shape
    weight = torch.randint(-2, 3, shape, generator=generator)
    kept = torch.rand((-(-k // 8), c // 8, r, s), generator=generator) < 0.3
    kept[8:] &= torch.rand((1, c // 8, r, s), generator=generator) < 0.5
    kept[:8] = kept[:8] & (k <= 64)
    return weight * kept.repeat_interleave(8, 0)[:k].repeat_interleave(8, 1)


def chunks_of(problem, form, weight):
    """The weight as the kernel copies it."""
    if form.weights:  # as it lies: the map of a weight [k, r, s, c]
        return weight.permute(0, 2, 3, 1).contiguous()
    if form.planes == 2:
        return planes_in_blocks(weight, form)[0]
    if not form.sparse:
        return in_blocks(weight, form)
    return Packing(positions(problem.mask), form.filters, form.cluster, taps_first=form.halo > 0).pack(weight)


def emulated_weights(weight, described):
    """The map of a weight as it lies."""
    found = emulated_map(weight, described)
    found.rows = described.rows
    return found


def x_planes(x, weight):
    """High and low planes of x as more images, and what the sums are to be multiplied with."""
    scaled = x.double() * X_SCALE
    high = scaled.half()
    low = ((scaled - high.double()) * 2048).half()
    planes = torch.cat((high, low)).contiguous(memory_format=torch.channels_last)
    return planes, [torch.tensor([1 / X_SCALE]), split_weight(weight)[2]]


def run(library, problem, form, blocks, sliced=0, without=None):
    """Launch on `blocks` clusters; the result, how much beside it was written, the exact result, and faults seen."""
    generator = torch.Generator().manual_seed(11)
    dtype = DTYPES[problem.x_dtype]

    def integers(shape):
        drawn = torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return drawn.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else drawn

    swapped = isinstance(form, DenseForm)
    x = integers(problem.x_spec.shape)
    if swapped and not form.sparse:
        weight = integers(problem.weight_spec.shape)
        if form.planes == 2:  # more bits than a half has, of one of both: products of both low planes are left out
            large = [x, weight][problem.k % 16 > 0]
            large += torch.randint(-2, 3, large.shape, generator=generator) * 2048.0
    else:
        weight = (sparse_weight if swapped else blocky_weight)(problem.weight_spec.shape, generator).to(dtype)
        problem = problem.with_mask(mask_of(weight))
    bias = integers((problem.k,)) if problem.epilogue.bias else None
    residual = integers(problem.y_spec.shape) if problem.epilogue.residual else None
    n, k, p, q = problem.y_spec.shape
    whole = torch.full((n, p, q, k + 2 * sliced), float("nan"), dtype=dtype).permute(0, 3, 1, 2)
    y = whole.narrow(1, sliced, k)
    scales = [None, None]
    if swapped:
        chunks = chunks_of(problem, form, weight)
        given, x_given = problem, x
        if form.planes == 2:
            given, (x_given, scales) = of_planes(problem), x_planes(x, weight)
        pixels = emulated_map(x_given, pixel_map(given, form))
        results = emulated_map(y, result_map(problem, form, k + 2 * sliced))
        added = emulated_map(y if residual is None else residual, result_map(problem, form, k))
        last = [ctypes.byref(results), ctypes.byref(added)]
        boxes = emulated_weights(chunks, FilterMap.of(problem, form.filters)) if form.weights else None
        at = ctypes.byref(boxes) if form.weights else address(chunks)
        held, first, grid = (chunks,), [ctypes.byref(pixels), at], blocks * form.cluster
        grid = form.units(problem) * form.cluster * form.split if form.split > 1 or form.staged == 2 else grid
    else:
        lists = Lists(problem, form.filters)
        last = []
        held, grid = (lists.tiles, lists.blocks, lists.pack(weight)), blocks
        first = [address(x), *map(address, held)]
    given = given if swapped else problem
    kernel = library("igemm_swap_ab" if swapped else "block_sparse", form.parameters(given), given.x_dtype, without)
    sizes = structure("Sizes", form.sizes(given, k + 2 * sliced))
    last += map(address, scales) if swapped else ()
    faults = kernel.run(*first, address(y), address(residual), address(bias), ctypes.byref(sizes), *last, grid)
    del held
    expected = F.conv2d(
        x.double(), weight.double(), None if bias is None else bias.double(), (problem.stride_h, problem.stride_w),
        (problem.pad_h, problem.pad_w), (problem.dilation_h, problem.dilation_w),
    )  # fmt: skip
    expected = expected if residual is None else expected + residual.double()
    if problem.epilogue.activation == "relu":
        expected = expected.relu()
    outside = int(whole.isnan().sum()) - 2 * sliced * n * p * q
    return y, expected.to(dtype), outside, faults


ONE = Sparse24Tile(64, 16, 3, 1, 1)
TWO = Sparse24Tile(64, 24, 2, 2, 1)
TALL = Sparse24Tile(128, 8, 3, 1, 1)
PAIR = Sparse24Tile(64, 32, 6, 1, 2, 2)
FOUR = Sparse24Tile(64, 32, 2, 1, 4)
DEEP = Sparse24Tile(64, 16, 11, 1, 1)
HALVES = Sparse24Tile(64, 24, 3, 2, 1, split=2)
THIRDS = Sparse24Tile(128, 16, 3, 1, 1, split=3, blocks=2)
QUARTERS = Sparse24Tile(64, 72, 2, 1, 1, depth=2, split=4, blocks=2)
STAGED = Sparse24Tile(64, 24, 3, 1, 1, staged=1)
STAGED_TALL = Sparse24Tile(128, 16, 4, 2, 1, staged=1)
STAGED_PAIR = Sparse24Tile(64, 32, 4, 1, 2, staged=1)
STAGED_THIRDS = Sparse24Tile(128, 24, 3, 1, 1, split=3, blocks=2, staged=1)
HALO = Sparse24Tile(64, 24, 4, 1, 1, staged=1, halo=8)
HALO_WIDE = Sparse24Tile(128, 32, 7, 1, 1, depth=3, staged=1, halo=16)
HALO_HALVES = Sparse24Tile(64, 24, 3, 2, 1, split=2, staged=1, halo=8)
HALO_THIRDS = Sparse24Tile(64, 48, 3, 1, 1, depth=3, split=3, staged=1, halo=16)
IN_RING = Sparse24Tile(64, 24, 3, 2, 1, staged=2)
IN_RING_THIRDS = replace(STAGED_THIRDS, staged=2)
IN_RING_PAIR = replace(STAGED_PAIR, staged=2)
HALO_IN_RING = Sparse24Tile(64, 48, 3, 1, 1, depth=3, split=2, blocks=2, staged=2, halo=16)
GATHERED = block_sparse.BlockSparseTile(64, 32, 5, 1)
GATHERED_WIDE = block_sparse.BlockSparseTile(128, 16, 3, 2)
CASES = {
    "3x3": (ONE, conv(2, 8, 9, 8, 24, 3, 3, 1, 1, epilogue=FULL)),
    "even and odd blocks of channels": (ONE, conv(1, 136, 6, 5, 72, 1, 1)),
    "stride 2, dilation": (TWO, conv(1, 16, 13, 14, 72, 3, 2, 2, 1, 2, 3, 2, 3, epilogue=FULL)),
    "tall tiles, bf16": (TALL, conv(1, 72, 5, 7, 128, 3, 1, 1, 0, dtype="bf16", epilogue=FULL)),
    "pair": (PAIR, conv(2, 72, 5, 7, 72, 3, 1, 1, 0, epilogue=FULL)),
    "four, some without filters": (FOUR, conv(1, 8, 7, 9, 144, 3, 1, 1, 0)),
    "a ring deeper than a tile": (DEEP, conv(2, 8, 9, 8, 72, 3, 3, 1, 1, epilogue=FULL)),
    "split in two, a pair of eights and a half": (HALVES, conv(2, 8, 9, 8, 72, 3, 3, 1, 1, epilogue=FULL)),
    "split in three, an owner of nothing": (THIRDS, conv(1, 72, 5, 7, 128, 3, 1, 1, 0, dtype="bf16", epilogue=FULL)),
    "split in four, unequal shares": (QUARTERS, conv(1, 136, 9, 10, 72, 3, 2, 1, 1, 2, 1, 1, 2, epilogue=FULL)),
    "staged, odd groups of pixels": (STAGED, conv(2, 8, 5, 8, 72, 3, 3, 1, 1, epilogue=FULL)),
    "staged without residual, several tiles a block": (STAGED, conv(2, 72, 9, 8, 40, 1, 1)),
    "staged, tall tiles, bf16, filters that are not there": (
        STAGED_TALL,
        conv(1, 72, 5, 7, 136, 3, 1, 1, 0, dtype="bf16", epilogue=FULL),
    ),
    "staged in a pair": (STAGED_PAIR, conv(2, 72, 5, 7, 72, 3, 1, 1, 0, epilogue=FULL)),
    "staged split in three": (STAGED_THIRDS, conv(2, 136, 5, 7, 136, 3, 1, 1, 0, 2, 1, epilogue=FULL)),
    "halo as wide as the image": (HALO, conv(1, 264, 4, 7, 24, 3, 3, 1, 1, epilogue=FULL)),
    "halo, rows of taps, bf16": (HALO_WIDE, conv(2, 72, 3, 13, 72, 3, 3, 1, 1, dtype="bf16", epilogue=FULL)),
    "halo split in two": (HALO_HALVES, conv(2, 72, 4, 7, 72, 3, 3, 1, 1, epilogue=FULL)),
    "halo split in three, no residual": (HALO_THIRDS, conv(1, 136, 4, 9, 24, 3, 3, 1, 1)),
    "results in the ring": (IN_RING, conv(1, 72, 5, 8, 136, 3, 1, 1, 0, epilogue=FULL)),
    "results in the ring, split": (IN_RING_THIRDS, conv(1, 136, 5, 7, 136, 3, 1, 1, 0, 2, 1, epilogue=FULL)),
    "results in the ring, pair": (IN_RING_PAIR, conv(1, 72, 5, 7, 72, 1, 1)),
    "halo, results in the ring": (HALO_IN_RING, conv(1, 136, 4, 9, 24, 3, 3, 1, 1, epilogue=FULL)),
    "gathered 3x3": (GATHERED, conv(2, 24, 9, 8, 24, 3, 3, 1, 1, epilogue=FULL)),
    "gathered, tiles of no pieces": (GATHERED, conv(1, 264, 6, 7, 200, 1, 1, epilogue=FULL)),
    "gathered, stride, dilation, bf16": (
        GATHERED_WIDE,
        conv(1, 16, 13, 14, 320, 3, 2, 2, 1, 2, 3, 2, 3, dtype="bf16", epilogue=FULL),
    ),
}


def dense(form):
    """The same cut for weights that are whole."""
    return DenseForm(**{field.name: getattr(form, field.name) for field in fields(form)})


TWINS = (
    "3x3", "stride 2, dilation", "tall tiles, bf16", "four, some without filters", "split in three, an owner of nothing",
    "staged, tall tiles, bf16, filters that are not there", "staged in a pair", "halo, rows of taps, bf16",
    "halo split in two", "results in the ring, split",
)  # fmt: skip
CASES |= {f"dense, {name}": (dense(form), problem) for name, (form, problem) in CASES.items() if name in TWINS}
CASES["dense, halo of odd rows"] = (
    DenseForm(64, 48, 3, 2, 1, staged=1, halo=15),
    conv(2, 72, 7, 14, 136, 3, 3, 1, 1, epilogue=FULL),
)
CASES["dense, halo of odd rows, several tiles a block, no residual"] = (
    DenseForm(64, 24, 4, 1, 1, depth=3, staged=1, halo=10),
    conv(3, 136, 5, 9, 72, 3, 3, 1, 1),
)
CASES["dense, halo of odd rows in the ring"] = (
    DenseForm(128, 32, 4, 1, 1, depth=3, staged=2, halo=14),
    conv(1, 136, 5, 13, 72, 3, 3, 1, 1, dtype="bf16", epilogue=FULL),
)
CASES["dense, halo of odd rows split in three"] = (
    DenseForm(64, 32, 3, 2, 1, split=3, halo=15),
    conv(1, 136, 5, 14, 136, 3, 3, 1, 1, epilogue=FULL),
)
CASES |= {
    f"{word}, {name}": (kind(*shape), conv(*sizes, dtype="fp32", epilogue=epilogue))
    for name, (shape, sizes, epilogue) in {
        "3x3": ((64, 16, 3, 1, 1), (2, 8, 9, 8, 24, 3, 3, 1, 1), FULL),
        "tall tiles, stride, dilation": ((128, 24, 3, 1, 1), (1, 16, 13, 14, 72, 3, 2, 2, 1, 2, 3, 2, 3), FULL),
        "split in three": ((64, 24, 3, 2, 1, 1, 3), (1, 136, 5, 7, 128, 3, 1, 1, 0), FULL),
        "halo": ((64, 32, 4, 2, 1, 1, 1, 1, 0, 10), (2, 72, 5, 9, 136, 3, 3, 1, 1), FULL),
        "halo split in two, no epilogue": (
            (64, 48, 3, 1, 1, 1, 2, 1, 0, 16),
            (1, 136, 5, 15, 72, 3, 3, 1, 1),
            Epilogue(),
        ),
        "two blocks": ((64, 32, 3, 1, 1, 1, 1, 2), (2, 72, 9, 8, 40, 1, 1), FULL),
    }.items()
    for word, kind in (("tf32", WideForm), ("planes", PlanesForm))
}
CASES |= {
    f"fresh, {name}": (UnpackedForm(**{field.name: getattr(form, field.name) for field in fields(form)}), problem)
    for name, (form, problem) in list(CASES.items())
    if name
    in ("stride 2, dilation", "tall tiles, bf16", "pair", "split in three, an owner of nothing", "halo split in two")
}
CASES["tf32, pair"] = (WideForm(64, 32, 6, 1, 2, 2), conv(2, 60, 5, 7, 72, 3, 1, 1, 0, dtype="fp32", epilogue=FULL))
CASES["tf32, halo, rows of taps"] = (
    WideForm(64, 32, 4, 1, 1, 3, 1, 1, 0, 15),
    conv(1, 68, 3, 14, 12, 3, 3, 1, 1, dtype="fp32", epilogue=FULL),
)
CASES["dense, halo split in six, an owner of nothing"] = (
    DenseForm(64, 80, 2, 1, 1, split=6, staged=2, halo=16),
    conv(1, 384, 9, 14, 24, 3, 3, 1, 1, epilogue=FULL),
)


@pytest.mark.parametrize("name", CASES)
def test_exact_on_integers(library, name):
    form, problem = CASES[name]
    y, expected, _, faults = run(library, problem, form, 1 if getattr(form, "cluster", 1) == 4 else 2)
    assert faults == 0
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", ["3x3", "staged in a pair", "halo split in two", "gathered 3x3"])
def test_a_slice_of_a_larger_tensor_is_written_and_nothing_beside_it(library, name):
    form, problem = CASES[name]
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


GRADIENTS = {
    "3x3": (TurnedForm(64, 24, 3, 2, 1), conv(2, 72, 9, 8, 40, 3, 3, 1, 1, direction="dgrad")),
    "3x3, halo": (
        TurnedForm(64, 48, 3, 2, 1, staged=1, halo=15),
        conv(1, 136, 6, 14, 72, 3, 3, 1, 1, direction="dgrad"),
    ),
    "3x3, halo split in two, bf16": (
        TurnedForm(64, 48, 3, 1, 1, depth=3, split=2, staged=1, halo=16),
        conv(1, 24, 4, 9, 136, 3, 3, 1, 1, dtype="bf16", direction="dgrad"),
    ),
    "no padding, unlike sides, tall tiles": (
        TurnedForm(128, 32, 4, 1, 1, depth=2),
        conv(1, 136, 7, 9, 128, 3, 2, 0, 1, direction="dgrad"),
    ),
    "dilation": (
        TurnedForm(64, 40, 4, 1, 1, split=3),
        conv(1, 64, 11, 12, 72, 3, 3, 1, 2, 1, 1, 2, 3, direction="dgrad"),
    ),
    "1x1, pair": (TurnedForm(64, 32, 4, 1, 2, staged=1), conv(2, 200, 5, 7, 72, 1, 1, direction="dgrad")),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_of_x_is_exact(library, name):
    form, problem = GRADIENTS[name]
    generator, dtype = torch.Generator().manual_seed(5), DTYPES[problem.x_dtype]

    def integers(shape):
        drawn = torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return drawn.contiguous(memory_format=torch.channels_last)

    made = turned(problem)
    weight, dy = integers((problem.k, problem.c, problem.r, problem.s)), integers(made.x_spec.shape)
    lies = weight.permute(0, 2, 3, 1).contiguous()
    dx = torch.full(made.y_spec.shape, float("nan"), dtype=dtype).contiguous(memory_format=torch.channels_last)
    pixels, boxes = emulated_map(dy, pixel_map(made, form)), emulated_weights(lies, FilterMap.of(problem, BOX))
    results = emulated_map(dx, result_map(made, form, made.k))
    grid = form.units(made) * form.cluster * form.split if form.split > 1 else 2 * form.cluster
    faults = library("igemm_swap_ab", form.parameters(made), made.x_dtype).run(
        ctypes.byref(pixels), ctypes.byref(boxes), address(dx), None, None,
        ctypes.byref(structure("Sizes", form.sizes(made, made.k))), ctypes.byref(results), ctypes.byref(results),
        None, None, grid,
    )  # fmt: skip
    assert faults == 0
    x = torch.zeros(problem.x_spec.shape, dtype=torch.float64, requires_grad=True)
    padding, dilation = (problem.pad_h, problem.pad_w), (problem.dilation_h, problem.dilation_w)
    F.conv2d(x, weight.double(), None, 1, padding, dilation).backward(dy.double())
    assert torch.equal(dx, x.grad.to(dtype))


def test_a_planted_fault_in_dense_weights_is_seen(library, monkeypatch):
    """Pieces of a row that lie where the swizzle does not look for them."""
    (form, problem), right = CASES["dense, 3x3"], in_blocks
    monkeypatch.setitem(globals(), "in_blocks", lambda *given: right(*given).roll(8, dims=3))
    y, expected, _, _ = run(library, problem, form, 1)
    assert not torch.equal(y, expected)


@pytest.mark.parametrize("name", ["pair", "four, some without filters", "results in the ring, pair"])
def test_a_block_that_leaves_its_peers_behind_is_seen(library, name):
    form, problem = CASES[name]
    y, expected, _, faults = run(
        library, problem, form, 1, without="if (CLUSTER > 1) wait_until_empty(ring, smem.empty);"
    )
    assert torch.equal(y, expected)
    assert faults > 0


@pytest.mark.parametrize(
    ("name", "of", "sizes"),
    [
        ("halo split in two", "pixel_map", (72, 6, 4, 2)),  # a column of x less
        ("halo, rows of taps, bf16", "result_map", (64, 13, 3, 2)),  # eight filters of y less
    ],
)
def test_a_planted_fault_in_a_map_is_seen(library, monkeypatch, name, of, sizes):
    form, problem = CASES[name]
    right = globals()[of]
    monkeypatch.setitem(globals(), of, lambda *given: replace(right(*given), sizes=sizes))
    y, expected, _, _ = run(library, problem, form, 1)
    assert not torch.equal(y, expected)


def test_a_planted_fault_in_a_list_is_seen(library, monkeypatch):
    form, problem = CASES["gathered 3x3"]
    right = Lists.__init__

    def wrong(self, problem, filters):
        right(self, problem, filters)
        self.blocks[0, 0] += 1 << 15  # a column to the right

    monkeypatch.setattr(Lists, "__init__", wrong)
    y, expected, _, _ = run(library, problem, form, 1)
    assert not torch.equal(y, expected)
