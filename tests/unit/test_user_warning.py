"""warn_user points at the user's line, through Convoy's frames and torch's."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

from convoy.user_warning import warn_user


class Warns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside(x)
        return x


def inside(x: torch.Tensor) -> None:
    """As a function of Convoy's would: compiled under the name of a file of its own."""
    code = compile("def f(x):\n    warn_user('planted')\n", warn_user.__code__.co_filename, "exec")
    scope = {"warn_user": warn_user, "__name__": "convoy.planted"}
    exec(code, scope)
    scope["f"](x)


def test_the_line_of_the_caller_is_named() -> None:
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="^convoy: planted$") as caught:
        warn_user("planted")
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_frames_of_convoy_and_torch_are_passed_over() -> None:
    net = Warns()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(torch.zeros(1))
    first, last = inspect.getsourcelines(inside)[1], inspect.getsourcelines(inside)[1] + 6
    assert caught[0].filename == __file__
    assert first <= caught[0].lineno <= last
