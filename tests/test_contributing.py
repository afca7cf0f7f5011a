"""A command needs no more than the steps in CONTRIBUTING.md."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer

import convoy.cli
from convoy.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NET = "from torch import nn\n\n\ndef net():\n    return nn.Conv2d(3, 8, 3)\n"


@pytest.fixture
def weigh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's command among the others, as its two steps say."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (line,) = re.findall(r"^ +(app\.command\(.*)$", PAGE, re.MULTILINE)
    module = types.ModuleType("convoy.cli.commands.weigh")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "weigh.py", "exec"), module.__dict__)
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    exec(line, {"app": app, "weigh": module})
    return module


@pytest.mark.usefixtures("weigh")
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [([], 0, "0.00 M\n"), (["--unit", "K"], 0, "0.22 K\n"), (["--unit", "ton"], 2, "M or K")],
)
def test_the_command_works(
    words: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convoy", "weigh", "net.py:net", "--trust", *words])
    with pytest.raises(SystemExit) as end:
        convoy.cli.main()
    printed = capsys.readouterr()
    assert end.value.code == code
    assert says in printed.out + printed.err
    assert len((printed.out + printed.err).splitlines()) == 1


@pytest.mark.usefixtures("weigh")
def test_the_reference_has_it() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "_site" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    section = generate.cli_reference().split("## convoy weigh MODEL\n")[1].split("\n## ")[0]
    assert "Print the number of MODEL's parameters." in section
    assert "| `--unit` `WORD` | M (millions) or K (thousands); by default `M` |" in section


def test_every_place_of_a_command_is_named() -> None:
    """A command stands in the files that the page names, and in no other source."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"\blayers\.layers\b|cli\.commands\.layers\b|import layers\b", path.read_text(encoding="utf-8"))
    }
    assert found <= {"src/convoy/cli/app.py"}
    assert typer.main.get_command(app).commands["layers"]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:src|tests|bench|docs)/[\w/.-]+)`", PAGE))))
def test_paths_on_the_page_are_there(name: str) -> None:
    assert (ROOT / name).exists() or name == "src/convoy/cli/commands/weigh.py"
