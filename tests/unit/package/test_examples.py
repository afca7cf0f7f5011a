"""The examples in C and C++: built with the system's compilers, run without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import convoy
from tests.unit.package.libconvoy import Libconvoy

EXAMPLES = Path(__file__).parents[3] / "examples" / "libconvoy"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def built(source: Path, compiler: str, flags: tuple[str, ...], libconvoy: Libconvoy, folder: Path) -> Path:
    """The program of an example."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    program, library = folder / source.stem, libconvoy.path.parent
    links = (f"-I{library}", f"-L{library}", "-lconvoy", f"-Wl,-rpath,{library}", "-pthread")
    done = subprocess.run(
        [compiler, *flags, *WARNINGS, str(source), *links, "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return program


def said(*command: object) -> tuple[int, str]:
    """Exit code and output of a program with an empty environment."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env={}, timeout=60)
    return done.returncode, done.stdout + done.stderr


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
