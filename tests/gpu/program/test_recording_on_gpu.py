"""The memory that a recorded graph holds stays its own, whoever frees libraries' workspaces afterwards."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

from convoy.program.cuda.recording import forget_library_workspaces, recording  # noqa: E402


def test_a_graph_keeps_its_librarys_workspace() -> None:
    """A product that is split along its sum, warmed up on the stream of the capture: a step captured so wrote elsewhere."""
    draw = torch.Generator("cuda").manual_seed(0)
    left = torch.randint(-3, 4, (64, 1 << 16), generator=draw, device="cuda").bfloat16()
    right = torch.randint(-3, 4, (1 << 16, 64), generator=draw, device="cuda").bfloat16()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm = left @ right
    graph = torch.cuda.CUDAGraph()
    with recording(graph, stream):
        found = left @ right
    forget_library_workspaces()
    torch.cuda.empty_cache()
    others = torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, warm)
    assert bool((others == 7).all())
