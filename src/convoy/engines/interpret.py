"""Runs a graph by PyTorch's own operators, node by node: the baseline's way, and the oracle's in float64.

`compile_graph` resolves everything once (operators, arguments, slots), so that a call is a loop over small closures. Views
of a tensor in another memory format become reshapes, so results do not depend on the memory format of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from convoy.engines.interpreter_calls import (
    Slots,
    binary,
    has_refs,
    in_memory_order,
    is_fused_attention,
    mentions_device,
    unary,
    widened,
    with_contiguous_rows,
)
from convoy.engines.torch_operators import SYMBOLS, resolve, returns_many
from convoy.errors import InputError
from convoy.graph.ir import CONVOLUTIONS, GRADIENTS, VOLUME_GRADIENTS, Arg, Graph, Node, Ref, Symbol
from convoy.graph.layers import gradient3d_problem, gradient_problem
from convoy.graph.randomness import split_memory_order
from convoy.graph.text import print_arg
from convoy.graph.verify import verify

_Sizes = tuple[int, int, list[None]]
_Step = Callable[[Slots], None]


class GraphFunction:
    """A graph as a function of tensors. It holds no tensors and may be called from several threads at once.

    It does not change the grad mode: call it under `torch.no_grad()`, unless gradients are wanted.
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


class _Compiler:
    """Turns one node into a closure over slot numbers."""

    def __init__(self, graph: Graph, node: Node, slots: Mapping[str, int], double: bool) -> None:
        self.graph, self.slots, self.double = graph, slots, double
        self.node, self.order = split_memory_order(graph, node)

    def step(self) -> _Step:
        """The closure: reads its arguments from the slots and writes its results there."""
        node = self.node
        if node.op in CONVOLUTIONS:
            return self._convolution()
        if node.op in GRADIENTS:
            return self._gradient()
        if _is_channel_affine(self.graph, node):
            return self._multiply_add()
        function = linear if node.op == "linear" else resolve(node.op)
        if self.order:
            function = in_memory_order(function, self.order)
        if is_fused_attention(node.op):
            function = with_contiguous_rows(function)
        if any(mentions_device(arg) for arg in (*node.args, *(arg for _, arg in node.kwargs))):
            call = self._call_on_device(function)
        else:
            call = self._call(function)
        return self._store(call)

    def _convolution(self) -> _Step:
        x, weight, bias, stride, padding, dilation, groups = self.node.args
        assert isinstance(x, Ref)
        assert isinstance(weight, Ref)
        source, kernel, result = self.slots[x.name], self.slots[weight.name], self.slots[self.node.outputs[0]]
        convolve: Callable[..., torch.Tensor] = torch.conv2d if self.node.op == "conv2d" else torch.conv3d
        sizes = (stride, padding, dilation, groups)
        if isinstance(bias, Ref):
            shift = self.slots[bias.name]

            def run_biased(slots: Slots) -> None:
                slots[result] = convolve(slots[source], slots[kernel], slots[shift], *sizes)

            return run_biased

        def run(slots: Slots) -> None:
            slots[result] = convolve(slots[source], slots[kernel], None, *sizes)

        return run

    def _gradient(self) -> _Step:
        """One direction of ATen's convolution_backward, which reads only the sizes of the operand whose gradient is computed."""
        first, second = (self.slots[name] for name in self.node.refs())
        result = self.slots[self.node.outputs[0]]
        volumes = self.node.op in VOLUME_GRADIENTS
        problem = (gradient3d_problem if volumes else gradient_problem)(self.graph, self.node)
        _, _, _, stride, padding, dilation, groups = self.node.args
        backward = torch.ops.aten.convolution_backward.default
        sizes = (stride, padding, dilation, False, (0, 0, 0) if volumes else (0, 0), groups)
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
        """A per-channel `shift + x * scale`: a batch norm that cannot be folded.

        ATen's addcmul is fastest in channels_last. On a CPU it is not vectorised if the channel is not the innermost
        dimension; there a product and an addition in place take a third of its time ([1,256,56,56], one AVX2 core: batch_norm
        131 µs, addcmul 356, two steps 114; in channels_last 211, 79, 140).
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
        kwargs = {name: self._constant(arg) for name, arg in self.node.kwargs if not has_refs(arg)}
        late = [(name, self._loader(arg)) for name, arg in self.node.kwargs if has_refs(arg)]
        args = self.node.args
        refs = [isinstance(arg, Ref) for arg in args]
        rest = [self._constant(arg) for arg in args[1:]] if not any(has_refs(arg) for arg in args[1:]) else None
        if not late and args and refs[0] and rest is not None:
            return unary(function, self._slot(args[0]), rest, kwargs)
        if not late and not kwargs and len(args) == 2 and all(refs):
            return binary(function, self._slot(args[0]), self._slot(args[1]))
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
            tuple(None if mentions_device(arg) else arg for arg in node.args),
            tuple((name, arg) for name, arg in node.kwargs if not mentions_device(arg)),
            node.outputs,
        )
        call_without = _Compiler(self.graph, plain, self.slots, self.double)
        loaders = [call_without._loader(arg) for arg in plain.args]
        named = [(name, call_without._loader(arg)) for name, arg in plain.kwargs]
        positions = [index for index, arg in enumerate(node.args) if mentions_device(arg)]
        keywords = [name for name, arg in node.kwargs if mentions_device(arg)]

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
        if self.double:  # operators that create numbers, such as `eye`, use PyTorch's default dtype
            call = widened(call)
        if len(outputs) == 1 and not returns_many(self.node.op):
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
        if isinstance(arg, tuple) and has_refs(arg):
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
            value = SYMBOLS.get(arg.text)
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
