"""Split the backward pass of a convolution into its directions, so that each is chosen and scheduled by itself."""

from __future__ import annotations

from collections import Counter

from convoy.capture.draft import Draft
from convoy.errors import InputError
from convoy.graph.ir import Arg, Node, Ref
from convoy.problem import ConvProblem


def split_backward(draft: Draft) -> None:
    """Rewrite ATen's convolution_backward of 2-D convolutions.

    before: %dx, %dw, %db = aten.convolution_backward.default(%dy, %x, %w, (4,), stride, ..., (True, True, True))
    -->
    after:  %dx = conv2d_dgrad(%dy, %w, (8, 8), stride, padding, dilation, groups)
            %dw = conv2d_wgrad(%x, %dy, (3, 3), stride, padding, dilation, groups)
            %db = aten.sum.dim_IntList(%dy, (0, 2, 3))

    A gradient that nobody reads gets no node: the data gradient of the first layer is not computed. Gradients are named after
    the layer (`conv1.wgrad`). Transposed, 1-D and 3-D convolutions stay, as do those whose sizes `ConvProblem` refuses or whose
    values differ in dtype.
    """
    read = draft.read_counts()
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in draft.nodes:
        split = _split(draft, node, read, names) if node.op == _BACKWARD else []
        nodes += split or [node]
    draft.nodes = nodes
    draft.rename(names)


_BACKWARD = "aten.convolution_backward.default"


def _split(draft: Draft, node: Node, read: Counter[str], names: dict[str, str]) -> list[Node]:
    """A node for each gradient that is read; adds their values' new names to `names`. Empty where it must stay whole."""
    dy, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    if transposed or not _fits(draft, (dy, x, weight), (stride, padding, dilation), groups):
        return []
    assert isinstance(x, Ref)
    assert isinstance(weight, Ref)
    rest = (stride, padding, dilation, groups)
    dx, dweight, dbias = (*node.outputs, "", "", "")[:3]
    path = node.name.removesuffix(".backward")
    parts: tuple[tuple[str, str, str, tuple[Arg, ...]], ...] = (
        (dx, "dgrad", "conv2d_dgrad", (dy, weight, draft.specs[x.name].shape[2:], *rest)),
        (dweight, "wgrad", "conv2d_wgrad", (x, dy, draft.specs[weight.name].shape[2:], *rest)),
        (dbias, "bgrad", "aten.sum.dim_IntList", (dy, (0, 2, 3))),
    )
    found: list[Node] = []
    for made, suffix, op, args in parts:
        if made and read[made]:
            names[made] = draft.unique(f"{path}.{suffix}")
            draft.specs[names[made]] = draft.specs[made]
            found.append(Node(names[made], op, args, (), (names[made],)))
    return found


def _fits(draft: Draft, values: tuple[Arg, Arg, Arg], sizes: tuple[Arg, ...], groups: Arg) -> bool:
    """Whether the sizes are those of a `ConvProblem` and all dtypes are one."""
    specs = [draft.specs[value.name] for value in values if isinstance(value, Ref)]
    if len(specs) < 3 or any(len(spec.shape) != 4 for spec in specs) or len({spec.dtype for spec in specs}) > 1:
        return False
    if not all(isinstance(size, tuple) and len(size) == 2 for size in sizes) or not isinstance(groups, int):
        return False
    dy, x, weight = specs
    n, c, h, w = x.shape
    k, _, r, s = weight.shape
    stride, padding, dilation = sizes
    dtypes = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), x.dtype)
    try:
        problem = ConvProblem(*(n, c, h, w, k, r, s), *padding, *stride, *dilation, groups, **dtypes)  # pyright: ignore[reportCallIssue]
    except InputError:
        return False
    return (problem.weight_spec, problem.y_spec) == (weight, dy)
