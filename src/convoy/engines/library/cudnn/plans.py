"""cuDNN's execution plans: their names, their properties before they are built, and the list for one problem.

A plan is one of cuDNN's engines with a value for each of its knobs. Its name is enough to build it again:

- `eng62_k2-5_k6-1` is engine 62 with knob 2 (TILE_SIZE) at 5 and knob 6 (TILEK) at 1, in the numbers of the frontend's
  `knob_type`, which never change. It is built from these numbers directly.
- `eng46_b2-4_b5-2` has a knob that the frontend cannot set: a third of the plans in fp32 and of weight gradients (cuDNN
  9.19). The numbers are cuDNN's own, and the plan is searched among those that the heuristics recommend.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from convoy.engines.library.cudnn import library
from convoy.engines.library.cudnn.graphs import operation_graph
from convoy.errors import InputError
from convoy.problem import ConvolutionProblem, Epilogue

MODES: Final = ("A", "B", "FALLBACK")
"""cuDNN's heuristics, the most reliable first. (cuDNN 9.19 answers A and B alike on an H100.)"""

FRONTEND_ENGINES: Final = 10_000
"""Engine ids from here on are the frontend's own, written in Python: they are no cuDNN plans."""

DENIED: Final[Mapping[tuple[str, str, int], str]] = MappingProxyType(
    {("wgrad", "nchw", 70): "leaves the gradient of 13x11 and 13x13 images unwritten (TF32, cuDNN 9.19, H200)"}
)
"""(direction, layout, engine id) → why cuDNN's engine is not used although cuDNN offers it: wrong results, or bits that change
without the note that says so."""

INEXACT: Final = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "TENSOR_CORE")
"""Notes of plans that are no fp32 arithmetic on fp32 tensors: inputs rounded (TF32, or a half type), sums too. In cuDNN 9.19 a
TF32 plan says TENSOR_CORE alone."""

TRANSFORMING: Final = ("FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")
"""Notes of plans that compute on transformed tiles, and lose some accuracy by it."""

NONDETERMINISTIC: Final = ("NONDETERMINISTIC",)

_NAME: Final = re.compile(r"eng(\d{1,9})((?:_k\d{1,9}--?\d{1,18})*|(?:_b\d{1,9}--?\d{1,18})+)", re.ASCII)
_KNOB: Final = re.compile(r"_[kb](\d+)[-=](-?\d+)", re.ASCII)
_TAG: Final = re.compile(r"eng(\d+)((?:_k\d+=-?\d+)*)", re.ASCII)
_WORKSPACE: Final = re.compile(r"workspace violation\. Requires (\d+)")


@dataclass(frozen=True, slots=True, order=True)
class CudnnPlan:
    """An engine of cuDNN's with its knobs: (number, value), sorted; `listed`: in cuDNN's numbers, to be found in a list."""

    engine: int
    knobs: tuple[tuple[int, int], ...] = ()
    listed: bool = False

    @property
    def name(self) -> str:
        """A word that fits into `convoy.problem.Knobs`, read back by `parse`."""
        letter = "b" if self.listed else "k"
        return f"eng{self.engine}" + "".join(f"_{letter}{number}-{value}" for number, value in self.knobs)

    @staticmethod
    def parse(name: str) -> CudnnPlan:
        """Inverse of `name`; raises InputError on anything else."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise InputError("plan", name, "an engine with its knobs, as eng62_k2-5_k6-1")
        knobs = _pairs(match[2])
        if [number for number, _ in knobs] != sorted({number for number, _ in knobs}):
            raise InputError("plan", name, "knobs in rising order, each once")
        return CudnnPlan(int(match[1]), knobs, match[2].startswith("_b"))

    @staticmethod
    def at(graph: Any, index: int) -> CudnnPlan | None:
        """The plan that a graph has at an index; None for an engine of the frontend's own."""
        engine, knobs = graph.get_engine_and_knobs_at_index(index)
        if engine >= FRONTEND_ENGINES:
            return None
        numbers = {int(getattr(kind, "value", kind)): int(value) for kind, value in knobs.items()}
        if 0 not in numbers:  # NOT_SET: any number of knobs that the frontend has no word for
            return CudnnPlan(engine, tuple(sorted(numbers.items())))
        tag = _TAG.search(graph.get_plan_name_at_index(index))
        return CudnnPlan(int(tag[1]), tuple(sorted(_pairs(tag[2]))), listed=True) if tag else None


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(number), int(value)) for number, value in _KNOB.findall(text))


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a plan that cuDNN reports before it is built.

    Attributes:
        workspace_bytes: workspace of a run.
        deterministic: whether it gives the same bits in every run.
        exact: whether it has none of the `INEXACT` notes.
    """

    workspace_bytes: int
    deterministic: bool
    exact: bool


def recommending(problem: ConvolutionProblem, fused: Epilogue) -> Any:
    """A graph with all plans of the heuristics."""
    modes = library.load().heur_mode
    graph = operation_graph(problem, fused)
    graph.create_execution_plans([getattr(modes, mode) for mode in MODES])
    return graph


def graph_of(problem: ConvolutionProblem, fused: Epilogue, plan: CudnnPlan) -> tuple[Any, int]:
    """A graph that has a plan, not built yet, and the plan's index.

    Raises:
        InputError: cuDNN does not recommend a plan that only its heuristics can make.
        library.errors(): it refuses the plan.
    """
    if plan.listed:
        graph = recommending(problem, fused)
        for index in range(graph.get_execution_plan_count()):
            if CudnnPlan.at(graph, index) == plan:
                return graph, index
        raise _absent(problem, plan, "its heuristics no longer recommend it")
    kinds = library.load().knob_type
    graph = operation_graph(problem, fused)
    graph.create_execution_plan(plan.engine, {kinds(number): value for number, value in plan.knobs})
    return graph, 0


def denial(problem: ConvolutionProblem, plan: CudnnPlan) -> str:
    """Why a plan's engine is denied; empty where it is not."""
    return DENIED.get((problem.direction, problem.layout, plan.engine), "")


