"""convoy runtime: write the C runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.output.lines import say


def runtime(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder for convoy.h, the sources and libconvoy.so.")
    ],
) -> None:
    """Write and compile libconvoy, the C runtime of portable packages and of those for GPUs, into FOLDER."""
    from convoy.package.runtime_library import write_runtime

    made = write_runtime(folder)
    say(f"{made}: link with -lconvoy; the header is {folder / 'convoy.h'}")
