"""For tests of kernels in C: a source with a `main` under the compiler's own sanitizers, and its settings. Not a test module."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from convoy.engines.compilers import host_compiler

FLAGS = ("-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run(folder: Path, source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """The program's output; the test is skipped where the compiler has no sanitizers, and fails where it refuses the source."""
    built = _compile(folder / "kernel", source, *flags)
    if built.returncode:
        if _compile(folder / "nothing", "int main(void) { return 0; }").returncode:
            pytest.skip("the compiler has no sanitizers")
        pytest.fail(built.stderr)
    return subprocess.run([folder / "kernel"], capture_output=True, text=True, check=False, timeout=120)


def sizes_of(source: Path) -> list[str]:
    """The fields of a kernel's `Sizes`, in order."""
    struct = re.search(r"typedef struct \{([^}]*)\} Sizes;", source.read_text(encoding="utf-8"))
    assert struct is not None
    return re.findall(r"(?:int64_t|,) (\w+)", struct[1])


def _compile(program: Path, source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    text = program.with_suffix(".c")
    text.write_text(source, encoding="utf-8")
    command = [host_compiler.compiler(), *FLAGS, *flags, str(text), "-o", str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