def notes_named(names: Iterable[str]) -> list[Any]:
    """The frontend's numerical notes of these names, those that it knows."""
    known = library.load().numerical_note
    return [getattr(known, name) for name in names if hasattr(known, name)]


def probe(graph: Any, index: int) -> int | None:
    """Workspace of a plan in bytes, without building it; None if the plan is deselected or cuDNN refuses it.

    The frontend reports neither directly. With a limit that no plan keeps, building fails at the workspace check, and the
    message names the limit; a deselected plan fails earlier. Each index can be queried once.
    """
    graph.deselect_workspace_greater_than(-1)
    try:
        graph.build_plan_at_index(index)
    except library.errors() as error:
        match = _WORKSPACE.search(str(error))
        return int(match[1]) if match else None
    return int(graph.get_workspace_size_plan_at_index(index))


def _probe_without(problem: ConvolutionProblem, fused: Epilogue, plan: CudnnPlan, names: Iterable[str]) -> int | None:
    """Workspace of a plan that carries none of some notes; None where it has one, or cuDNN refuses it."""
    graph, index = graph_of(problem, fused, plan)
    graph.deselect_numeric_notes(notes_named(names))
    return probe(graph, index)


@lru_cache(maxsize=8192)
def facts(problem: ConvolutionProblem, fused: Epilogue, plan: CudnnPlan, device: int) -> Facts:
    """A plan's properties. The query takes about 15 ms; nothing is compiled.

    Args:
        problem: the convolution.
        fused: the part of its epilogue that is in the graph.
        plan: the plan.
        device: PyTorch's current device, part of the cache's key.

    Raises:
        InputError: cuDNN does not have the plan for this problem.
    """
    del device
    tried = ((True, True, INEXACT + NONDETERMINISTIC), (True, False, NONDETERMINISTIC), (False, True, INEXACT))
    try:
        for deterministic, exact, names in (*tried, (False, False, ())):
            found = _probe_without(problem, fused, plan, names)
            if found is not None:
                return Facts(found, deterministic, exact)
    except library.errors() as error:
        if isinstance(error, InputError):
            raise
        raise _absent(problem, plan, library.first_line(error)) from error
    raise _absent(problem, plan, "its engine refuses these knobs")


@lru_cache(maxsize=8192)
def transforms(problem: ConvolutionProblem, fused: Epilogue, plan: CudnnPlan, device: int) -> bool:
    """Whether a plan that cuDNN has computes on transformed tiles; arguments as of `facts`."""
    del device
    return _probe_without(problem, fused, plan, TRANSFORMING) is None


def _absent(problem: ConvolutionProblem, plan: CudnnPlan, reason: str) -> InputError:
    return InputError("plan", plan.name, f"a plan that cuDNN has for {problem}", f"cuDNN says: {reason}.")


TOLD: Final = (*TRANSFORMING, *INEXACT, *NONDETERMINISTIC)
"""Notes that reports show; each costs a graph of its own, about 10 ms."""


@lru_cache(maxsize=1024)
def noted(problem: ConvolutionProblem, fused: Epilogue, plan: CudnnPlan, device: int) -> tuple[str, ...]:
    """The notes of `TOLD` that a plan carries, in lower case and in that order; the frontend's errors pass through.

    Args:
        problem: the convolution.
        fused: the part of its epilogue that is in the graph.
        plan: a plan that cuDNN has.
        device: PyTorch's current device, part of the cache's key.
    """
    del device
    known = library.load().numerical_note
    names = [name for name in TOLD if hasattr(known, name)]
    return tuple(name.lower() for name in names if _probe_without(problem, fused, plan, (name,)) is None)


def notes(problem: ConvolutionProblem, fused: Epilogue, plan: CudnnPlan) -> tuple[str, ...]:
    """Names of all numerical and behaviour notes of a plan, in lower case, in alphabetical order.

    The frontend filters by numerical notes but does not list them: each is tested with a graph of its own.
    """
    known = library.load().numerical_note
    names = [name for name in dir(known) if name[0].isupper() and name != "NOT_SET"]
    found = {name.lower() for name in names if _probe_without(problem, fused, plan, (name,)) is None}
    graph, index = graph_of(problem, fused, plan)
    behaviours = graph.get_behavior_notes_for_plan_at_index(index)
    return tuple(sorted(found | {str(note.name).lower() for note in behaviours if note.name != "NOT_SET"}))
