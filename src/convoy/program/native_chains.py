"""ChainedProgram: on a CPU, consecutive launches that need no Python run as one native chain, in one call (chain.c).

In a benchmark's loop, Python between two launches costs little. In a net it costs much, because the layers' weights and
activations have evicted its code and objects from the caches. Values that only the launches of a chain use lie in one buffer
per thread, in which values with disjoint lifetimes share memory. The inputs and outputs of a chain are tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast

import torch

from convoy.engines.compilers.host_compiler import library
from convoy.engines.cpu.native_launch import Native, NativeExecutable, address
from convoy.errors import CompileError
from convoy.problem import TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.eager import EagerProgram, LaunchObserver, Slots, empty, in_layout, run_step
from convoy.program.lifetimes import slot_users
from convoy.schedule import plan_memory

SOURCE: Final = Path(__file__).with_name("chain.c")
FLAGS: Final = ("-std=gnu11", "-O2")

MOST_TENSORS: Final = 64
"""Most tensors of a launch, as in chain.c."""

LEAST: Final = 2
"""Fewest launches of a chain: a single one gains nothing."""


ChainRunner = Callable[["ctypes.Array[_Launch]", int, "ctypes.Array[ctypes.c_void_p]"], object]
"""Makes launches in order: (launches, their number, pointers of the values)."""


class _Operand(ctypes.Structure):
    _fields_ = (("fixed", ctypes.c_void_p), ("slot", ctypes.c_int64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("settings", ctypes.c_void_p),
        ("operands", ctypes.POINTER(_Operand)),
        ("count", ctypes.c_int64),
    )


@cache
def _driver() -> Any:
    function = library(SOURCE, FLAGS, "chain").convoy_chain
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None
    return function


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the values that a launch reads and makes, for `plan_memory`."""

    args: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NativeChain:
    """Consecutive launches, ready to be called.

    Values are numbered: each has an index into the array of pointers that chain.c reads. The last index is the workspace's.

    Attributes:
        launches: array of launches that chain.c reads.
        count: number of launches.
        args: (index, slot) of the values that come from outside.
        results: (index, slot, spec, memory format) of the values that are used outside.
        inner: (index, offset in the buffer) of the values that only the chain uses.
        pointers: number of pointers, the workspace's included.
        arena_bytes: bytes of the buffer for inner values.
        frees: slots from outside that no later step uses.
        keeps: objects that the launches point to.
    """

    launches: ctypes.Array[_Launch]
    count: int
    args: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int, TensorSpec, str], ...]
    inner: tuple[tuple[int, int], ...]
    pointers: int
    arena_bytes: int
    frees: tuple[int, ...]
    keeps: list[object] = field(default_factory=list[object])

    @staticmethod
    def of(steps: Sequence[tuple[BoundStep, Native]], seen_outside: set[int]) -> NativeChain:
        """A chain of launches.

        Args:
            steps: bound steps with their native launches, in order.
            seen_outside: slots that other steps read or write, and the program's outputs.
        """
        made = [slot for step, _ in steps for slot in step.results]
        inner = [slot for slot in made if slot not in seen_outside]
        outer = dict.fromkeys(slot for step, _ in steps for slot in step.args if slot not in made)
        at = {slot: index for index, slot in enumerate((*outer, *made))}
        arena = _arena([step for step, _ in steps], set(inner))
        keeps: list[object] = []
        launches = (_Launch * len(steps))(*(_launch(step, native, at, keeps) for step, native in steps))
        freed = [slot for step, _ in steps for slot in step.frees]
        return NativeChain(
            launches=launches,
            count=len(steps),
            args=tuple((at[slot], slot) for slot in outer),
            results=tuple(
                (at[slot], slot, spec, step.step.layout)
                for step, _ in steps
                for slot, spec in zip(step.results, step.specs, strict=True)
                if slot in seen_outside
            ),
            inner=tuple((at[slot], arena.offsets[str(slot)]) for slot in inner),
            pointers=len(at) + 1,
            arena_bytes=arena.size_bytes,
            frees=tuple(slot for slot in freed if slot not in inner),
            keeps=keeps,
        )


def _arena(steps: Sequence[BoundStep], inner: set[int]) -> Any:
    """Offsets in the buffer for the values that only the chain uses."""
    names = [
        _Names(tuple(str(s) for s in step.args if s in inner), tuple(str(s) for s in step.results if s in inner))
        for step in steps
    ]
    sizes = {str(s): spec.size_bytes for step in steps for s, spec in zip(step.results, step.specs, strict=True)}
    return plan_memory(names, sizes)


def _launch(step: BoundStep, native: Native, at: dict[int, int], keeps: list[object]) -> _Launch:
    """A launch as chain.c reads it; the objects that it points to are added to `keeps`."""
    operands = (_Operand * len(native.tensors))()
    for operand, source in zip(operands, native.tensors, strict=True):
        operand.slot = -1
        if isinstance(source, torch.Tensor):
            operand.fixed = address(source)
        elif source is not None:
            kind, number = source
            slots = {"arg": step.args, "result": step.results}.get(kind)
            operand.slot = len(at) if slots is None else at[slots[number]]
    keeps += [native, operands, step.executable]
    assert isinstance(step.executable, NativeExecutable)
    call = ctypes.cast(cast("Any", step.executable.call), ctypes.c_void_p)
    return _Launch(call, ctypes.addressof(native.settings), operands, len(operands))


