"""Spaces of engines that are kept in the user's cache: the engine's own, made once, and made anew where it matters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.engines.base import Engine, Executable
from convoy.engines.compilers import host_compiler
from convoy.engines.compilers.device_binaries import keep
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.measurement import known_spaces
from convoy.measurement.known_spaces import KnownSpaces
from convoy.problem import ConvProblem, Epilogue, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
CPU = replace(GPU, device="cpu")
HALF = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16", "layout": "nhwc"}
LAYERS = [
    ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1, epilogue=Epilogue(bias=True, activation="relu"), **HALF),
    ConvProblem(1, 256, 14, 14, 1024, 1, 1, epilogue=Epilogue(bias=True, residual=True), **HALF),
    ConvProblem(8, 96, 28, 28, 96, 3, 3, 1, 1, groups=96, **HALF),
]


class Counting(Engine):
    """Counts how often it is asked for its space."""

    id = "aten"  # a name of Convoy's own
    family = "library"
    pure_space = True

    def __init__(self) -> None:
        self.asked = 0

    def supports(self, problem: Problem, target: Target) -> Support:
        del problem, target
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        del problem, target
        self.asked += 1
        return [Knobs.of(k=k, fast=k > 1, word="a") for k in range(3)]

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "compiled"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(host_compiler, "compiled_folder", lambda: made)
    return made


def asked(engine: Counting, target: Target = GPU, problem: Problem = LAYERS[0]) -> int:
    """How often a session asks an engine that another session may have asked."""
    before = engine.asked
    known = KnownSpaces(target)
    for _ in range(2):
        found = known.space(engine, problem)
        assert list(found) == engine.space(problem, target)
        assert [str(knobs) for knobs in found] == [
            "fast=false,k=0,word=a",
            "fast=false,k=1,word=a",
            "fast=true,k=2,word=a",
        ]
    known.keep()
    return engine.asked - before - 2


def test_a_second_session_asks_nothing(folder: Path) -> None:
    engine = Counting()
    assert asked(engine) == 1
    (path,) = folder.iterdir()
    assert path.name.startswith("spaces-")
    written = path.stat().st_mtime_ns
    assert asked(engine) == 0
    assert path.stat().st_mtime_ns == written


def test_another_problem_version_target_or_package_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Counting()
    assert asked(engine) == 1
    assert asked(engine, problem=LAYERS[1]) == 1
    assert asked(engine, replace(GPU, units=78)) == 1
    monkeypatch.setattr(Counting, "version", 2)
    assert asked(engine) == 1
    monkeypatch.setattr(known_spaces, "_stamp", lambda: "edited")
    assert asked(engine) == 1
    monkeypatch.setattr(known_spaces, "_stamp", lambda: "")  # no files: nothing is kept
    assert asked(engine) == asked(engine) == 2


@pytest.mark.parametrize(
    ("name", "value", "target", "problem"),
    [
        ("id", "mine", GPU, LAYERS[0]),
        ("pure_space", False, GPU, LAYERS[0]),
        ("id", "aten", CPU, LAYERS[0]),
        ("id", "aten", GPU, replace(LAYERS[0], weight_mask="0123456789abcdef")),
    ],
)
def test_what_may_differ_by_more_is_asked_every_time(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, value: object, target: Target, problem: Problem
) -> None:
    monkeypatch.setattr(Counting, name, value)
    engine = Counting()
    assert asked(engine, target, problem) == asked(engine, target, problem) == 2
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", '{"PLACE": 3}', '{"PLACE": []}', '{"PLACE": [3]}', '{"PLACE": [["k"], [1, 2]]}',
     '{"PLACE": [["k"], [1.5]]}', '{"PLACE": [["k"], 7]}', '{"PLACE": [[1], [1]]}'],
)  # fmt: skip
def test_another_content_is_a_miss(content: str) -> None:
    engine = Counting()
    place = json.dumps(f"aten@1 {LAYERS[0].key}")
    keep("spaces", KnownSpaces(GPU)._key, content.replace('"PLACE"', place).encode(), ".json")
    assert asked(engine) >= 1


def test_a_damaged_file_is_a_miss(folder: Path) -> None:
    engine = Counting()
    asked(engine)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    assert asked(engine) == 1
    assert asked(engine) == 0


def test_a_file_that_grew_too_large_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_spaces, "MOST_BYTES", 10)
    engine = Counting()
    assert asked(engine) == asked(engine) == 1


def test_spaces_come_back_as_the_engine_makes_them() -> None:
    engines = [load_engine(name) for name in MANIFEST if name.startswith(("triton.", "cuda."))]
    pairs = [(e, p) for e in engines if e.pure_space for p in LAYERS if e.competes(p) and e.supports(p, GPU)]
    for _ in range(2):
        known = KnownSpaces(GPU)
        for engine, problem in pairs:
            found, made = known.space(engine, problem), engine.space(problem, GPU)
            assert [str(knobs) for knobs in found] == [str(knobs) for knobs in made]
            assert list(found) == list(made)
        known.keep()
