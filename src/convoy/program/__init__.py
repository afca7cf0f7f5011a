"""What runs: a plan with its executables, eagerly on a CPU or as one captured CUDA graph on a GPU."""

from __future__ import annotations

from convoy.program.bind import BoundStep, PackedSteps, bind
from convoy.program.cuda_graph import CudaGraphProgram
from convoy.program.eager import EagerProgram
from convoy.program.module import OptimizedModule, Program, build_program

__all__ = [
    "BoundStep",
    "CudaGraphProgram",
    "EagerProgram",
    "OptimizedModule",
    "PackedSteps",
    "Program",
    "bind",
    "build_program",
]
