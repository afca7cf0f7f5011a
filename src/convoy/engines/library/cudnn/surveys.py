"""Which plans cuDNN recommends for a problem, and their workspaces: asked once, and kept in the user's cache.

A query takes about 10 ms for each problem and epilogue, which is a third of a start from the database. What cuDNN answers depends
on the problem, the device and the versions of the libraries alone, so the answer is kept as JSON beside compiled code
(`convoy.engines.compilers.device_binaries`). A damaged file is a miss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, cast

from convoy.engines.compilers.device_binaries import cached
from convoy.engines.library.cudnn import library
from convoy.engines.library.cudnn.plans import (
    INEXACT,
    TRANSFORMING,
    CudnnPlan,
    denial,
    notes_named,
    probe,
    recommending,
)
from convoy.errors import InputError
from convoy.problem import ConvolutionProblem, Epilogue
from convoy.untrusted import parse_json

_FORM: Final = "cudnn plans 1"
"""Part of the key: another form of the answers has other files."""


def recommended(problem: ConvolutionProblem, fused: Epilogue, where: str, *, exact: bool) -> tuple[CudnnPlan, ...]:
    """The plans that cuDNN's heuristics recommend, best first, without the denied ones.

    Args:
        problem: the convolution.
        fused: the part of its epilogue that is in the graph.
        where: the target's digest.
        exact: whether fp32 products must be fp32: plans with an `INEXACT` note are left out. Plans that transform tiles are
            left out too under numerics `strict`, and come last otherwise.

    Raises:
        library.errors(): cuDNN refuses the graph, or fails.
    """
    if not exact:
        return _survey(problem, fused, (), where)
    direct = _survey(problem, fused, INEXACT + TRANSFORMING, where)
    if problem.numerics == "strict":
        return direct
    return tuple(sorted(_survey(problem, fused, INEXACT, where), key=lambda plan: plan not in direct))


def announced(problem: ConvolutionProblem, fused: Epilogue, device: int) -> dict[CudnnPlan, int]:
    """Workspaces in bytes of the plans that were recommended for a graph so far; `recommended` adds them.

    Args:
        problem: the convolution.
        fused: the part of its epilogue that is in the graph.
        device: PyTorch's current device, part of the cache's key.
    """
    return known_workspaces(_as_in_graph(problem, fused), device)


@lru_cache(maxsize=4096)
def known_workspaces(problem: ConvolutionProblem, device: int) -> dict[CudnnPlan, int]:
    """The same of a convolution whose epilogue is in the graph."""
    del problem, device
    return {}


def _as_in_graph(problem: ConvolutionProblem, fused: Epilogue) -> ConvolutionProblem:
    """The convolution with the epilogue that the graph has: convolutions that differ in what follows it share an answer."""
    pool = problem.epilogue.pool
    return replace(problem, epilogue=replace(fused, pool=pool))


def _survey(problem: ConvolutionProblem, fused: Epilogue, without: Sequence[str], where: str) -> tuple[CudnnPlan, ...]:
    """The recommended plans that carry none of some notes, and that the device can run."""
    found = _kept(_as_in_graph(problem, fused), fused, without, where)
    announced(problem, fused, library.device()).update(found)
    return tuple(plan for plan in found if not denial(problem, plan))


def _kept(problem: ConvolutionProblem, fused: Epilogue, without: Sequence[str], where: str) -> Mapping[CudnnPlan, int]:
    """Plans and their workspaces from the user's cache, or from cuDNN."""
    key = (_FORM, where, problem.key, str(fused), " ".join(without))
    data = cached("cudnn", key, lambda: _answer(problem, fused, without), suffix=".json")
    try:
        return _read(data)
    except InputError:  # whole, and yet not what this version writes
        return _read(_answer(problem, fused, without))


def _answer(problem: ConvolutionProblem, fused: Epilogue, without: Sequence[str]) -> bytes:
    """What cuDNN says, as JSON; that it has no plan for a graph is an answer too."""
    try:
        found = _asked(problem, fused, without)
    except library.unsupported() as error:
        return json.dumps({"refused": library.first_line(error)}).encode()
    return json.dumps({"plans": [[plan.name, size] for plan, size in found.items()]}).encode()


def _read(data: bytes) -> dict[CudnnPlan, int]:
    """The plans of an answer; raises InputError for anything else, and cuDNN's own error for a refusal."""
    said = parse_json(data, "cudnn plans")
    fields = cast("dict[str, Any]", said if isinstance(said, dict) else {})
    if isinstance(fields.get("refused"), str):
        raise library.unsupported()(fields["refused"])
    pairs = fields.get("plans")
    if not isinstance(pairs, list):
        raise InputError("cudnn plans", str(fields)[:80], "plans, or a refusal")
    return dict(map(_plan_of, cast("list[object]", pairs)))


def _plan_of(pair: object) -> tuple[CudnnPlan, int]:
    said = str(pair)[:80]
    values = cast("list[Any]", pair) if isinstance(pair, list) else []
    if [type(value) for value in values] != [str, int] or values[1] < 0:
        raise InputError("cudnn plans", said, "a plan's name and its workspace in bytes")
    return CudnnPlan.parse(values[0]), values[1]


def _asked(problem: ConvolutionProblem, fused: Epilogue, without: Sequence[str]) -> dict[CudnnPlan, int]:
    graph = recommending(problem, fused)
    graph.deselect_numeric_notes(notes_named(without))
    found: dict[CudnnPlan, int] = {}
    for index in range(graph.get_execution_plan_count()):
        plan = CudnnPlan.at(graph, index)
        if plan is not None and plan not in found:
            workspace = probe(graph, index)
            if workspace is not None:
                found[plan] = workspace
    return found


MOST_VARIED: Final = 3
"""Recommended plans whose neighbours are tried: the best of them are the first, nearly always."""


def beyond(found: Sequence[CudnnPlan]) -> tuple[CudnnPlan, ...]:
    """Plans that no heuristic recommends: the first few recommended ones with another value of one knob.

    The values are those of recommended plans of the same engine. cuDNN refuses many of these when they are built; such a
    refusal is stored as a row with its reason.
    """
    known, made = set(found), dict[CudnnPlan, None]()
    for plan in [plan for plan in found if not plan.listed][:MOST_VARIED]:
        alike = [other for other in found if other.engine == plan.engine and not other.listed]
        for place, (number, value) in enumerate(plan.knobs):
            values = dict.fromkeys(dict(other.knobs).get(number, value) for other in alike)
            for other in values:
                knobs = (*plan.knobs[:place], (number, other), *plan.knobs[place + 1 :])
                made[CudnnPlan(plan.engine, knobs)] = None
    return tuple(plan for plan in made if plan not in known)
