"""A program from one run of a model: every ATen call is recorded as it is made, with its module, instead of traced.

The first run has tensors without data (`torch.device("meta")`): it computes shapes alone, while a first run on a GPU waits some
seconds for cuDNN to choose and load its kernels. Where Python asks for the device, or strides of results depend on it, a second
run computes on the model's own device.

`torch.export` traces with fake tensors, which takes some seconds (ResNet-50: 2.2 s, on a CPU). A run that makes only calls that
`functionalize` knows gives the same calls in the same order. Where it does anything else, nothing is recorded, and the caller
exports: another operator, a tensor that no recorded call made, a value that Python reads out of a tensor, a state that the model
changes.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from convoy.capture.copies import copied_arguments, separate_copy
from convoy.capture.export import tracing
from convoy.capture.functionalize import rewrite_calls
from convoy.capture.recording.recorded_program import RecordedNesting, RecordedProgram, RecordedSignature
from convoy.capture.recording.recorder_modes import RecordCalls, RefuseReadValues
from convoy.capture.recording.simple_calls import SPLITS, SimpleCalls
from convoy.capture.recording.without_data import result_without_data, tensors_without_data, without_data
from convoy.capture.state.attribute_snapshot import AttributeSnapshot
from convoy.engines.torch_flags import unsearched_convolutions
from convoy.typed_torch import named_modules


class _NotRecordableError(Exception):
    """The run does something that a record of its calls would not show."""


class _NeedsDataError(_NotRecordableError):
    """A run without data may take another way than one on the device, or make results with other strides."""


def recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedProgram | None:
    """Run a copy of a model once in evaluation mode and record its calls; None where only `torch.export` may trace it.

    Args:
        model: not changed.
        args: tensors, numbers and None; not changed.
        kwargs: must be empty.
    """
    try:
        names = _argument_names(model, args, kwargs)
        tensors = _ordinary_state(model)
        try:
            return _recorded(model, args, names, tensors, data=False)
        except _NeedsDataError:
            return _recorded(model, args, names, tensors, data=True)
    except Exception:  # the forward is the user's, and torch's private parts change: the exporter names the fault
        return None


def _recorded(
    model: nn.Module, args: tuple[Any, ...], names: Sequence[str], tensors: dict[str, torch.Tensor], *, data: bool
) -> RecordedProgram | None:
    """The program of one run, on the model's device or without data; None if the run changes an attribute.

    Raises:
        _NeedsDataError: a run without data may differ from one on the device.
        _NotRecordableError: the run does what a record would not show.
    """
    copied = separate_copy(model, tensors=None if data else tensors_without_data(model))
    given = copied_arguments(args, {})[0] if data else tuple(map(without_data, args))
    with tracing(copied), torch.no_grad():
        before = AttributeSnapshot(copied)
        run = _Run(copied, tensors, (args, given), names, data=data)
        try:
            outputs = run.outputs()
        except Exception as error:  # everything: a model's own code may raise anything
            if data or (run.refused and not run.needs_data):
                raise
            raise _NeedsDataError from error  # also for an error of the run itself: the device may know better
        if run.needs_data:  # and the model caught the error that said so
            raise _NeedsDataError
        if before.has_changed():
            return None
    return run.program(outputs, tensors)


_CONSTANTS: Final = (bool, int, float, str, type(None))


def _argument_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The parameter of `forward` of each argument.

    Raises:
        _NotRecordableError: an argument is nested, named, or goes into `*args`.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    plain = all(type(arg) is torch.Tensor or type(arg) in _CONSTANTS for arg in args)
    if kwargs or not plain or len(args) > len(parameters):
        raise _NotRecordableError
    return [parameter.name for parameter in parameters[: len(args)]]


def _ordinary_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name.

    Raises:
        _NotRecordableError: a module has two names or is compiled, or a tensor is of a class of its own.
    """
    modules = list(model.modules())
    again = sum(1 for _ in cast("Any", model).named_modules(remove_duplicate=False))
    if again != len(modules) or any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise _NotRecordableError
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    if any(type(tensor) not in kinds or tensor.layout != torch.strided for tensor in found.values()):
        raise _NotRecordableError
    return found


