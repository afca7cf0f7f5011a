"""Graphs that torch.compile traced for training: forward and backward pass, each tuned when it is first called."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from convoy.capture import Captured, capture_traced, captured_function, to_double
from convoy.deadline import Deadline
from convoy.engines.group_norm_backward import GroupNormGuard
from convoy.engines.torch_flags import convolutions
from convoy.errors import SelectionError
from convoy.graph.randomness import draws_random
from convoy.measurement.device.cudnn_search import cudnn_search
from convoy.measurement.device.memory_limit import memory_limited
from convoy.measurement.failure import is_out_of_memory
from convoy.perfdb import Database
from convoy.pipeline.ceilings import is_brief
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.rounding import InputPerturbation, fixed_seed, unit_roundoff
from convoy.pipeline.check.rounding_bound import allowed_baseline
from convoy.pipeline.check.verify_predicted import rebuild_until_verified
from convoy.pipeline.isolation import preserve_global_state
from convoy.pipeline.measure_net import measure, prediction_notes
from convoy.pipeline.net import Net, input_formats, make_net, memory_format
from convoy.pipeline.observer import Observer
from convoy.pipeline.plan_target import device_of, target_for
from convoy.pipeline.profile_output import profile_of_pass, profiled
from convoy.pipeline.schedules import build_fastest
from convoy.pipeline.select import make_plan, select, stock_defects
from convoy.pipeline.stored_plans.plan_record import PlanRecord
from convoy.pipeline.stored_plans.plan_store import plan_store
from convoy.pipeline.stored_plans.start import build_stored, checked, start_stored
from convoy.pipeline.tune_in_time import was_finished
from convoy.plan import Plan
from convoy.problem import image_layout
from convoy.program import CudaGraphProgram, Program
from convoy.program.cuda.recording import first_line
from convoy.program.runnable_program import Runnable, eager_of
from convoy.progress import shown
from convoy.settings import Settings
from convoy.torch_compile.dispatch_modes import without_modes
from convoy.torch_compile.result_layout import ResultLayout, layout_of
from convoy.torch_compile.stored_pass import PassStart, StartedPass
from convoy.tune import SearchResult
from convoy.user_warning import warn_user

CHECK_SHARE: Final = 0.4
"""Part of a limited time that is kept for building and checking a graph."""


@dataclass(frozen=True, slots=True)
class _Built:
    """A plan of a pass, what runs it, and why its results are wrong as a whole; empty where they are not."""

    plan: Plan
    ways: dict[str, Runnable]
    wrong: str


class TracedGraph:
    """A traced graph that is tuned with the arguments of its first call, and runs by its plan from then on.

    If it cannot be captured (with a warning), or the plan is not faster, PyTorch runs it as it was traced.

    Args:
        module: the graph.
        settings: what may be done.
        name: `forward` or `backward`.
        visible: number of its results, the first ones, that leave the compiled function; they get PyTorch's strides.

    Attributes:
        plan: what it runs; None before the first call and where it could not be captured.
    """

    def __init__(self, module: fx.GraphModule, settings: Settings, name: str, visible: int = 0) -> None:
        self._module, self._settings, self._name = module, settings, name
        self._visible = visible
        targets = {node.target for node in module.graph.nodes if node.op == "call_function"}
        self._has_group_norm = torch.ops.aten.native_group_norm_backward.default in targets
        self._lock = threading.Lock()
        self._run: Callable[[Sequence[Any]], Any] | None = None
        self.plan: Plan | None = None

    def __call__(self, given: list[Any]) -> Any:
        """Run once; the list is emptied, so that a value can be freed when its last reader has run."""
        args = list(given)
        given.clear()
        with self._lock:
            if self._run is None:
                if any(isinstance(arg, FakeTensor) for arg in args):  # they hold no numbers to tune with
                    return self._stock(args)
                self._run = self._tune(args)
        with torch.no_grad():
            return self._run(args)

    def _stock(self, args: Sequence[Any]) -> Any:
        if not self._has_group_norm:
            return self._module(*args)
        with GroupNormGuard():
            return self._module(*args)

    def _tune(self, args: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        deadline = Deadline(self._settings.time_s)
        try:
            search = cudnn_search(args[0].device.type, allowed=not is_brief(self._settings.effort, deadline))
            with shown(self._settings.progress) as display, preserve_global_state(), without_modes(), search:
                watch = partial(_tell, display, self._name)
                with profiled(profile_of_pass(self._settings, self._name)):
                    captured = capture_traced(self._module, args)
                    layout = self._layout(args)
                    runnable = self._runnable(captured, [arg.detach() for arg in args], watch, deadline)
        except SelectionError:
            raise  # a budget or a promise that was asked for cannot be kept
        except Exception as error:  # whatever a user's operators, a compiler or a device make of it
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
            warn_user(f"torch.compile: PyTorch runs the {self._name} pass as it was traced: {first_line(error)}")
            return self._stock
        if runnable is None:
            return self._stock
        return lambda args: layout(captured.unflatten_outputs(runnable(args)))

    def _layout(self, args: Sequence[Any]) -> ResultLayout:
        """How PyTorch's own visible results lie in memory: fake tensors of one channel may be wrong about it."""
        if not self._visible:
            return layout_of(())
        with torch.no_grad(), fixed_seed():
            return layout_of(self._stock(args)[: self._visible])

    def _runnable(
        self, captured: Captured, args: list[torch.Tensor], watch: Observer, deadline: Deadline
    ) -> Runnable | None:
        """Tune; None if PyTorch's own run replaces the plan (`end_to_end.falls_back`)."""
        device = device_of(self._module, tuple(args), {})
        net = _net(self._name, self._module, captured, args, self._settings, target_for(device))
        settings = self._settings
        limited = memory_limited(device, settings.tuning_memory_bytes, isolate=settings.isolate)
        with limited, Database.open(self._settings.db) as database:
            store = plan_store(f"{self._name} pass of torch.compile", database, net, settings)
            started = start_stored(store, PassStart(partial(self.start, net, args)))
            if isinstance(started, StartedPass):
                self.plan = started.plan
                return started.runnable
            searching = deadline.earlier(CHECK_SHARE * deadline.left_s) if deadline.is_limited else deadline
            found = measure(net, self._settings, database, watch, deadline=searching)
            # Not before: among a forward pass's results are all activations that the backward pass reads.
            with torch.no_grad(), convolutions("as_torch", args[0].device):
                exact, theirs = self._reference(captured, args)
                stock = end_to_end.errors_against(theirs, exact)
            build = partial(
                self._build, net, [*filter(None, [started]), *database.warnings], args, exact, stock, deadline
            )
            built, found = rebuild_until_verified(build, net, found, settings, database, watch, deadline)
            best, slow = self._fastest(built.ways, args, deadline)
            slow = "" if built.wrong else slow
            stock_wrong = bool(stock_defects(net))
            falls_back, note = end_to_end.falls_back(
                slow, built.wrong, captured.as_pytorch, device, self._settings, stock_wrong
            )
            notes = (*built.plan.notes, note) if note else built.plan.notes
            self.plan = dataclasses.replace(built.plan, baseline=falls_back, notes=notes)
            if not built.wrong and was_finished(self.plan, found, deadline):
                store.keep(self.plan, stock.rel_l2_error, way=best)
        return None if falls_back else built.ways[best]

    def _build(
        self,
        net: Net,
        known: Sequence[str],
        args: list[torch.Tensor],
        exact: list[torch.Tensor],
        stock: end_to_end.OutputErrors,
        deadline: Deadline,
        found: SearchResult,
    ) -> _Built:
        """Select, build, and check against what PyTorch's own run was held to."""
        choice = select(net, found, self._settings, deadline)
        plan = make_plan(net, choice, self._settings, [*prediction_notes(found), *known], found)
        plan, program = build_fastest(plan, net, self._settings, choice.problem, deadline=deadline)
        ways = self._ways(program)
        return _Built(plan, ways, self._why_wrong(ways["convoy"], args, exact, stock))

    def _ways(self, program: Program) -> dict[str, Runnable]:
        """How a program may run: launch by launch, or on a GPU as one graph."""
        assert program.runnable is not None
        ways: dict[str, Runnable] = {"convoy": eager_of(program.runnable)}
        if isinstance(program.runnable, CudaGraphProgram) and not self._settings.static_outputs:
            ways["convoy.graph"] = program.runnable
        return ways

    def _why_wrong(
        self, run: Runnable, args: list[torch.Tensor], exact: list[torch.Tensor], stock: end_to_end.OutputErrors
    ) -> str:
        """Why results are wrong; empty if they are as near to the reference as PyTorch's own may be."""
        with torch.no_grad(), convolutions("as_torch", args[0].device), fixed_seed():
            ours = end_to_end.errors_against(end_to_end.float_outputs(run(args)), exact)
            unit, numerics = self._unit(cuda=args[0].is_cuda), self._settings.numerics
            allowed = allowed_baseline(ours, stock, numerics, unit, lambda: self._rounded(args))
        return end_to_end.why_wrong("its", ours, allowed, end_to_end.LEAST_ERROR)

    def start(self, net: Net, args: list[torch.Tensor], record: PlanRecord, plan: Plan) -> Runnable | None:
        """The function that runs a stored plan; None if PyTorch runs.

        Raises:
            StoredPlanError: it cannot be built, or its results are wrong.
        """
        program = build_stored(plan, net, self._settings)
        if program.runnable is None:
            return None
        ways = self._ways(program)

        def why_wrong() -> str:
            with torch.no_grad(), convolutions("as_torch", args[0].device):
                exact, theirs = self._reference(net.captured, args)
                stock = end_to_end.errors_against(theirs, exact)
            return self._why_wrong(ways["convoy"], args, exact, stock)

        checked(why_wrong)
        return ways.get(record.way, ways["convoy"])

    def _fastest(self, ways: dict[str, Runnable], args: list[torch.Tensor], deadline: Deadline) -> tuple[str, str]:
        """The plan launch by launch, or on a GPU as one graph between copies, whichever the clock prefers; and why it is slow."""
        runs: dict[str, Callable[[], object]] = {"torch.eager": lambda: self._stock(args)}
        runs |= {name: (lambda way=way: way(args)) for name, way in ways.items()}
        with torch.no_grad(), convolutions("as_torch", args[0].device):
            timed = end_to_end.interleave(runs, cuda=args[0].is_cuda, most_s=deadline.left_s)
        best = min(ways, key=lambda name: timed[name].median_ms)
        faster = end_to_end.is_faster(timed[best], timed["torch.eager"])
        return best, "" if faster else "not faster than PyTorch in four of five rounds"

    def _reference(self, captured: Captured, args: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The reference, and results whose error against it is allowed.

        The reference is float64, compared with PyTorch's own results. If float64 would draw other random numbers or does not
        fit in memory, the reference is PyTorch's own results, compared with those from arguments that are changed by one
        rounding each.
        """
        with fixed_seed():
            stock = end_to_end.float_outputs(self._stock(args))
        if not any(draws_random(node) for node in captured.graph.nodes):
            try:
                return end_to_end.float_outputs(captured_function(to_double(captured))(*args)), stock
            except Exception as error:  # a dtype is fixed in the graph, or it does not fit in memory
                if is_out_of_memory(error):
                    torch.cuda.empty_cache()
        return [tensor.double() for tensor in stock], self._shaken(args)

    def _unit(self, *, cuda: bool) -> float:
        """The unit roundoff of the graph, by the dtypes of its values."""
        made = (node.meta.get("val") for node in self._module.graph.nodes)
        return unit_roundoff({value.dtype for value in made if isinstance(value, torch.Tensor)}, cuda=cuda)

    def _shaken(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """PyTorch's own results from arguments that are off by one rounding each."""
        shake = InputPerturbation(self._unit(cuda=args[0].is_cuda))
        with fixed_seed():
            return end_to_end.float_outputs(self._stock([shake(arg) for arg in args]))

    def _rounded(self, args: list[torch.Tensor]) -> end_to_end.OutputErrors:
        """How far one rounding of every argument moves PyTorch's own results."""
        with fixed_seed():
            stock = end_to_end.float_outputs(self._stock(args))
        return end_to_end.errors_against(self._shaken(args), [tensor.double() for tensor in stock])


def _tell(display: Observer, name: str, message: str, done: int, total: int) -> None:
    """Show the progress of one pass: a training step has two, one after the other."""
    display(f"{name} pass: {message}", done, total)


def _net(
    name: str, module: fx.GraphModule, captured: Captured, args: list[torch.Tensor], settings: Settings, target: Any
) -> Net:
    """The captured graph; its results have the memory format that they were traced with."""
    border = input_formats(captured, args)
    first = image_layout(next(iter(border.values()), "nchw"))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    made = [node.meta["val"] for node in output.args[0] if isinstance(node, fx.Node)]
    for value, tensor in zip(captured.graph.outputs, made, strict=True):
        if captured.graph.has_layout(value):
            border[value] = memory_format(tensor)
    return make_net(name, captured, border, first, settings, target)
