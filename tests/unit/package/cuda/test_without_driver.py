"""libconvoy on a machine without a CUDA driver: a package for a GPU is refused in words, and CPU packages do not care."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from convoy.engines.compilers.host_compiler import compiler_support
from convoy.package.runtime_library import write_runtime
from tests.unit.package.cuda.recorded import write
from tests.unit.package.libconvoy import Libconvoy

NO_GPU = 9


@pytest.mark.skipif(not compiler_support(), reason="needs a C compiler")
def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    probe = ctypes.CDLL(None)
    probe.dlopen.restype = ctypes.c_void_p
    if probe.dlopen(b"libcuda.so.1", 2):
        pytest.skip("this machine has a CUDA driver")
    library = Libconvoy(write_runtime(tmp_path / "runtime"))
    assert library.status(write(tmp_path / "net.convoy")) == NO_GPU
    assert "there is no CUDA driver" in library.error()
