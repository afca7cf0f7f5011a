"""cpu.layer_norm: PyTorch's numbers in every memory format, within its buffers, and the same bits for any number of threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from convoy.capture import capture_inference
from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_layer_norm
from convoy.engines.cpu.cpu_layer_norm import ENGINE
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.measurement.candidate import prepare
from convoy.measurement.device.detect import detect_target
from convoy.measurement.reference_data import ReferenceData
from convoy.problem import Knobs, SubgraphProblem
from convoy.regions import fused_regions
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

AFFINE = "constant %s: {0}[{1}]\nconstant %b: {0}[{1}]\n"


def image_norm(
    n: int,
    c: int,
    h: int,
    w: int,
    layout: str = "nhwc",
    dtype: str = "fp32",
    *,
    affine: bool = True,
    flat: bool = False,
) -> SubgraphProblem:
    """A layer norm over the channels of an image, with a view of one pixel behind it where it is flat."""
    first, last = f"{dtype}[{n},{c},{h},{w}]", f"{dtype}[{n},{h},{w},{c}]"
    factors = "%s, %b" if affine else "None, None"
    text = f"graph 1\ninput %x: {first}\n" + (AFFINE.format(dtype, c) if affine else "")
    text += f"%l: {last} = aten.permute.default(%x, (0, 2, 3, 1))\n"
    text += f"%n: {last} = aten.layer_norm.default(%l, ({c},), {factors}, 1e-06, False)\n"
    text += f"%y: {first} = aten.permute.default(%n, (0, 3, 1, 2))\n"
    text += f"%z: {dtype}[{n},{c}] = aten.view.default(%y, ({n}, {c}))\nreturn %z\n" if flat else "return %y\n"
    return SubgraphProblem(text, layout)


def row_norm(shape: tuple[int, ...], over: int = 1, layout: str = "any") -> SubgraphProblem:
    """A layer norm over the last dimensions."""
    spec, sides = f"fp32[{','.join(map(str, shape))}]", ", ".join(map(str, shape[-over:]))
    text = f"graph 1\ninput %x: {spec}\n" + AFFINE.format("fp32", sides.replace(" ", ""))
    return SubgraphProblem(f"{text}%y: {spec} = aten.layer_norm.default(%x, ({sides},), %s, %b)\nreturn %y\n", layout)


CASES = {
    "nhwc": image_norm(2, 96, 7, 5),
    "nchw": image_norm(2, 24, 7, 5, "nchw"),
    "channels that fill no register": image_norm(3, 37, 3, 2),
    "three channels": image_norm(1, 3, 5, 5),
    "one channel": image_norm(1, 1, 4, 4),
    "no scale": image_norm(1, 40, 3, 3, affine=False),
    "no scale in nchw": image_norm(1, 5, 3, 3, "nchw", affine=False),
    "a pixel that is flattened": image_norm(2, 40, 1, 1, flat=True),
    "a pixel that is flattened in nchw": image_norm(2, 40, 1, 1, "nchw", flat=True),
    "enough for threads": image_norm(2, 64, 28, 28),
    "enough for threads in nchw": image_norm(2, 32, 28, 28, "nchw"),
    "no image": image_norm(0, 8, 2, 2),
    "tokens": row_norm((2, 9, 48)),
    "a matrix": row_norm((5, 20)),
    "channels last": row_norm((2, 3, 4, 24), layout="nchw"),
    "several dimensions": row_norm((2, 3, 4, 5), 3, "nchw"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_to_its_buffers_and_to_the_oracle(name: str) -> None:
    problem = CASES[name]
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    assert prepare(ReferenceData(problem, CPU), ENGINE.config()).error < 1e-6
    half = SubgraphProblem(problem.text.replace("fp32", "bf16"), problem.layout)
    assert prepare(ReferenceData(half, CPU), ENGINE.config()).error < 2.0**-8


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_a_large_mean_takes_no_digits_of_the_variance(layout: str) -> None:
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-2, 3, (1, 64, 3, 3), generator=generator).float() + 4096.0
    x = x.contiguous(memory_format=memory_format)
    y = torch.full_like(x, torch.nan)
    executable = ENGINE.build(image_norm(1, 64, 3, 3, layout, affine=False), Knobs(), CPU)
    executable.launch(Buffers((x,), [y], ()), None)
    wide = x.double().permute(0, 2, 3, 1)
    expected = nn.functional.layer_norm(wide, (64,), eps=1e-6).permute(0, 3, 1, 2)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["enough for threads", "enough for threads in nchw"])
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    problem, before, found = CASES[name], torch.get_num_threads(), list[torch.Tensor]()
    n, c, h, w = (2, 64, 28, 28) if problem.layout == "nhwc" else (2, 32, 28, 28)
    memory_format = torch.channels_last if problem.layout == "nhwc" else torch.contiguous_format
    x = torch.randn(n, c, h, w, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=memory_format)
    scale = torch.linspace(-1, 2, c)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            executable = ENGINE.build(problem, Knobs(), CPU)
            found.append(torch.empty_like(x))
            executable.launch(Buffers((x,), [found[-1]], executable.pack((scale, scale + 1))), None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


OTHERS = {
    "half": image_norm(1, 8, 2, 2, dtype="fp16"),
    "blocked": image_norm(1, 8, 2, 2, "blocked"),
    "rows in nhwc": row_norm((2, 3, 4, 24), layout="nhwc"),
    "another permute": SubgraphProblem(image_norm(1, 8, 2, 2).text.replace("(0, 2, 3, 1)", "(0, 3, 2, 1)"), "nhwc"),
    "two results": SubgraphProblem(image_norm(1, 8, 2, 2).text.replace("return %y", "return %n, %y"), "nhwc"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_does_not_take_has_a_reason(name: str) -> None:
    support = ENGINE.supports(OTHERS[name], CPU)
    assert not support
    assert support.reason
    assert "runs on CPUs" in ENGINE.supports(CASES["nhwc"], Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


class _Normed(nn.Module):
    """Normalised channels between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_it_names_the_norms_of_a_net_with_their_permutes() -> None:
    graph = capture_inference(_Normed().eval(), (torch.zeros(1, 3, 4, 4),)).graph
    (region,) = fused_regions(graph, ENGINE.fusions(graph), ("nchw", "nhwc"), ENGINE.id)
    assert len(region.nodes) == 3
    assert all(ENGINE.supports(problem, CPU) for problem in region.problems)


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t planes = 0; planes < 2; planes++)
        for (int64_t c = 1; c < 150; c = 2 * c + 5)
            for (int64_t pixels = 1; pixels < 80; pixels = 2 * pixels + 3) {
                stored *x = calloc(2 * c * pixels, sizeof *x), *y = calloc(2 * c * pixels, sizeof *x);
                float *s = calloc(c, 4), *b = calloc(c, 4);
                int64_t settings[] = {2, pixels, c, planes, 1, 0x358637bd};
                NAMED(convoy_layer_norm)(settings, (void *const[]){x, s, b, y + MISSING});
                free(x), free(y), free(s), free(b);
            }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("flags", [("-DLANES=4",), ("-DLANES=16", "-DBF16")], ids=["fp32", "bf16"])
def test_it_reads_and_writes_nothing_else(tmp_path, flags: tuple[str, ...], missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, cpu_layer_norm.SOURCE)) + MAIN
    done = sanitized.run(tmp_path, source, *flags, f"-DMISSING={missing}", "-fno-math-errno")
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]
