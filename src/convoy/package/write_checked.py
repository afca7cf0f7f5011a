"""Writes a package, runs it, and compares its results with those of the programs, before it gets its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from convoy.errors import CompileError, InputError
from convoy.package.cuda.recorded_net import RecordedNet
from convoy.package.opening import open as open_package
from convoy.package.same_results import compare_results
from convoy.package.write import BoundNet, ModelInfo, write_package
from convoy.program import BoundPlan, Program
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.program.native_chains import ChainedProgram
from convoy.user_warning import warn_user
from convoy.whole_file import whole_file


def write_checked(path: Path, nets: Sequence[BoundNet], info: ModelInfo, *, portable: bool) -> None:
    """Write a package under another name, check it, and rename it.

    Args:
        path: the file.
        nets: a program for each set of input shapes.
        info: what is said of the model.
        portable: for a CPU: refuse steps that the C runtime cannot run.

    Raises:
        InputError: the path cannot be written, or a step cannot be packaged.
        CompileError: the package gives other results than the programs.
    """
    device = torch.device(info.target.device)
    try:
        with whole_file(path, "output") as temporary:
            try:
                _write_and_check(temporary, nets, info, device, portable=portable)
            except InputError as error:
                if error.value != str(temporary):
                    raise
                raise InputError(error.argument, str(path), error.expected, error.todo) from error
    except OSError as error:
        raise InputError("output", str(path), "a path that can be written", str(error)) from error


_GPU_RUNS: Final = 20
"""On a GPU, launches that overlap where they must not show in some runs only."""

_OTHER_RESULTS: Final = {
    "cpu": "the packaged code gives other {} than the program; set CONVOY_MAX_CPU_ISA to an instruction set of this CPU, and "
    "report this as a bug",
    "cuda": "the recorded launches give other {} than the program; report this as a bug",
}


def _write_and_check(
    path: Path, nets: Sequence[BoundNet], info: ModelInfo, device: torch.device, *, portable: bool
) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        _write_cuda(path, nets, info, device)
    else:
        write_package(path, nets, info, portable=portable)
    opened = open_package(path, trust=True)
    for index, (net, program) in enumerate(zip(nets, opened.programs, strict=True)):
        _check(net.bound, program, opened.example_inputs(index), device)


def _write_cuda(path: Path, nets: Sequence[BoundNet], info: ModelInfo, device: torch.device) -> None:
    from convoy.package.cuda.cuda_contents import CudaContents, write_cuda_package
    from convoy.package.cuda.record import record

    contents = CudaContents()
    programs = [(net, record(net.captured, net.bound, device, contents)) for net in nets]
    write_cuda_package(path, programs, contents, info)


def _check(
    bound: BoundPlan, program: Program | RecordedNet, inputs: tuple[torch.Tensor, ...], device: torch.device
) -> None:
    """Raise CompileError unless a packaged program gives the results of the plan's own executables."""
    own = CudaGraphProgram(bound, device) if device.type == "cuda" else ChainedProgram(bound, device)
    assert program.runnable is not None
    found = compare_results(own, program.runnable, inputs, runs=_GPU_RUNS if device.type == "cuda" else 1)
    if not found.agree:
        wrong = f"results (relative error {found.error:.2g})" if found.tolerance else "bits"
        raise CompileError("package", _OTHER_RESULTS[device.type].format(wrong))
    if found.tolerance:
        warn_user(
            "the exported program's own bits differ from run to run, so the package was compared with it within a relative "
            f"error of {found.tolerance:.2g}, not bit by bit; Settings(deterministic=True) refuses such kernels"
        )
