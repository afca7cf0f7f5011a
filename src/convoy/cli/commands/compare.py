"""convoy compare: one net in every framework, or the effect of each option of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from convoy.cli import interrupt
from convoy.cli.options import compare as given
from convoy.cli.options import inputs, shared, values
from convoy.cli.output import kept
from convoy.cli.output.files import check_outputs, file_word
from convoy.cli.output.lines import say, tell
from convoy.errors import InputError, unknown_name
from convoy.settings import Effort, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from convoy.compare.runs.runfile import Run

BATCHES: Final = "batch sizes of at least 1, separated by commas: 1,32"
"""What `--batch` takes."""


def compare(
    model: shared.Model,
    batch: given.Batch = None,
    size: shared.Size = None,
    dtype: shared.Dtype = "fp32",
    device: shared.Device = None,
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    frameworks: given.Frameworks = None,
    option_names: given.OptionNames = None,
    train: given.Train = False,
    effort: given.Effort = "quick",
    time_s: given.TimeS = 0.0,
    db: shared.Db = None,
    threads: given.Threads = None,
    rounds: given.Rounds = 15,
    timeout_s: given.TimeoutS = 900.0,
    seconds: given.Seconds = 0.0,
    jobs: given.Jobs = 0,
    memory_limit: given.MemoryLimit = None,
    output: given.Output = None,
    run: given.RunFile = None,
    again: given.Again = False,
    report: shared.Report = None,
) -> None:
    """Time MODEL in every framework, or with PyTorch's options. Outputs are checked first; each framework has its process."""
    kind = _kind(option_names, frameworks, dtype)
    name, path = _run_file(output, run, f"{kind}-{file_word(model)}.json")
    asked_batches = () if batch is None else values.positive_integers("--batch", batch, BATCHES)
    check_outputs({name: path, "--report": report})
    _check(rounds, effort, timeout_s, {"--seconds": seconds, "--time-s": time_s, "--jobs": jobs})
    values.check_database(db)
    names = values.words_of(frameworks or given.ALL) if kind == "compare" else []

    from convoy.compare.case import Case
    from convoy.compare.limits import Limits
    from convoy.zoo import read_info

    first = Case(
        model=model,
        weights=weights or "",
        size=values.image_size(size) or read_info(weights).size or 0,
        dtype=dtype,
        mode="training" if train else "inference",
        device=values.pick_target(device, dtype).device,
        threads=_threads(threads),
        effort=effort,
        time_s=time_s,
        db=str(db or ""),
        trust=trust,
    )
    batches = list(dict.fromkeys(asked_batches)) or [_own_batch(first)]
    cases = [replace(first, batch=n) for n in batches]
    memory = parse_bytes(memory_limit, "--memory-limit") if memory_limit else 0
    kept.run_file(path)
    interrupt.unwinds()  # ends the frameworks' processes
    asked = (path, requested(kind, cases, rounds), Limits(timeout_s, memory, rounds, seconds, jobs), again)
    found = _frameworks(cases, names, *asked) if option_names is None else _options(cases, option_names, *asked)
    _show(found, path, report)
    raise typer.Exit(0 if worked(found, batches, names) else 1)


def worked(run: Run, batches: Sequence[int], frameworks: Sequence[str]) -> bool:
    """Whether the run has a figure for a requested batch size and framework; without frameworks, for an option."""
    asked = {word.partition("=")[0] for word in frameworks}
    return any(row.ok and row.batch in batches and (not asked or row.provider in asked) for row in run.rows)


def _run_file(output: Path | None, run: Path | None, usual: str) -> tuple[str, Path]:
    """The option that named the run file, and the file."""
    if output is not None and run is not None and output != run:
        raise InputError("--run", str(run), f"the file that --out names: {output}", "They are two names of one option.")
    return ("--run", run) if output is None and run is not None else ("--out", output or Path(usual))


