"""The command line run in this process, so that a test can plant faults round it; and a net small enough to tune at once."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from convoy import cli

NET = '''
"""A net for tests: a 3x3 convolution with ReLU, a 1x1 convolution, a linear layer."""

import torch
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 1)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.second(torch.relu(self.first(x))).mean((2, 3)))


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5, padding=2)

    def forward(self, x):
        return torch.relu(self.conv(x)).mean((2, 3))


def small():
    torch.manual_seed(0)
    return Small()


def other():
    torch.manual_seed(0)
    return Other()


def fixed():
    """Takes images of 16 x 16 alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 2))


def fails():
    raise RuntimeError("no such luck\\nand a second line")


def words():
    return "no module"
'''


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and what it printed."""

    code: object
    out: str
    err: str


class Command:
    """`convoy`, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *words: object) -> Done:
        """Run it with these words."""
        self._monkeypatch.setattr(sys, "argv", ["convoy", *map(str, words)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        said = self._capsys.readouterr()
        return Done(caught.value.code or 0, said.out, said.err)

    def works(self, *words: object) -> str:
        """The standard output of a command that must succeed."""
        done = self(*words)
        assert done.code == 0, done.err
        return done.out

    def refused(self, *words: object) -> str:
        """The one line with which a command refuses bad input, exit code 2."""
        done = self(*words)
        assert (done.code, done.out) == (2, ""), done
        (line,) = without_progress(done.err).splitlines()
        assert line.startswith("convoy: ")
        return line


def without_progress(text: str) -> str:
    """Standard error without the lines that a long command writes now and then: a busy machine makes any command long."""
    return re.sub(r"^convoy: .*, \d+:\d\d\n", "", text, flags=re.MULTILINE)


def summary(path: Path) -> dict[str, Any]:
    """The object that `--json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
