"""Settings, sizes, support, target and errors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from convoy.errors import CompileError, InputError, UnsupportedError
from convoy.settings import (
    Effort,
    Settings,
    checked_settings,
    database_from_environment,
    engines_from_environment,
    parse_bytes,
)
from convoy.support import Support
from convoy.target import Target

TARGET = Target("cuda", "GPU", "sm_90", 132, 80 << 30, 50 << 20, (("cudnn", "9.19"), ("torch", "2.11.0")))


def test_settings_take_words_and_refuse_others() -> None:
    assert Settings(effort="full").effort is Effort.FULL  # type: ignore[arg-type]
    for name in ("numerics", "effort", "solver", "layout"):
        with pytest.raises(InputError) as caught:
            Settings(**{name: "wild"})
        assert caught.value.argument == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("effort", None),
        ("effort", 3),
        ("numerics", ["strict"]),
        ("solver", True),
        ("time_s", "3"),
        ("time_s", 0.0),
        ("time_s", -1),
        ("time_s", float("nan")),
        ("time_s", None),
        ("time_s", True),
        ("timeout_s", 0.0),
        ("timeout_s", float("nan")),
        ("timeout_s", 1j),
        ("streams", None),
        ("streams", True),
        ("streams", 2.0),
        ("streams", "4"),
        ("streams", 0),
        ("streams", 17),
        ("stream_memory", 0.5),
        ("stream_memory", float("nan")),
        ("stream_memory", "2"),
        ("deterministic", "no"),
        ("deterministic", 1),
        ("static_outputs", None),
        ("isolate", 0),
        ("progress", "yes"),
        ("keep_freed_memory", []),
        ("memory_budget_bytes", 0),
        ("memory_budget_bytes", "1GiB"),
        ("memory_budget_bytes", 1e9),
        ("tuning_memory_bytes", -1),
        ("tuning_memory_bytes", True),
        ("only_engines", "aten"),
        ("only_engines", None),
        ("only_engines", (1,)),
        ("deny_engines", ("",)),
        ("only_engines", ("aten", "onednn", "aten")),
        ("deny_engines", ["inductor", "inductor"]),
        ("engines", {"mine": "my.module:Mine"}),
        ("engines", ["mine"]),
        ("engines", ["mine=my.module"]),
        ("engines", ["mine=my.module:"]),
        ("engines", ["=my.module:Mine"]),
        ("engines", ["mine=my.module:Mine:2"]),
        ("engines", ["mine=my.module:Mine", "mine=my.module:Other"]),
        ("db", 3),
        ("db", b"perf.db"),
        ("db", ""),
    ],
)
def test_settings_name_the_field_that_is_wrong(name: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        Settings(**{name: value})  # type: ignore[arg-type]
    assert caught.value.argument == name
    assert str(caught.value).startswith(f"{name}: got ")


def test_every_field_is_checked() -> None:
    for field in dataclasses.fields(Settings):
        with pytest.raises(InputError) as caught:
            Settings(**{field.name: object()})  # type: ignore[arg-type]
        assert caught.value.argument == field.name


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array(1.5), torch.tensor([1, 2]), torch.tensor(1.5)])
@pytest.mark.parametrize("field", ["streams", "memory_budget_bytes"])
def test_arrays_and_tensors_that_are_no_integer_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Settings(**{field: value})  # type: ignore[arg-type]


def test_settings_take_what_means_the_same() -> None:
    numbers = Settings(
        time_s=np.float32(2), streams=np.int64(3), tuning_memory_bytes=np.int32(5), isolate=np.bool_(False)
    )
    assert (numbers.time_s, numbers.streams, numbers.tuning_memory_bytes, numbers.isolate) == (2.0, 3, 5, False)
    assert {type(numbers.time_s), type(numbers.streams), type(numbers.isolate)} == {float, int, bool}
    assert Settings(time_s=3).time_s == 3.0
    assert Settings(only_engines=["aten"], deny_engines={"b", "a"}).deny_engines == ("a", "b")  # type: ignore[arg-type]
    assert Settings(db="a/b.db").db == Path("a/b.db")  # type: ignore[arg-type]
    assert Settings(db=None).db is None


def test_settings_of_a_call() -> None:
    given = Settings(effort=Effort.NONE)
    assert checked_settings(given) is given
    assert checked_settings(None) == Settings()
    with pytest.raises(InputError, match=r"settings: got .*convoy.Settings\(\*\*settings\)"):
        checked_settings({"effort": "none"})
    with pytest.raises(InputError, match="settings: got 'none'"):
        checked_settings("none")


def test_environment() -> None:
    assert database_from_environment({"CONVOY_DB": "a/b.db"}) == Path("a/b.db")
    assert database_from_environment({}) is None
    assert engines_from_environment({"CONVOY_ENGINES": "x=m:C, y=n:D"}) == ("x=m:C", "y=n:D")
    with pytest.raises(InputError, match="CONVOY_ENGINES"):
        engines_from_environment({"CONVOY_ENGINES": "x=m"})


@pytest.mark.parametrize(
    ("text", "value"), [("256MiB", 256 << 20), ("1.5GB", 1_500_000_000), ("4096", 4096), ("1KiB", 1024), ("7B", 7)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text, "size") == value


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "0", "1TiB", "nan", "inf", "1 0MiB", "1iMB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InputError, match="a size such as 256MiB"):
        parse_bytes(text, "size")


def test_support() -> None:
    assert Support.yes()
    assert not Support.no("too big")
    with pytest.raises(ValueError, match="reason"):
        Support(False)


def test_every_field_but_memory_enters_the_target_digest() -> None:
    other = {"device": "cpu", "name": "x", "arch": "sm_80", "units": 1, "cache_bytes": 1, "versions": ()}
    for name, value in other.items():
        assert dataclasses.replace(TARGET, **{name: value}).digest != TARGET.digest
    assert dataclasses.replace(TARGET, memory_bytes=1).digest == TARGET.digest
    assert Target.from_dict(TARGET.to_dict()) == TARGET
    assert (TARGET.capability, TARGET.version("cudnn"), TARGET.version("none")) == (90, "9.19", "")


def test_errors_carry_what_was_wrong_and_the_log() -> None:
    error = InputError("batch", "x" * 500, "a positive integer", "Use 1.")
    assert str(error).startswith("batch: got 'xxx")
    assert str(error).endswith("expected a positive integer. Use 1.")
    assert len(str(error)) < 200
    assert "ptxas said no" in str(CompileError("triton.x", "failed", "ptxas said no"))
    assert (error.exit_code, UnsupportedError("e", "p", "r").exit_code, CompileError("e", "s").exit_code) == (2, 2, 1)


def test_importing_convoy_imports_no_torch() -> None:
    code = "import convoy, sys; assert 'torch' not in sys.modules; convoy.Settings(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
