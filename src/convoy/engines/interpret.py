"""Runs a graph by PyTorch's own operators, node by node: the baseline's way, and the oracle's in float64.

`compile_graph` resolves everything once (operators, arguments, slots), so that a call is a loop over small closures. Views
of a tensor in another memory format become reshapes, so results do not depend on the memory format of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch.nn.functional import linear

from convoy.errors import InputError
from convoy.graph.ir import AVG_POOL_BACKWARD, GRADIENTS, LAYERS, Arg, Graph, Node, Ref, Symbol
from convoy.graph.layers import gradient_problem
from convoy.graph.text import print_arg
from convoy.graph.verify import verify

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
"""Convoy's name of a dtype → torch's."""

_SYMBOLS: Final[Mapping[str, Any]] = {
    **{f"dtype.{name}": dtype for name, dtype in DTYPES.items()},
    "layout.strided": torch.strided,
    "memory_format.nchw": torch.contiguous_format,
    "memory_format.nhwc": torch.channels_last,
    "memory_format.preserve": torch.preserve_format,
}

_DEVICE: Final = "device.inputs"

# torch.* entry points of the same arguments: their argument parser costs about half of what torch.ops' does (1.1 against
# 1.8 µs a call for relu, 1.2 against 2.7 for cat, on one core of a 2-core AVX2 machine).
_QUICK: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.add.Tensor": torch.add,
    "aten.addcmul.default": torch.addcmul,
    "aten.cat.default": torch.cat,
    "aten.max_pool2d.default": torch.max_pool2d,
    "aten.mul.Tensor": torch.mul,
    "aten.relu.default": torch.relu,
    "aten.sigmoid.default": torch.sigmoid,
}

# Reshape copies where the memory format allows no view. A graph's views are views of values, not of memory.
_VIEWS: Final[Mapping[str, str]] = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a kernel of PyTorch's would run on a GPU; not while a graph is traced."""
    return type(tensor) is torch.Tensor and tensor.is_cuda


def _average_gradient(
    dy: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Sequence[int], *rest: Any
) -> torch.Tensor:
    """The gradient of an average pooling, in nchw where PyTorch reads wrong windows.

    On a GPU its kernel for channels_last leaves the padding out (pytorch/pytorch#188344, seen with 2.11): wrong gradients, and no
    word of it.
    """
    if any(padding) and _is_on_gpu(dy):
        dy, x = dy.contiguous(), x.contiguous()
    return torch.ops.aten.avg_pool2d_backward.default(dy, x, kernel, stride, padding, *rest)


_MENDED: Final[Mapping[str, Callable[..., Any]]] = {AVG_POOL_BACKWARD: _average_gradient}
"""Operators that some PyTorch gets wrong, and what is run instead."""

_STRIDED: Final = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
"""They read memory by strides, so their result would depend on the memory format of their input."""

Slots = list[Any]
_Sizes = tuple[int, int, list[None]]
_Step = Callable[[Slots], None]


