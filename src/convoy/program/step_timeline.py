"""Timeline of a bound plan: when each launch starts and ends, by the clock of the device or of the host."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable
from convoy.program.cuda.recording import distinct_stream, recording
from convoy.program.eager import EagerProgram
from convoy.schedule.timeline import Span, spans

ROUNDS: Final = 5
"""Runs of which the median is taken."""

WARM_RUNS: Final = 2
"""Runs before them that do not count."""

Marks = list[tuple[float, float]]
"""Start and end of each launch, microseconds."""


class _MarkedExecutable(Executable):
    """An executable that calls a function before and after each launch."""

    def __init__(self, inner: Executable, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._inner, self._begin, self._end = inner, begin, end
        self.workspace_bytes = inner.workspace_bytes
        self.allocates_results = inner.allocates_results

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        self._begin()
        self._inner.launch(buffers, workspace)
        self._end()


def measure_timeline(program: EagerProgram, inputs: Sequence[torch.Tensor], rounds: int = ROUNDS) -> list[Span]:
    """The timeline of a program: start and duration of each step, medians over several runs.

    On a GPU the launches and marks are captured as one CUDA graph, if the program itself could be.

    Args:
        program: the program; it is not changed.
        inputs: tensors of the plan's specs.
        rounds: runs that count; two more warm up, and with a single one none does.
    """
    found = (_on_gpu if program.device.type == "cuda" else _on_cpu)(
        program, inputs, rounds, WARM_RUNS if rounds > 1 else 0
    )
    starts = [statistics.median(marks[i][0] for marks in found) for i in range(len(program.bound.steps))]
    lengths = [statistics.median(marks[i][1] - marks[i][0] for marks in found) for i in range(len(starts))]
    return spans([bound.step for bound in program.bound.steps], starts, lengths)


def with_step_marks(program: EagerProgram, mark: Callable[[int, int], None]) -> EagerProgram:
    """The same program with marks: `mark(step, 0)` is called before and `mark(step, 1)` after each launch."""
    steps = [
        dataclasses.replace(
            bound,
            executable=_MarkedExecutable(bound.executable, lambda i=index: mark(i, 0), lambda i=index: mark(i, 1)),
        )
        for index, bound in enumerate(program.bound.steps)
    ]
    return type(program)(dataclasses.replace(program.bound, steps=steps), program.device)


def _on_cpu(program: EagerProgram, inputs: Sequence[torch.Tensor], rounds: int, warm: int) -> list[Marks]:
    found: list[Marks] = []
    for _ in range(rounds + warm):
        times: list[list[float]] = [[0.0, 0.0] for _ in program.bound.steps]

        def mark(step: int, side: int, times: list[list[float]] = times) -> None:
            times[step][side] = time.perf_counter() * 1e6

        run = with_step_marks(program, mark)
        with torch.no_grad():
            run(inputs)
        first = min((begin for begin, _ in times), default=0.0)
        found.append([(begin - first, end - first) for begin, end in times])
    return found[warm:]


def _on_gpu(program: EagerProgram, inputs: Sequence[torch.Tensor], rounds: int, warm: int) -> list[Marks]:
    count = len(program.bound.steps)
    events = [[torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)] for _ in range(count)]
    marked = with_step_marks(program, lambda step, side: events[step][side].record())
    stream = distinct_stream(program.device, marked.streams)
    stream.wait_stream(torch.cuda.current_stream(program.device))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.device(program.device):
        with torch.cuda.stream(stream):
            program(inputs)
        stream.synchronize()
        if program.recordable:
            with recording(graph, stream):
                marked(inputs)
        found: list[Marks] = []
        for _ in range(rounds + warm):
            if program.recordable:
                graph.replay()
            else:
                marked(inputs)
            torch.cuda.synchronize(program.device)
            origin = events[0][0]
            found.append([(origin.elapsed_time(a) * 1e3, origin.elapsed_time(b) * 1e3) for a, b in events])
    return found[warm:]
