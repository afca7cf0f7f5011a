"""The command line, one file a command. `main` is the entry point; it imports the rest after Ctrl-C has a handler."""

from __future__ import annotations

import sys

from convoy.cli import interrupt


def main() -> None:
    """The command line within a process that goes on: ends by SystemExit, and puts SIGINT's handler back."""
    restore = interrupt.install()
    try:
        code = _run()
    finally:
        restore()
    sys.exit(code)


def entry() -> None:
    """The entry point of the process: `main` with SIGINT handled till Python has ended."""
    interrupt.install()
    code = _run()
    interrupt.ignore()
    sys.exit(code)


def _run() -> int:
    """One clear line for an error that a user can mend, exit code 2; 1 for an internal one; 130 for Ctrl-C."""
    try:
        from convoy.cli.app import run

        code = run()
    except KeyboardInterrupt:
        code = interrupt.EXIT_CODE
    if interrupt.was_interrupted() or code == interrupt.EXIT_CODE:
        interrupt.tell()
        return interrupt.EXIT_CODE
    return code
