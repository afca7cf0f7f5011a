"""Three-dimensional convolutions, transposed ones and their backward passes, as layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.capture.draft import Draft
from convoy.errors import InputError
from convoy.graph.ir import Arg, Node, Ref
from convoy.graph.layers import triple
from convoy.problem import Conv3dProblem, TensorSpec

Triple = tuple[int, int, int]

_NAMES: Final = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_NAMES: Final = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_BIAS_SIDES: Final = (0, 2, 3, 4)


def three_dimensional(draft: Draft) -> None:
    """Rewrite three-dimensional convolutions.

    before: %y = aten.conv3d.default(%x, %w, %b, (1, 2, 2), (0, 1, 1))
    -->
    after:  %y = conv3d(%x, %w, %b, (1, 2, 2), (0, 1, 1), (1, 1, 1), 1)

    before: %y = aten.conv_transpose3d.input(%x, %w, %b, (2, 2, 2))       x: [n, k, o, p, q], w: [k, c, t, r, s]
    -->
    after:  %d = conv3d_dgrad(%x, %w, (d, h, w), (2, 2, 2), (0, 0, 0), (1, 1, 1), 1)
            %y = aten.add.Tensor(%d, %b.channels)

    before: %dx, %dw, %db = aten.convolution_backward.default(%dy, %x, %w, ..., (True, True, True))
    -->
    after:  %dx = conv3d_dgrad(%dy, %w, (d, h, w), ...); %dw = conv3d_wgrad(%x, %dy, (t, r, s), ...)
            %db = aten.sum.dim_IntList(%dy, (0, 2, 3, 4))

    and the backward passes of transposed ones, whose gradients are a `conv3d` and a `conv3d_wgrad`. Volumes without a batch stay,
    as do mixed dtypes, padding that differs between two sides, and sizes that `Conv3dProblem` refuses.
    """
    nodes, draft.nodes = draft.nodes, []
    read = {name for node in nodes for name in node.refs()} | set(draft.outputs)
    for node in nodes:
        draft.nodes += _forward(draft, node) or _transposed(draft, node) or _backward(draft, node, read) or [node]


def _forward(draft: Draft, node: Node) -> list[Node]:
    if node.op in ("aten.conv3d.default", "aten.conv3d.padding"):
        given = dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        plain = "valid" if node.op.endswith("padding") else 0
        padding, groups = given.get("padding", plain), given.get("groups", 1)
        stride, dilation = given.get("stride", 1), given.get("dilation", 1)
    elif node.op == "aten.convolution.default" and len(node.args) == 9 and node.args[6] is False:
        x, weight, bias, stride, padding, dilation, _, _, groups = node.args
    else:
        return []
    if not isinstance(weight, Ref) or len(draft.specs[weight.name].shape) != 5:
        return []
    steps = _triple(dilation)
    pads = _named(padding, steps, draft.specs[weight.name].shape[2:]) if isinstance(padding, str) else _triple(padding)
    if pads is None:
        return []
    sizes = (_triple(stride), pads, steps)
    if not _fits(draft, (x, weight, bias), sizes, groups, node.outputs[0]):
        return []
    return [Node(node.name, "conv3d", (x, weight, bias, *sizes, groups), (), node.outputs)]


def _named(padding: str, dilation: Triple, window: Sequence[int]) -> Triple | None:
    """`valid` or `same` as numbers; None where `same` pads the two sides differently."""
    totals = [step * (size - 1) if padding == "same" else 0 for step, size in zip(dilation, window, strict=True)]
    return None if any(total % 2 for total in totals) else triple([total // 2 for total in totals])


def _transposed(draft: Draft, node: Node) -> list[Node]:
    if node.op == "aten.conv_transpose3d.input":
        given = dict(zip(_TRANSPOSED_NAMES, node.args, strict=False)) | dict(node.kwargs)
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        stride, padding, dilation = given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1)
        groups = given.get("groups", 1)
    elif node.op == "aten.convolution.default" and len(node.args) == 9 and node.args[6] is True:
        x, weight, bias, stride, padding, dilation, _, _, groups = node.args
    else:
        return []
    if not isinstance(weight, Ref) or len(draft.specs[weight.name].shape) != 5:
        return []
    sizes = (_triple(stride), _triple(padding), _triple(dilation))
    y = draft.specs[node.outputs[0]]
    if not isinstance(x, Ref) or not _fits(draft, (Ref(node.outputs[0]), weight, bias), sizes, groups, x.name):
        return []
    name = node.name if bias is None else draft.unique(f"{node.name}.dgrad")
    made = node.outputs[0] if bias is None else name
    draft.specs.setdefault(made, y)
    found = [Node(name, "conv3d_dgrad", (x, weight, y.shape[2:], *sizes, groups), (), (made,))]
    return [*found, *_added(draft, node, made, bias)] if isinstance(bias, Ref) else found


def _added(draft: Draft, node: Node, made: str, bias: Ref) -> list[Node]:
    """Nodes that add a bias [c] to volumes."""
    if bias.name in draft.constants:
        channels = draft.add_constant(f"{bias.name}.channels", draft.constants[bias.name][:, None, None, None])
        return [Node(node.name, "aten.add.Tensor", (Ref(made), Ref(channels)), (), node.outputs)]
    spec = draft.specs[bias.name]
    channels = draft.unique(f"{node.name}.bias")
    draft.specs[channels] = TensorSpec((*spec.shape, 1, 1, 1), spec.dtype)
    view = Node(channels, "aten.view.default", (bias, draft.specs[channels].shape), (), (channels,))
    return [view, Node(node.name, "aten.add.Tensor", (Ref(made), Ref(channels)), (), node.outputs)]


def _backward(draft: Draft, node: Node, read: set[str]) -> list[Node]:
    if node.op != "aten.convolution_backward.default" or len(node.args) != 11:
        return []
    dy, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    if not (isinstance(dy, Ref) and isinstance(x, Ref) and isinstance(weight, Ref)):
        return []
    if len(draft.specs[weight.name].shape) != 5:
        return []
    sizes = (_triple(stride), _triple(padding), _triple(dilation))
    ends = (dy, x) if transposed else (x, dy)  # the input of the convolution, and its output
    if not _fits(draft, (ends[0], weight, None), sizes, groups, ends[1].name):
        return []
    window, rest = draft.specs[weight.name].shape[2:], (*sizes, groups)
    of_input: tuple[Arg, ...] = (dy, weight, None if transposed else draft.specs[x.name].shape[2:], *rest)
    dx, dweight, dbias = (*node.outputs, "", "", "")[:3]
    path = node.name.removesuffix(".backward")
    parts: Sequence[tuple[str, str, str, tuple[Arg, ...]]] = (
        (dx, "dgrad", "conv3d" if transposed else "conv3d_dgrad", of_input),
        (dweight, "wgrad", "conv3d_wgrad", (*ends, window, *rest)),
        (dbias, "bgrad", "aten.sum.dim_IntList", (dy, _BIAS_SIDES)),
    )
    return [
        Node(draft.unique(f"{path}.{suffix}"), op, args, (), (made,))
        for made, suffix, op, args in parts
        if made and made in read
    ]


def _fits(
    draft: Draft, values: tuple[Arg, Arg, Arg], sizes: tuple[Triple, Triple, Triple], groups: Arg, y: str
) -> bool:
    """Whether a convolution from x to `y` with these sizes exists, and all dtypes are one. A bias may be None."""
    x, weight, *bias = (draft.specs[value.name] for value in values if isinstance(value, Ref))
    made = draft.specs[y]
    if any(len(spec.shape) != 5 for spec in (x, weight, made)) or not isinstance(groups, int):
        return False
    if {spec.dtype for spec in (x, weight, *bias)} != {made.dtype}:
        return False
    (n, c, *size), (k, _, *window) = x.shape, weight.shape
    try:
        problem = Conv3dProblem(
            n, c, triple(size), k, triple(window), sizes[1], sizes[0], sizes[2], groups, dtype=x.dtype
        )
    except InputError:
        return False
    return problem.weight_spec == weight and problem.y_spec == made


def _triple(arg: Arg) -> Triple:
    """ATen's sizes: one integer, a tuple of one, or three."""
    if isinstance(arg, int):
        return arg, arg, arg
    assert isinstance(arg, tuple)
    return triple(arg * 3 if len(arg) == 1 else arg)
