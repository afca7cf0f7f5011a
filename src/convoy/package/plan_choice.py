"""Plans that are chosen for a package: of kernels that it can hold, or of PyTorch's own operators where nothing was faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from convoy.deadline import Deadline
from convoy.engines.base import Engine
from convoy.engines.library.cudnn import calls_torch
from convoy.engines.manifest import BASELINE, MANIFEST, load_engine
from convoy.engines.subgraph import parse_subgraph
from convoy.errors import InputError, SelectionError
from convoy.measurement.protocol import protocol_for
from convoy.perfdb import Database
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.measure_net import measure
from convoy.pipeline.net import Net
from convoy.pipeline.select import Choice, make_plan
from convoy.pipeline.selection_input import distinct_problems, selection_problem
from convoy.plan import Plan
from convoy.problem import Problem, SubgraphProblem
from convoy.progress import shown
from convoy.selection import SelectionProblem, solve
from convoy.settings import Effort, Numerics, Settings
from convoy.target import Target

PREDICTED: Final = "times of its kernels are estimates where none was measured on this machine"


def portable_engines(device: str) -> list[str]:
    """Ids of the engines whose launches a package can hold: C functions on a CPU, kernels of Convoy's own on a GPU."""
    if device == "cuda":
        return [engine for engine in MANIFEST if engine.startswith(("cuda.", "triton."))]
    return [engine for engine in MANIFEST if engine.startswith(("cpu.", "zeroskip.cpu")) and load_engine(engine).native]


def is_portable(plan: Plan) -> bool:
    """Whether a plan names such engines alone."""
    known = portable_engines(str(plan.target.get("device")))
    return not plan.baseline and all(step.config.engine in known for step in plan.steps)


CUDNN: Final = "cudnn"
"""The library whose plans a package for a GPU can hold beside kernels of Convoy's own."""


def own_engines(settings: Settings, device: str, *, portable: bool = True) -> list[str]:
    """The engines of `portable_engines` that the user allows, and cuDNN on a GPU unless the package is to be portable.

    Raises:
        InputError: the user allows none of them.
    """
    found = portable_engines(device) + ([CUDNN] if device == "cuda" and not portable else [])
    only, denied = settings.only_engines, settings.deny_engines
    kept = [engine for engine in found if engine not in denied and (not only or engine in only)]
    if not kept:
        raise InputError("only_engines", only, "engines with kernels of Convoy's own: " + ", ".join(found))
    return kept


def portable_plan(net: Net, settings: Settings, deadline: Deadline | None = None, *, portable: bool = True) -> Plan:
    """Choose a plan for a package, by rows measured on this machine, and by the engines' estimates for the rest.

    On a GPU the effort is at least `quick`: which of a kernel's forms can be built there is known only when it was built.

    Args:
        net: the captured model.
        settings: effort, engines and database.
        deadline: when measuring must end; None: after `settings.time_s`.
        portable: whether the plan has kernels of Convoy's own alone. Otherwise it may have plans of cuDNN's on a GPU.

    Raises:
        InputError: naming the layers that none of these kernels computes.
    """
    device = net.target.device
    effort = Effort.QUICK if device == "cuda" and settings.effort is Effort.NONE else settings.effort
    own = replace(
        settings, only_engines=tuple(own_engines(settings, device, portable=portable)), deny_engines=(), effort=effort
    )
    engines = [load_engine(engine) for engine in own.only_engines if engine != CUDNN]  # which estimates no times
    rows: dict[str, list[Measurement]] = {}
    if own.effort is not Effort.NONE:
        with shown(own.progress) as watch, Database.open(own.db) as database:
            found = measure(net, own, database, watch, deadline=deadline)
        rows = {
            key: [row for row in kept if row.ok and row.config.engine != BASELINE] for key, kept in found.rows.items()
        }
    for problem in distinct_problems(net.regions, net.copies):
        rows[problem.key] = [row for row in rows.get(problem.key, ()) if not _calls_torch(problem, row)]
        if not rows[problem.key]:
            able = [*engines, load_engine(BASELINE)] if launches_no_kernel(problem) else engines
            rows[problem.key] = _estimates(problem, able, net.target)
    choices = _selection_problem(net, rows)
    covered = {node for candidate in choices.candidates for node in choices.regions[candidate.region].nodes}
    missing = [name for name in choices.nodes if name not in covered]
    if missing:
        raise _no_kernel(net, missing)
    try:
        selection = solve(choices, "exact")
    except SelectionError as error:
        raise InputError(
            "portable", net.name, "layers that Convoy's own kernels compute together", str(error)
        ) from error
    return make_plan(net, Choice(choices, selection, {}), own, [PREDICTED])


