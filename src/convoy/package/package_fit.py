"""Graphs and plans of a package, and whether they fit its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.errors import PackageError
from convoy.graph.ir import Graph
from convoy.graph.text import digest, parse_graph
from convoy.graph.verify import verify
from convoy.package.archive import PackageArchive
from convoy.package.cuda.recorded_graph import RecordedGraph
from convoy.package.program_file import PackedProgram
from convoy.plan.file import MAX_BYTES as MOST_PLAN_BYTES
from convoy.plan.file import from_dict
from convoy.plan.plan import Plan
from convoy.untrusted import parse_json

MOST_GRAPH_BYTES: Final = 32 << 20


def read_graph(archive: PackageArchive, member: str) -> Graph:
    """A graph from a member; raises PackageError or InputError."""
    content = archive.view(member)
    if len(content) > MOST_GRAPH_BYTES:
        raise PackageError(member, len(content), f"at most {MOST_GRAPH_BYTES} bytes")
    try:
        graph = parse_graph(bytes(content).decode("utf-8"))
    except UnicodeDecodeError:
        raise PackageError(member, archive.path, "text in UTF-8") from None
    verify(graph)
    return graph


def read_plan(archive: PackageArchive, member: str) -> Plan:
    """A plan from a member; raises PackageError or InputError."""
    content = archive.view(member)
    if len(content) > MOST_PLAN_BYTES:
        raise PackageError(member, len(content), f"at most {MOST_PLAN_BYTES} bytes")
    return from_dict(parse_json(bytes(content), f"{member} of {archive.path}", PackageError))


def check_steps(archive: PackageArchive, plan: Plan, program: PackedProgram) -> None:
    """Compare the steps of a program for a CPU with those of its plan; raises PackageError."""
    _compare(archive, ("steps", len(program.steps), len(plan.steps)))
    _compare(archive, ("streams", any(step.stream for step in plan.steps), False))


def check_fit(archive: PackageArchive, graph: Graph, plan: Plan, program: PackedProgram | RecordedGraph) -> None:
    """Compare graph, plan and program with each other; raises PackageError."""
    for facts in (
        ("graph digest", digest(graph), plan.graph_digest),
        ("inputs", [str(one.spec) for one in program.inputs], [str(graph.values[name].spec) for name in graph.inputs]),
        ("outputs", [one.name for one in program.outputs], list(graph.outputs)),
        ("arguments", program.arguments.leaves.count(None), len(graph.inputs)),
        ("results", program.results.leaves.count(None), len(graph.outputs)),
        ("baseline", plan.baseline, False),
    ):
        _compare(archive, facts)
    for one, name in zip(program.outputs, graph.outputs, strict=True):
        if one.spec != graph.values[name].spec:
            raise PackageError(
                f"outputs of {archive.path}", str(one.spec), f"{graph.values[name].spec}, as in the graph"
            )
    if program.strides and len(program.strides) != len(graph.outputs):
        raise PackageError(f"strides of {archive.path}", len(program.strides), "strides of each output")
    for strides, name in zip(program.strides, graph.outputs, strict=False):
        shape = graph.values[name].spec.shape
        if strides is not None and not _dense(shape, strides):
            raise PackageError(f"strides of {archive.path}", strides, f"dense strides of a tensor {list(shape)}")


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides give each element a place of its own in as much memory as the tensor has."""
    if len(shape) != len(strides):
        return False
    size = 1
    for stride, side in sorted((stride, side) for stride, side in zip(strides, shape, strict=True) if side != 1):
        if stride != size and side:
            return False
        size *= side
    return True


def _compare(archive: PackageArchive, facts: tuple[str, object, object]) -> None:
    name, found, wanted = facts
    if found != wanted:
        raise PackageError(f"{name} of {archive.path}", found, f"{wanted}, which another member has")
