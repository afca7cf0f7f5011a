"""`python -m convoy` is the command line."""

from __future__ import annotations

from convoy.cli import entry

if __name__ == "__main__":
    entry()
