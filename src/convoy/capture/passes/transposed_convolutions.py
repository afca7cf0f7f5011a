"""Transposed convolutions as what they are: data gradients of convolutions. Their gradients are convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.capture.draft import Draft
from convoy.errors import InputError
from convoy.graph.ir import Arg, Node, Ref
from convoy.problem import ConvProblem, TensorSpec

_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS: tuple[Arg, ...] = (None, None, None, 1, 0, 0, 1, 1)


def transposed_convolutions(draft: Draft) -> None:
    """Rewrite 2-D transposed convolutions and their backward passes.

    before: %y = aten.conv_transpose2d.input(%x, %w, %b, (2, 2))          x: [n, k, p, q], w: [k, c, r, s]
    -->
    after:  %d = conv2d_dgrad(%x, %w, (h, w), (2, 2), (0, 0), (1, 1), 1)
            %y = aten.add.Tensor(%d, %b.channels)                         b.channels: [c, 1, 1]

    before: %dx, %dw, %db = aten.convolution_backward.default(%dy, %x, %w, ..., True, ..., (True, True, True))
    -->
    after:  %dx = conv2d(%dy, %w, None, stride, padding, dilation, groups)
            %dw = conv2d_wgrad(%dy, %x, (r, s), stride, padding, dilation, groups)
            %db = aten.sum.dim_IntList(%dy, (0, 2, 3))

    An output padding of the stride or more stays ATen's (no convolution has that many pixels), as do mixed dtypes.
    """
    nodes, draft.nodes = draft.nodes, []
    read = {name for node in nodes for name in node.refs()} | set(draft.outputs)
    for node in nodes:
        draft.nodes += _forward(draft, node) or _backward(draft, node, read) or [node]


def _forward(draft: Draft, node: Node) -> list[Node]:
    if node.op == "aten.conv_transpose2d.input":
        given = dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
        args = [given.get(name, default) for name, default in zip(_NAMES, _DEFAULTS, strict=True)]
        x, weight, bias, stride, padding, _, groups, dilation = args
    elif node.op == "aten.convolution.default" and len(node.args) == 9 and node.args[6] is True:
        x, weight, bias, stride, padding, dilation, _, _, groups = node.args
    else:
        return []
    sizes = tuple(_pair(size) for size in (stride, padding, dilation))
    y = draft.specs[node.outputs[0]]
    if not _fits(draft, (x, weight, bias), sizes, groups, y):
        return []
    name = node.name if bias is None else draft.unique(f"{node.name}.dgrad")
    made = node.outputs[0] if bias is None else name
    draft.specs.setdefault(made, y)
    found = [Node(name, "conv2d_dgrad", (x, weight, y.shape[2:], *sizes, groups), (), (made,))]
    if isinstance(bias, Ref):
        found += _added(draft, node, made, bias)
    return found


def _added(draft: Draft, node: Node, made: str, bias: Ref) -> list[Node]:
    """Nodes that add a bias [c] to images."""
    if bias.name in draft.constants:
        channels = draft.add_constant(f"{bias.name}.channels", draft.constants[bias.name][:, None, None])
        return [Node(node.name, "aten.add.Tensor", (Ref(made), Ref(channels)), (), node.outputs)]
    spec = draft.specs[bias.name]
    channels = draft.unique(f"{node.name}.bias")
    draft.specs[channels] = TensorSpec((*spec.shape, 1, 1), spec.dtype)
    view = Node(channels, "aten.view.default", (bias, draft.specs[channels].shape), (), (channels,))
    return [view, Node(node.name, "aten.add.Tensor", (Ref(made), Ref(channels)), (), node.outputs)]


def _backward(draft: Draft, node: Node, read: set[str]) -> list[Node]:
    if node.op != "aten.convolution_backward.default" or len(node.args) != 11 or node.args[7] is not True:
        return []
    dy, x, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
    sizes = tuple(_pair(size) for size in (stride, padding, dilation))
    if not isinstance(dy, Ref) or not _fits(draft, (x, weight, dy), sizes, groups, draft.specs[dy.name]):
        return []
    assert isinstance(weight, Ref)
    dx, dweight, dbias = (*node.outputs, "", "", "")[:3]
    path = node.name.removesuffix(".backward")
    parts: Sequence[tuple[str, str, str, tuple[Arg, ...]]] = (
        (dx, "dgrad", "conv2d", (dy, weight, None, *sizes, groups)),
        (dweight, "wgrad", "conv2d_wgrad", (dy, x, draft.specs[weight.name].shape[2:], *sizes, groups)),
        (dbias, "bgrad", "aten.sum.dim_IntList", (dy, (0, 2, 3))),
    )
    found: list[Node] = []
    for made, suffix, op, args in parts:
        if made and made in read:
            found.append(Node(draft.unique(f"{path}.{suffix}"), op, args, (), (made,)))
    return found


def _fits(
    draft: Draft, values: tuple[Arg, Arg, Arg], sizes: tuple[tuple[int, int], ...], groups: Arg, y: TensorSpec
) -> bool:
    """Whether a convolution from `y` to x with these sizes exists, and all dtypes are one."""
    x, weight, *rest = (draft.specs[value.name] for value in values if isinstance(value, Ref))
    if len(x.shape) != 4 or len(weight.shape) != 4 or len(y.shape) != 4 or not isinstance(groups, int):
        return False
    if {spec.dtype for spec in (x, weight, *rest)} != {y.dtype}:
        return False
    (n, c, h, w), (k, _, r, s) = y.shape, weight.shape
    stride, padding, dilation = sizes
    dtypes = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), y.dtype)
    try:
        problem = ConvProblem(*(n, c, h, w, k, r, s), *padding, *stride, *dilation, groups, **dtypes)
    except InputError:
        return False
    return problem.weight_spec == weight and problem.y_spec == x


def _pair(arg: Arg) -> tuple[int, int]:
    """ATen's sizes: one integer, a tuple of one, or a pair."""
    sides = arg if isinstance(arg, tuple) else (arg,)
    first, last = sides[0], sides[-1]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last