class _Run:
    """Records one run of a model.

    Args:
        model: a copy in evaluation mode.
        state: the original's parameters and buffers by name.
        args: its arguments, and copies of them that the run gets.
        names: the arguments' names.
        data: whether the copies have data; else they and the model's tensors are on the meta device.

    Attributes:
        refused: whether the run does what a record would not show.
        needs_data: whether that may be otherwise on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        state: dict[str, torch.Tensor],
        args: tuple[tuple[Any, ...], tuple[Any, ...]],
        names: Sequence[str],
        *,
        data: bool,
    ) -> None:
        self._model, self._data = model, data
        self._args, self._given = args
        self._graph = fx.Graph()
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        self._calls = SimpleCalls()
        self._path = [""]
        self._kept: list[InputSpec] = []
        self.refused = self.needs_data = False
        buffers = dict(model.named_buffers())
        for kind, held in ((InputKind.PARAMETER, dict(model.named_parameters())), (InputKind.BUFFER, buffers)):
            for name, tensor in held.items():
                node = self._placeholder(f"{kind.name[0].lower()}_{name.replace('.', '_')}", tensor)
                node.meta["val"] = state[name]
                self._kept.append(InputSpec(kind, TensorArgument(node.name), name, persistent=True))
        for name, arg, copied in zip(names, *args, strict=True):
            spec = TensorArgument(name) if isinstance(arg, torch.Tensor) else ConstantArgument(name, arg)
            node = self._placeholder(name, copied)
            node.name, node.meta["val"] = name, arg
            self._kept.append(InputSpec(InputKind.USER_INPUT, spec, None))

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        node = self._graph.placeholder(name)
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = (weakref.ref(value), node)
        return node

    def outputs(self) -> Any:
        """Run the model, and return what it returns.

        Raises:
            _NotRecordableError: the run does what a record would not show.
        """
        hooks = [hook for name, module in named_modules(self._model) for hook in self._marks(name, module)]
        device = next((arg.device for arg in self._args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
        try:
            with (
                unsearched_convolutions(device),
                RefuseReadValues(self.refuse, None if self._data else self._needs),
                enable_python_dispatcher(),
                RecordCalls(self.call),
            ):
                return self._model(*self._given)
        finally:
            for hook in hooks:
                hook.remove()

    def _marks(self, name: str, module: nn.Module) -> tuple[Any, Any]:
        """Hooks that keep the path of the module that runs."""

        def enter(*_: Any) -> None:
            self._path.append(name)

        def leave(*_: Any) -> None:
            self._path.pop()

        return module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and record it."""
        node = self._graph.call_function(
            func, tuple(map(self._used, args)), {name: self._used(arg) for name, arg in kwargs.items()}
        )
        plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if self.refused or not plain or torch.is_autocast_enabled("cuda") or not self._calls.accepts(node):
            self.refuse()
        made = self._made(func, args, kwargs)
        node.meta["nn_module_stack"] = {self._path[-1]: (self._path[-1], "")}
        if func not in SPLITS:
            self._keep(made, node)
            return made
        for index, part in enumerate(made):
            self._keep(part, self._graph.call_function(operator.getitem, (node, index)))
        node.meta["val"] = [_shape_of(part) for part in made]
        return made

    def _keep(self, made: Any, node: fx.Node) -> None:
        """Remember which call made a tensor."""
        if type(made) is not torch.Tensor:
            self.refuse()
        node.meta["val"] = _shape_of(made)
        self._nodes[id(made)] = (weakref.ref(made), node)

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator. If it fails for want of data, `needs_data` says so; the model may catch the error."""
        if self._data:
            return func(*args, **kwargs)
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # its result's strides are the kernel's
            self._needs()
        try:
            return result_without_data(func, args, kwargs)
        except Exception:  # everything: shape functions without data raise errors of their own
            self.needs_data = True
            raise

    def _used(self, value: Any) -> Any:
        """The nodes of a call's operands."""
        if isinstance(value, torch.Tensor):
            return self._node(value)
        if isinstance(value, (tuple, list)):
            return [self._used(item) for item in cast("Sequence[Any]", value)]
        return value

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        kept, node = self._nodes.get(id(tensor), (None, None))
        if kept is None or node is None or kept() is not tensor:
            self.refuse()
        return cast("fx.Node", node)

    def _needs(self) -> None:
        """Give up a run without data."""
        self.needs_data = True
        raise _NeedsDataError

    def refuse(self) -> None:
        """Give up, also where the model catches the error."""
        self.refused = True
        raise _NotRecordableError

    def program(self, outputs: Any, state: dict[str, torch.Tensor]) -> RecordedProgram:
        """The program of the recorded calls, on the original's parameters and buffers."""
        leaves, out_spec = pytree.tree_flatten(outputs)
        if self.refused or any(type(leaf) is not torch.Tensor and type(leaf) not in _CONSTANTS for leaf in leaves):
            raise _NotRecordableError
        if not self._data and any(isinstance(leaf, torch.Tensor) and not _is_plain(leaf) for leaf in leaves):
            raise _NeedsDataError
        returned = [self._node(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._graph.output(tuple(returned))
        rewrite_calls(self._graph)
        specs = tuple(
            OutputSpec(
                OutputKind.USER_OUTPUT,
                TensorArgument(leaf.name) if isinstance(leaf, fx.Node) else ConstantArgument("", leaf),
                None,
            )
            for leaf in returned
        )
        in_spec = pytree.tree_flatten((self._args, dict[str, Any]()))[1]
        return RecordedProgram(
            self._graph, RecordedSignature(tuple(self._kept), specs), state, RecordedNesting(in_spec, out_spec)
        )


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_plain(result: torch.Tensor) -> bool:
    """Whether a result has the same strides on every device. Those of images depend on what computes them."""
    return result.dim() < 4 and result.is_contiguous()
