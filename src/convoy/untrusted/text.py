"""Text for terminals and files: no control characters, and nothing that UTF-8 cannot encode."""

from __future__ import annotations

import re
from typing import Final

_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e\n\t]")


def escape_controls(text: str, *, one_line: bool = False) -> str:
    r"""Text for a terminal: control characters, bidirectional overrides and lone surrogates as `\x1b`, `\u202e`, `\udc80`.

    Args:
        text: any text.
        one_line: also escape tabs and line feeds; otherwise a text of several lines stays one.
    """
    shown = _UNPRINTABLE.sub(lambda match: _escaped(match[0]), text)
    return shown.replace("\n", "\\n").replace("\t", "\\t") if one_line else shown


def storable(text: str, longest: int) -> str:
    """Text for a file: characters that UTF-8 cannot encode (file names may have them) are replaced, and a long text is cut."""
    clean = text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def size_text(count: int) -> str:
    """A number of bytes, in MiB from 1 MiB on."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"
