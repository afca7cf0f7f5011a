"""Libraries of several packages in one process: each has its own functions, the same code is loaded once."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.engines.compilers.host_compiler import compiler, compiler_support
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource
from convoy.errors import PackageError
from convoy.package.kernels import load_library, needs_here, why_not_code


@pytest.fixture
def codes(tmp_path: Path) -> list[memoryview]:
    """Libraries whose function `number` gives 0, 1, 2."""
    if not compiler_support():
        pytest.skip("needs a C compiler")
    found: list[memoryview] = []
    for index in range(3):
        source, made = tmp_path / f"{index}.c", tmp_path / f"{index}.so"
        source.write_text(f"int number(void) {{ return {index}; }}\n")
        subprocess.run([compiler(), "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        found.append(memoryview(made.read_bytes()))
    return found


def test_each_library_has_its_own_functions(codes: list[memoryview]) -> None:
    libraries = [load_library(code) for code in codes]
    assert [library.number() for library in libraries] == [0, 1, 2]
    assert [load_library(code) for code in codes] == libraries
    with pytest.raises(PackageError, match="loader accepts"):
        load_library(memoryview(b"no library"))


def test_a_kernel_may_need_more_of_a_processor_than_its_level() -> None:
    plain = KernelSource((PARALLEL_H,), (), "test", "convoy_test")
    tiles = replace(plain, cpu_flags=("amx_tile", "no_such_feature"))
    assert set(needs_here([plain, tiles]).flags) - set(needs_here([plain]).flags) >= {"no_such_feature"}
    assert "lacks" in why_not_code(needs_here([tiles]))
    assert "no_such_feature" in why_not_code(needs_here([tiles]))
    assert why_not_code(needs_here([plain])) == ""
    assert needs_here([]).flags == ()
