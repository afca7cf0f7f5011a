"""The command line run in this process, so that a test can plant faults round it; and a net small enough to tune at once."""

from __future__ import annotations

import json
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


def small():
    torch.manual_seed(0)
    head = (nn.Conv2d(8, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *head)


def other():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


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
        """What a command that must succeed prints on standard output."""
        done = self(*words)
        assert done.code == 0, done.err
        return done.out

    def refused(self, *words: object) -> str:
        """The one line with which a command refuses bad input, exit code 2."""
        done = self(*words)
        assert (done.code, done.out) == (2, ""), done
        (line,) = done.err.splitlines()
        assert line.startswith("convoy: ")
        return line


def summary(path: Path) -> dict[str, Any]:
    """What `--json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
