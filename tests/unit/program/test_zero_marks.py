"""Marks of values: linked where a maker writes and a reader takes them, as values with slots of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from convoy.engines.base import Buffers, Executable
from convoy.plan.plan import Step
from convoy.problem import EngineConfig, TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep, ChannelSlice
from convoy.program.eager import EagerProgram
from convoy.program.lifetimes import peak_bytes, with_frees
from convoy.program.zero_marks import with_zero_marks

SPEC = TensorSpec((1, 2, 2, 2), "fp32")
MARKS = TensorSpec((2, 1, 1), "i32")


@dataclass
class Adds(Executable):
    """y = x + 1, and y's largest value as its mark; reads a mark where it is given one."""

    writes: TensorSpec | None = MARKS
    reads: bool = True
    seen: list[int] = field(default_factory=list)

    def marks_written(self) -> TensorSpec | None:
        return self.writes

    def accept_marks(self, spec: TensorSpec) -> bool:
        return self.reads and spec == MARKS

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        y, *marks = buffers.results
        assert y is not None
        y.copy_(buffers.args[0] + 1)
        for mark in marks:
            assert mark is not None
            mark.fill_(int(y.max()))
        self.seen += [int(mark.max()) for mark in buffers.args[1:]]


def step(executable: Executable, arg: int, result: int, layout: str = "nhwc", stream: int = 0) -> BoundStep:
    made = Step("region", "conv", ("n",), ("a",), ("r",), "p", EngineConfig("e"), layout, 1.0, stream=stream)
    return BoundStep(made, executable, (), (arg,), (result,), (SPEC,))


def chain(*executables: Executable) -> tuple[list[BoundStep], list[str]]:
    steps = [step(e, index, index + 1) for index, e in enumerate(executables)]
    return steps, [f"v{index}" for index in range(len(executables) + 1)]


def bound_plan(steps: Sequence[BoundStep], names: Sequence[str], outputs: list[int]) -> BoundPlan:
    return BoundPlan(with_frees(steps, outputs), names, [(SPEC, "nhwc")], outputs, 0, 0)


def run(bound: BoundPlan) -> list[torch.Tensor]:
    x = torch.zeros(SPEC.shape).contiguous(memory_format=torch.channels_last)
    return EagerProgram(bound, torch.device("cpu"))([x])


def test_a_reader_is_given_what_the_maker_marked() -> None:
    first, second, third = Adds(), Adds(), Adds()
    steps, names = chain(first, second, third)
    linked, names = with_zero_marks(steps, names)
    assert [s.args for s in steps] == [(0,), (1,), (2,)], "what is given stays as it was"
    steps = linked
    assert list(names) == ["v0", "v1", "v2", "v3", "v1.marks", "v2.marks"]
    assert [s.args for s in steps] == [(0,), (1, 4), (2, 5)]
    assert [s.results for s in steps] == [(1, 4), (2, 5), (3,)]
    bound = bound_plan(steps, names, [3])
    (y,) = run(bound)
    assert y.max() == 3
    assert (first.seen, second.seen, third.seen) == ([], [1], [2])
    assert 4 in bound.steps[1].frees, "marks are freed as any value"
    assert peak_bytes(bound) == 2 * (SPEC.size_bytes + MARKS.size_bytes)


def test_one_value_is_marked_once_for_all_its_readers() -> None:
    maker, readers = Adds(), [Adds(), Adds(reads=False), Adds()]
    steps = [step(maker, 0, 1), *(step(reader, 1, 2 + index) for index, reader in enumerate(readers))]
    names = [f"v{index}" for index in range(5)]
    steps, names = with_zero_marks(steps, names)
    assert steps[0].results == (1, 5)
    assert [s.args for s in steps[1:]] == [(1, 5), (1,), (1, 5)]
    run(bound_plan(steps, names, [2, 3, 4]))
    assert [reader.seen for reader in readers] == [[1], [], [1]]


@pytest.mark.parametrize("why", ["maker", "reader", "spec", "layout", "slice", "input"])
def test_nothing_is_linked_where_one_of_them_cannot(why: str) -> None:
    maker = Adds(writes=None if why == "maker" else TensorSpec((2, 9, 1), "i32") if why == "spec" else MARKS)
    steps, names = chain(maker, Adds(reads=why != "reader"))
    if why == "layout":
        steps[1] = step(steps[1].executable, 1, 2, "nchw")
    if why == "slice":
        steps[0] = replace(steps[0], slices=(ChannelSlice(2, SPEC, 0, 2),))
    if why == "input":
        steps = steps[1:]
    steps, names = with_zero_marks(steps, names)
    assert len(names) == 3
    assert all(len(s.results) == len(s.args) == 1 for s in steps)
