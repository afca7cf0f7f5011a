"""Settings: what a user may choose. Frozen; the only module that reads environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from convoy.errors import InputError, unknown_name
from convoy.former_names import takes_former_names
from convoy.setting_values import read_engines, read_flag, read_integer, read_names, read_number, read_path, read_word


class Effort(StrEnum):
    """How much time tuning may take: only predict from the database, measure the likely candidates, measure all."""

    NONE = "none"
    QUICK = "quick"
    FULL = "full"


class Numerics(StrEnum):
    """Which rounding a candidate may use (docs/concepts/numerics.md)."""

    STRICT = "strict"
    AS_TORCH = "as_torch"
    HALF = "half"


class Solver(StrEnum):
    """How candidates are chosen: exact optimum, best per layer, one engine for all layers, or as PyTorch does."""

    EXACT = "exact"
    GREEDY = "greedy"
    SINGLE = "single"
    BASELINE = "baseline"


class LayoutChoice(StrEnum):
    """Memory formats that selection may use: any mixture, or only one."""

    AUTO = "auto"
    NCHW = "nchw"
    NHWC = "nhwc"


class Check(StrEnum):
    """How an optimised module detects changes of its stock module (docs/concepts/stale-weights.md)."""

    IDENTITY = "identity"
    CONTENTS = "contents"


EffortName = Literal["none", "quick", "full"]
NumericsName = Literal["strict", "as_torch", "half"]
SolverName = Literal["exact", "greedy", "single", "baseline"]
LayoutName = Literal["auto", "nchw", "nhwc"]
CheckName = Literal["identity", "contents"]

_Names = tuple[str, ...] | list[str] | set[str] | frozenset[str]
"""Collections of words. A plain string is none of them, although type checkers count it among collections of strings."""


@takes_former_names
@dataclass(frozen=True, slots=True)
class Settings:
    """All options of `convoy.optimize`; environment variables give the defaults of `db` and `engines`.

    Attributes:
        numerics: the allowed rounding.
        effort: how much to measure.
        time_s: wall time of a whole call of `optimize` or `training_step`, seconds. A first answer from predictions is made
            first; measuring improves it until the time is up. A first answer that takes longer is reported. `tune_s`, the
            former name, works for one release.
        solver: how to choose.
        layout: memory formats allowed inside the net (inputs and outputs keep the caller's).
        memory_budget_bytes: most bytes for activations, the growth of packed weights, and workspace together; None: no limit.
        tuning_memory_bytes: most bytes of a GPU that tuning may take beyond what the device already holds, including CUDA
            contexts of the processes that it starts; None: all free memory. Candidates that do not fit are recorded as
            `out_of_memory`, and tried again when there is more memory.
        deterministic: refuse candidates that may give different bits from run to run.
        static_outputs: on CUDA, return the program's own output buffers, which the next call overwrites.
        isolate: measure in a child process, so that a crash or a hang of a candidate costs one row, not the session.
        streams: most streams that a program on a GPU may use; measurements decide how many it uses.
        stream_memory: most memory that a schedule on several streams may use, weights and inputs included, as a multiple of
            the memory on one stream.
        timeout_s: a candidate that takes longer to build or to run is recorded as `timeout`.
        only_engines: restrict the choice to these ids (the baseline always competes); empty: all.
        deny_engines: ids that must not be used; the baseline, `aten`, cannot be denied.
        db: path of the performance database; None: in the user's cache folder (`CONVOY_DB` changes it).
        engines: extra engines as `id=module:Class` (`CONVOY_ENGINES`, comma-separated).
        progress: show the progress: a bar in a terminal, a display that updates in a notebook, else a line now and then on
            standard error. With `time_s` it shows the best so far and the time left, too.
        keep_freed_memory: on a CPU, tell glibc to keep freed memory in the process (`convoy.measurement.device.heap`):
            faster, but for the whole process, and other programs cannot use that memory.
        profile: after tuning, write where its time went to this file, as a trace for Perfetto, and print a table on standard
            error; None: do neither. `torch.compile` in training writes a file for each pass: `NAME.forward.json`,
            `NAME.backward.json`.
        check: how an optimised module detects changes of its stock module. `identity`: objects, addresses and version
            counters. `contents`: also sums over all parameters and buffers, in every call, which detect writes through
            `.data` too.
    """

    numerics: Numerics = Numerics.AS_TORCH
    effort: Effort = Effort.QUICK
    time_s: float = math.inf
    solver: Solver = Solver.EXACT
    layout: LayoutChoice = LayoutChoice.AUTO
    memory_budget_bytes: int | None = None
    tuning_memory_bytes: int | None = None
    deterministic: bool = False
    static_outputs: bool = False
    isolate: bool = True
    streams: int = 4
    stream_memory: float = 1.1
    timeout_s: float = 30.0
    only_engines: tuple[str, ...] = ()
    deny_engines: tuple[str, ...] = ()
    db: Path | None = field(default_factory=lambda: database_from_environment(os.environ))
    engines: tuple[str, ...] = field(default_factory=lambda: engines_from_environment(os.environ))
    progress: bool = False
    keep_freed_memory: bool = True
    profile: Path | None = None
    check: Check = Check.IDENTITY

    if TYPE_CHECKING:
        # What type checkers read in place of the method that `dataclass` writes: plain strings and lists are accepted, and every
        # field has one type afterwards. A test compares names and defaults with the fields above.
        def __init__(
            self,
            numerics: Numerics | NumericsName = Numerics.AS_TORCH,
            effort: Effort | EffortName = Effort.QUICK,
            time_s: float = math.inf,
            solver: Solver | SolverName = Solver.EXACT,
            layout: LayoutChoice | LayoutName = LayoutChoice.AUTO,
            memory_budget_bytes: int | None = None,
            tuning_memory_bytes: int | None = None,
            deterministic: bool = False,
            static_outputs: bool = False,
            isolate: bool = True,
            streams: int = 4,
            stream_memory: float = 1.1,
            timeout_s: float = 30.0,
            only_engines: _Names = (),
            deny_engines: _Names = (),
            db: str | os.PathLike[str] | None = ...,
            engines: _Names = ...,
            progress: bool = False,
            keep_freed_memory: bool = True,
            profile: str | os.PathLike[str] | None = None,
            check: Check | CheckName = Check.IDENTITY,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Check every field and convert it to its type.

        Raises:
            InputError: naming the field.
        """
        for name, read in _READERS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))


