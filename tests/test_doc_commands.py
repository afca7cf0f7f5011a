"""Every `convoy` line of the pages runs, in the order of its page, on a small net and a small folder; or another test runs it.

Names of nets, weights and data that the pages use stand for small ones here. Nothing is measured, and no net is timed.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convoy import cli
from convoy.engines.compilers import compiled_cache
from convoy.perfdb import Database
from tests.doc_blocks import BLOCKS, ROOT, Block
from tests.unit.cli.commands.test_db import ROWS, TARGET
from tests.unit.pipeline.untimed import keep_plans

NET = '''
"""A net with a layer of the name that the pages explain."""

from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.conv2(self.conv1(x).relu()).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.pool, self.fc = nn.Sequential(Block()), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.pool(self.layer1(x)).flatten(1))


def net():
    return Net()
'''

STAND_INS = {
    **dict.fromkeys(("alexnet", "resnet18", "resnet50", "resnet20_cifar10"), "net.py:net"),
    **dict.fromkeys(("photographs/", "photographs", "images/", "shapes/", "shapes", "cifar10"), "photos"),
    "DEFAULT": "net.safetensors",
    "FOLDER": "shipped",
    "DIGEST": TARGET.digest,
}
"""Word of a page → what stands for it here."""

SMALLER = {"--epochs": "1", "--batch": "2", "--effort": "none"}
"""Option → its value here."""

ADDED = {
    "optimize": ("--trust", "--size", "16", "--effort", "none"),
    "run": ("--trust", "--size", "16"),
    "prune": ("--trust", "--size", "16"),
    "train": ("--trust", "--size", "16", "--effort", "none"),
    "layers": ("--trust", "--size", "16"),
    "sparsity": ("--trust", "--size", "16"),
    "export": ("--trust", "--size", "16"),
}
"""Command → options that it has here besides, where the line does not have them."""

ELSEWHERE = {
    "compare": ("tests/unit/compare", "it times frameworks for minutes"),
    "report": ("tests/unit/compare", "it needs the run file of a comparison"),
    "scale": ("tests/unit/compare", "it trains on as many devices as it names"),
    "study": ("tests/unit/compare", "it measures every algorithm on every layer"),
    "bench": ("tests/unit/package/test_bench_package.py", "it measures for half a minute"),
    "export --batches": ("tests/e2e/test_package.py", "it tunes a program for each batch size"),
    "export --portable": ("tests/e2e/test_package.py", "it compiles every kernel"),
    "run --signers": ("tests/e2e/test_package.py", "it needs a signature"),
    "export --device": ("tests/gpu/package", "it needs a GPU"),
    "runtime": ("tests/e2e/test_package.py", "it compiles the runtime"),
    "prune --advise": ("tests/e2e/test_prune.py", "it measures every layer at every sparsity"),
}
"""Command → where it runs instead, and why not here."""


def elsewhere(words: list[str]) -> tuple[str, str] | None:
    """The place where a line runs instead, and why; None if it runs here."""
    named = ("--advise", "--batches", "--portable", "--signers", *(["--device"] if words[0] == "export" else []))
    long = [flag for flag in named if flag in words]
    return ELSEWHERE.get(" ".join([words[0], *long]))


def lines_of(block: Block) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in block.commands]


LINES = [(block.page, words) for block in BLOCKS if block.kind == "commands" for words in lines_of(block)]
PAGES = sorted({page for page, words in LINES if elsewhere(words) is None})


def here(words: list[str]) -> list[str]:
    """A page's line with what stands for its words here."""
    found = [STAND_INS.get(word, word) for word in words]
    for at, word in enumerate(found[:-1]):
        if word in SMALLER:
            found[at + 1] = SMALLER[word]
    added = ADDED.get(words[0], ()) if any(word.startswith("net.py:") for word in found) else ()
    for at, word in enumerate(added):
        if word.startswith("--") and word not in found:
            found += [word, *([added[at + 1]] if at + 1 < len(added) and not added[at + 1].startswith("--") else [])]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's working folder: a net, its weights, photographs by class, a database and another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))
    monkeypatch.setattr(compiled_cache, "cache_folder", lambda: tmp_path / "cache")
    compiled_cache.compiled_folder.cache_clear()
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    (tmp_path / "shipped").mkdir()
    for index in range(24):
        path = tmp_path / "photos" / f"class{index % 3}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return tmp_path


@pytest.fixture
def type_in(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a line, answers "y" to what it asks, and gives what it printed."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["convoy", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert not end.value.code, (words, said.err)
        return said.out

    return run


def before(page: str, type_in: Callable[..., str]) -> None:
    """The files that a page's text asks for."""
    names: dict[str, object] = {}
    exec(NET, names)
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(names["net"]().state_dict(), "net.safetensors")  # type: ignore[operator]
    for name in ("perf.db", "other.db"):
        with Database.open(Path(name)) as database:
            database.put(ROWS, targets=[TARGET])
    if page.endswith("deploy.md"):
        type_in("db", "export", "rows.csv")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(
    page: str, type_in: Callable[..., str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    keep_plans(monkeypatch)
    before(page, type_in)
    for of, words in LINES:
        if of == page and elsewhere(words) is None:
            type_in(*here(words))
            named = [words[at + 1] for at, word in enumerate(words) if word in ("--plan", "--report", "--out", "-o")]
            assert [name for name in named if not (folder / name).stat().st_size] == []


@pytest.mark.parametrize("command", ELSEWHERE)
def test_a_command_that_another_test_runs_has_its_options_there(command: str) -> None:
    place = ROOT / ELSEWHERE[command][0]
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    found = [words for _, words in LINES if elsewhere(words) == ELSEWHERE[command]]
    options = {word for words in found for word in words if re.match(r"--?[a-z]", word)}
    assert found
    assert f'"{command.split(maxsplit=1)[0]}"' in text or command == "prune --advise"
    assert {option for option in options if f'"{option}"' not in text} <= TAKEN.get(command, set())


TAKEN = {"compare": {"--time-s"}, "export --portable": {"--weights"}}
"""Command → options that no test there types: what they set is tested where it is used."""


SHELL = {
    "make ": "tests/test_docs.py holds that the Makefile has the target; the targets take minutes, or are the tests themselves",
    "pip install ": "it installs; the extras are held below",
    "python bench/": "it takes minutes or a GPU; the script is held below",
    "python examples/": "an example, which another test runs; the script is held below",
    ".venv/bin/": "it checks this tree, as `make test` does; the program is held below",
}
"""Beginning of a line that is no `convoy` → why it does not run here."""


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.kind == "shell"], ids=lambda b: f"{b.page}:{b.line}"
)
def test_other_commands_name_what_is_there(block: Block) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line in filter(None, block.text.splitlines()):
        assert [begin for begin in SHELL if line.startswith(begin)], line
        for extra in re.findall(r"\.\[(\w+)\]", line):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
        for script in re.findall(r"python ((?:bench|examples)/\S+\.py)", line):
            assert (ROOT / script).is_file()
        for program, packages in re.findall(r"\.venv/bin/(\w[\w-]*) ?([^&]*)", line):
            assert program == "python" or {"lint-imports": "import-linter"}.get(program, program) in project
            for path in re.findall(r"(?:src|tests)/\S+", packages):
                assert (ROOT / path).exists(), path
