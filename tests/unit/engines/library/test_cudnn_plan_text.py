"""The reader of the frontend's UBJSON finds a plan's text, and refuses plans that need the frontend at each run."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from convoy.engines.library.cudnn.plan_text import plan_text, read_ubjson
from convoy.errors import CompileError


def ubjson(value: object) -> bytes:
    """A value as the frontend's JSON library writes it: each integer in the shortest form."""
    if value is None:
        return b"Z"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        for marker, form, least, most in (
            (b"i", ">b", -128, 127),
            (b"U", ">B", 0, 255),
            (b"I", ">h", -(2**15), 2**15 - 1),
        ):
            if least <= value <= most:
                return marker + struct.pack(form, value)
        return b"l" + struct.pack(">i", value) if abs(value) < 2**31 else b"L" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"D" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"S" + _key(value)
    if isinstance(value, list):
        return b"[" + b"".join(map(ubjson, value)) + b"]"
    assert isinstance(value, dict)
    return b"{" + b"".join(_key(name) + ubjson(one) for name, one in value.items()) + b"}"


def _key(text: str) -> bytes:
    return ubjson(len(text.encode())) + text.encode()


class FakeGraph:
    def __init__(self, data: dict[str, Any], cut: int = 0) -> None:
        raw = ubjson(data)
        self.raw = raw[: len(raw) - cut]

    def serialize(self) -> list[int]:
        return list(self.raw)


WHOLE = {
    "json_version": "1.0",
    "tensors": [{"dim": [1, 64, 300, 70_000, 2**40], "value": 0.5, "virtual": False, "name": None}],
    "cudnn_backend_data": '{"engine": "größer"}' * 40,
    "variant_pack_uids": [101, 102, 103],
    "pass_by_values": {},
    "workspace_modifications": {},
    "variant_pack_replacements": None,
    "fe_workspace_size": 0,
}


def test_values_come_back() -> None:
    assert read_ubjson(ubjson(WHOLE)) == WHOLE
    assert read_ubjson(b"d" + struct.pack(">f", -0.25)) == -0.25
    assert read_ubjson(b"[]") == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"S", b"Si\xff", b"SU\x05abc", b"[i", b"{i\x01ai\x01", b"{Za", b"X", b"TT", b"Sd\0\0\0\0", b"[$i#i\x01\x01"],
)
def test_bytes_that_are_no_value_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"at|behind"):
        read_ubjson(raw)


def test_every_cut_is_refused() -> None:
    whole = ubjson({"a": [1, "b", {"c": 300}]})
    for length in range(len(whole)):
        with pytest.raises(ValueError, match="at"):
            read_ubjson(whole[:length])


def test_the_plan_is_found() -> None:
    assert plan_text(FakeGraph(WHOLE)) == WHOLE["cudnn_backend_data"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pass_by_values", {"7": 1.0}), ("workspace_modifications", {"7": [0, 0, [1.0]]}), ("fe_workspace_size", 16),
        ("variant_pack_replacements", {"7": [1, 2]}), ("aligned_operands", [103]),
    ],
)  # fmt: skip
def test_a_run_that_needs_the_frontend_is_refused(field: str, value: object) -> None:
    with pytest.raises(CompileError, match=f"needs the frontend: {field}"):
        plan_text(FakeGraph({**WHOLE, field: value}))


def test_an_answer_without_a_plan_is_refused() -> None:
    with pytest.raises(CompileError, match="gives no text of a plan"):
        plan_text(FakeGraph({"json_version": "1.0"}))
    with pytest.raises(CompileError, match="cannot be read"):
        plan_text(FakeGraph(WHOLE, cut=3))
