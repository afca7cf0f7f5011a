"""Command lines of benchmarks: a wrong argument ends the script with one line, as `convoy`'s commands do."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from convoy.errors import ConvoyError
from convoy.setting_values import is_count


def run_main(main: Callable[[], None]) -> None:
    """Run a script's `main`; an error of Convoy's, such as a file that is not there, becomes the script's last line."""
    try:
        main()
    except ConvoyError as error:
        raise SystemExit(str(error)) from None


def counts(text: str) -> list[int]:
    """Argparse's type of batch sizes and numbers of GPUs: integers of at least 1, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(map(is_count, words)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected integers of at least 1, separated by commas: 1,32")
    return [int(word) for word in words]