def _kind(option_names: str | None, frameworks: str | None, dtype: str) -> str:
    """`compare` for a run of frameworks, `options` for one of PyTorch's options; InputError where `--dtype` does not fit it."""
    if option_names is not None and frameworks is not None:
        expected = "no --frameworks beside it"
        raise InputError("--options", option_names, expected, "They are two runs with two run files.")
    kind = "compare" if option_names is None else "options"
    _check_dtype(dtype, kind)
    return kind


def _check(rounds: int, effort: str, timeout_s: float, least_zero: Mapping[str, float]) -> None:
    """Refuse numbers and words that are none of those that there are."""
    if rounds < 3:
        raise InputError("--rounds", rounds, "at least 3")
    if not 0 < timeout_s < math.inf:
        raise InputError("--timeout-s", timeout_s, "a number of seconds above 0")
    for name, value in least_zero.items():
        if not 0 <= value < math.inf:
            raise InputError(name, value, "at least 0")
    if effort not in list(Effort):
        raise unknown_name("--effort", effort, Effort)


def _check_dtype(dtype: str, kind: str) -> None:
    """Refuse types that no framework is given, and any but fp32 where types are among the options that are tried."""
    from convoy.compare.case import DTYPES

    if dtype not in DTYPES:
        raise unknown_name("--dtype", dtype, DTYPES)
    if kind == "options" and dtype != "fp32":
        raise InputError("--dtype", dtype, "fp32 beside --options", "Types are options: bf16, autocast_bf16, ...")


def requested(kind: str, cases: list[Any], rounds: int) -> dict[str, Any]:
    """The request of a run file. A run continues with other batch sizes, trust or database, so those are left out."""
    about = {name: value for name, value in cases[0].to_dict().items() if name not in ("batch", "db", "trust")}
    return {"command": kind, **about, "rounds": rounds}


def _frameworks(
    cases: list[Any], names: Sequence[str], path: Path, request: dict[str, Any], limits: Any, again: bool
) -> Run:
    from convoy.compare.comparison import compare as run_comparison
    from convoy.compare.frameworks import find

    entries = [find(word) for word in names]
    if not entries:
        raise InputError("--frameworks", "", f"names among {given.ALL}")
    _check_model(cases)
    # The frameworks are no part of the request: a run goes on with others, and those that are there stay.
    return run_comparison(cases, entries, path, request=request, limits=limits, again=again, observer=_observe)


def _options(cases: list[Any], words: str, path: Path, request: dict[str, Any], limits: Any, again: bool) -> Run:
    from convoy.compare.options.ablation import search_options

    _check_model(cases)
    return search_options(cases, words, path, request=request, limits=limits, again=again, observer=_observe)


def _own_batch(case: Any) -> int:
    """The batch where none is asked for: an exported program's own, else 1."""
    from convoy.zoo import example_batch
    from convoy.zoo.model_names import is_exported

    return (is_exported(case.model) and example_batch(_model(case))) or 1


def _model(case: Any) -> nn.Module:
    """The model in fp32, on the CPU: exact results are computed from such weights, and rounded for other types."""
    return values.load_fp32(case.model, case.weights or None, "cpu", trust=case.trust)


def _check_model(cases: Sequence[Any]) -> None:
    """Make the model once: its errors are the user's and no framework's, and leave no run file."""
    from convoy.zoo.model_names import is_exported

    module = _model(cases[0])
    for case in cases if is_exported(cases[0].model) else ():  # which may take one shape alone
        args = inputs.example(module, case.model, None, case.batch, case.size or None, "fp32", "cpu")
        inputs.check_shape(module, args)


def _observe(message: str, done: int, total: int) -> None:
    tell(message + (f" ({done}/{total})" if total else ""))


def _show(found: Run, path: Path, report: Path | None) -> None:
    from convoy.compare.runs.run_page import sheet_of
    from convoy.report.sheet import print_sheet, write_sheet

    sheet = sheet_of([found])
    print_sheet(sheet)
    if report is not None:
        write_sheet(sheet, report)
        say(f"report:    {report}")
    say(f"run:       {path}")


def _threads(given: int | None) -> int:
    if given is None:
        import torch

        return torch.get_num_threads()
    if given < 1:
        raise InputError("--threads", given, "an integer of at least 1")
    return given
