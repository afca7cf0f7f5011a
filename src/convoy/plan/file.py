"""Plans as files: versioned JSON, every field checked when read, written completely or not at all."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from convoy.errors import InputError, PlanError
from convoy.plan.plan import PLAN_VERSION, Plan, Step
from convoy.problem import ANY_LAYOUT, LAYOUTS, EngineConfig, Knobs, TensorSpec
from convoy.untrusted import read_json, storable

MAX_BYTES: Final = 16 << 20
"""A plan of a training step with 1000 launches has 1 MiB."""
MAX_STEPS: Final = 20_000
MAX_ITEMS: Final = 100_000
"""Most items of any other list: a training step has as many inputs as parameters."""
MAX_TEXT: Final = 4000
MAX_NAME: Final = 400

_NAME = re.compile(r"\w[\w.]*(@[a-z]+)?", re.ASCII)
_ENGINE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
_PROBLEM = re.compile(r"[a-z]+:[\w:.+,=\[\]-]+", re.ASCII)
_RETUNE = "Tune the model anew: `convoy optimize`."


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan; an existing file is replaced only when the new one is complete.

    Raises:
        InputError: the path is a folder, or its folder does not exist or is not writable.
    """
    write_text(Path(path), json.dumps(to_dict(plan), indent=1) + "\n", "plan")


def write_text(path: Path, text: str, argument: str) -> None:
    """Write a UTF-8 file completely or not at all; raises InputError naming `argument`.

    Characters that UTF-8 cannot encode, such as invalid bytes of a file name, are written as `?`.
    """
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise InputError(argument, str(path), "a file in a folder that exists")
        # Not by `tempfile`, which makes files that only their owner can read; the umask decides.
        temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(text.encode("utf-8", "replace"))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise InputError(argument, str(path), "a path that can be written", str(error)) from error


def load(path: str | Path) -> Plan:
    """Read a plan and check every field.

    Raises:
        PlanError: no regular file, too large, no JSON, another version, or an invalid field; it is named.
    """
    return from_dict(read_json(path, MAX_BYTES, "plan", PlanError))


def to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as JSON types, with texts that `from_dict` accepts: a model's path may not be valid UTF-8."""
    data = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    data["steps"] = [_step_to_dict(step) for step in plan.steps]
    data["inputs"], data["notes"] = list(plan.inputs), [storable(note, MAX_TEXT) for note in plan.notes]
    data["model"] = storable(plan.model, MAX_TEXT)
    return {"version": data.pop("version"), **data}


def _step_to_dict(step: Step) -> dict[str, Any]:
    data: dict[str, Any] = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    del data["config"]
    data |= {"engine": step.config.engine, "engine_version": step.config.version, "knobs": str(step.config.knobs)}
    for name in ("nodes", "args", "results", "waits"):
        data[name] = list(data[name])
    return data


def from_dict(data: object) -> Plan:
    """Inverse of `to_dict`; raises PlanError naming the field."""
    fields = _Fields("plan", data)
    version = fields.integer("version")
    if version != PLAN_VERSION:
        raise PlanError(
            "plan.version", version, str(PLAN_VERSION), "It was written by another version of Convoy. " + _RETUNE
        )
    plan = Plan(
        version=version,
        model=fields.text("model", MAX_TEXT),
        graph_digest=fields.text("graph_digest", 16, re.compile(r"[0-9a-f]{16}")),
        inputs=tuple(fields.texts("inputs", _spec)),
        target=fields.plain("target"),
        numerics=fields.text("numerics", 20, re.compile("strict|as_torch|half")),
        steps=tuple(_step(f"plan.steps[{i}]", item, i) for i, item in enumerate(fields.items("steps", MAX_STEPS))),
        solver=fields.text("solver", MAX_NAME),
        total_us=fields.number("total_us"),
        bound_us=fields.number("bound_us"),
        workspace_bytes=fields.integer("workspace_bytes"),
        activation_bytes=fields.integer("activation_bytes"),
        baseline=fields.boolean("baseline"),
        notes=tuple(fields.texts("notes", lambda text: len(text) <= MAX_TEXT)),
        border=_border(fields.plain("border")),
    )
    fields.finish()
    return plan


def _border(found: dict[str, object]) -> dict[str, str]:
    for name, layout in found.items():
        if not _is_name(name) or layout not in LAYOUTS:
            raise PlanError("plan.border", (name, layout), "value names with " + ", ".join(LAYOUTS))
    return cast("dict[str, str]", found)


