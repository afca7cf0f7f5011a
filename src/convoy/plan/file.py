"""Plans as files: versioned JSON, every field checked when read, written completely or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from convoy.errors import InputError, PlanError
from convoy.plan.plan import PLAN_VERSION, Plan, Step, StepCandidate
from convoy.plan.plan_fields import RETUNE, PlanFields
from convoy.problem import ANY_LAYOUT, LAYOUTS, VOLUME_LAYOUTS, EngineConfig, Knobs, TensorSpec
from convoy.untrusted import read_json, storable
from convoy.whole_file import whole_file

MAX_BYTES: Final = 16 << 20
"""A plan of a training step with 1000 launches has some 4 MiB, most of it candidates for `explain`."""
MAX_STEPS: Final = 20_000
MAX_TEXT: Final = 4000
MAX_NAME: Final = 400
MAX_CANDIDATES: Final = 1000
"""Most candidates of a step: each engine has one for each memory format, and one reason."""
MAX_REASON: Final = 200
"""Characters of a candidate's reason; the report has the whole text."""

_NAME = re.compile(r"\w[\w.]*(@[a-z]+)?", re.ASCII)
_ENGINE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
_FORMATS = (*LAYOUTS, *VOLUME_LAYOUTS)
_LAYOUT = re.compile("|".join((*_FORMATS, ANY_LAYOUT)))
_PROBLEM = re.compile(r"[a-z][a-z0-9]*:[\w:.+,=\[\]-]+", re.ASCII)


def paths_of(path: object) -> list[Path]:
    """The paths of plans: one, or several.

    Raises:
        InputError: anything else, or none.
    """
    if isinstance(path, (str, os.PathLike)):
        return [Path(cast("str | os.PathLike[str]", path))]
    found = list(cast("Sequence[object]", path)) if isinstance(path, (list, tuple)) else []
    if not found or not all(isinstance(one, (str, os.PathLike)) for one in found):
        raise InputError("path", cast("object", path), "the path of a plan, or a list of paths, one for each shape")
    return [Path(cast("str | os.PathLike[str]", one)) for one in found]


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
        with whole_file(path, argument) as temporary:
            temporary.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
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
    data["rejected_steps"] = [_step_to_dict(step) for step in plan.rejected_steps]
    data["inputs"], data["notes"] = list(plan.inputs), [storable(note, MAX_TEXT) for note in plan.notes]
    data["model"], data["weights"] = storable(plan.model, MAX_TEXT), storable(plan.weights, MAX_TEXT)
    return {"version": data.pop("version"), **data}


def _step_to_dict(step: Step) -> dict[str, Any]:
    data: dict[str, Any] = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    del data["config"]
    data |= {"engine": step.config.engine, "engine_version": step.config.version, "knobs": str(step.config.knobs)}
    for name in ("nodes", "args", "results", "waits"):
        data[name] = list(data[name])
    data["candidates"] = [dataclasses.asdict(one) for one in step.candidates]
    return data


def from_dict(data: object) -> Plan:
    """Inverse of `to_dict`; raises PlanError naming the field."""
    fields = PlanFields("plan", data)
    version = fields.integer("version")
    refuse_other_version(version)
    if fields.has("programs"):
        raise PlanError("plan", "plans for several sizes", "a plan for one size", "convoy.load reads the file.")
    plan = Plan(
        version=version,
        model=fields.text("model", MAX_TEXT),
        graph_digest=fields.text("graph_digest", 16, re.compile(r"[0-9a-f]{16}")),
        inputs=tuple(fields.texts("inputs", _spec)),
        target=fields.plain("target"),
        numerics=fields.text("numerics", 20, re.compile("strict|as_torch|half")),
        steps=_steps(fields, "steps"),
        solver=fields.text("solver", MAX_NAME),
        total_us=fields.number("total_us"),
        bound_us=fields.number("bound_us"),
        workspace_bytes=fields.integer("workspace_bytes"),
        activation_bytes=fields.integer("activation_bytes"),
        baseline=fields.boolean("baseline"),
        notes=tuple(fields.texts("notes", lambda text: len(text) <= MAX_TEXT)),
        border=_border(fields.plain("border")),
        weights=fields.text("weights", MAX_TEXT) if fields.has("weights") else "",
        predicted=fields.has("predicted") and fields.boolean("predicted"),
        rejected_steps=_steps(fields, "rejected_steps") if fields.has("rejected_steps") else (),
    )
    fields.finish()
    return plan


def refuse_other_version(version: int) -> None:
    """Raise PlanError unless this version of Convoy writes such files."""
    if version != PLAN_VERSION:
        raise PlanError(
            "plan.version", version, str(PLAN_VERSION), "It was written by another version of Convoy. " + RETUNE
        )


def _steps(fields: PlanFields, name: str) -> tuple[Step, ...]:
    return tuple(_step(f"plan.{name}[{i}]", item, i) for i, item in enumerate(fields.items(name, MAX_STEPS)))


def _border(found: dict[str, object]) -> dict[str, str]:
    for name, layout in found.items():
        if not _is_name(name) or layout not in _FORMATS:
            raise PlanError("plan.border", (name, layout), "value names with " + ", ".join(_FORMATS))
    return cast("dict[str, str]", found)


def _step(where: str, data: object, index: int) -> Step:
    fields = PlanFields(where, data)
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
        layout=fields.text("layout", 10, _LAYOUT),
        median_us=fields.number("median_us"),
        workspace_bytes=fields.integer("workspace_bytes"),
        stream=fields.integer("stream"),
        waits=tuple(fields.integers("waits")),
        predicted=fields.has("predicted") and fields.boolean("predicted"),
        baseline_us=fields.number("baseline_us") if fields.has("baseline_us") else 0.0,
        baseline_predicted=fields.has("baseline_predicted") and fields.boolean("baseline_predicted"),
        candidates=_candidates(where, fields) if fields.has("candidates") else (),
    )
    fields.finish()
    lengths = len(step.nodes), len(step.args), len(step.results)
    if lengths != (0, 1, 1) if step.kind == "convert" else not step.nodes:
        raise PlanError(
            where, step.kind, "one value copied by a step of kind convert, nodes in one of kind region", RETUNE
        )
    if any(wait >= index for wait in step.waits):
        raise PlanError(f"{where}.waits", step.waits, "indices of earlier steps")
    return step


def _candidates(where: str, fields: PlanFields) -> tuple[StepCandidate, ...]:
    items = fields.items("candidates", MAX_CANDIDATES)
    return tuple(_candidate(f"{where}.candidates[{i}]", item) for i, item in enumerate(items))


def _candidate(where: str, data: object) -> StepCandidate:
    fields = PlanFields(where, data)
    found = StepCandidate(
        engine=fields.text("engine", 100, _ENGINE),
        knobs=fields.text("knobs", 500),
        layout=fields.text("layout", 10, _LAYOUT),
        status=fields.text("status", 20, re.compile("[a-z_]+")),
        median_us=fields.number("median_us"),
        predicted=fields.boolean("predicted"),
        reason=fields.text("reason", MAX_REASON),
    )
    fields.finish()
    return found


def _is_name(text: str) -> bool:
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def _spec(text: str) -> bool:
    if len(text) > MAX_NAME:
        return False
    try:
        return str(TensorSpec.parse(text)) == text
    except InputError:
        return False
