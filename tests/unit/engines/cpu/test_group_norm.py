"""cpu.group_norm: the oracle's numbers, within its buffers, the same bits for any number of threads, and its place in a net."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.capture import capture_inference
from convoy.engines.base import Buffers, Executable
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu import cpu_group_norm
from convoy.engines.cpu.cpu_group_norm import ENGINE
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.measurement.candidate import prepare
from convoy.measurement.device.detect import detect_target
from convoy.measurement.reference_data import ReferenceData
from convoy.problem import Knobs
from convoy.regions import fused_regions
from convoy.target import Target
from tests.unit.engines import group_norm_cases, sanitized
from tests.unit.engines.group_norm_cases import piece

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

MORE = {
    "channels that fill no register": (3, 37, 37, 3, 2, "fp32", "silu", True),
    "three channels": (1, 3, 1, 5, 5, "fp32", "", True),
    "one channel": (1, 1, 1, 4, 4, "fp32", "relu", False),
    "a long group": (1, 1200, 1, 3, 3, "fp32", "silu", True),
    "enough for threads": (2, 320, 32, 16, 16, "fp32", "silu", True),
    "no image": (0, 8, 2, 2, 2, "fp32", "silu", True),
}


@pytest.fixture(autouse=True, scope="module")
def cases():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_norm_cases, "CASES", {**group_norm_cases.CASES, **MORE})
        yield


@pytest.mark.parametrize("name", [*group_norm_cases.CASES, *MORE])
def test_it_keeps_to_its_buffers_and_to_the_oracle(name: str) -> None:
    problem = piece(name, "fp32")
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    assert prepare(ReferenceData(problem, CPU), ENGINE.config()).error < 1e-6
    assert prepare(ReferenceData(piece(name, "bf16"), CPU), ENGINE.config()).error < 2.0**-8


def launched(executable: Executable, x: torch.Tensor, constants: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
    y = torch.full_like(x, torch.nan)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers((x,), [y], executable.pack(constants)), workspace)
    return y


def test_a_large_mean_takes_no_digits_of_the_variance() -> None:
    x = torch.randint(-2, 3, (1, 32, 8, 8), generator=torch.Generator().manual_seed(2)).float() + 4096.0
    x = x.contiguous(memory_format=torch.channels_last)
    problem = replace(
        piece("without constants"), text=piece("without constants").text.replace("[2,12,3,4]", "[1,32,8,8]")
    )
    found = launched(ENGINE.build(problem, Knobs(), CPU), x)
    expected = nn.functional.silu(nn.functional.group_norm(x.double(), 4))
    torch.testing.assert_close(found.double(), expected, rtol=5e-6, atol=5e-6)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    x = torch.randn(2, 320, 16, 16, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=torch.channels_last
    )
    scale, before, found = torch.linspace(-1, 2, 320), torch.get_num_threads(), list[torch.Tensor]()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(launched(ENGINE.build(piece("enough for threads"), Knobs(), CPU), x, (scale, scale + 1)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_what_it_does_not_take_has_a_reason() -> None:
    assert "needs fp32 or bf16, got fp16" in ENGINE.supports(piece("halves"), CPU).reason
    assert "needs layout nhwc or ndhwc, got nchw" in ENGINE.supports(piece("silu", layout="nchw"), CPU).reason
    assert "ReLU, SiLU or no activation" in ENGINE.supports(piece("leaky"), CPU).reason
    assert "needs layout ndhwc, got nhwc" in ENGINE.supports(piece("volumes", layout="nhwc"), CPU).reason
    gelu = replace(piece("silu"), text=piece("silu").text.replace("silu", "gelu"))
    assert "another subgraph" in ENGINE.supports(gelu, CPU).reason
    assert "runs on CPUs" in ENGINE.supports(piece("silu"), Target("cuda", "GPU", "sm_90", 1, 1, 1)).reason


def block() -> nn.Module:
    """The norm, activation and convolution of a diffusion U-Net's block."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        norm = nn.GroupNorm(4, 16)
        nn.init.normal_(norm.weight)
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm, nn.SiLU(), nn.Conv2d(16, 8, 3, padding=1)).eval()


def test_it_names_the_norms_of_a_net_with_their_activations() -> None:
    x = torch.zeros(2, 3, 9, 9)
    graph = capture_inference(block(), (x,)).graph
    (region,) = fused_regions(graph, ENGINE.fusions(graph), ("nhwc",), ENGINE.id)
    assert len(region.nodes) == 2
    assert all(ENGINE.supports(problem, CPU) for problem in region.problems)


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t size = 1; size < 90; size = 2 * size + 3)
        for (int64_t groups = 1; groups < 9; groups += 3)
            for (int64_t pixels = 1; pixels < 300; pixels = 4 * pixels + 3) {
                int64_t c = size * groups, together = (64 + size - 1) / size < groups ? (64 + size - 1) / size : groups;
                stored *x = calloc(2 * c * pixels, sizeof *x), *y = calloc(2 * c * pixels, sizeof *x);
                float *s = calloc(c, 4), *b = calloc(c, 4);
                float *w = calloc(4 * c, 4);
                int64_t settings[] = {2, pixels, c, size, together, 1, size % 4, 0x358637bd};
                NAMED(convoy_group_norm)(settings, (void *const[]){x, s, b, y + MISSING, w});
                free(x), free(y), free(s), free(b), free(w);
            }
    return 0;
}
"""


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("flags", [("-DLANES=4",), ("-DLANES=16", "-DBF16")], ids=["fp32", "bf16"])
def test_it_reads_and_writes_nothing_else(tmp_path, flags: tuple[str, ...], missing: int) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, cpu_group_norm.SOURCE)) + MAIN
    done = sanitized.run(tmp_path, source, *flags, f"-DMISSING={missing}", "-fno-math-errno")
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]
