"""Recognise the layers that Convoy computes itself: `conv2d` and `linear` nodes in place of ATen's several forms."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from convoy.capture.draft import Draft
from convoy.errors import InputError
from convoy.graph.ir import Arg, Node, Ref
from convoy.problem import ConvProblem, LinearProblem, TensorSpec

_PAIR = tuple[int, int]


def recognise_layers(draft: Draft) -> None:
    """Rewrite 2-D convolutions and matrix-times-weight products.

    before: %y = aten.conv2d.default(%x, %w, %b, (2, 2))
    -->
    after:  %y = conv2d(%x, %w, %b, (2, 2), (0, 0), (1, 1), 1)

    before: %y = aten.addmm.default(%b, %x, %t)        constant %t: fp32[c,k]
    -->
    after:  %y = linear(%x, %w, %b)                    constant %w: fp32[k,c]

    The leading dimensions of a linear layer's x are rows. Transposed, 1-D and 3-D convolutions stay, as do mixed dtypes, sizes
    that `ConvProblem` refuses, and linear layers of 4-D values (and of 5-D ones beside volumes): those would have a memory
    format. An image without a batch gets one for the convolution.
    """
    nodes = draft.nodes
    draft.nodes = []
    ranks = (0, 1, 4, 5) if any(node.op.startswith("conv3d") for node in nodes) else (0, 1, 4)
    for node in nodes:
        draft.nodes += _convolution(draft, node) or _linear(draft, node, ranks) or [node]


def _arguments(node: Node, names: tuple[str, ...], defaults: tuple[Arg, ...]) -> list[Arg]:
    """A node's arguments in the order of `names`, however they were given."""
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return [given.get(name, default) for name, default in zip(names, defaults, strict=True)]


def _convolution(draft: Draft, node: Node) -> list[Node]:
    if node.op in ("aten.conv2d.default", "aten.conv2d.padding"):
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        default: Arg = "valid" if node.op.endswith("padding") else 0
        x, weight, bias, stride, padding, dilation, groups = _arguments(
            node, names, (None, None, None, 1, default, 1, 1)
        )
    elif node.op == "aten.convolution.default":
        x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
        if transposed:
            return []
    else:
        return []
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or len(draft.specs[weight.name].shape) != 4:
        return []
    if len(draft.specs[x.name].shape) == 3:
        return _unbatched(draft, node, x)
    strides, dilations = _pair(stride), _pair(dilation)
    before: list[Node] = []
    if isinstance(padding, str):
        pads, before, x = _pad_as_named(draft, node, x, weight, padding, dilations)
    else:
        pads = _pair(padding)
    args = (x, weight, bias, strides, pads, dilations, groups)
    if not _fits(draft, node, args):
        return []
    return [*before, Node(node.name, "conv2d", args, (), node.outputs)]


def _pad_as_named(
    draft: Draft, node: Node, x: Ref, weight: Ref, padding: str, dilation: _PAIR
) -> tuple[_PAIR, list[Node], Ref]:
    """Padding as numbers. `same` adds d·(r - 1) in all: an odd one puts the rest below and to the right, by a node."""
    if padding == "valid":
        return (0, 0), [], x
    r, s = draft.specs[weight.name].shape[2:]
    total_h, total_w = dilation[0] * (r - 1), dilation[1] * (s - 1)
    pads = (total_h // 2, total_w // 2)
    if total_h % 2 == 0 and total_w % 2 == 0:
        return pads, [], x
    spec = draft.specs[x.name]
    n, c, h, w = spec.shape
    name = draft.unique(f"{node.name}.pad")
    draft.specs[name] = TensorSpec((n, c, h + total_h % 2, w + total_w % 2), spec.dtype)
    extra = (0, total_w % 2, 0, total_h % 2)
    return pads, [Node(name, "aten.constant_pad_nd.default", (x, extra, 0.0), (), (name,))], Ref(name)


def _unbatched(draft: Draft, node: Node, x: Ref) -> list[Node]:
    """Before: y[k,p,q] = conv2d(x[c,h,w]).  After: the same through a batch of one."""
    wide, made = (_with_batch(draft, source, f"{node.name}.batch") for source in (x.name, node.outputs[0]))
    inner = replace(node, name=made, args=tuple(Ref(wide) if arg == x else arg for arg in node.args), outputs=(made,))
    convolution = _convolution(draft, inner)
    if not convolution:
        return []
    before = Node(wide, "aten.unsqueeze.default", (x, 0), (), (wide,))
    after = Node(node.name, "aten.squeeze.dim", (Ref(made), 0), (), node.outputs)
    return [before, *convolution, after]


def _with_batch(draft: Draft, source: str, wanted: str) -> str:
    name, spec = draft.unique(wanted), draft.specs[source]
    draft.specs[name] = TensorSpec((1, *spec.shape), spec.dtype)
    return name


def _fits(draft: Draft, node: Node, args: tuple[Arg, ...]) -> bool:
    """Whether the sizes are those of a `ConvProblem` and all dtypes are one."""
    x, weight, bias, stride, padding, dilation, groups = args
    assert isinstance(x, Ref)
    assert isinstance(weight, Ref)
    x_spec, weight_spec = draft.specs[x.name], draft.specs[weight.name]
    if len(x_spec.shape) != 4 or not isinstance(groups, int) or not _one_dtype(draft, x, weight, bias):
        return False
    n, c, h, w = x_spec.shape
    k, _, r, s = weight_spec.shape
    dtypes = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), x_spec.dtype)
    try:
        problem = ConvProblem(
            *(n, c, h, w, k, r, s), *_pair(padding), *_pair(stride), *_pair(dilation), groups, **dtypes
        )
    except InputError:
        return False
    return problem.weight_spec == weight_spec and problem.y_spec == draft.specs[node.outputs[0]]


def _linear(draft: Draft, node: Node, refused: Collection[int]) -> list[Node]:
    """`refused`: ranks of values without rows, or with a memory format."""
    if node.op == "aten.linear.default":
        x, weight, bias = _arguments(node, ("input", "weight", "bias"), (None, None, None))
    elif node.op == "aten.addmm.default" and not node.kwargs:
        bias, x, weight = node.args
    elif node.op == "aten.mm.default":
        x, weight, bias = (*node.args, None)
    else:
        return []
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or weight.name not in draft.constants:
        return []
    sides = draft.specs[x.name].shape
    if len(sides) in refused or not _one_dtype(draft, x, weight, bias):
        return []
    if node.op != "aten.linear.default":
        weight = Ref(draft.add_constant(f"{weight.name}.transposed", draft.constants[weight.name].t()))
    k = draft.specs[weight.name].shape[0]
    if isinstance(bias, Ref) and draft.specs[bias.name].shape != (k,):
        return []
    try:
        LinearProblem(math.prod(sides[:-1]), sides[-1], k, draft.specs[x.name].dtype)
    except InputError:
        return []
    return [Node(node.name, "linear", (x, weight, bias), (), node.outputs)]


def _one_dtype(draft: Draft, *operands: Arg) -> bool:
    return len({draft.specs[arg.name].dtype for arg in operands if isinstance(arg, Ref)}) == 1


def _pair(arg: Arg) -> _PAIR:
    """ATen's sizes: one integer, a tuple of one, or a pair."""
    if isinstance(arg, int):
        return arg, arg
    assert isinstance(arg, tuple)
    first, last = arg[0], arg[-1]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last