class GraphFunction:
    """A graph as a function of tensors. Holds no tensors; safe to call from several threads at once.

    It records no gradient of its own accord and changes no grad mode: call it under `torch.no_grad()`.
    """

    def __init__(self, steps: Sequence[tuple[_Step, tuple[int, ...]]], outputs: tuple[int, ...], sizes: _Sizes) -> None:
        self._steps = tuple(steps)
        self._outputs = outputs
        self._sizes = sizes

    def __call__(
        self, args: Sequence[torch.Tensor], constants: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Run every node.

        Args:
            args: the graph's inputs, in order; any memory format; all floating ones may be float64 instead.
            constants: the graph's constants in the order of `Graph.constants()`, of the inputs' precision.

        Returns:
            The graph's outputs, in order. They may be views of the arguments where the operators make views.

        Raises:
            InputError: a wrong number of tensors.
        """
        inputs, held, rest = self._sizes
        if len(args) != inputs or len(constants) != held:
            raise InputError("args, constants", (len(args), len(constants)), f"{inputs} inputs and {held} constants")
        slots: Slots = [*args, *constants, *rest]
        for step, frees in self._steps:
            step(slots)
            for slot in frees:
                slots[slot] = None
        return tuple([slots[slot] for slot in self._outputs])


def compile_graph(graph: Graph, *, double: bool = False) -> GraphFunction:
    """Resolve a graph once into a function.

    Args:
        graph: any graph that `verify` accepts.
        double: read every floating dtype named in the graph as float64: for the oracle, called with float64 tensors.

    Raises:
        InputError: a malformed graph, an operator that this PyTorch does not have, or one that is not functional.
    """
    verify(graph)
    names = [*graph.inputs, *(value.name for value in graph.constants())]
    names += [output for node in graph.nodes for output in node.outputs if output]
    slots = {name: index for index, name in enumerate(names)}
    last_use = {slots[name]: index for index, node in enumerate(graph.nodes) for name in node.refs()}
    kept = {slots[name] for name in graph.outputs}
    steps: list[tuple[_Step, tuple[int, ...]]] = []
    for index, node in enumerate(graph.nodes):
        touched = dict.fromkeys(slots[name] for name in node.refs())
        frees = tuple(slot for slot in touched if last_use[slot] == index and slot not in kept)
        steps.append((_Compiler(graph, node, slots, double).step(), frees))
    first = len(graph.inputs) + len(graph.constants())
    sizes = (len(graph.inputs), len(graph.constants()), [None] * (len(names) - first))
    return GraphFunction(steps, tuple(slots[name] for name in graph.outputs), sizes)


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The function behind `aten.NAME.OVERLOAD`.

    Raises:
        InputError: no such overload, one that writes to its arguments, or one whose result depends on strides.
    """
    op = _VIEWS.get(op, op)
    namespace, name, overload = [*op.split("."), "", ""][:3]
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" and name.isidentifier() else None
    found = getattr(packet, overload, None) if overload in (packet.overloads() if packet is not None else ()) else None
    if found is None:
        raise InputError("operator", op, f"an ATen overload that PyTorch {torch.__version__} has")
    if found._schema.is_mutable:
        raise InputError("operator", op, "an operator that makes new values, and overwrites none")
    if name in _STRIDED:
        raise InputError("operator", op, "an operator whose result does not depend on its input's strides")
    return _MENDED.get(op) or _QUICK.get(op, found)


def _returns_many(op: str) -> bool:
    """Whether an operator gives a sequence of tensors; one such as a split may hold a single one."""
    if op in LAYERS:
        return False
    _, name, overload = _VIEWS.get(op, op).split(".")
    returns = getattr(getattr(torch.ops.aten, name), overload)._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"


class _Compiler:
    """Turns one node into a closure over slot numbers."""

    def __init__(self, graph: Graph, node: Node, slots: Mapping[str, int], double: bool) -> None:
        self.graph, self.node, self.slots, self.double = graph, node, slots, double

    def step(self) -> _Step:
        """The closure: reads its arguments from the slots and writes its results there."""
        node = self.node
        if node.op == "conv2d":
            return self._convolution()
        if node.op in GRADIENTS:
            return self._gradient()
        if _is_channel_affine(self.graph, node):
            return self._multiply_add()
        function = linear if node.op == "linear" else resolve(node.op)
        if any(_mentions_device(arg) for arg in (*node.args, *(arg for _, arg in node.kwargs))):
            call = self._call_on_device(function)
        else:
            call = self._call(function)
        return self._store(call)

    def _convolution(self) -> _Step:
        x, weight, bias, stride, padding, dilation, groups = self.node.args
        assert isinstance(x, Ref)
        assert isinstance(weight, Ref)
        source, kernel, result = self.slots[x.name], self.slots[weight.name], self.slots[self.node.outputs[0]]
        convolve, sizes = torch.conv2d, (stride, padding, dilation, groups)
        if isinstance(bias, Ref):
            shift = self.slots[bias.name]

            def run_biased(slots: Slots) -> None:
                slots[result] = convolve(slots[source], slots[kernel], slots[shift], *sizes)

            return run_biased

        def run(slots: Slots) -> None:
            slots[result] = convolve(slots[source], slots[kernel], None, *sizes)

        return run

    def _gradient(self) -> _Step:
        """One direction of ATen's convolution_backward; of the operand whose gradient is asked for only the sizes are read."""
        first, second = (self.slots[name] for name in self.node.refs())
        result = self.slots[self.node.outputs[0]]
        problem = gradient_problem(self.graph, self.node)
        _, _, _, stride, padding, dilation, groups = self.node.args
        backward = torch.ops.aten.convolution_backward.default
        sizes = (stride, padding, dilation, False, (0, 0), groups)
        x_shape, weight_shape, biases = problem.x_spec.shape, problem.weight_spec.shape, [problem.k]

        def run_dgrad(slots: Slots) -> None:
            dy, weight = slots[first], slots[second]
            x = dy.new_empty(1).expand(x_shape)
            slots[result] = backward(dy, x, weight, biases, *sizes, (True, False, False))[0]

        def run_wgrad(slots: Slots) -> None:
            x, dy = slots[first], slots[second]
            weight = dy.new_empty(1).expand(weight_shape)
            slots[result] = backward(dy, x, weight, biases, *sizes, (False, True, False))[1]

        return run_dgrad if problem.direction == "dgrad" else run_wgrad

    def _multiply_add(self) -> _Step:
        """A per-channel `shift + x * scale`, which is what a batch norm that cannot be folded becomes.

        ATen's addcmul is the fastest form in channels_last, but not vectorised on a CPU where the channel is not the
        innermost side: there a product and an addition in place take a third of its time ([1,256,56,56], one AVX2 core:
        batch_norm 131 µs, addcmul 356, in two steps 114; in channels_last 211, 79, 140).
        """
        shift, x, scale = (self._slot(arg) for arg in self.node.args)
        result = self.slots[self.node.outputs[0]]

        def run(slots: Slots) -> None:
            base, value, factor = slots[shift], slots[x], slots[scale]
            if value.is_cuda or value.is_contiguous(memory_format=torch.channels_last):
                slots[result] = torch.addcmul(base, value, factor)
            else:
                slots[result] = torch.mul(value, factor).add_(base)

        return run

    def _call(self, function: Callable[..., Any]) -> Callable[[Slots], Any]:
        """The call of a function with everything but the slots bound."""
        kwargs = {name: self._constant(arg) for name, arg in self.node.kwargs if not _has_refs(arg)}
        late = [(name, self._loader(arg)) for name, arg in self.node.kwargs if _has_refs(arg)]
        args = self.node.args
        refs = [isinstance(arg, Ref) for arg in args]
        rest = [self._constant(arg) for arg in args[1:]] if not any(_has_refs(arg) for arg in args[1:]) else None
        if not late and args and refs[0] and rest is not None:
            return _unary(function, self._slot(args[0]), rest, kwargs)
        if not late and not kwargs and len(args) == 2 and all(refs):
            return _binary(function, self._slot(args[0]), self._slot(args[1]))
        loaders = [self._loader(arg) for arg in args]

        def call(slots: Slots) -> Any:
            named = {name: load(slots) for name, load in late}
            return function(*[load(slots) for load in loaders], **kwargs, **named)

        return call

    def _call_on_device(self, function: Callable[..., Any]) -> Callable[[Slots], Any]:

        node = self.node
        plain = Node(
            node.name,
            node.op,
            tuple(None if _mentions_device(arg) else arg for arg in node.args),
            tuple((name, arg) for name, arg in node.kwargs if not _mentions_device(arg)),
            node.outputs,
        )
        call_without = _Compiler(self.graph, plain, self.slots, self.double)
        loaders = [call_without._loader(arg) for arg in plain.args]
        named = [(name, call_without._loader(arg)) for name, arg in plain.kwargs]
        positions = [index for index, arg in enumerate(node.args) if _mentions_device(arg)]
        keywords = [name for name, arg in node.kwargs if _mentions_device(arg)]

        def call(slots: Slots) -> Any:
            device = next((s.device for s in slots if isinstance(s, torch.Tensor)), None)
            args = [load(slots) for load in loaders]
            for position in positions:
                args[position] = device
            kwargs = {name: load(slots) for name, load in named} | dict.fromkeys(keywords, device)
            return function(*args, **kwargs)

        return call

    def _store(self, call: Callable[[Slots], Any]) -> _Step:
        outputs = self.node.outputs
        if len(outputs) == 1 and not _returns_many(self.node.op):
            only = self.slots[outputs[0]]

            def store(slots: Slots) -> None:
                slots[only] = call(slots)

            return store
        places = [(index, self.slots[name]) for index, name in enumerate(outputs) if name]

        def store_each(slots: Slots) -> None:
            made = call(slots)
            for index, slot in places:
                slots[slot] = made[index]

        return store_each

    def _slot(self, arg: Arg) -> int:
        assert isinstance(arg, Ref)
        return self.slots[arg.name]

    def _loader(self, arg: Arg) -> Callable[[Slots], Any]:
        if isinstance(arg, Ref):
            slot = self.slots[arg.name]
            return lambda slots: slots[slot]
        if isinstance(arg, tuple) and _has_refs(arg):
            if all(isinstance(item, Ref) for item in arg):
                places = [self._slot(item) for item in arg]
                return lambda slots: [slots[slot] for slot in places]
            loaders = [self._loader(item) for item in arg]
            return lambda slots: [load(slots) for load in loaders]
        value = self._constant(arg)
        return lambda _: value

    def _constant(self, arg: Arg) -> Any:
        """An argument without values in it, as torch takes it."""
        if isinstance(arg, tuple):
            return [self._constant(item) for item in arg]
        if isinstance(arg, Symbol):
            value = _SYMBOLS.get(arg.text)
            if value is None:
                raise InputError(self.node.name, print_arg(arg), "a symbol that there is")
            wide = self.double and isinstance(value, torch.dtype) and value.is_floating_point
            return torch.float64 if wide else value
        return arg


def _is_channel_affine(graph: Graph, node: Node) -> bool:
    """Whether a node is `shift + x * scale` of a 4-D x, with shift and scale of [1, c, 1, 1]."""
    if node.op != "aten.addcmul.default" or len(node.args) != 3 or node.kwargs:
        return False
    shift, x, scale = (graph.values[name].spec for name in node.refs())
    sides = x.shape
    return len(sides) == 4 and shift == scale and shift.dtype == x.dtype and shift.shape == (1, sides[1], 1, 1)


def _unary(function: Callable[..., Any], slot: int, rest: list[Any], kwargs: dict[str, Any]) -> Callable[[Slots], Any]:
    if not rest and not kwargs:
        return lambda slots: function(slots[slot])
    if not kwargs:
        return lambda slots: function(slots[slot], *rest)
    return lambda slots: function(slots[slot], *rest, **kwargs)


def _binary(function: Callable[..., Any], first: int, second: int) -> Callable[[Slots], Any]:
    return lambda slots: function(slots[first], slots[second])


def _has_refs(arg: Arg) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(map(_has_refs, arg)))


def _mentions_device(arg: Arg) -> bool:
    return isinstance(arg, Symbol) and arg.text == _DEVICE
