"""Reads files of untrusted origin: only regular files, bounded in size, depth, count and numbers.

Every damage is one InputError (or the subclass that the caller names). Nothing here imports torch.
"""

from __future__ import annotations

from convoy.untrusted.files import open_file, read_at_most, read_bytes, read_json, read_text
from convoy.untrusted.gzip_stream import gunzip
from convoy.untrusted.json_text import MAX_DEPTH, MAX_DIGITS, MAX_VALUES, parse_json
from convoy.untrusted.text import escape_controls, storable

__all__ = [
    "MAX_DEPTH",
    "MAX_DIGITS",
    "MAX_VALUES",
    "escape_controls",
    "gunzip",
    "open_file",
    "parse_json",
    "read_at_most",
    "read_bytes",
    "read_json",
    "read_text",
    "storable",
]