_VIEWS: Final = ("aten.view.default", "aten._unsafe_view.default")


def launches_no_kernel(problem: Problem) -> bool:
    """Whether PyTorch launches no kernel: a view of a dense value is the same memory. A package has it, or a copy of it."""
    if not isinstance(problem, SubgraphProblem) or problem.layout != "nchw":
        return False
    nodes = parse_subgraph(problem.text).nodes
    return bool(nodes) and all(node.op in _VIEWS for node in nodes)


def _calls_torch(problem: Problem, row: Measurement) -> bool:
    return row.config.engine == CUDNN and calls_torch(problem, row.config.knobs)


def _no_kernel(net: Net, missing: Sequence[str]) -> InputError:
    graph = net.captured.graph
    shown = ", ".join(f"{name} ({graph.node(name).op}, {_shape(net, name)})" for name in missing[:20])
    more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
    todo = "Convoy has no kernel of its own for these"
    todo += (
        ": export without portable=True (--portable)."
        if net.target.device == "cpu"
        else ", and a package for a GPU needs one for each."
    )
    return InputError("portable", f"{len(missing)} layers", "layers with such kernels", f"{shown}{more}. {todo}")


def _shape(net: Net, node: str) -> str:
    graph = net.captured.graph
    return ", ".join(str(graph.values[name].spec) for name in graph.node(node).outputs if name)


def _estimates(problem: Problem, engines: Sequence[Engine], target: Target) -> list[Measurement]:
    """A row of each engine that computes a problem, with its own estimate of the time."""
    found: list[Measurement] = []
    for engine in engines:
        if engine.skips_zeros or not engine.accepts(problem, target):  # whose time depends on data
            continue
        knobs = engine.space(problem, target)[0]
        time = engine.estimate_us(problem, knobs, target) or 1.0
        found.append(_row(problem, engine, target, time, engine.workspace_bytes(problem, knobs)))
    return found


def _row(problem: Problem, engine: Engine, target: Target, time_us: float, workspace_bytes: int = 0) -> Measurement:
    config = engine.config(engine.space(problem, target)[0])
    return Measurement(
        problem.key,
        config,
        target.digest,
        protocol_for(Effort.QUICK, target.device).id,
        Status.OK,
        1,
        time_us,
        workspace_bytes=workspace_bytes,
    )


def baseline_plan(net: Net, plan: Plan) -> Plan:
    """PyTorch's own operator for every node, in the place of a plan that says that the stock module runs."""
    aten = load_engine(BASELINE)
    rows = {
        problem.key: [_row(problem, aten, net.target, 1.0)]
        for problem in distinct_problems(net.regions, net.copies)
        if aten.accepts(problem, net.target)
    }
    choices = _selection_problem(net, rows)
    settings = Settings(numerics=Numerics(plan.numerics))
    made = make_plan(net, Choice(choices, solve(choices, "baseline"), {}), settings)
    return replace(made, notes=tuple(dict.fromkeys((*plan.notes, *made.notes))))


def _selection_problem(net: Net, rows: Mapping[str, Sequence[Measurement]]) -> SelectionProblem:
    return selection_problem(net.captured.graph, net.regions, net.copies, rows, layouts=net.layouts, border=net.border)
