"""Writes a package, runs it, and compares the bits that it gives with those of the programs, before it gets its name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from convoy.errors import CompileError, InputError
from convoy.package.cuda.recorded_net import RecordedNet
from convoy.package.opening import open as open_package
from convoy.package.tensor_file import tensor_bytes
from convoy.package.write import BoundNet, ModelInfo, write_package
from convoy.pipeline.check.rounding import fixed_seed
from convoy.program import BoundPlan, Program
from convoy.program.cuda_graph import CudaGraphProgram
from convoy.program.native_chains import ChainedProgram
from convoy.program.runnable_program import Runnable


def write_checked(path: Path, nets: Sequence[BoundNet], info: ModelInfo, *, portable: bool) -> None:
    """Write a package under another name, check it, and rename it.

    Args:
        path: the file.
        nets: a program for each set of input shapes.
        info: what is said of the model.
        portable: for a CPU: refuse steps that the C runtime cannot run.

    Raises:
        InputError: the path cannot be written, or a step cannot be packaged.
        CompileError: the package gives other bits than the programs.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.new")
    device = torch.device(info.target.device)
    try:
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            _write_cuda(temporary, nets, info, device)
        else:
            write_package(temporary, nets, info, portable=portable)
        opened = open_package(temporary, trust=True)
        for index, (net, program) in enumerate(zip(nets, opened.programs, strict=True)):
            if not _gives_same_bits(net.bound, program, opened.example_inputs(index), device):
                raise CompileError("package", _OTHER_BITS[device.type])
        temporary.replace(path)
    except InputError as error:
        if error.value != str(temporary):
            raise
        raise InputError(error.argument, str(path), error.expected, error.todo) from error
    except OSError as error:
        raise InputError("output", str(path), "a path that can be written", str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


_GPU_RUNS: Final = 20

_OTHER_BITS: Final = {
    "cpu": "the packaged code gives other bits than the program; set CONVOY_MAX_CPU_ISA to an instruction set of this CPU, and "
    "report this as a bug",
    "cuda": "the recorded launches give other bits than the program; report this as a bug",
}


def _write_cuda(path: Path, nets: Sequence[BoundNet], info: ModelInfo, device: torch.device) -> None:
    from convoy.package.cuda.cuda_contents import CudaContents, write_cuda_package
    from convoy.package.cuda.record import record

    contents = CudaContents()
    programs = [(net, record(net.captured, net.bound, device, contents)) for net in nets]
    write_cuda_package(path, programs, contents, info)


def _gives_same_bits(
    bound: BoundPlan, program: Program | RecordedNet, inputs: tuple[torch.Tensor, ...], device: torch.device
) -> bool:
    """Whether a packaged program gives the bits of the plan's own executables; true where those differ from run to run."""
    own = CudaGraphProgram(bound, device) if device.type == "cuda" else ChainedProgram(bound, device)
    assert program.runnable is not None
    with torch.no_grad():
        first, second = _bits(own, inputs), _bits(own, inputs)
        # Launches of a GPU that overlap where they must not show in some runs only.
        runs = _GPU_RUNS if device.type == "cuda" else 1
        return first != second or all(first == _bits(program.runnable, inputs) for _ in range(runs))


def _bits(run: Runnable, inputs: tuple[torch.Tensor, ...]) -> list[bytes]:
    with fixed_seed():
        return [bytes(tensor_bytes(tensor.cpu())) for tensor in run(inputs)]
