"""The files that commands write: refused before any work is done for them, and the page of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from convoy.cli.output.lines import say
from convoy.errors import InputError
from convoy.whole_file import replaceable_file

if TYPE_CHECKING:
    from convoy.compare import Run


def write_report(run: Run, path: Path | None) -> None:
    """The page of a run, where one is wanted."""
    if path is None:
        return
    from convoy.compare.runs.run_page import sheet_of
    from convoy.report.sheet import write_sheet

    write_sheet(sheet_of([run]), path)
    say(f"report: {path}")


def file_word(model: str) -> str:
    """A model's name as part of a file's name."""
    return "".join(ch if ch.isalnum() or ch in "_-" else "-" for ch in Path(model).name) or "model"


def check_output(path: Path | None, argument: str) -> None:
    """Refuse an output path before any work is done for it."""
    if path is None:
        return
    folder = replaceable_file(path, argument).absolute().parent
    if not os.access(folder, os.W_OK):
        raise InputError(argument, str(path), "a file in a folder that may be written to")


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """`check_output` for each option; and no two may name one file, for the second would replace the first."""
    seen: dict[Path, str] = {}
    for argument, path in outputs.items():
        check_output(path, argument)
        if path is not None:
            other = seen.setdefault(path.resolve(), argument)
            if other != argument:
                raise InputError(argument, str(path), f"another file than {other} names")


def check_overwrites(outputs: Mapping[str, object], inputs: Mapping[str, object]) -> None:
    """Refuse an output that would replace a file that the same command reads, such as the model's source.

    Args:
        outputs: values of the options that name outputs, by the options' names; what is no path does not count.
        inputs: values of all other options and arguments. Weights may be replaced by the weights that were trained from them.
    """
    read = {path: name for name, value in inputs.items() if name != "--weights" for path in _paths_in(value)}
    for name, value in outputs.items():
        other = read.get(value.resolve()) if isinstance(value, Path) else None
        if other is not None:
            raise InputError(name, str(value), f"another file than {other} names")


def _paths_in(value: object) -> Iterator[Path]:
    """The paths that an option's value names: paths, words that are files, and the file of `FILE.py:FACTORY`."""
    if isinstance(value, Path):
        yield value.resolve()
    elif isinstance(value, str):
        for word in (value, value.rpartition(":")[0]):
            if os.path.isfile(word):  # noqa: PTH113 - `Path.is_file` raises OSError for a word that is too long for a name
                yield Path(word).resolve()
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[object]", value):
            yield from _paths_in(item)
