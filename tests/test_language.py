"""One language: a class name has one meaning, and words that only this project used do not come back.

Retired words are looked for in the pages of `docs/` and at the root, and in docstrings, comments and texts of `src`. A room that
has some left stands in `NOT_CLEAN_YET` with their number; numbers only go down, and a room without any leaves the table.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "convoy"

RETIRED_WORDS = {
    "room": "memory, space, folder",
    "rooms": "folders",
    "piece": "subgraph, block, part",
    "pieces": "subgraphs, blocks, parts",
    "kin": "a device of the same architecture",
    "landing": "output buffer",
    "landings": "output buffers",
    "standing": "leaderboard",
    "footing": "state that a captured step depends on",
    "parting": "shutdown",
    "fresh": "dynamic (weights), new",
    "swapped": "swap-AB (operands), replaced",
    "frugal": "that takes less memory, smaller",
    "unsteady": "nondeterministic",
    "forerunner": "the kernel before",
    "forerunners": "the kernels before",
    "twin": "equivalent target",
    "twins": "equivalent targets",
    "shelf": "shipped table",
    "shelves": "shipped tables",
    "heed": "depend on",
    "heeds": "depends on",
    "outdone": "superfluous",
    "disproved": "found to be wrong",
    "likeness": "distance",
    "whoever": "name the subject",
    "of ours": "Convoy's own",
}
"""Retired word → what to write."""

ALLOWED = (
    r"(?:triton|cuda)\.(?:swapped|fresh)",  # engine ids, which stand in databases and plans
    r"fresh_weight",
    r"\bunsteady\b(?=\"|\.| is now)",  # the former name of a method that a user's own engine may still have
    r"fresh (?:clone|checkout|process|install)",
    r"[\"'`:<]fresh\b",  # the word in problem keys and in stored criteria
)
"""Where a retired word is right."""

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CHRONICLES = ROOT / "docs" / "notes"
"""Notes say what was done on some day, in the words of that day."""

NOT_CLEAN_YET: dict[str, int] = {
    "engines/triton": 4,
    "pipeline": 1,
}
"""Folder of `src/convoy`, or page → retired words that are left."""

WORDS = re.compile(rf"(?<![\w./-])({'|'.join(RETIRED_WORDS)})(?![\w/-]|\.\w)", re.IGNORECASE)
RIGHT = re.compile("|".join(ALLOWED))

SAME_NAMES: dict[str, str] = {}
"""Class names that stand more than once → why they are one meaning, or cannot differ."""


def found_in(text: str) -> list[str]:
    """The retired words of a text."""
    return [match[1].lower() for match in WORDS.finditer(RIGHT.sub("", text))]


def folder_of(path: Path) -> str:
    """The folder that a module is counted under: the first below the package, below `engines` the second."""
    parts = path.relative_to(SOURCE).parts
    return "/".join(parts[: 2 if parts[0] == "engines" and len(parts) > 2 else 1])


@cache
def retired() -> dict[str, Counter[str]]:
    """Folder or page → retired words and how often they stand there."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in SOURCE.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if (
                token.type == tokenize.COMMENT
                or token.type == tokenize.STRING
                or "FSTRING" in tokenize.tok_name[token.type]
            ):
                found[folder_of(path)].update(found_in(token.string))
    for page in PAGES:
        if CHRONICLES not in page.parents:
            found[page.relative_to(ROOT).as_posix()].update(found_in(page.read_text(encoding="utf-8")))
    return {place: words for place, words in found.items() if words}


def test_retired_words_do_not_come_back() -> None:
    more = {
        place: dict(words) for place, words in retired().items() if sum(words.values()) > NOT_CLEAN_YET.get(place, 0)
    }
    assert more == {}, {word: RETIRED_WORDS[word] for words in more.values() for word in words}


def test_a_place_that_is_clean_leaves_the_table_and_none_is_gone() -> None:
    left = retired()
    assert [place for place in NOT_CLEAN_YET if place not in left] == []


def class_names() -> dict[str, list[str]]:
    """Class name → the modules that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(SOURCE).as_posix())
    return found


def test_a_class_name_has_one_meaning() -> None:
    twice = {name: modules for name, modules in class_names().items() if len(modules) > 1 and not name.startswith("_")}
    assert {name: modules for name, modules in twice.items() if name not in SAME_NAMES} == {}
    assert [name for name in SAME_NAMES if name not in twice] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a fresh clone of `cuda.swapped`, with fresh weights", ["fresh"]),
        ("Room for a piece", ["room", "piece"]),
        ("masterpieces in bedrooms; standing.md", []),
        ("an engine of ours.", ["of ours"]),
    ],
)
def test_what_counts_as_a_retired_word(text: str, words: list[str]) -> None:
    assert found_in(text) == words


GLOSSARY = (ROOT / "docs" / "concepts" / "glossary.md").read_text(encoding="utf-8")


def test_the_glossary_defines_each_term_once_in_the_order_of_the_alphabet() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*", GLOSSARY, re.MULTILINE)
    assert len(terms) > 30
    assert len(terms) == len(set(terms))
    for section in GLOSSARY.split("\n## ")[1:]:
        inside = re.findall(r"^\*\*(.+?)\*\*", section, re.MULTILINE)
        assert inside == sorted(inside, key=str.lower)


def test_the_glossary_uses_no_retired_word_as_a_term() -> None:
    assert {term.lower() for term in re.findall(r"^\*\*(.+?)\*\*", GLOSSARY, re.MULTILINE)} & set(
        RETIRED_WORDS
    ) == set()
