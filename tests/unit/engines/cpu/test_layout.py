"""cpu.layout: the same values at the same places, whatever their size, and nothing else written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_layout
from convoy.engines.cpu.cpu_layout import ENGINE
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.torch_operators import DTYPES
from convoy.measurement.candidate import prepare
from convoy.measurement.device.detect import detect_target
from convoy.measurement.reference_data import ReferenceData
from convoy.problem import Knobs, LayoutProblem, TensorSpec
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
SHAPES = [(1, 3, 64, 65), (2, 3, 1, 1), (3, 1, 7, 5), (2, 17, 5, 4), (1, 16, 16, 1), (1, 70, 50, 43), (0, 4, 2, 2)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp64", "i64", "u8", "bool"])
@pytest.mark.parametrize(("source", "wanted"), [("nchw", "nhwc"), ("nhwc", "nchw")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_copied_bit_by_bit(
    shape: tuple[int, ...], source: str, wanted: str, dtype: str, threads: int
) -> None:
    problem = LayoutProblem(TensorSpec(shape, dtype), source, wanted)
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randint(0, 120, shape, generator=generator).to(DTYPES[dtype]).contiguous(memory_format=FORMATS[source])
    y = torch.zeros_like(x).contiguous(memory_format=FORMATS[wanted])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ENGINE.build(problem, Knobs(), CPU).launch(Buffers((x,), [y], ()), None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, x)
    assert prepare(ReferenceData(problem, CPU), ENGINE.config()).error == 0.0


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (LayoutProblem(TensorSpec((1, 3, 4, 4), "fp32"), "nchw", "blocked"), CPU, "got nchw to blocked"),
        (LayoutProblem(TensorSpec((1, 3, 4, 4), "fp32"), "nhwc", "nhwc"), CPU, "got nhwc to nhwc"),
        (
            LayoutProblem(TensorSpec((1, 3, 4, 4), "fp32"), "nchw", "nhwc"),
            Target("cuda", "GPU", "sm_90", 1, 1, 1),
            "runs on CPUs",
        ),
    ],
    ids=["blocked", "the same", "a GPU"],
)
def test_what_it_does_not_take_has_a_reason(problem: LayoutProblem, target: Target, reason: str) -> None:
    assert reason in ENGINE.supports(problem, target).reason


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t bytes = 1; bytes <= 8; bytes *= 2)
        for (int64_t c = 1; c < 40; c += 2)
            for (int64_t pixels = 1; pixels < 6000; pixels = pixels * 3 + 14)
                for (int64_t to_nhwc = 0; to_nhwc < 2; to_nhwc++) {
                    char *x = calloc(2 * c * pixels, bytes), *y = calloc(2 * c * pixels, bytes);
                    convoy_layout((int64_t[]){2, c, pixels, to_nhwc, bytes, 1}, (void *const[]){x, y + MISSING * bytes});
                    free(x), free(y);
                }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
def test_it_reads_and_writes_nothing_else(tmp_path: Path, missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, cpu_layout.SOURCE)) + MAIN
    done = sanitized.run(tmp_path, source, f"-DMISSING={missing}")
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]
