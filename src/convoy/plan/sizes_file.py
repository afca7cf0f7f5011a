"""Plans for several sizes of one net as one file: the ranges of its sizes, and for each program its sizes, time and plan."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from convoy.errors import PlanError
from convoy.plan.file import MAX_TEXT, from_dict, refuse_other_version, to_dict, write_text
from convoy.plan.plan import PLAN_VERSION, Plan
from convoy.plan.plan_fields import PlanFields
from convoy.untrusted import read_json, storable

MAX_BYTES: Final = 128 << 20
MAX_RANGES: Final = 64
MAX_PROGRAMS: Final = 1000
MAX_NAME: Final = 100

# With these types, a checker narrows a value to Any after `isinstance`, not to a container of unknown items.
_LIST: Final[type[Any]] = list
_DICT: Final[type[Any]] = dict


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes that may be given for one or several dimensions, which always have the same size.

    Attributes:
        name: how it is shown, such as `dynamic[0]`.
        least: smallest size.
        most: largest size.
        example: size in the example.
        places: (number of the tensor among the inputs, dimension) of each. Of a batch, each is dimension 0.
    """

    name: str
    least: int
    most: int
    example: int
    places: tuple[tuple[int, int], ...]

    @property
    def dim(self) -> int:
        """The dimension, of the first input that has it."""
        return self.places[0][1]

    @property
    def is_batch(self) -> bool:
        """Whether it is the number of images."""
        return self.dim == 0


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """A plan for some sizes.

    Attributes:
        sizes: one for each range.
        time_ms: milliseconds of one call, by which splits are chosen.
        plan: the plan.
    """

    sizes: tuple[int, ...]
    time_ms: float
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlansForSizes:
    """All plans of a net whose sizes may change.

    Attributes:
        ranges: that of the batch first, where there is one.
        not_split: why batches must not be split or padded; empty if they may be.
        programs: the plans, first that of the example.
    """

    ranges: tuple[SizeRange, ...]
    not_split: str
    programs: tuple[SizedPlan, ...]


def save_plans(found: PlansForSizes, path: str | Path) -> None:
    """Write plans for several sizes; an existing file is replaced only when the new one is complete.

    Raises:
        InputError: the path is a folder, or its folder does not exist or is not writable.
    """
    data = {
        "version": PLAN_VERSION,
        "ranges": [dataclasses.asdict(one) for one in found.ranges],
        "not_split": storable(found.not_split, MAX_TEXT),
        "programs": [
            {"sizes": list(one.sizes), "time_ms": one.time_ms, "plan": to_dict(one.plan)} for one in found.programs
        ],
    }
    write_text(Path(path), json.dumps(data, indent=1) + "\n", "plan")


def load_plans(path: str | Path) -> Plan | PlansForSizes:
    """Read a plan, or plans for several sizes, and check every field.

    Raises:
        PlanError: no regular file, too large, no JSON, another version, or an invalid field; it is named.
    """
    data = read_json(path, MAX_BYTES, "plan", PlanError)
    if not isinstance(data, _DICT) or "programs" not in data:
        return from_dict(data)
    fields = PlanFields("plan", data)
    refuse_other_version(fields.integer("version"))
    ranges = tuple(_range(f"plan.ranges[{i}]", one) for i, one in enumerate(fields.items("ranges", MAX_RANGES)))
    programs = fields.items("programs", MAX_PROGRAMS)
    found = PlansForSizes(
        ranges,
        fields.text("not_split", MAX_TEXT),
        tuple(_program(f"plan.programs[{i}]", one, ranges) for i, one in enumerate(programs)),
    )
    fields.finish()
    for name, items in (("ranges", ranges), ("programs", found.programs)):
        if not items:
            raise PlanError(f"plan.{name}", [], "at least one")
    return found


def _range(where: str, data: object) -> SizeRange:
    fields = PlanFields(where, data)
    found = SizeRange(
        name=fields.text("name", MAX_NAME),
        least=fields.integer("least"),
        most=fields.integer("most"),
        example=fields.integer("example"),
        places=tuple(_pair(where, one) for one in fields.items("places", 1000)),
    )
    fields.finish()
    if not 1 <= found.least <= found.example <= found.most <= 1 << 16:
        raise PlanError(where, (found.least, found.example, found.most), "1 <= least <= example <= most <= 65536")
    if not found.places or len({dim == 0 for _, dim in found.places}) != 1:
        raise PlanError(f"{where}.places", found.places, "dimension 0 of all inputs, or of none")
    return found


def _pair(where: str, data: Any) -> tuple[int, int]:
    if isinstance(data, _LIST) and len(data) == 2 and all(type(one) is int and one >= 0 for one in data):
        return data[0], data[1]
    raise PlanError(f"{where}.places", data, "pairs of an input's number and a dimension")


def _program(where: str, data: object, ranges: tuple[SizeRange, ...]) -> SizedPlan:
    fields = PlanFields(where, data)
    sizes = tuple(fields.integers("sizes"))
    if len(sizes) != len(ranges) or not all(
        one.least <= size <= one.most for one, size in zip(ranges, sizes, strict=False)
    ):
        raise PlanError(f"{where}.sizes", sizes, "a size within each range")
    found = SizedPlan(sizes, fields.number("time_ms"), from_dict(fields.plain("plan")))
    fields.finish()
    return found
