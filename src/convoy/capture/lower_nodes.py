"""The calls of an ATen graph, one by one, to nodes of a draft: what exported programs and training graphs have in common."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import fx

from convoy.capture.draft import Draft, dtype_name, spec_of
from convoy.capture.node_names import is_bookkeeping
from convoy.capture.structure import ConstantLeaf
from convoy.engines.torch_operators import resolve
from convoy.errors import CaptureError, InputError
from convoy.graph.ir import Arg, Node, Ref, Symbol
from convoy.graph.randomness import MEMORY_ORDER, RANDOM, memory_order
from convoy.narrowing import is_sequence

_MEMORY_FORMATS = {
    torch.contiguous_format: "memory_format.nchw",
    torch.channels_last: "memory_format.nhwc",
    torch.preserve_format: "memory_format.preserve",
}

# What they say holds for every graph: strided tensors of the inputs' device in ordinary memory.
_NEEDLESS_KEYWORDS = frozenset({"pin_memory", "layout", "non_blocking"})


class NodeNames(Protocol):
    """Gives calls their names."""

    def name(self, node: fx.Node) -> str:
        """The name wanted for a call; it need not be free."""
        ...


class NodeLowering:
    """Lowers calls into a draft.

    Args:
        device: where the model's tensors are.
        namer: names the calls.

    Attributes:
        draft: what is made.
        found: what each node of the fx graph became: a value, several, or something that is no tensor.
    """

    def __init__(self, device: torch.device, namer: NodeNames) -> None:
        self.draft = Draft(device=device)
        self.namer = namer
        self.found: dict[fx.Node, str | tuple[str, ...] | ConstantLeaf] = {}

    def input(self, node: fx.Node, wanted: str, given: torch.Tensor | None = None) -> None:
        """Make a placeholder an input of the draft, of the spec of the tensor given for it where there is one."""
        self.found[node] = self._define(wanted, node.meta["val"] if given is None else given)
        self.draft.inputs.append(str(self.found[node]))

    def constant(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Make a tensor that the traced graph holds itself, such as `torch.tensor([1.0, 2.0])` in forward, a constant."""
        spec_of(tensor, node.name)
        self.found[node] = self.draft.add_constant(node.name, tensor.to(self.draft.device))

    def _define(self, wanted: str, value: Any) -> str:
        name = self.draft.unique(wanted)
        self.draft.specs[name] = spec_of(value, name)
        return name

    def call(self, node: fx.Node) -> None:
        """Add what a call computes.

        Raises:
            CaptureError: an operator that is not ATen's, or a result that depends on data.
        """
        if node.target is operator.getitem:
            source, index = node.args
            made = self.found[source] if isinstance(source, fx.Node) else ()
            assert isinstance(made, tuple)
            assert isinstance(index, int)
            self.found[node] = made[index]
            return
        if is_bookkeeping(node):
            return
        target, operation = str(node.target), node.target
        if not isinstance(operation, torch._ops.OpOverload) or operation.namespace != "aten":
            raise CaptureError(f"the model calls {target}, which is no ATen operator")
        try:
            resolve(target)
        except InputError as error:
            raise CaptureError(f"the model calls {target}: expected {error.expected}") from error
        name = self.draft.unique(self.namer.name(node))
        outputs = self._results(node, name)
        kwargs = tuple(
            (k, self._arg(v))
            for k, v in cast("dict[str, Any]", node.kwargs).items()
            if v is not None and k not in _NEEDLESS_KEYWORDS
        )
        made = Node(name, target, tuple(map(self._arg, cast("tuple[Any, ...]", node.args))), kwargs, outputs)
        self.draft.nodes.append(_with_memory_order(made, node))

    def _results(self, node: fx.Node, name: str) -> tuple[str, ...]:
        """Define what a call makes. An output that is no tensor has the empty name: nothing may read it."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            self.draft.specs[name] = spec_of(value, name)
            self.found[node] = name
            return (name,)
        if not is_sequence(value):
            raise CaptureError(f"{name} makes a {type(value).__name__}, which depends on data ({node.target})")
        names: list[str] = []
        for index, part in enumerate(value):
            wanted = name if index == 0 else f"{name}.{index}"
            names.append(self._define(wanted, part) if isinstance(part, torch.Tensor) else "")
        if "_native_batch_norm" in str(node.target) or "native_batch_norm.default" in str(node.target):
            self._correct_saved_statistics(node, names)
        self.found[node] = tuple(names)
        return tuple(names)

    def _correct_saved_statistics(self, node: fx.Node, names: Sequence[str]) -> None:
        """Give the saved mean and deviation of a half-precision batch norm the dtype that they really have.

        PyTorch's fake tensors (2.11 to 2.13) say the input's; its kernels save fp32 beside fp32 parameters, and on a GPU always.
        """
        parameters = [arg.meta["val"].dtype for arg in node.args[1:5] if isinstance(arg, fx.Node)]
        if torch.float32 in parameters or self.draft.device.type == "cuda":
            for name in names[1:3]:
                if self.draft.specs[name].dtype in ("fp16", "bf16"):
                    self.draft.specs[name] = replace(self.draft.specs[name], dtype="fp32")

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return self._used(arg)
        if is_sequence(arg):
            return tuple(self._arg(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return Symbol(f"dtype.{dtype_name(arg)}")
        if isinstance(arg, torch.memory_format) and arg in _MEMORY_FORMATS:
            return Symbol(_MEMORY_FORMATS[arg])
        if isinstance(arg, torch.device):
            return Symbol("device.inputs")
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise CaptureError(
            f"the model passes {arg!r} to an operator: a {type(arg).__name__}, which a graph cannot hold"
        )

    def _used(self, node: fx.Node) -> Arg:
        found = self.found[node]
        if isinstance(found, ConstantLeaf):
            return self._arg(found.value)
        if isinstance(found, tuple):
            return tuple(Ref(name) for name in found)
        if not found:
            raise CaptureError(f"the model reads {node.name}, which is no tensor")
        return Ref(found)


def _with_memory_order(made: Node, node: fx.Node) -> Node:
    """A node that draws random numbers, with the order in which PyTorch draws them where that must be said."""
    first = node.args[0] if node.args and made.op.split(".")[1] in RANDOM else None
    value = first.meta["val"] if isinstance(first, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return made
    order = memory_order(value.shape, value.stride())
    return made if order is None else replace(made, kwargs=(*made.kwargs, (MEMORY_ORDER, order)))
