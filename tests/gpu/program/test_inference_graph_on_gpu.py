"""torch.compile with Convoy's backend without gradients on a GPU: each call's own weights, by CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.torch_compile import backend
from convoy.torch_compile.inference_graph import InferenceGraph
from tests.gpu.program.branches import FEW, keep_ours

pytestmark = pytest.mark.gpu


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[InferenceGraph]]:
    """The graphs that were compiled, in order; their plans are kept, whatever the clock says."""
    keep_ours(monkeypatch)
    torch.compiler.reset()
    made: list[InferenceGraph] = []

    class Remembered(InferenceGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(backend, "InferenceGraph", Remembered)
    yield made
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


@pytest.mark.parametrize("static_outputs", [False, True])
def test_blocks_of_one_class_run_with_their_own_weights(
    graphs: list[InferenceGraph], tmp_path: Path, static_outputs: bool
):
    blocks = [Block().cuda().eval() for _ in range(3)]
    options = {
        "db": tmp_path / "perf.db",
        "isolate": False,
        "only_engines": FEW,
        "numerics": "strict",
        "static_outputs": static_outputs,
    }
    compiled = [torch.compile(block, backend="convoy", options=options) for block in blocks]
    x = torch.randn(4, 16, 24, 24, device="cuda")
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        for round_ in range(3):
            made = [fast(x) for fast in compiled]
            for found, block in zip(made, blocks, strict=True):
                torch.testing.assert_close(found, block(x), rtol=1e-4, atol=1e-4)
            blocks[round_].conv.weight.mul_(1.5)  # launched early with the old values, which are thrown away
    (graph,) = graphs
    assert graph.plan is not None
    assert not graph.plan.baseline, graph.plan.notes
    assert len(graph.sets) == 3


def test_inference_mode_and_another_stream(graphs: list[InferenceGraph], tmp_path: Path):
    block = Block().cuda().half().eval()
    options = {"db": tmp_path / "perf.db", "isolate": False, "only_engines": FEW}
    compiled = torch.compile(block, backend="convoy", options=options)
    x = torch.randn(4, 16, 24, 24, device="cuda", dtype=torch.half)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), block(x), rtol=1e-2, atol=1e-2)
    torch.cuda.synchronize()
    assert graphs[0].plan is not None
