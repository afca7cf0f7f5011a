"""Programs: a plan with its executables, launched one by one on a CPU or captured as one CUDA graph on a GPU."""

from __future__ import annotations

from convoy.program.bind import PackedSteps, bind
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.program.eager import EagerProgram
from convoy.program.optimized_module import OptimizedModule
from convoy.program.runnable_program import Program, build_program

__all__ = [
    "BoundPlan",
    "BoundStep",
    "CudaGraphProgram",
    "EagerProgram",
    "OptimizedModule",
    "PackedSteps",
    "Program",
    "bind",
    "build_program",
]