def chains_of(bound: BoundPlan, least: int = LEAST) -> list[BoundStep | NativeChain]:
    """A plan's steps, with at least `least` consecutive launches that need no Python joined to chains."""
    used, found = slot_users(bound.steps), list[BoundStep | NativeChain]()
    natives = [_native(step) for step in bound.steps]
    outputs = set(bound.outputs)
    for is_native, group in groupby(range(len(bound.steps)), key=lambda i: natives[i] is not None):
        run = list(group)
        if not is_native or len(run) < least:
            found += [bound.steps[i] for i in run]
            continue
        outside = {
            slot for slot, steps in used.items() if slot in outputs or not run[0] <= steps[0] <= steps[-1] <= run[-1]
        }
        pairs = [(bound.steps[i], native) for i in run if (native := natives[i]) is not None]
        found.append(NativeChain.of(pairs, outside))
    return found


def _native(step: BoundStep) -> Native | None:
    """A step's launch without Python; None if it has none, or if its results are written in slices."""
    if not isinstance(step.executable, NativeExecutable) or step.slices:
        return None
    native = step.executable.native(step.constants)
    return native if native is not None and len(native.tensors) <= MOST_TENSORS else None


@dataclass(frozen=True, slots=True)
class ThreadMemory:
    """A thread's buffer, and the pointers of each chain."""

    buffer: torch.Tensor
    pointers: list[ctypes.Array[ctypes.c_void_p]]


class ChainedProgram(EagerProgram):
    """A bound plan on a CPU. Safe to call from several threads at once. Each thread has a buffer, kept from call to call.

    Args:
        bound: the plan with its executables.
        device: the CPU.
        runner: runs the launches of a chain, single ones too; None: chain.c, in this thread.
    """

    def __init__(self, bound: BoundPlan, device: torch.device, runner: ChainRunner | None = None) -> None:
        super().__init__(bound, device)
        self._single = {id(step): allocate for step, allocate in self._steps}
        self._items = chains_of(bound, LEAST if runner is None else 1)
        self._chains = [item for item in self._items if isinstance(item, NativeChain)]
        self._runner = runner
        if self._chains and runner is None:
            try:
                self._runner = _driver()
            except CompileError:  # without a working compiler the launches run one by one
                self._chains = []

    def with_bound(self, bound: BoundPlan) -> EagerProgram:
        """A program of another form of the plan, whose steps run one by one."""
        made = super().with_bound(bound)
        assert isinstance(made, ChainedProgram)
        made._chains = []
        return made

    @property
    def chains(self) -> list[NativeChain]:
        """The chains, in order."""
        return self._chains

    def __call__(self, inputs: Sequence[torch.Tensor], observer: LaunchObserver | None = None) -> list[torch.Tensor]:
        """Run on inputs of the plan's specs; returns the graph's outputs in order. With an observer, steps run one by one."""
        if observer is not None or not self._chains:
            return super().__call__(inputs, observer)
        slots: Slots = [
            in_layout(tensor, layout) for tensor, (_, layout) in zip(inputs, self.bound.inputs, strict=True)
        ]
        slots.extend(self._blank)
        workspace, memory = self._workspace(), self.thread_memory()
        pointers = iter(memory.pointers)
        for item in self._items:
            if isinstance(item, NativeChain):
                self._run_chain(item, next(pointers), slots)
            else:
                run_step(item, self._single[id(item)], slots, workspace)
                for slot in item.frees:
                    slots[slot] = None
        return [slots[slot] for slot in self.bound.outputs]  # pyright: ignore[reportReturnType]

    def _run_chain(self, chain: NativeChain, pointers: ctypes.Array[ctypes.c_void_p], slots: Slots) -> None:
        for index, slot in chain.args:
            pointers[index] = address(slots[slot])  # pyright: ignore[reportArgumentType]
        for index, slot, spec, layout in chain.results:
            made = slots[slot] = empty(spec, layout, self.device)
            pointers[index] = address(made)
        assert self._runner is not None
        self._runner(chain.launches, chain.count, pointers)
        for slot in chain.frees:
            slots[slot] = None

    def thread_memory(self) -> ThreadMemory:
        """This thread's buffer: first the inner values of one chain at a time, then the workspace of the launches."""
        memory: ThreadMemory | None = getattr(self._local, "memory", None)
        if memory is None:
            arena = max(chain.arena_bytes for chain in self._chains)
            count = arena + self.bound.workspace_bytes
            if self._shared is None:
                buffer = torch.empty(count, dtype=torch.uint8, device=self.device)
            else:
                buffer = self._shared.scratch(count, self.device)
            start = address(buffer)
            memory = ThreadMemory(buffer, list(self._pointers(start, start + arena)))
            self._local.memory = memory
        return memory

    def _pointers(self, arena: int, workspace: int) -> Iterator[ctypes.Array[ctypes.c_void_p]]:
        for chain in self._chains:
            pointers = (ctypes.c_void_p * chain.pointers)()
            for index, offset in chain.inner:
                pointers[index] = arena + offset
            pointers[chain.pointers - 1] = workspace
            yield pointers
