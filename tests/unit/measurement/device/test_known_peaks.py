"""Peak rates that are known: kept once they settled, taken where they fit, measured again where a file is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.measurement import Peaks
from convoy.measurement.device.known_peaks import (
    DevicePeaks,
    export_peaks,
    find_peaks,
    keep_peaks,
    peaks_json,
    read_peaks,
)
from convoy.perfdb.shipped import shipped_folder
from convoy.pipeline import ceilings
from convoy.settings import Effort, Settings
from convoy.target import Target

HERE = Target("cuda", "a GPU", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.13.0"),))
NEWER = replace(HERE, versions=(("torch", "2.14.0"),))
OTHER = replace(HERE, name="another GPU")
RATES = Peaks(3.1e12, {"fp32": 5e13, "fp16": 8e14}, 0.1 + 7e12, 50 << 20)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "perf.db"


def test_kept_rates_come_back_to_the_last_digit(database: Path) -> None:
    keep_peaks(DevicePeaks(HERE, RATES), database)
    for brief in (True, False):
        assert find_peaks(HERE, database, brief=brief) == RATES
    assert [path.name for path in database.parent.iterdir()] == [f"perf-{HERE.digest}.peaks.json"]


def test_rates_of_other_software_are_good_for_a_brief_answer_alone(database: Path) -> None:
    keep_peaks(DevicePeaks(NEWER, RATES), database)
    assert find_peaks(HERE, database, brief=True) == RATES
    assert find_peaks(HERE, database, brief=False) is None
    assert find_peaks(OTHER, database, brief=True) is None
    assert find_peaks(HERE, database.with_name("other.db"), brief=True) is None


def test_brief_rates_do_not_take_the_place_of_patient_ones(database: Path) -> None:
    brief = replace(RATES, bytes_per_s=1e12)
    keep_peaks(DevicePeaks(HERE, brief, brief=True), database)
    assert find_peaks(HERE, database, brief=True) == brief
    assert find_peaks(HERE, database, brief=False) is None
    keep_peaks(DevicePeaks(HERE, RATES), database)
    keep_peaks(DevicePeaks(HERE, brief, brief=True), database)
    assert find_peaks(HERE, database, brief=True) == RATES


def test_the_users_own_rates_come_before_shipped_ones(database: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / f"{NEWER.digest}.peaks.json").write_text(peaks_json(DevicePeaks(NEWER, RATES)))
    assert find_peaks(HERE, database, brief=True, folder=shipped) == RATES
    assert find_peaks(HERE, database, brief=False, folder=shipped) is None
    own = replace(RATES, bytes_per_s=2e12)
    keep_peaks(DevicePeaks(HERE, own), database)
    assert find_peaks(HERE, database, brief=True, folder=shipped) == own


def test_a_damaged_file_counts_as_none_and_is_written_anew(database: Path) -> None:
    path = database.with_name(f"perf-{HERE.digest}.peaks.json")
    good = json.loads(peaks_json(DevicePeaks(HERE, RATES)))
    wrong = [
        {}, {**good, "schema": 2}, {**good, "more": 1}, {**good, "brief": 1}, {**good, "flops": {}}, {**good, "flops": 7},
        {**good, "bytes_per_s": 0}, {**good, "bytes_per_s": "fast"}, {**good, "bytes_per_s": True},
        {**good, "flops": {"fp32": -1.0}}, {**good, "flops": {"fp32": 1e30}}, {**good, "target": {}},
        {**good, "target": OTHER.to_dict()},
    ]  # fmt: skip
    for text in ("", "no json", "\x00", "[]", *map(json.dumps, wrong)):
        path.write_text(text)
        assert find_peaks(HERE, database, brief=True) is None
    keep_peaks(DevicePeaks(HERE, RATES), database)
    assert find_peaks(HERE, database, brief=True) == RATES
    with pytest.raises(InputError, match="fp32"):
        read_peaks(json.dumps(wrong[4]), "file")


def test_a_folder_that_cannot_be_written_to_is_left_alone(tmp_path: Path) -> None:
    keep_peaks(DevicePeaks(HERE, RATES), tmp_path / "absent" / "perf.db")
    assert list(tmp_path.iterdir()) == []


def test_patient_rates_are_exported_in_the_shipped_form(database: Path, tmp_path: Path) -> None:
    for target, brief in ((HERE, False), (NEWER, True)):
        keep_peaks(DevicePeaks(target, RATES, brief=brief), database)
    folder = tmp_path / "shipped"
    folder.mkdir()
    digests = {HERE.digest, NEWER.digest, OTHER.digest}
    assert export_peaks(database, folder, digests) == [folder / f"{HERE.digest}.peaks.json"]
    assert find_peaks(NEWER, tmp_path / "other.db", brief=True, folder=folder) == RATES


def test_what_the_package_ships_can_be_read() -> None:
    for entry in shipped_folder().iterdir():
        if entry.name.endswith(".peaks.json"):
            known = read_peaks(entry.read_text(encoding="utf-8"), entry.name)
            assert entry.name == f"{known.target.digest}.peaks.json"
            assert not known.brief


@pytest.mark.parametrize("settled", [True, False])
def test_a_device_is_measured_once_if_its_rates_settle(
    database: Path, monkeypatch: pytest.MonkeyPatch, settled: bool
) -> None:
    asked: list[bool] = []

    def rates(target: Target, *, brief: bool) -> Peaks:
        asked.append(brief)
        return replace(RATES, settled=settled, cache_bytes=target.cache_bytes)

    monkeypatch.setattr(ceilings, "peaks", rates)
    target = replace(HERE, device="cpu")
    for effort in (Effort.NONE, Effort.NONE, Effort.QUICK, Effort.QUICK, Effort.NONE):
        found = ceilings.ceilings_of(target, Settings(db=database, effort=effort))
        assert found == replace(RATES, settled=settled)
    assert asked == ([True, False] if settled else [True, True, False, False, True])
