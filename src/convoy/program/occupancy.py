"""Occupancy of each step of a program: its kernels' grids, registers and shared memory, from PyTorch's profiler.

Libraries and compilers choose their own kernels, so the launches are profiled: every step runs alone between two profiler
marks, and the kernels between the marks are those of the step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from convoy.program.eager import EagerProgram
from convoy.program.step_timeline import with_step_marks
from convoy.schedule import DeviceResources, KernelResources, share_of
from convoy.typed_torch import gpu_properties

MARK: Final = "convoy.step."
"""Prefix of a step's mark; the step's index follows."""


def device_shares(program: EagerProgram, inputs: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """The share of the GPU that each step's kernels occupy, 0..1; empty if the profiler sees no kernels.

    Args:
        program: a program on one stream.
        inputs: tensors of the plan's specs.
    """
    count = len(program.bound.steps)
    found = kernels_of_steps(_events(program, inputs), count)
    if not any(found):
        return ()
    device = capacity(program.device)
    return tuple(share_of(kernels, device) for kernels in found)


def capacity(device: torch.device) -> DeviceResources:
    """Resources of a GPU. Values that the driver does not report are those of compute capability 9.0."""
    properties = gpu_properties(device)
    book = DeviceResources(sms=properties.multi_processor_count)
    return DeviceResources(
        sms=book.sms,
        threads=getattr(properties, "max_threads_per_multi_processor", book.threads),
        registers=getattr(properties, "regs_per_multiprocessor", book.registers),
        shared_bytes=getattr(properties, "shared_memory_per_multiprocessor", book.shared_bytes),
    )


def kernels_of_steps(events: Sequence[Mapping[str, Any]], count: int) -> list[list[KernelResources]]:
    """The kernels that ran between each step's marks, in a trace of PyTorch's profiler.

    Args:
        events: `traceEvents` of a Chrome trace.
        count: number of steps.
    """
    marks: list[tuple[float, float, int]] = []
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "user_annotation" and name.startswith(MARK):
            marks.append((event["ts"], event["ts"] + event["dur"], int(name.removeprefix(MARK))))
    found: list[list[KernelResources]] = [[] for _ in range(count)]
    for event in events:
        if event.get("cat") != "kernel":
            continue
        middle = event["ts"] + event["dur"] / 2
        step = next((index for begin, end, index in marks if begin <= middle <= end), None)
        if step is not None:
            found[step].append(_kernel(event))
    return found


def _kernel(event: Mapping[str, Any]) -> KernelResources:
    said = event.get("args", {})
    grid, block = said.get("grid", [1, 1, 1]), said.get("block", [1, 1, 1])
    return KernelResources(
        blocks=grid[0] * grid[1] * grid[2],
        threads=block[0] * block[1] * block[2],
        registers=int(said.get("registers per thread", 0)),
        shared_bytes=int(said.get("shared memory", 0)),
        time_us=float(event["dur"]),
    )


def _events(program: EagerProgram, inputs: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Events of one run under the profiler, each step alone; empty if profiling is not permitted."""
    marks: dict[int, record_function] = {}

    def mark(step: int, side: int) -> None:
        if side == 0:
            marks[step] = record_function(f"{MARK}{step}")
            marks[step].__enter__()
        else:
            torch.cuda.synchronize(program.device)
            marks.pop(step).__exit__(None, None, None)

    marked = with_step_marks(program, mark)
    with torch.no_grad():
        program(inputs)
        torch.cuda.synchronize(program.device)
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                marked(inputs)
        except RuntimeError:  # no permission to profile, or another profiler is active
            return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]
