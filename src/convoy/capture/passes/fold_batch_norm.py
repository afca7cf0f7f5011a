"""Batch norm in evaluation mode: y = x · scale + shift with constants. Into the layer before it, or as one product and sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from convoy.capture.draft import Draft, renamed
from convoy.engines.torch_operators import DTYPES
from convoy.graph.ir import CONVOLUTIONS, Arg, Node, Ref

_LAYERS = (*CONVOLUTIONS, "linear")
_FORMS = {
    "aten.batch_norm.default": ("input", "weight", "bias", "mean", "var", "training", "momentum", "eps", "cudnn"),
    "aten._native_batch_norm_legit_no_training.default": ("input", "weight", "bias", "mean", "var", "momentum", "eps"),
    "aten.native_batch_norm.default": ("input", "weight", "bias", "mean", "var", "training", "momentum", "eps"),
    "aten.cudnn_batch_norm.default": ("input", "weight", "bias", "mean", "var", "training", "momentum", "eps"),
}


@dataclass(frozen=True, slots=True)
class _BatchNorm:
    """A batch norm whose statistics are constants: x is the value read; scale and shift are float64 [c]."""

    x: str
    scale: torch.Tensor
    shift: torch.Tensor


def fold_batch_norm(draft: Draft) -> None:
    """Fold each batch norm into the convolution or linear layer whose only reader it is.

    before: %y = conv2d(%x, %w, %b, ...); %n = aten.batch_norm.default(%y, %g, %h, %mean, %var, False, 0.1, 1e-05, True)
    -->
    after:  %y = conv2d(%x, %w.folded, %b.folded, ...)        every reader of %n reads %y

    with w.folded = w · g / sqrt(var + eps), b.folded = (b - mean) · g / sqrt(var + eps) + h, computed in float64 and rounded
    once to the layer's dtype. Where that overflows (fp16), the batch norm stays.
    """
    counts = draft.read_counts()
    layers = {node.outputs[0]: index for index, node in enumerate(draft.nodes) if node.op in _LAYERS}
    names: dict[str, str] = {}
    for index, node in enumerate(draft.nodes):
        norm = _batch_norm(draft, renamed(node, names))
        if norm is None or norm.x not in layers or counts[norm.x] != 1:
            continue
        layer = draft.nodes[layers[norm.x]]
        folded = _folded(draft, layer, norm)
        if folded is None:
            continue
        draft.nodes[layers[norm.x]] = folded
        draft.nodes[index] = replace(node, outputs=("",) * len(node.outputs))
        names[node.outputs[0]] = norm.x
        counts[norm.x] = counts[node.outputs[0]]
    draft.rename(names)
    draft.nodes = [node for node in draft.nodes if any(node.outputs)]


def _folded(draft: Draft, layer: Node, norm: _BatchNorm) -> Node | None:
    x, weight, bias, *sizes = layer.args
    assert isinstance(weight, Ref)
    if weight.name not in draft.constants or (isinstance(bias, Ref) and bias.name not in draft.constants):
        return None
    kernel = draft.constants[weight.name]
    scale = norm.scale.view(-1, *[1] * (kernel.dim() - 1))
    shift = norm.shift
    if isinstance(bias, Ref):
        shift = shift + draft.constants[bias.name].double() * norm.scale
    new_kernel = kernel.to(torch.float64, copy=True).mul_(scale).to(kernel.dtype)
    new_bias = shift.to(kernel.dtype)
    if not (_is_finite(new_kernel) and _is_finite(new_bias)):
        return None
    base = weight.name.removesuffix(".weight")
    names = (
        draft.add_constant(f"{base}.weight.folded", new_kernel),
        draft.add_constant(f"{base}.bias.folded", new_bias),
    )
    return replace(layer, args=(x, Ref(names[0]), Ref(names[1]), *sizes))


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite: extremes pass NaN on, and need no tensor of answers."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def replace_batch_norm(draft: Draft) -> None:
    """Write the batch norms that could not be folded as one product and sum, with the constants worked out beforehand.

    before: %y = aten.batch_norm.default(%x, %g, %h, %mean, %var, False, 0.1, 1e-05, True)
    -->
    after:  %y = aten.addcmul.default(%shift, %x, %scale)        constants fp32[1,c,1,1]

    with scale = g / sqrt(var + eps), shift = h - mean · scale in float64, rounded once: ATen's CPU kernel does the same sum,
    with both rounded on the way. Inductor computes a batch norm's root and quotient anew for every element of a CPU loop,
    and takes 1.7 to 2.4 times as long for it as for this form, with a ReLU behind ([1,256,56,56], one AVX2 core: 178 µs
    against 105; channels_last 268 against 124); ATen takes 131 against 114, and 211 against 79. In half precision, where
    rounded constants would lose digits that ATen's float arithmetic keeps, only the form of the call is made one.
    """
    for index, node in enumerate(draft.nodes):
        norm = _batch_norm(draft, node)
        if norm is None:
            continue
        spec = draft.specs[norm.x]
        if spec.dtype in ("fp32", "fp64"):
            sides = (1, -1, *[1] * (len(spec.shape) - 2))
            dtype = DTYPES[spec.dtype]
            scale = draft.add_constant(f"{node.name}.scale", norm.scale.to(dtype).view(sides))
            shift = draft.add_constant(f"{node.name}.shift", norm.shift.to(dtype).view(sides))
            op, args = "aten.addcmul.default", (Ref(shift), Ref(norm.x), Ref(scale))
        else:
            given = _given(node)
            statistics = tuple(given[name] for name in ("input", "weight", "bias", "mean", "var"))
            op, args = "aten.batch_norm.default", (*statistics, False, 0.0, given["eps"], False)
        draft.nodes[index] = Node(node.name, op, args, (), node.outputs[:1])


def _given(node: Node) -> dict[str, Arg]:
    return dict(zip(_FORMS[node.op], node.args, strict=False))


def _batch_norm(draft: Draft, node: Node) -> _BatchNorm | None:
    """What a node computes, if it is a batch norm with constant statistics that only its first output is read of."""
    if node.op not in _FORMS or node.kwargs:
        return None
    given = _given(node)
    x, mean, var, eps = given["input"], given["mean"], given["var"], given["eps"]
    if given.get("training", False) is not False or not isinstance(x, Ref) or not isinstance(eps, float):
        return None
    tensors = [draft.constants.get(arg.name) if isinstance(arg, Ref) else None for arg in (mean, var)]
    if tensors[0] is None or tensors[1] is None or not node.outputs[0]:
        return None
    scale = torch.rsqrt(tensors[1].double() + eps)
    for name in ("weight", "bias"):
        arg = given[name]
        if arg is not None and not (isinstance(arg, Ref) and arg.name in draft.constants):
            return None
    weight, bias = given["weight"], given["bias"]
    if isinstance(weight, Ref):
        scale = draft.constants[weight.name].double() * scale
    shift = -tensors[0].double() * scale
    if isinstance(bias, Ref):
        shift = shift + draft.constants[bias.name].double()
    return _BatchNorm(x.name, scale, shift)
