"""A first answer does not wait for cuDNN's search: inside, no launch turns it on, and the user's flag stands."""

from __future__ import annotations

import pytest
import torch

from convoy.engines.torch_flags import convolutions, unsearched_convolutions
from convoy.measurement.device.cudnn_search import cudnn_search

CUDA = torch.device("cuda")


@pytest.mark.parametrize("users_own", [False, True])
def test_without_search_every_launch_runs_as_the_users_flags_say(
    users_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", users_own)
    with cudnn_search("cuda", allowed=False):
        with convolutions("as_torch", CUDA), convolutions("strict", CUDA, deterministic=True):
            assert torch.backends.cudnn.benchmark == users_own
            assert torch.backends.cudnn.deterministic
        with unsearched_convolutions(CUDA):
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark == users_own
    assert torch.backends.cudnn.benchmark == users_own
    with convolutions("as_torch", CUDA):
        assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(("device", "allowed"), [("cuda", True), ("cpu", False)])
def test_elsewhere_launches_search_as_ever(device: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with cudnn_search(device, allowed=allowed), convolutions("as_torch", CUDA):
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


def test_the_flag_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    @cudnn_search("cuda", allowed=False)
    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - it is this one's own
        fails()
    with convolutions("as_torch", CUDA):
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark
