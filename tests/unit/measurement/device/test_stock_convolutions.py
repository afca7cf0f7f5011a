"""cuDNN searches for PyTorch's own convolutions, unless the caller waits for a first answer."""

from __future__ import annotations

import pytest
import torch

from convoy.measurement.device.stock_convolutions import first_answer_wanted, stock_convolutions

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def benchmark_inside(device: torch.device) -> bool:
    with stock_convolutions(device):
        return torch.backends.cudnn.benchmark


@pytest.mark.parametrize("users_own", [False, True])
def test_a_first_answer_leaves_the_users_flag(users_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", users_own)
    with first_answer_wanted(True):
        assert benchmark_inside(CUDA) == users_own
    assert torch.backends.cudnn.benchmark == users_own


def test_other_calls_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert benchmark_inside(CUDA)
    assert not benchmark_inside(CPU)
    with (
        first_answer_wanted(True),
        first_answer_wanted(False),
    ):  # a call that tunes, in the course of one that answers soon
        assert benchmark_inside(CUDA)
    assert benchmark_inside(CUDA)
    assert not torch.backends.cudnn.benchmark
