"""Executables of several kernels say which one reads an argument last: held to the pointers that a launch gives its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.manifest import load_engine
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.problem import ConvProblem, Epilogue, Problem
from convoy.target import Target
from tests.unit.engines import gated_1x1_cases, squeeze_excitation_cases

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20, (("triton", "3.6.0"),))
HALF: dict[str, Any] = {
    "x_dtype": "fp16",
    "weight_dtype": "fp16",
    "y_dtype": "fp16",
    "numerics": "half",
    "layout": "nhwc",
}


class Recorder:
    """In the place of a kernel: it remembers the addresses that each launch gets, in the order of all launches."""

    def __init__(self, launches: list[set[int]]) -> None:
        self._launches = launches

    def _keep(self, arguments: Any) -> None:
        given = [getattr(a, "value", None) if not isinstance(a, torch.Tensor) else a.data_ptr() for a in arguments]
        self._launches.append({address for address in given if isinstance(address, int)})

    def launch(self, device: int, blocks: int, threads: int, arguments: Any, **_: Any) -> None:
        """As `Function.launch`."""
        self._keep(arguments)

    def __call__(self, grid: Any, arguments: Any) -> None:
        self._keep(arguments)


def holds(executable: Executable, problem: Problem, launches: list[set[int]]) -> None:
    """Each argument is read by the kernel that is told, and by no later one."""
    data = make_data(problem, 1, "normal")
    args = tuple(t.contiguous(memory_format=torch.channels_last) for t in data.args)
    (exact,) = oracle(problem, data)
    y = torch.empty(exact.shape, dtype=args[0].dtype).contiguous(memory_format=torch.channels_last)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8)
    executable.launch(Buffers(args, [y], executable.pack(data.constants)), workspace)
    assert len(launches) == 2
    assert executable.last_readers is not None
    assert sorted(executable.last_readers) == list(range(len(args)))
    for index, kernel in executable.last_readers.items():
        readers = [place - len(launches) for place, given in enumerate(launches) if args[index].data_ptr() in given]
        assert readers[-1] == kernel


GATES = {
    "cuda.squeeze_excitation": squeeze_excitation_cases.block("residual and relu"),
    "cuda.gated_1x1": gated_1x1_cases.piece("mobilenet"),
}


@pytest.mark.parametrize("name", GATES)
def test_the_second_kernel_of_a_gate_reads_image_and_residual_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[set[int]] = []
    module = "convoy.engines.gates." + name.removeprefix("cuda.")
    monkeypatch.setattr(f"{module}.compile_cubin", lambda *_, **__: (b"", ""))
    monkeypatch.setattr(f"{module}.Function", lambda *_: Recorder(launches))
    engine, problem = load_engine(name), GATES[name]
    holds(engine.build(problem, engine.space(problem, H100)[0], H100), problem, launches)


def test_a_split_reduction_reads_x_in_its_first_kernel_and_the_residual_in_its_second() -> None:
    pytest.importorskip("triton")
    engine = load_engine("triton.implicit_gemm")
    problem = ConvProblem(1, 256, 8, 8, 64, 3, 3, 1, 1, epilogue=Epilogue(bias=True, residual=True), **HALF)
    knobs = next(k for k in engine.space(problem, H100) if engine.workspace_bytes(problem, k))
    executable: Any = engine.build(problem, knobs, H100)
    launches: list[set[int]] = []
    executable.kernel = executable.reduce.kernel = Recorder(launches)
    holds(executable, problem, launches)


def test_a_reduction_in_one_kernel_needs_to_say_nothing() -> None:
    pytest.importorskip("triton")
    engine = load_engine("triton.implicit_gemm")
    problem = ConvProblem(4, 32, 28, 28, 64, 3, 3, 1, 1, **HALF)
    knobs = next(k for k in engine.space(problem, H100) if not engine.workspace_bytes(problem, k))
    assert engine.build(problem, knobs, H100).last_readers is None
