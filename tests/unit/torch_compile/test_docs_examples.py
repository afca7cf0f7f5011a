"""The examples of docs/how-to/torch-compile.md run, in the page's order."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.settings import Effort
from convoy.torch_compile import backend
from tests.unit.pipeline.untimed import keep_plans

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "torch-compile.md"


def blocks() -> list[str]:
    """The indented blocks of the page."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [textwrap.dedent(block) for block in found if block.strip()]


def test_the_page_runs_without_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))
    read = backend.settings_of

    def unmeasured(*args: Any) -> Any:
        return dataclasses.replace(read(*args), effort=Effort.NONE)

    monkeypatch.setattr(backend, "settings_of", unmeasured)
    keep_plans(monkeypatch)
    torch.compiler.reset()
    names: dict[str, Any] = {"__name__": "page"}
    assert len(blocks()) >= 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        for block in blocks():
            exec(compile(block, str(PAGE), "exec"), names)
    model, x = names["model"], names["x"]
    with torch.no_grad():
        torch.testing.assert_close(names["scores"], model(x), rtol=1e-4, atol=1e-5)
        wanted = names["second"].forward(names["first"].forward(x))
    torch.testing.assert_close(names["z"], wanted, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
