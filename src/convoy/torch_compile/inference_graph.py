"""InferenceGraph: a graph of torch.compile without gradients, tuned in its first call; each set of weights is packed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import torch
from torch import fx, nn

from convoy.errors import PlanError, SelectionError
from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check.rounding import fixed_seed
from convoy.pipeline.isolation import preserve_global_state
from convoy.pipeline.net import capture_net
from convoy.pipeline.optimize import optimize_model
from convoy.pipeline.plan_target import device_of, target_for
from convoy.plan import Plan
from convoy.program import CudaGraphProgram, Program, build_program
from convoy.program.cuda.recording import first_line
from convoy.settings import Settings
from convoy.torch_compile.dispatch_modes import modes_forbid_tuning, without_modes
from convoy.torch_compile.result_layout import ResultLayout, layout_of
from convoy.torch_compile.weight_sets import PackedWeights, WeightSets, version_of
from convoy.user_warning import warn_user

LONGEST_WAIT: Final = 8
"""Calls in a row that PyTorch computes because weights change, before the user is told."""


class GraphWithWeights(nn.Module):
    """A Dynamo graph whose parameters and buffers are its own again; called with the remaining inputs alone.

    Dynamo lifts them to inputs. Weights must be constants to be packed once.

    Args:
        graph_module: the graph.
        inputs: all its inputs.
        weights_at: which of them are weights.
    """

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], weights_at: Sequence[int]) -> None:
        super().__init__()
        self.graph_module = graph_module
        self._names = [f"p{index}" if index in set(weights_at) else "" for index in range(len(inputs))]
        for index in weights_at:
            self.register_buffer(f"p{index}", inputs[index].detach())

    def forward(self, *free: Any) -> Any:
        """The graph, called with what is no weight."""
        rest = iter(free)
        return self.graph_module(*(getattr(self, name) if name else next(rest) for name in self._names))


class InferenceGraph:
    """Runs a graph by the plan that was made in its first call, with the weights that each call hands over.

    Weights are found by the tensors' identity and by their version counters: those of another instance of a class, new
    parameters, and values that were changed in place are packed under the same plan. Where weights change every few calls,
    PyTorch runs the graph until they stay the same, and says so once.

    Args:
        graph_module: the graph; it writes to none of its inputs and returns no views of them.
        weights_at: inputs that are parameters or buffers.
        settings: what may be done.

    Attributes:
        plan: what it runs; None before the first call and where PyTorch runs it.
        sets: the sets of weights that are packed.
    """

    def __init__(self, graph_module: fx.GraphModule, weights_at: Sequence[int], settings: Settings) -> None:
        self._module, self._settings = graph_module, settings
        count = sum(node.op == "placeholder" for node in graph_module.graph.nodes)
        self._weights_at = tuple(weights_at)
        self._weights_of = _picker(weights_at)
        self._free_of = _picker(sorted(set(range(count)) - set(weights_at)))
        self._lock = threading.Lock()
        self._stock_only = False
        self._told = False
        self._layout: ResultLayout | None = None
        self._launches_early = False
        self._guess: PackedWeights | None = None
        self.plan: Plan | None = None
        self.sets = WeightSets()

    def __call__(self, *inputs: Any) -> Any:
        """Run once."""
        if self._stock_only or modes_forbid_tuning():
            return self._module(*inputs)
        free = self._free_of(inputs)
        # A GPU has its work before the weights are looked at, which takes tens of microseconds (ResNet-50 has 320 tensors). If
        # they turn out to be others, the result is thrown away.
        guess = self._guess
        early = None if guess is None else guess.run
        made = None if early is None else _launched(early, free)
        run = self._current(self._weights_of(inputs), inputs)
        if run is None:
            return self._module(*inputs)
        return made if run is early else _launched(run, free)

    def _current(self, weights: tuple[torch.Tensor, ...], inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """What computes with these weights; None where PyTorch does."""
        stamp, packed = version_of(weights), self.sets.of(weights)
        run = packed.run
        if run is not None and packed.is_current(stamp):
            self._guess = packed if self._launches_early else None
            return run
        with self._lock:
            if self._stock_only:
                return None
            if packed.run is not None and packed.is_current(stamp):
                return packed.run
            if not packed.is_due(stamp):
                self._tell(packed.left)
                return None
            run = self._packed(inputs)
            if run is not None:
                packed.pack(weights, stamp, run)
            return run

    def _tell(self, left: int) -> None:
        if self._told or left < LONGEST_WAIT:
            return
        self._told = True
        warn_user(
            "the weights of a compiled graph change every few calls: PyTorch runs it until they stay the same for"
            " some calls. In a training loop, compile the model that is trained, or evaluate many batches at a time"
        )

    def _packed(self, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Tune, or pack under the plan that is there; None where PyTorch runs the graph from now on."""
        try:
            with preserve_global_state(), without_modes():
                closed = GraphWithWeights(self._module, inputs, self._weights_at).eval()
                program = self._program(closed, self._free_of(inputs))
                if program.runnable is not None and self._layout is None:
                    with fixed_seed():
                        self._layout = layout_of(self._module(*inputs))
        except SelectionError:
            raise  # a budget or a promise that was asked for cannot be kept
        except Exception as error:  # whatever a user's operators, a compiler or a device make of it
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
            self._stock_only = True
            warn_user(f"torch.compile: PyTorch runs a graph as Dynamo caught it: {first_line(error)}")
            return None
        if program.runnable is None:
            self._stock_only = True
            return None
        # What a graph with static outputs made for other weights would be lost.
        self._launches_early = isinstance(program.runnable, CudaGraphProgram) and not self._settings.static_outputs
        layout = self._layout
        assert layout is not None

        def run(free: tuple[Any, ...]) -> list[Any]:
            return layout(program(free, {}))

        return run

    def _program(self, closed: GraphWithWeights, free: tuple[Any, ...]) -> Program:
        if self.plan is not None:
            try:
                return self._bind(self.plan, closed, free)
            except PlanError:
                pass  # other zeros in the weights, which a plan may rest on
        result = optimize_model(closed, free, name="a graph of torch.compile", settings=self._settings)
        self.plan = result.plan
        return result.program.programs[0]

    def _bind(self, plan: Plan, closed: GraphWithWeights, free: tuple[Any, ...]) -> Program:
        target = target_for(device_of(closed, free, {}))
        settings = dataclasses.replace(self._settings, numerics=plan.numerics, only_engines=(), deny_engines=())
        net = capture_net(plan.model, closed, free, {}, settings, target)
        return build_program(plan, net.captured, net.regions_by_nodes, target, self._settings)


def _launched(run: Callable[..., Any], free: tuple[Any, ...]) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        return run(free)


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Takes the values in some places of a sequence, in C where they are several."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])