def _step(where: str, data: object, index: int) -> Step:
    fields = _Fields(where, data)
    engine = fields.text("engine", 100, _ENGINE)
    engine_version = fields.integer("engine_version")
    text = fields.text("knobs", 500)
    try:
        knobs = Knobs.parse(text)
    except InputError as error:
        raise PlanError(f"{where}.knobs", error.value, error.expected) from None
    if str(knobs) != text:
        raise PlanError(f"{where}.knobs", text, f"knobs sorted by name, {knobs}")
    step = Step(
        kind=fields.text("kind", 10, re.compile("region|convert")),
        pattern=fields.text("pattern", 20, re.compile("[a-z_]*")),
        nodes=tuple(fields.texts("nodes", _is_name)),
        args=tuple(fields.texts("args", _is_name)),
        results=tuple(fields.texts("results", _is_name)),
        problem=fields.text("problem", MAX_NAME, _PROBLEM),
        config=EngineConfig(engine, engine_version, knobs),
        layout=fields.text("layout", 10, re.compile("|".join((*LAYOUTS, ANY_LAYOUT)))),
        median_us=fields.number("median_us"),
        workspace_bytes=fields.integer("workspace_bytes"),
        stream=fields.integer("stream"),
        waits=tuple(fields.integers("waits")),
    )
    fields.finish()
    lengths = len(step.nodes), len(step.args), len(step.results)
    if lengths != (0, 1, 1) if step.kind == "convert" else not step.nodes:
        raise PlanError(
            where, step.kind, "one value copied by a step of kind convert, nodes in one of kind region", _RETUNE
        )
    if any(wait >= index for wait in step.waits):
        raise PlanError(f"{where}.waits", step.waits, "indices of earlier steps")
    return step


def _is_name(text: str) -> bool:
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def _spec(text: str) -> bool:
    if len(text) > MAX_NAME:
        return False
    try:
        return str(TensorSpec.parse(text)) == text
    except InputError:
        return False


class _Fields:
    """Takes fields out of a JSON object, each checked; unknown fields are refused."""

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, dict):
            raise PlanError(where, data, "a JSON object", _RETUNE)
        self._where = where
        self._left = dict(cast("dict[str, Any]", data))

    def _take(self, name: str, right: Callable[[Any], bool], expected: str) -> Any:
        if name not in self._left:
            raise PlanError(f"{self._where}.{name}", None, expected, _RETUNE)
        value = self._left.pop(name)
        if not right(value):
            raise PlanError(f"{self._where}.{name}", value, expected, _RETUNE)
        return value

    def text(self, name: str, longest: int, pattern: re.Pattern[str] | None = None) -> str:
        """A text of at most `longest` characters that matches."""

        def right(value: Any) -> bool:
            return isinstance(value, str) and len(value) <= longest and (not pattern or bool(pattern.fullmatch(value)))

        return self._take(name, right, f"a text{f' that matches {pattern.pattern}' if pattern else ''}")

    def integer(self, name: str) -> int:
        """An integer from 0 to 2^53."""
        return self._take(name, _is_count, "an integer of at least 0")

    def number(self, name: str) -> float:
        """A finite number of at least 0."""
        value = self._take(
            name,
            lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < 1e15,
            "a number of at least 0",
        )
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false."""
        return self._take(name, lambda v: isinstance(v, bool), "true or false")

    def items(self, name: str, most: int = MAX_ITEMS) -> list[Any]:
        """A list of at most `most` items."""

        def right(value: Any) -> bool:
            return isinstance(value, list) and len(cast("list[Any]", value)) <= most

        return self._take(name, right, f"a list of at most {most} items")

    def texts(self, name: str, right: Callable[[str], bool]) -> list[str]:
        """A list of texts, each of them valid."""
        found = self.items(name)
        for item in found:
            if not isinstance(item, str) or not right(item):
                raise PlanError(f"{self._where}.{name}", item, "well-formed names or texts", _RETUNE)
        return found

    def integers(self, name: str) -> list[int]:
        """A list of integers of at least 0."""
        found = self.items(name)
        for item in found:
            if not _is_count(item):
                raise PlanError(f"{self._where}.{name}", item, "integers of at least 0", _RETUNE)
        return found

    def plain(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return self._take(name, lambda v: isinstance(v, dict), "a JSON object")

    def finish(self) -> None:
        """Refuse unknown fields."""
        for name in self._left:
            raise PlanError(f"{self._where}.{name}", name, "no such field", _RETUNE)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53
