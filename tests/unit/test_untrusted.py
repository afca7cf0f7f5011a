"""Files from elsewhere: regular files alone, bounded; JSON of finite numbers, 64-bit integers and few levels."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import socket
import tracemalloc
from pathlib import Path

import pytest

from convoy.errors import InputError, PlanError
from convoy.untrusted import escape_controls, gunzip, open_file, parse_json, read_bytes, read_json, read_text


def test_regular_files_are_read_and_all_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"four")
    assert read_bytes(file, 4, "plan") == b"four"
    with open_file(file, 4, "plan") as opened:
        assert opened.seek(0, io.SEEK_END) == 4
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for name, expected in (("pipe", "a regular file"), ("socket", "a regular file"), ("", "a regular file")):
            with pytest.raises(InputError, match=expected):
                read_bytes(tmp_path / name, 4, "plan")
    with pytest.raises(InputError, match="a regular file"):
        read_bytes("/dev/zero", 4, "plan")
    with pytest.raises(InputError, match="at most 3 bytes"):
        read_bytes(file, 3, "plan")
    with pytest.raises(PlanError, match="can be read"):
        read_bytes(tmp_path / "absent", 3, "plan", PlanError)
    with pytest.raises(InputError, match="can be read"):
        read_bytes("a\0b", 3, "plan")


def test_a_file_whose_size_says_nothing_is_cut_off(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at most 3 bytes"):
        read_bytes("/proc/self/status", 3, "plan")
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(InputError, match="UTF-8"):
        read_text(tmp_path / "file", 3, "plan")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nan",
        "NaN",
        "[-Infinity]",
        "1e999",
        "9" * 400,
        "9" * 5000,
        "-" + "9" * 20,
        '{"a": 1, "b": 2, "a": 3}',
        '"\\ud800"',
        '{"\\udc00": 1}',
        '[["\\ud83d", "\\ude00"]]',
        "[" * 65 + "]" * 65,
        "[" * 990 + "]" * 990,
        "[" * 100_000,
        '{"a":' * 65 + "1" + "}" * 65,
        "[" + "1," * 1001 + "1]",
        b"\xff",
        b'"\xed\xa0\x80"',
    ],
)
def test_json_that_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlanError, match=r"^text"):
        parse_json(text, "text", PlanError, most_values=1000)


def test_json_that_is_taken(tmp_path: Path) -> None:
    deep = "[" * 64 + "]" * 64
    for text in (deep, "1.5e300", "-9223372036854775808", "18446744073709551615", '"\\ud83d\\ude00"', "[]"):
        assert parse_json(text, "text") == json.loads(text)
    (tmp_path / "a").write_text('{"a": [1, null, true]}')
    assert read_json(tmp_path / "a", 100, "plan") == {"a": [1, None, True]}


def test_mutated_json_is_read_as_the_library_reads_it_or_refused() -> None:
    rng = random.Random(3)
    seed = json.dumps({"a": [1, -2.5, "t\\u00e9xt", None, {"b": [[], {}]}], "c": "é\ud83d\ude00", "d": 10**18})
    for _ in range(500):
        text = list(seed)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 2)] = rng.choice(['"', "\\", "[", "]", "{", ":", ",", "e", "9", "d8", "\x00"])
        given = "".join(text)
        try:
            found = parse_json(given, "text")
        except InputError:
            continue
        assert found == json.loads(given)


def test_gzip_is_cut_off_and_its_damage_is_an_input_error() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="at most 1 MiB decompressed"):
            gunzip(io.BytesIO(bomb), 1 << 20, "rows").read()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    whole = gzip.compress(b"text" * 100)
    assert gunzip(io.BytesIO(whole), 400, "rows").read() == b"text" * 100
    assert gunzip(io.BytesIO(whole * 3), 1200, "rows").read() == b"text" * 300
    with pytest.raises(InputError, match="1001 parts"):
        gunzip(io.BytesIO(gzip.compress(b"") * 5000), 10, "rows").read()
    for end in range(len(whole)):
        with pytest.raises(InputError, match="a whole gzip file"):
            gunzip(io.BytesIO(whole[:end]), 400, "rows").read()
    rng = random.Random(5)
    for _ in range(200):
        broken = bytearray(whole)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        try:
            gunzip(io.BytesIO(broken[: rng.randint(1, 60)]), 400, "rows").read()
        except InputError:
            continue


def test_controls_are_escaped_and_words_of_any_language_are_not() -> None:
    assert escape_controls("Größe 大小 µ\n\tb") == "Größe 大小 µ\n\tb"
    assert escape_controls("a\n\tb", one_line=True) == r"a\n\tb"
    given = "\x1b[31m\x9b2J\u202eabc\u2066\x07\r\x00\x7f\udc80\u200f\U000e0001"
    shown = escape_controls(given)
    assert shown == (r"\x1b[31m\x9b2J\u202eabc\u2066\x07\x0d\x00\x7f\udc80\u200f\U000e0001")
    assert all(character.isprintable() for character in shown)
