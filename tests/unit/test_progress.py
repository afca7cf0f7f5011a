"""Progress: a bar that other lines do not run into, a display in a notebook, a line now and then in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import convoy
from convoy import progress
from convoy.cli.output.lines import say
from convoy.progress import ProgressDisplay, hidden, shown


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


class Notebook:
    """IPython in a kernel: it notes each display and its updates."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Notebook:
        assert raw
        assert display_id
        self.shown.append(data)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found = Notebook()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.display = found.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return found


def test_a_pipe_gets_a_line_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        for second in range(100):
            clock.now = float(second)
            display("measuring conv", second, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "convoy: measuring conv, 10 of 100, 0:10"
    assert lines[1:] == [f"convoy: measuring conv, {n} of 100, {n // 60}:{n % 60:02d}" for n in (40, 70)]


def test_a_short_call_writes_nothing_into_a_pipe(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        display("measuring", 0, 0)
    assert capsys.readouterr().err == ""


def test_a_notebook_has_one_display_that_updates(notebook: Notebook, clock: Clock) -> None:
    with ProgressDisplay() as display:
        for step in range(1, 11):
            clock.now = step / 8
            display("a < b", step, 10)
    texts = [data["text/plain"] for data in notebook.shown]
    assert texts[0] == "capturing the model, 0:00"
    assert 4 <= len(texts) < 10, "updates come too seldom or too often"
    assert texts[-1] == "convoy: done, 10 of 10, 0:01"
    assert "a &lt; b" in notebook.shown[1]["text/html"]
    assert '<progress value="10" max="10">' in notebook.shown[-1]["text/html"]


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch, notebook: Notebook) -> None:
    sys.modules["IPython"].get_ipython = SimpleNamespace  # type: ignore[attr-defined]
    with ProgressDisplay():
        pass
    assert notebook.shown == []


@pytest.mark.parametrize("wanted", [True, False])
def test_the_setting_shows_the_progress_of_a_python_call(notebook: Notebook, wanted: bool) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()).eval()
    settings = convoy.Settings(progress=wanted, effort="none", isolate=False)
    convoy.optimize(net, torch.zeros(1, 2, 6, 6), settings=settings)
    assert bool(notebook.shown) == wanted


def test_the_setting_shows_the_progress_of_a_training_step(notebook: Notebook) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    batch = torch.zeros(2, 2, 6, 6), torch.zeros(2, dtype=torch.long)
    settings = convoy.Settings(progress=True, effort="none", isolate=False)
    convoy.training_step(
        net, nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1), batch, settings=settings
    )
    assert notebook.shown


def in_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, block: Callable[[], None]) -> str:
    """The bytes that a terminal of so many columns gets while a block prints to both of its streams."""
    main, end = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    with os.fdopen(end, "w", encoding="utf-8", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        block()
        terminal.flush()
        sent = b""
        while select.select([main], [], [], 0.2)[0]:
            sent += os.read(main, 65536)
    os.close(main)
    monkeypatch.undo()
    return sent.decode()


def screen(sent: str) -> list[str]:
    """The lines that a terminal shows at the end: carriage returns, erased lines and a cursor that goes up."""
    lines, row, column = [""], 0, 0
    for word in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", sent):
        if word == "\r":
            column = 0
        elif word == "\n":
            row += 1
            column = 0
            lines += [""] * (row + 1 - len(lines))
        elif word.startswith("\x1b"):
            if word == "\x1b[2K":
                lines[row] = ""
            elif word.endswith("A"):
                row -= int(word[2:-1] or 1)
        else:
            lines[row] = lines[row].ljust(column)[:column] + word + lines[row][column + len(word) :]
            column += len(word)
    return lines


@pytest.mark.parametrize("columns", [60, 140])
def test_lines_do_not_run_into_the_bar(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    def block() -> None:
        with ProgressDisplay() as display:
            for epoch in range(3):
                display(f"epoch {epoch}, {'a long message ' * 5}", epoch, 3)
                time.sleep(0.15)  # rich draws ten times a second
                say(f"epoch {epoch}: loss 1.0")
                say(f"convoy: a note on {epoch}", err=True)
                with hidden():
                    print(f"table {epoch}", file=sys.stdout)

    sent = in_terminal(monkeypatch, columns, block)
    expected = [text for n in range(3) for text in (f"epoch {n}: loss 1.0", f"convoy: a note on {n}", f"table {n}")]
    assert [line.rstrip() for line in screen(sent) if line.strip()] == expected
    assert "━" in sent, "no bar was drawn"
    assert all(len(line) <= columns for line in re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", sent))


def test_nothing_is_shown_where_it_is_not_wanted(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with shown(False) as display:
        clock.now = 1e6
        display("measuring", 1, 2)
    assert capsys.readouterr().err == ""


def test_what_is_piped_stays_out_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO()

    def block() -> None:
        monkeypatch.setattr(sys, "stdout", piped)
        with ProgressDisplay():
            print("a user's own line")

    assert "own line" not in in_terminal(monkeypatch, 100, block)
    assert piped.getvalue() == "a user's own line\n"
