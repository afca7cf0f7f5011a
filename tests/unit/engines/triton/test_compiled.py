"""The log of ptxas decides whether a kernel is kept: planted logs, so that neither a GPU nor the assembler is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, assembler_log
from convoy.errors import CompileError
from convoy.target import Target

triton = pytest.importorskip("triton")

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
ENTRY = "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
SERIALISED = (
    "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient "
    "register resources for the wgmma pipeline crossing function boundary in the function 'kernel'\n"
)


def spills(count: int) -> str:
    return ENTRY + f"    {count} bytes stack frame, {count} bytes spill stores, {count} bytes spill loads\n"


@triton.jit
def kernel(x, count):
    pass


class Planted:
    """Triton's cache of one kernel: the log that is kept beside the binary."""

    def __init__(self, folder: Path, log: str) -> None:
        self.path = folder / "ptxas.log"
        self.path.write_text(log)

    def get_file(self, name: str) -> str | None:
        return str(self.path) if name == self.path.name else None


@pytest.fixture
def build_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Builds a kernel of which the assembler has said a text."""

    def build(log: str, *, tensor_cores: bool) -> TritonKernel:
        made = SimpleNamespace(hash="kernel", metadata=SimpleNamespace(shared=0, tensordesc_meta=None))
        monkeypatch.setattr(triton, "compile", lambda source, *, target, options: made)
        monkeypatch.setattr("triton.runtime.cache.get_cache_manager", lambda key: Planted(tmp_path, log))
        signature = {"x": "*fp16", "count": "i32"}
        return TritonKernel(KernelBuild("triton.stem", kernel, signature, {}, tensor_cores=tensor_cores), TARGET)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return build


@pytest.mark.parametrize(("tensor_cores", "count"), [(True, 4), (True, 256), (True, 1040), (False, 260), (False, 1040)])
def test_a_kernel_that_spills_is_refused_with_its_log(build_with, tensor_cores: bool, count: int):
    with pytest.raises(CompileError, match=rf"the kernel spills {count} bytes of registers") as caught:
        build_with(spills(count), tensor_cores=tensor_cores)
    assert caught.value.engine == "triton.stem"
    assert caught.value.log == spills(count)


@pytest.mark.parametrize(("tensor_cores", "count"), [(True, 0), (False, 0), (False, 4), (False, 256)])
def test_few_spills_are_no_matter_where_loads_bind(build_with, tensor_cores: bool, count: int):
    built = build_with(spills(count), tensor_cores=tensor_cores)
    assert assembler_log(built.compiled) == spills(count)


def test_serialised_products_are_refused_with_their_log(build_with):
    with pytest.raises(CompileError, match=r"serialised the wgmma instructions \(C7515\)") as caught:
        build_with(SERIALISED + spills(0), tensor_cores=True)
    assert caught.value.log == SERIALISED + spills(0)


def test_a_kernel_without_products_cannot_have_serialised_ones(build_with):
    assert build_with(SERIALISED + spills(0), tensor_cores=False).compiled is not None
