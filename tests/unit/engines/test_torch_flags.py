"""PyTorch's switches for convolutions: held inside, and as they were afterwards."""

from __future__ import annotations

import pytest
import torch

from convoy.engines.torch_flags import convolutions, unsearched_convolutions

CUDA = torch.device("cuda")


def flags() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


@pytest.mark.parametrize("searches", [False, True])
def test_a_run_without_a_search_leaves_no_plan_for_runs_that_search(
    monkeypatch: pytest.MonkeyPatch, searches: bool
) -> None:
    """PyTorch's key of a cached plan has the deterministic flag, not the one of the search: the two runs must differ in it."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", searches)
    before = flags()
    with unsearched_convolutions(CUDA):
        assert flags() == (False, True)
        with convolutions("as_torch", CUDA):  # what a program's own steps hold
            assert torch.backends.cudnn.benchmark
        assert flags() == (False, True)
    assert flags() == before
    with convolutions("as_torch", CUDA):
        assert flags() == (True, False)
    assert flags() == before


def test_a_cpu_has_no_such_switches() -> None:
    before = flags()
    with unsearched_convolutions(torch.device("cpu")):
        assert flags() == before
