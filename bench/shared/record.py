"""Recorder: a benchmark's figures as one long-form CSV, bench/results/QUESTION-DEVICE.csv, a row a figure."""

from __future__ import annotations

import csv
import datetime as dt
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLUMNS = (
    "question",
    "subject",
    "batch",
    "dtype",
    "numerics",
    "provider",
    "metric",
    "unit",
    "p50",
    "p20",
    "p80",
    "ok",
    "note",
    "device",
    "versions",
    "protocol",
    "commit",
    "date",
    "processes",
    "host",
    "gpu",
    "clocks",
    "temperature",
    "power_limit",
    "code",
)
"""Column names, in order. Rows that were written before a column was added have nothing in it."""

MACHINE = ("host", "gpu", "clocks", "temperature", "power_limit")
"""Columns of the machine's identity and state."""

RESULTS = Path(__file__).parents[1] / "results"
"""Where committed results lie."""


class Recorder:
    """Collects rows of one question on one device and writes them.

    Args:
        question: what is asked (`cpu-inference`, `layers`, ...): the file's name.
        device: the device's own name.
        versions: `name=version` words of what was compared.
        protocol: how it was measured, in a few words.
        folder: where to write; `bench/results` by default.
        commit: what measured; by default what runs.
        date: when; by default now.
        machine: `host`, `gpu`, `clocks`, `temperature` and `power_limit` of the run, as far as they are known.
        code: digest of the code that is timed (`bench/shared/timed_code.py`), for questions that have one.
    """

    def __init__(
        self,
        question: str,
        *,
        device: str,
        versions: str = "",
        protocol: str = "",
        folder: Path | None = None,
        commit: str = "",
        date: str = "",
        machine: Mapping[str, str] | None = None,
        code: str = "",
    ) -> None:
        self.question, self.device, self.versions, self.protocol = question, device, versions, protocol
        self.commit, self.date = commit, date
        self.machine, self.code = dict(machine or {}), code
        self.folder = folder or RESULTS
        self.rows: list[dict[str, Any]] = []

    @property
    def path(self) -> Path:
        """The file that `write` makes."""
        return self.folder / f"{self.question}-{_word(self.device)}.csv"

    def add(
        self,
        *,
        subject: str,
        provider: str,
        metric: str,
        unit: str,
        p50: float,
        p20: float | None = None,
        p80: float | None = None,
        batch: int = 1,
        dtype: str = "fp32",
        numerics: str = "as_torch",
        ok: bool = True,
        note: str = "",
        processes: str = "",
    ) -> None:
        """Add one figure.

        `ok` says that the output was checked and right. `processes` is `own` where each provider ran in a process of its own,
        `one` where all were timed in one.
        """
        figures = {"p50": p50, "p20": p50 if p20 is None else p20, "p80": p50 if p80 is None else p80}
        self.rows.append(
            {
                "question": self.question,
                "subject": subject,
                "batch": batch,
                "dtype": dtype,
                "numerics": numerics,
                "provider": provider,
                "metric": metric,
                "unit": unit,
                **{name: f"{value:.6g}" for name, value in figures.items()},
                "ok": str(ok).lower(),
                "note": note,
                "device": self.device,
                "versions": self.versions,
                "protocol": self.protocol,
                "commit": self.commit or _commit(),
                "date": self.date or dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "processes": processes,
                **{name: self.machine.get(name, "") for name in MACHINE},
                "code": self.code,
            }
        )

    def earlier(self) -> list[dict[str, str]]:
        """The rows that the file has."""
        return _read(self.path)

    def write(self) -> Path:
        """Write all rows and return the file. Figures of an older file stay, where this run has none of that subject and setting.

        A subject's providers are replaced together: peers of another run are no comparison.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        measured = {setting(row) for row in self.rows}
        kept = [row for row in _read(self.path) if setting(row) not in measured]
        written = self.path.with_suffix(".csv.new")  # a run that is cut short here leaves the older file
        with written.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows([*kept, *self.rows])
        return written.replace(self.path)


def origin(manifest: Mapping[str, Any]) -> dict[str, str]:
    """A run file's commit and date, as a recorder takes them: its figures are not those of whoever reads it."""
    return {name: str(manifest.get(name, "")) for name in ("commit", "date")}


def setting(row: dict[str, Any]) -> tuple[str, ...]:
    """What rows of one comparison share.

    Where inputs have zeros, with how many and how they lie, and where weights are pruned, of which list of layers: the note's
    first words. (One of the ten operators is a layer of ResNet-50 too.)
    """
    words = tuple(str(row.get(name) or "") for name in ("subject", "batch", "dtype", "numerics", "metric", "processes"))
    of_zeros = row["note"].startswith("zeros ")
    return (*words, *row["note"].split()[: 4 if of_zeros else int(row["question"] == "pruned")])


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _commit() -> str:
    """The commit that is measured: git's, or `CONVOY_COMMIT` where the tree was copied without its history."""
    named = os.environ.get("CONVOY_COMMIT")
    if named:
        return named
    git = shutil.which("git")
    if git is None:
        return "unknown"
    here = Path(__file__).parent
    done = subprocess.run(
        [git, "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
