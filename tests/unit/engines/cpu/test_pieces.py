"""cpu.pooling and cpu.concat: equal to PyTorch's on every shape, within their buffers, and on torch's own threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import avg_pool2d, max_pool2d

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.compilers.host_compiler import library
from convoy.engines.cpu import cpu_concat, cpu_pooling
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.engines.manifest import load_engine
from convoy.engines.torch_operators import DTYPES
from convoy.errors import CompileError
from convoy.measurement.candidate import prepare
from convoy.measurement.device.detect import detect_target
from convoy.measurement.reference_data import ReferenceData
from convoy.problem import Knobs, SubgraphProblem
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

Case = tuple[tuple[int, ...], str, tuple[int, int], tuple[int, int], tuple[int, int], bool]
"""Shape, kind, window, stride, padding, and ceil mode of a maximum or whether an average counts padding."""

POOLINGS: dict[str, Case] = {
    "3x3/2 of a stem, in ceil mode": ((1, 64, 112, 112), "max", (3, 3), (2, 2), (0, 0), True),
    "3x3/1 of a branch": ((2, 100, 14, 13), "max", (3, 3), (1, 1), (1, 1), False),
    "2x2/2": ((1, 832, 7, 7), "max", (2, 2), (2, 2), (0, 0), True),
    "an odd number of channels": ((3, 17, 9, 5), "max", (3, 2), (2, 1), (1, 1), False),
    "a row that does not fit a block": ((1, 33, 4, 300), "max", (2, 5), (1, 2), (1, 2), False),
    "a window of more than three": ((1, 16, 20, 40), "max", (5, 7), (3, 2), (2, 3), True),
    "gaps between windows": ((1, 8, 30, 700), "max", (2, 2), (7, 301), (0, 0), False),
    "one pixel": ((4, 5, 1, 1), "max", (1, 1), (1, 1), (0, 0), False),
    "no image": ((0, 4, 8, 8), "max", (2, 2), (2, 2), (0, 0), False),
    "averages": ((2, 40, 11, 9), "avg", (3, 3), (2, 2), (1, 1), False),
    "averages that count padding": ((2, 40, 11, 9), "avg", (3, 3), (2, 2), (1, 1), True),
    "the whole": ((2, 130, 7, 7), "avg", (7, 7), (7, 7), (0, 0), False),
}


def piece(
    shapes: list[tuple[int, ...]], op: str, made: tuple[int, ...], layout: str, dtype: str = "fp32"
) -> SubgraphProblem:
    def spec(shape: tuple[int, ...]) -> str:
        return f"{dtype}[{','.join(map(str, shape))}]"

    inputs = "".join(f"input %x{index}: {spec(shape)}\n" for index, shape in enumerate(shapes))
    return SubgraphProblem(f"graph 1\n{inputs}%y: {spec(made)} = {op}\nreturn %y\n", layout=layout)


def pool_piece(case: Case, layout: str = "nhwc", dtype: str = "fp32") -> SubgraphProblem:
    shape, kind, window, stride, pad, special = case
    x = torch.empty(shape)
    if kind == "max":
        made = max_pool2d(x, window, stride, pad, ceil_mode=special) if shape[0] else torch.empty(0, 4, 4, 4)
        op = f"aten.max_pool2d.default(%x0, {window}, {stride}, {pad}, (1, 1), {special})"
    else:
        made = avg_pool2d(x, window, stride, pad, count_include_pad=special)
        op = f"aten.avg_pool2d.default(%x0, {window}, {stride}, {pad}, False, {special})"
    return piece([shape], op, tuple(made.shape), layout, dtype)


def flat_piece(case: Case) -> SubgraphProblem:
    """A pooling and the view behind it."""
    pooled = pool_piece(case)
    n, c, h, w = reference(case, torch.zeros(case[0])).shape
    view = f"%f: fp32[{n},{c * h * w}] = aten.view.default(%y, ({n}, {c * h * w}))\nreturn %f\n"
    return SubgraphProblem(pooled.text.replace("return %y\n", view), "nhwc")


def reference(case: Case, x: torch.Tensor) -> torch.Tensor:
    _, kind, window, stride, pad, special = case
    if kind == "max":
        return max_pool2d(x, window, stride, pad, ceil_mode=special)
    return avg_pool2d(x, window, stride, pad, count_include_pad=special)


def launched(engine: str, problem: SubgraphProblem, xs: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    found = load_engine(engine)
    assert found.supports(problem, CPU)
    y = torch.full_like(like, float("nan")) if like.is_floating_point() else torch.zeros_like(like)
    found.build(problem, Knobs(), CPU).launch(Buffers(tuple(xs), [y], ()), None)
    return y


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", [name for name in POOLINGS if name != "no image"])
def test_poolings_are_pytorchs_nan_and_infinity_included(name: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(len(name))
        case = POOLINGS[name]
        x = torch.randn(case[0], generator=generator).contiguous(memory_format=torch.channels_last)
        places = torch.rand(x.shape, generator=generator)
        x[places < 0.02] = float("nan")
        x[places > 0.98] = float("-inf")
        exact = reference(case, x.double())
        found = launched("cpu.pooling", pool_piece(case), [x], reference(case, x))
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
        if case[1] == "max":
            assert torch.equal(found.nan_to_num(7.0), reference(case, x).nan_to_num(7.0))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", POOLINGS)
def test_poolings_keep_to_their_buffers_and_to_the_oracle(name: str) -> None:
    for dtype, bound in (("fp32", 1e-6), ("bf16", 2.0**-8)):
        ready = prepare(
            ReferenceData(pool_piece(POOLINGS[name], dtype=dtype), CPU), load_engine("cpu.pooling").config()
        )
        assert ready.error < (0.0 if POOLINGS[name][1] == "max" else bound) + 1e-12


MEANS = {"(2, 3), True": (2, 40, 1, 1), "(-1, -2), True": (2, 40, 1, 1), "(3, 2)": (2, 40), "(2, 3), False": (2, 40)}


@pytest.mark.parametrize("options", MEANS)
def test_a_mean_over_the_image_is_an_average(options: str) -> None:
    problem = piece([(2, 40, 9, 7)], f"aten.mean.dim(%x0, {options})", MEANS[options], "nhwc")
    x = torch.randint(-9, 9, (2, 40, 9, 7), generator=torch.Generator().manual_seed(1)).float()
    found = launched(
        "cpu.pooling", problem, [x.contiguous(memory_format=torch.channels_last)], torch.empty(MEANS[options])
    )
    assert torch.equal(found.flatten(), x.mean((2, 3)).flatten())
    for dtype, bound in (("fp32", 1e-6), ("bf16", 2.0**-8)):
        given = SubgraphProblem(problem.text.replace("fp32", dtype), "nhwc")
        assert prepare(ReferenceData(given, CPU), load_engine("cpu.pooling").config()).error < bound


@pytest.mark.parametrize(
    ("options", "made"),
    [("(1, 3), True", (2, 1, 9, 1)), ("(2,), True", (2, 40, 1, 7)), ("(2, 3), True, dtype=dtype.fp64", (2, 40, 1, 1))],
)
def test_other_means_are_refused(options: str, made: tuple[int, ...]) -> None:
    problem = piece([(2, 40, 9, 7)], f"aten.mean.dim(%x0, {options})", made, "nhwc")
    if "fp64" in options:
        problem = SubgraphProblem(problem.text.replace("%y: fp32", "%y: fp64"), "nhwc")
    assert "got another subgraph" in load_engine("cpu.pooling").supports(problem, CPU).reason


@pytest.mark.parametrize("name", [name for name in POOLINGS if name != "no image"])
def test_a_view_behind_a_pooling_makes_images_rows(name: str) -> None:
    case = POOLINGS[name]
    x = torch.randn(case[0], generator=torch.Generator().manual_seed(2)).contiguous(memory_format=torch.channels_last)
    expected = reference(case, x).contiguous().flatten(1)
    torch.testing.assert_close(launched("cpu.pooling", flat_piece(case), [x], expected), expected, rtol=1e-5, atol=1e-6)
    assert prepare(ReferenceData(flat_piece(case), CPU), load_engine("cpu.pooling").config()).error < 1e-6


def test_random_poolings_are_pytorchs() -> None:
    generator = torch.Generator().manual_seed(11)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    for _ in range(150):
        window, stride = (draw(1, 6), draw(1, 6)), (draw(1, 4), draw(1, 4))
        pad = draw(0, window[0] // 2), draw(0, window[1] // 2)
        shape = draw(1, 3), draw(1, 70), draw(window[0], 24), draw(window[1], 40)
        kind = ("max", "avg")[draw(0, 1)]
        case = shape, kind, window, stride, pad, bool(draw(0, 1))
        x = torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last)
        found = launched("cpu.pooling", pool_piece(case), [x], reference(case, x))
        assert torch.allclose(found, reference(case, x), rtol=1e-5, atol=1e-6), case


TWO = POOLINGS["2x2/2"]

WIDE = piece([(1, 4, 2, 600)], "aten.max_pool2d.default(%x0, (1, 300))", (1, 4, 2, 2), "nhwc")

OTHER_VIEW = SubgraphProblem(
    flat_piece(TWO).text.replace("[1,13312]", "[1,832,16]").replace("(1, 13312)", "(1, 832, 16)"), "nhwc"
)

CONCATENATIONS = {
    "branches": ([(2, 64, 28, 28), (2, 128, 28, 28), (2, 31, 28, 28)], (0, 1, 2)),
    "in another order": ([(3, 5, 4, 6), (3, 2, 4, 6)], (1, 0)),
    "one": ([(1, 5, 4, 6)], (0,)),
    "of nothing": ([(0, 5, 4, 6), (0, 3, 4, 6)], (0, 1)),
    "large": ([(4, 96, 56, 56), (4, 96, 56, 56)], (0, 1)),
}


def cat_piece(name: str, layout: str, dtype: str = "fp32", axis: str = "1") -> SubgraphProblem:
    shapes, order = CONCATENATIONS[name]
    made = (shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:])
    listed = ", ".join(f"%x{index}" for index in order) + ("," if len(order) == 1 else "")
    return piece(shapes, f"aten.cat.default(({listed}), {axis})", made, layout, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "i64"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", CONCATENATIONS)
def test_concatenations_are_pytorchs_to_the_bit(name: str, layout: str, dtype: str) -> None:
    shapes, order = CONCATENATIONS[name]
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    xs = [torch.randint(-9, 9, shape).to(DTYPES[dtype]).contiguous(memory_format=form) for shape in shapes]
    exact = torch.cat([xs[index] for index in order], 1).contiguous(memory_format=form)
    assert torch.equal(launched("cpu.concat", cat_piece(name, layout, dtype), xs, exact), exact)


@pytest.mark.parametrize("name", CONCATENATIONS)
def test_concatenations_keep_to_their_buffers(name: str) -> None:
    prepare(ReferenceData(cat_piece(name, "nhwc"), CPU), load_engine("cpu.concat").config())


@pytest.mark.parametrize(
    ("engine", "problem", "words"),
    [
        ("cpu.pooling", pool_piece(TWO, "nchw"), "needs layout nhwc"),
        ("cpu.pooling", pool_piece(TWO, dtype="fp16"), "needs fp32 or bf16, got fp16"),
        ("cpu.pooling", cat_piece("branches", "nhwc"), "another subgraph"),
        ("cpu.pooling", WIDE, "at most 256 columns"),
        ("cpu.pooling", OTHER_VIEW, "another subgraph"),
        ("cpu.concat", pool_piece(TWO), "another subgraph"),
        ("cpu.concat", cat_piece("branches", "blocked"), "needs layout"),
        ("cpu.concat", piece([(1, 4, 2, 2)] * 2, "aten.cat.default((%x0, %x1), 2)", (1, 4, 4, 2), "nhwc"), "another subgraph"),
    ],
)  # fmt: skip
def test_what_they_do_not_do_they_refuse(engine: str, problem: SubgraphProblem, words: str) -> None:
    found = load_engine(engine).supports(problem, CPU)
    assert not found
    assert words in found.reason


@pytest.mark.parametrize("engine", ["cpu.pooling", "cpu.concat"])
def test_they_run_on_cpus(engine: str) -> None:
    problem = pool_piece(TWO) if engine == "cpu.pooling" else cat_piece("branches", "nhwc")
    gpu = Target("cuda", "test", "sm_90", 132, 1 << 34, 0)
    assert "runs on CPUs" in load_engine(engine).supports(problem, gpu).reason


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t c = 1; c < 70; c += 17)
        for (int64_t w = 1; w < 420; w = 2 * w + 3)
            for (int64_t window = 1; window <= 5; window++)
                for (int64_t stride = 1; stride <= 4; stride += 3) {
                    int64_t h = 6, pad = window / 2, left = BLOCK_FLOATS / (16 * (w < 256 ? w : 256)) * 16;
                    int64_t block = (c + 15) / 16 * 16 < left ? (c + 15) / 16 * 16 : left < 16 ? 16 : left;
                    if (h + 2 * pad < window || w + 2 * pad < window) continue;
                    int64_t y_h = (h + 2 * pad - window) / stride + 1, y_w = (w + 2 * pad - window) / stride + 1;
                    int64_t flat = w % 3 == 1;
                    Sizes s = {2, c, h, w, y_h, y_w, window % 2, window, window, stride, stride, pad, pad, 1, block, 1, flat};
                    stored *x = calloc(2 * c * h * w, sizeof *x), *y = calloc(2 * c * y_h * y_w, sizeof *y);
                    NAMED(convoy_pooling)(&s, (void *const[]){x, y + MISSING});
                    free(x), free(y);
                }
    return 0;
}
"""


@pytest.mark.parametrize(("missing", "dtype"), [(0, "fp32"), (1, "fp32"), (0, "bf16")])
def test_poolings_read_and_write_nothing_else(tmp_path: Path, missing: int, dtype: str) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, cpu_pooling.SOURCE)) + MAIN
    done = sanitized.run(
        tmp_path, source, f"-DMISSING={missing}", "-DLANES=8", *(["-DBF16"] if dtype == "bf16" else [])
    )
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]


def test_blocks_fill_their_room_and_no_more() -> None:
    for c, w, expected in ((64, 112, 32), (3, 224, 16), (832, 7, 576), (16, 5000, 16), (100, 14, 112)):
        found = cpu_pooling.channels_of_block(c, w)
        assert found == expected
        assert found * min(w, cpu_pooling.WIDEST) <= cpu_pooling.BLOCK_FLOATS


def test_a_source_that_does_not_compile_says_which_engine(tmp_path: Path) -> None:
    broken = tmp_path / "concat.c"
    broken.write_text("not C", encoding="utf-8")
    with pytest.raises(CompileError, match=r"cpu\.concat"):
        library(broken, cpu_concat.FLAGS, "cpu.concat")
