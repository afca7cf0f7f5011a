"""PlanRecord: a plan in the database with the figures of its report, and what must still hold for it to be used."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from convoy.errors import InputError
from convoy.plan import Plan
from convoy.plan.file import from_dict, to_dict
from convoy.report.summary import Summary
from convoy.untrusted import parse_json
from convoy.untrusted.typed_data import read_dataclass

MOST_BYTES: Final = 64 << 20
"""Of one part, decompressed: a training step of a thousand launches has some 20 MB of candidates."""

MOST_VALUES: Final = 5_000_000
"""Values of a report: a candidate has ten, a net tens of thousands of candidates."""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A stored plan.

    Attributes:
        plan: the plan.
        means: `PlanKey.means` of the search that found it.
        problems: keys of the problems whose rows it was chosen from; None: of all problems, as predictions are.
        rows: `PlanTable.sum_of_rows` of these when it was stored.
        way: how it runs, where there are several ways (`torch.compile`).
        baseline_error: relative L2 error of PyTorch's own results against float64.
        date: when it was found, ISO 8601, UTC.
        report: the summary, packed.
    """

    plan: Plan
    means: str
    problems: tuple[str, ...] | None
    rows: str
    baseline_error: float
    date: str
    way: str = ""
    report: str = ""

    def to_text(self) -> str:
        """The text that is stored: JSON, in which plan and report are packed."""
        head = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**head, "plan": pack(to_dict(self.plan)), "problems": pack(self.problems)})

    @staticmethod
    def from_text(text: str) -> PlanRecord:
        """Inverse of `to_text`; raises InputError if it is malformed."""
        data = parse_json(text, "stored plan")
        head = read_dataclass(_Head, data, "stored plan")
        problems = unpack(head.problems)
        if problems is not None and not _are_texts(problems):
            raise InputError("stored plan.problems", problems, "a list of keys")
        return PlanRecord(
            plan=from_dict(unpack(head.plan)),
            means=head.means,
            problems=None if problems is None else tuple(problems),
            rows=head.rows,
            baseline_error=head.baseline_error,
            date=head.date,
            way=head.way,
            report=head.report,
        )

    def summary(self, name: str, plan: Plan, seconds: float) -> Callable[[], Summary]:
        """What reads the summary of the search, when somebody asks for it: a large net's takes a second.

        Args:
            name: the user's name for the net in this call.
            plan: the plan that runs, with its notes.
            seconds: time of this call, in place of the search's.
        """
        packed = self.report

        @lru_cache(maxsize=1)
        def read() -> Summary:
            found = read_dataclass(Summary, unpack(packed), "stored report")
            known = found.tuning.measured + found.tuning.from_database
            tuning = dataclasses.replace(found.tuning, seconds=seconds, measured=0, from_database=known)
            return dataclasses.replace(found, model=name, tuning=tuning, notes=plan.notes)

        return read


@dataclass(frozen=True, slots=True)
class _Head:
    """A record whose plan and problems are still packed."""

    plan: str
    means: str
    problems: str
    rows: str
    baseline_error: float
    date: str
    way: str
    report: str


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[Any]", value))


def pack(data: object) -> str:
    """JSON types as compressed text; raises ValueError for a number that is not finite."""
    return base64.b64encode(zlib.compress(json.dumps(data, allow_nan=False).encode(), 6)).decode()


def unpack(text: str) -> Any:
    """Inverse of `pack`, bounded in size; raises InputError if it is malformed."""
    try:
        stream = zlib.decompressobj()
        raw = stream.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except (ValueError, zlib.error) as error:
        raise InputError("stored plan", text[:40], "compressed JSON", str(error)) from None
    if not stream.eof:
        raise InputError("stored plan", f"{len(raw)} bytes", f"compressed JSON of at most {MOST_BYTES} bytes")
    return parse_json(raw, "stored plan", most_values=MOST_VALUES)
