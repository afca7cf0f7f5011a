"""Plan files: they round-trip, refuse everything that is not a plan, and are written whole or not at all."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path

import pytest

from convoy import plan as plans
from convoy.engines.activation_sparsity import KINDS
from convoy.errors import InputError, PlanError
from convoy.plan import Plan, Step
from convoy.plan.describe import ZEROS
from convoy.plan.file import write_text
from convoy.problem import ConvProblem, EngineConfig, Knobs

STEPS = (
    Step("convert", "", (), ("x",), ("x@nhwc",), "layout:nchw:nhwc:fp32[1,3,8,8]", EngineConfig("aten"), "nhwc", 1.5),
    Step(
        "region",
        "conv",
        ("conv", "relu"),
        ("x@nhwc",),
        ("relu",),
        ConvProblem(1, 3, 8, 8, 4, 3, 3, layout="nhwc").key,
        EngineConfig("triton.implicit_gemm", 3, Knobs.of(block_m=64, flat=True)),
        "nhwc",
        7.25,
        4096,
        1,
        (0,),
    ),
)
PLAN = Plan(
    "net",
    "0123456789abcdef",
    ("fp32[1,3,8,8]",),
    {"device": "cpu", "digest": "f" * 16},
    "as_torch",
    STEPS,
    "exact",
    8.75,
    8.75,
    4096,
    1024,
    notes=("a note",),
    border={"x": "nchw", "relu": "nchw"},
)


def test_round_trip(tmp_path: Path) -> None:
    plans.save(PLAN, tmp_path / "p.json")
    assert plans.load(tmp_path / "p.json") == PLAN


def mutations(value: object, rng: random.Random) -> object:
    """A JSON value with one thing in it changed."""
    strange: list[object] = [None, -1, 1e308, "", "x" * 5000, [], {}, True, "../../etc", [[]], {"a": 1}, float("nan")]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != name} if rng.random() < 0.5 else {**value, "extra": 1}
        return {**value, name: mutations(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        return [*value[:index], mutations(value[index], rng), *value[index + 1 :]]
    return rng.choice(strange)


def test_only_plan_errors_come_out_of_damaged_plans(tmp_path: Path) -> None:
    rng = random.Random(4)
    path = tmp_path / "p.json"
    good = plans.to_dict(PLAN)
    refused = 0
    for _ in range(600):
        path.write_text(json.dumps(mutations(json.loads(json.dumps(good)), rng)), encoding="utf-8")
        try:
            plans.load(path)
        except PlanError:
            refused += 1
    assert refused > 400


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
def test_files_that_are_no_plans(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(PlanError):
        plans.load(path)


def test_a_newer_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**plans.to_dict(PLAN), "version": 99}), encoding="utf-8")
    with pytest.raises(PlanError, match="another version"):
        plans.load(path)


def test_nothing_is_overwritten_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    plans.save(PLAN, path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="plan"):
        plans.save(PLAN, tmp_path)
    with pytest.raises(InputError, match="plan"):
        plans.save(PLAN, tmp_path / "missing" / "p.json")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_explain_and_compare() -> None:
    text = plans.explain(PLAN)
    assert "conv(conv+relu)" in text
    assert "note: a note" in text
    assert "4096 bytes" in plans.explain(PLAN, "relu")
    with pytest.raises(InputError, match="layer"):
        plans.explain(PLAN, "nobody")
    with pytest.raises(InputError, match="layer: got 3"):
        plans.explain(PLAN, 3)  # type: ignore[arg-type]
    assert plans.compare(PLAN, PLAN) == []
    import dataclasses

    other = dataclasses.replace(PLAN, steps=(STEPS[0], dataclasses.replace(STEPS[1], config=EngineConfig("aten"))))
    assert any("triton.implicit_gemm" in line for line in plans.compare(PLAN, other))
    skipping = EngineConfig("zeroskip.cpu", 1, Knobs.of(skip="auto", zeros=70))
    sparse = dataclasses.replace(PLAN, steps=(STEPS[0], dataclasses.replace(STEPS[1], config=skipping)))
    assert "values 70 % or more are zero" in plans.explain(sparse, "relu")
    assert "zeros" not in plans.explain(PLAN, "relu")
    assert set(ZEROS) == set(KINDS)


def test_a_file_is_readable_as_the_umask_says_and_nothing_else_is_left(tmp_path):
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "page.html", "text", "report")
    finally:
        os.umask(before)
    assert [(p.name, stat.S_IMODE(p.stat().st_mode)) for p in tmp_path.iterdir()] == [("page.html", 0o644)]


def changed(**fields: object) -> dict[str, object]:
    return {**plans.to_dict(PLAN), **fields}


def first_step(**fields: object) -> dict[str, object]:
    first, second = plans.to_dict(PLAN)["steps"]
    return changed(steps=[{**first, **fields}, second])


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (changed(inputs=["fp32[" + "9" * 400 + "]"]), "inputs"),
        (changed(inputs=["fp32[" + "1," * 100 + "1]"]), "inputs"),
        (changed(border={"x": ["nchw"]}), "border"),
        (changed(border={"x\x1b": "nchw"}), "border"),
        (changed(steps=[None] * 20_001), "steps"),
        (changed(notes=["x"] * 100_001), "notes"),
        (first_step(args=[]), "steps.0."),
        (first_step(args=["x", "x"]), "steps.0."),
        (first_step(nodes=["x"]), "steps.0."),
        (first_step(kind="region"), "steps.0."),
        (first_step(knobs="a=1,a=2"), "knobs"),
        (first_step(knobs="b=1,a=2"), "knobs"),
        (first_step(knobs="a=" + "9" * 400), "knobs"),
        (first_step(knobs="a=01"), "knobs"),
        (first_step(knobs="é=1"), "knobs"),
        (first_step(median_us=10**400), "median_us"),
    ],
)
def test_fields_of_wrong_lengths_and_numbers_are_refused_and_named(data: dict[str, object], field: str) -> None:
    with pytest.raises(PlanError, match=rf"^plan\.{field}|^plan\.steps\[0\]\.{field}"):
        plans.from_dict(data)


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for path in (tmp_path / "pipe", tmp_path, large, Path("/dev/zero"), tmp_path / "absent", tmp_path / "a\0b"):
        with pytest.raises(PlanError, match="plan"):
            plans.load(path)
    for path in (tmp_path, tmp_path / "pipe" / "x", tmp_path / "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="plan"):
            plans.save(PLAN, path)


def test_the_paths_of_plans_are_one_or_several(tmp_path: Path) -> None:
    path = tmp_path / "net.plan.json"
    assert plans.paths_of(str(path)) == plans.paths_of(path) == plans.paths_of([path]) == [path]
    for wrong in (None, [], 3, [3], {}):
        with pytest.raises(InputError, match=r"^path: "):
            plans.paths_of(wrong)
