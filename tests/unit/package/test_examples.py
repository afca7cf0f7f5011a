"""The examples in C and C++: built with the system's compilers, run without Python."""

from __future__ import annotations

from pathlib import Path

import torch

import convoy
from tests.unit.package.example_programs import EXAMPLES, built, said
from tests.unit.package.libconvoy import Libconvoy


def test_the_example_in_c(libconvoy: Libconvoy, portable: Path, tmp_path: Path) -> None:
    program = built(EXAMPLES / "classify.c", "cc", ("-std=c11",), libconvoy, tmp_path)
    x = (torch.arange(2 * 3 * 17 * 15) % 1000 / 1000).view(2, 3, 17, 15)
    y = convoy.open(portable, trust=True)(x)
    code, text = said(program, portable)
    assert code == 0, text
    assert text == f"head: largest value {y.max():.9g} at {int(y.argmax())}\n"
    values = tmp_path / "values.f32"
    values.write_bytes(x.numpy().tobytes())
    assert said(program, portable, values) == (0, text)
    values.write_bytes(b"short")
    assert said(program, portable, values)[0] == 1
    code, text = said(program, tmp_path / "missing.convoy")
    assert code == 1
    assert "missing.convoy: No such file" in text


def test_the_example_in_cpp(libconvoy: Libconvoy, portable: Path, tmp_path: Path) -> None:
    program = built(EXAMPLES / "throughput.cpp", "c++", ("-std=c++17",), libconvoy, tmp_path)
    code, text = said(program, portable, 3, 20)
    assert code == 0, text
    assert "3 threads, 60 calls" in text
    assert said(program, tmp_path) == (1, f"{tmp_path}: not a regular file\n")
