"""A first answer waits for few of cuDNN's plans; the user's own choice stands."""

from __future__ import annotations

import pytest
import torch

from convoy.pipeline.check.cudnn_search import FEW_PLANS, cudnn_search

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """PyTorch's limit, which a build without CUDA has none of."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark_limit", 10, raising=False)
    return 10


def test_a_first_answer_searches_briefly_and_the_limit_comes_back(limit: int) -> None:
    with cudnn_search(CUDA, brief=True):
        assert torch.backends.cudnn.benchmark_limit == FEW_PLANS < limit
    assert torch.backends.cudnn.benchmark_limit == limit


@pytest.mark.parametrize(
    ("device", "brief", "users_own"), [(CPU, True, False), (CUDA, False, False), (CUDA, True, True)]
)
def test_others_search_as_ever(
    limit: int, monkeypatch: pytest.MonkeyPatch, device: torch.device, brief: bool, users_own: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", users_own)
    with cudnn_search(device, brief=brief):
        assert torch.backends.cudnn.benchmark_limit == limit