def checked_settings(settings: object) -> Settings:
    """The settings that were passed to a public call; the defaults for None.

    Raises:
        InputError: anything else than `Settings`.
    """
    if settings is None:
        return Settings()
    if not isinstance(settings, Settings):
        todo = "Pass convoy.Settings(**settings)." if isinstance(settings, Mapping) else ""
        raise InputError("settings", cast("object", settings), "convoy.Settings, or None", todo)
    return settings


MAX_STREAMS = 16
"""More streams never helped, and each has a workspace of its own."""

_BYTES: Final = read_integer(1, None, "a positive integer of bytes, or None", optional=True)

_READERS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "numerics": read_word(Numerics),
    "effort": read_word(Effort),
    "time_s": read_number(0, "a positive number of seconds", open_end=True, finite=False),
    "solver": read_word(Solver),
    "layout": read_word(LayoutChoice),
    "memory_budget_bytes": _BYTES,
    "tuning_memory_bytes": _BYTES,
    "deterministic": read_flag,
    "static_outputs": read_flag,
    "isolate": read_flag,
    "streams": read_integer(1, MAX_STREAMS, f"an integer from 1 to {MAX_STREAMS}"),
    "stream_memory": read_number(1, "a number of at least 1", open_end=False, finite=False),
    "timeout_s": read_number(0, "a positive number of seconds", open_end=True, finite=False),
    "only_engines": read_names("('onednn', 'cpu.direct')"),
    "deny_engines": read_names("('inductor',)"),
    "db": read_path,
    "engines": read_engines,
    "progress": read_flag,
    "keep_freed_memory": read_flag,
    "profile": read_path,
    "check": read_word(Check),
}
"""For each field the function that converts its value to the field's type, or refuses it."""


VARIABLES: Final[Mapping[str, str]] = {"db": "CONVOY_DB", "engines": "CONVOY_ENGINES"}
"""For fields whose default an environment variable gives: its name."""


def variable_of(name: str, environment: Mapping[str, str]) -> str:
    """The variable that gives a field's default in this environment; empty where none does."""
    variable = VARIABLES.get(name, "")
    return variable if environment.get(variable) else ""


def database_from_environment(environment: Mapping[str, str]) -> Path | None:
    """The path that `CONVOY_DB` names, or None."""
    value = environment.get("CONVOY_DB", "")
    return Path(value) if value else None


def commit_from_environment(environment: Mapping[str, str]) -> str:
    """The commit that `CONVOY_COMMIT` names, for a tree without its git history; empty if it is not set."""
    return environment.get("CONVOY_COMMIT", "")


def engines_from_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The entries of `CONVOY_ENGINES`; each must read `id=module:Class`."""
    entries = (entry.strip() for entry in environment.get("CONVOY_ENGINES", "").split(","))
    return read_engines("CONVOY_ENGINES", tuple(entry for entry in entries if entry))


CPU_ISAS = ("sse4", "avx2", "avx512", "avx512_bf16", "amx")
"""Levels that `CONVOY_MAX_CPU_ISA` may name, older first."""


def max_cpu_isa_from_environment(environment: Mapping[str, str]) -> str:
    """The newest instruction set that Convoy's C kernels may use (`CONVOY_MAX_CPU_ISA`); empty: no limit."""
    value = environment.get("CONVOY_MAX_CPU_ISA", "").strip().lower()
    if value and value not in CPU_ISAS:
        raise unknown_name("CONVOY_MAX_CPU_ISA", value, CPU_ISAS, "Unset it for no limit.")
    return value


def onednn_max_cpu_isa_from_environment(environment: Mapping[str, str]) -> str:
    """The newest instruction set that oneDNN may use, in lower case, by the two names that oneDNN reads; empty: no limit."""
    return (environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").strip().lower()


_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str, argument: str) -> int:
    """Read a size such as `256MiB`, `1.5GB` or `4096`; raises InputError for anything else."""
    number = text.strip().rstrip("BKMGi")
    unit = text.strip()[len(number) :]
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit not in _UNITS or not 0 < value < float("inf"):
        raise InputError(argument, text, "a size such as 256MiB, 1.5GB or 4096")
    return int(value * _UNITS[unit])
