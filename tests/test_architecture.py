"""docs/concepts/architecture.md says what the tree and the import contracts say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "convoy"
PAGE = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")


def contracts() -> dict[str, Any]:
    """The import contracts by their ids."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return {contract["id"]: contract for contract in tool["importlinter"]["contracts"]}


def folders() -> set[str]:
    """Every folder of the package that holds files, relative to it."""
    holding = {path.parent for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return {path.relative_to(SOURCE).as_posix() for path in holding - {SOURCE}}


def test_every_folder_has_one_line_and_no_line_is_of_a_folder_that_is_gone() -> None:
    lines = re.findall(r"^\| `([\w/]+)/` \| \S.+ \|$", PAGE, re.MULTILINE)
    assert len(lines) == len(set(lines))
    assert set(lines) == folders()


def test_the_layers_on_the_page_are_those_of_the_contract() -> None:
    section = PAGE.split("## Who may import whom")[1].split("\n## ")[0]
    assert re.findall(r"^    (\S.*)$", section, re.MULTILINE) == contracts()["layers"]["layers"]


def test_every_module_at_the_top_stands_in_a_layer() -> None:
    named = {name for line in contracts()["layers"]["layers"] for name in line.split(" | ")}
    ignored = set(contracts()["layers"]["exhaustive_ignores"])
    there = {path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__"}
    there |= {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert named | ignored == there


def test_the_pure_middle_is_what_the_page_says() -> None:
    layers = contracts()["layers"]["layers"]
    first, last = re.findall(r"folders from `(\w+)` to `(\w+)` do not import torch", PAGE)[0]
    lines = [line.split(" | ") for line in layers]
    rows = [index for index, line in enumerate(lines) if first in line or last in line]
    middle = {name for line in lines[min(rows) : max(rows) + 1] for name in line}
    assert {f"convoy.{name}" for name in middle} <= set(contracts()["pure"]["source_modules"])


def test_links_to_the_design_decisions_and_stages_name_what_is_there() -> None:
    for word in re.findall(r"`(\w+/[\w/]+\.py)`", PAGE):
        assert (SOURCE / word).exists() or (ROOT / word).exists(), word
