"""Dataclasses from JSON: what `asdict` wrote is read to an equal value, and anything else is refused by the field's name."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from convoy.errors import InputError
from convoy.untrusted.typed_data import read_dataclass


@dataclass(frozen=True)
class Part:
    name: str
    time_us: float
    kept: bool = True


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    first: Part
    rates: dict[str, float]
    anything: dict[str, Any]
    floor: float | None
    count: int = 3


WHOLE = Whole((Part("a", 1.5), Part("b", 2.0, kept=False)), Part("c", 3.0), {"fp32": 1.0}, {"deep": [1, "x"]}, None)


def test_what_was_written_is_read() -> None:
    assert read_dataclass(Whole, json.loads(json.dumps(asdict(WHOLE))), "whole") == WHOLE


def test_fields_with_a_default_may_be_missing_and_integers_are_floats_too() -> None:
    data = {"name": "a", "time_us": 2}
    found = read_dataclass(Part, data, "part")
    assert found == Part("a", 2.0)
    assert isinstance(found.time_us, float)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parts": [{"name": 1, "time_us": 1.0}]}, r"whole\.parts\.name"),
        ({"parts": {}}, r"whole\.parts"),
        ({"first": None}, r"whole\.first"),
        ({"rates": {"fp32": "fast"}}, r"whole\.rates"),
        ({"rates": []}, r"whole\.rates"),
        ({"floor": "low"}, r"whole\.floor"),
        ({"count": True}, r"whole\.count"),
        ({"count": 1.5}, r"whole\.count"),
        ({"more": 1}, r"whole\.more"),
    ],
)
def test_a_field_of_another_type_is_named(change: dict[str, object], named: str) -> None:
    data = json.loads(json.dumps(asdict(WHOLE))) | change
    with pytest.raises(InputError, match=named):
        read_dataclass(Whole, data, "whole")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InputError, match=r"part\.time_us"):
        read_dataclass(Part, {"name": "a"}, "part")
    with pytest.raises(InputError, match="part"):
        read_dataclass(Part, [1], "part")
