"""Criteria in a study's run file: the learned rules and their quality, as JSON of its manifest, as lines and as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from convoy.compare.study.learn_criteria import CriteriaCheck
from convoy.report.sheet import Cell, Section, Table
from convoy.tune.criteria import Criteria, rules

FIELD: Final = "criteria"
"""Of the manifest."""

UNLEARNED: Final = "too few layers with a choice in the database to learn from"

DEEPEST: Final = 64
"""Questions one below the other: each line of the table repeats those above it."""

_LEAF: Final = re.compile(r"(.*) \[(\d+) layers\]")


def to_dict(found: Criteria | None, checked: CriteriaCheck | str = "") -> dict[str, Any]:
    """Plain data for the manifest.

    Args:
        found: learned criteria; None where there were too few layers.
        checked: how good those of the swept layers are on the listed ones, or why that is not known.
    """
    if found is None:
        return {"layers": 0, "rules": [], "check": None, "note": UNLEARNED}
    measured = isinstance(checked, CriteriaCheck)
    return {
        "layers": found.problems,
        "rules": rules(found),
        "check": checked.to_dict() if measured else None,
        "note": "" if measured else checked,
    }


def check_line(data: Mapping[str, Any]) -> str:
    """How good they are, or why that is not known."""
    if data["check"] is None:
        return f"criteria: {data['note']}"
    return f"criteria from the swept layers alone, on the listed ones that were not swept: {CriteriaCheck(**data['check'])}"


def section(manifest: Mapping[str, Any]) -> list[Section]:
    """A part of the page; none where the run did not learn."""
    data: Mapping[str, Any] | None = manifest.get(FIELD)
    if not data:
        return []
    about = (
        f"`--effort none` chooses engines by these rules, learned from {data['layers']} layers on this machine. In brackets:"
        " how much slower than the best the engine was, on average."
    )
    if not data["rules"]:
        return [Section("Criteria", (check_line(data),))]
    cells = tuple(
        (Cell(where), Cell(ranked), Cell(str(count), count)) for where, ranked, count in leaf_rows(data["rules"])
    )
    table = Table(("layers with", "engines, the best first", "measured"), cells, numbers=(2,))
    return [Section("Criteria", (about, check_line(data)), (table,))]


def leaf_rows(lines: Sequence[str]) -> list[tuple[str, str, int]]:
    """Each end of the questions (`convoy.tune.criteria.rules`) by itself: a table that sorts must not need its order.

    Returns:
        The condition, the engines, and the number of measured layers.

    Raises:
        ValueError: lines that are no rules.
    """
    found: list[tuple[str, str, int]] = []
    holds: list[str] = []
    for line in lines:
        text = line.lstrip(" ")
        depth = (len(line) - len(text)) // 2
        leaf = _LEAF.fullmatch(text)
        if (
            depth > min(len(holds), DEEPEST)
            or (text == "else:" and depth == len(holds))
            or not (leaf or text.endswith(":"))
        ):
            raise ValueError(f"no rule of criteria: {line[:80]}")
        if leaf is not None:
            found.append((", ".join(holds[:depth]) or "anything", leaf[1], int(leaf[2])))
        else:
            holds[depth:] = [_opposite(holds[depth]) if text == "else:" else text.removesuffix(":")]
    return found


def _opposite(question: str) -> str:
    if question.startswith("not "):
        return question.removeprefix("not ")
    return question.replace(" <= ", " > ")
