"""Channel pruning through a net: which other parameters must be zero so that a pruned filter's channel stays zero.

A filter of zeros outputs its bias in the whole channel, and a batch norm turns that into another constant. So the bias becomes
zero, and so do the batch norm's scale and shift for that channel. The channel is then zero for every layer that reads it, and
the weights that read it can be zero too. The exported graph of the model shows which layers read which channels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from convoy.prune.magnitude import PrunableLayer

_aten = torch.ops.aten

LAYERS: Final = frozenset({_aten.conv2d.default, _aten.linear.default})

NORMS: Final = frozenset({_aten._native_batch_norm_legit_no_training.default, _aten.batch_norm.default})

KEEP_ZERO: Final = frozenset(
    {
        _aten.relu.default,
        _aten.silu.default,
        _aten.gelu.default,
        _aten.hardswish.default,
        _aten.tanh.default,
        _aten.leaky_relu.default,
        _aten.elu.default,
        _aten.max_pool2d.default,
        _aten.avg_pool2d.default,
        _aten.adaptive_avg_pool2d.default,
        _aten.dropout.default,
        _aten.clone.default,
        _aten.contiguous.default,
    }
)
"""Operators of one tensor that map a channel of zeros to a channel of zeros."""

FINAL: Final = "its channels are the model's outputs"
"""The reason why a layer keeps its filters. Their weights that read zero channels may still become zero."""

RESHAPES: Final = frozenset({_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints})


def keep_outputs(layers: Sequence[PrunableLayer], model: nn.Module, program: ExportedProgram) -> list[PrunableLayer]:
    """The layers, where those whose channels are the model's outputs get a reason: a class cannot be pruned away."""
    owners = _owners(layers, model)
    finals: set[str] = set()
    for node in program.graph.nodes:
        layer = _layer_of(node, program, owners)
        if layer is not None and _reaches_output(node):
            finals.add(layer.name)
    return [replace(layer, reason=layer.reason or FINAL) if layer.name in finals else layer for layer in layers]


def _reaches_output(node: fx.Node) -> bool:
    """Whether a value reaches an output of the model without passing through another layer."""
    seen: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user.op == "output":
            return True
        if user not in seen and user.target not in LAYERS:
            seen.add(user)
            waiting += user.users
    return False


def consistent_masks(
    masks: Mapping[str, torch.Tensor], layers: Sequence[PrunableLayer], model: nn.Module, program: ExportedProgram
) -> dict[str, torch.Tensor]:
    """Masks of parameters, by name, that make the pruned filters' channels zero for every layer that reads them.

    Args:
        masks: of the pruned layers, by layer name; True where a weight [k, c / groups, r, s] is kept.
        layers: of the model; layers with a reason keep their weights.
        model: the exported model.
        program: its export.

    Returns:
        Masks by parameter name, of the parameter's shape: the given masks, in which weights that read zeros are False too,
        and masks of biases and batch norms.
    """
    return _Flow(masks, layers, model, program).run()


def _owners(layers: Sequence[PrunableLayer], model: nn.Module) -> dict[str, PrunableLayer]:
    """Layers by each name of their weight."""
    by_weight = {id(layer.module.weight): layer for layer in layers}
    named = model.named_parameters(remove_duplicate=False)
    return {name: by_weight[id(parameter)] for name, parameter in named if id(parameter) in by_weight}


def _layer_of(node: fx.Node, program: ExportedProgram, owners: Mapping[str, PrunableLayer]) -> PrunableLayer | None:
    return owners.get(_parameter(node.args[1], program)) if node.target in LAYERS else None


def _parameter(node: Any, program: ExportedProgram) -> str:
    """Name of the parameter that a node stands for; empty for any other node."""
    return program.graph_signature.inputs_to_parameters.get(getattr(node, "name", ""), "")


def _shape(node: object) -> tuple[int, ...]:
    """Shape of the tensor that a node computes."""
    return tuple(cast("fx.Node", node).meta["val"].shape)


class _Flow:
    """Walks the graph once, in execution order, and finds for each value which of its channels are zero."""

    def __init__(
        self,
        masks: Mapping[str, torch.Tensor],
        layers: Sequence[PrunableLayer],
        model: nn.Module,
        program: ExportedProgram,
    ) -> None:
        self.chosen = masks
        self.owners = _owners(layers, model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.program = program
        self.masks = {f"{layer.name}.weight": masks[layer.name].clone() for layer in layers if layer.name in masks}
        self.zero: dict[fx.Node, torch.Tensor] = {}

    def run(self) -> dict[str, torch.Tensor]:
        for node in self.program.graph.nodes:
            rule = self._rule(node)
            found = rule(node) if rule is not None else None
            if found is not None and bool(found.any()):
                self.zero[node] = found
        return {name: mask.view(self.parameters[name].shape) for name, mask in self.masks.items()}

    def _rule(self, node: fx.Node) -> Callable[[fx.Node], torch.Tensor | None] | None:
        if node.target in LAYERS:
            return self._layer
        if node.target in NORMS:
            return self._norm
        if node.target in RESHAPES:
            return self._reshape
        if node.target is _aten.add.Tensor:
            return self._add
        if node.target is _aten.cat.default:
            return self._cat
        limits = cast("Sequence[float]", node.args[1:3] if node.target is _aten.hardtanh.default else ())
        clipped = len(limits) == 2 and limits[0] <= 0 <= limits[1]
        passes = node.target in KEEP_ZERO or clipped or node.target is operator.getitem or self._is_pixel_mean(node)
        return self._first if passes else None

    def _is_pixel_mean(self, node: fx.Node) -> bool:
        if node.target is not _aten.mean.dim or not isinstance(node.args[1], (list, tuple)):
            return False
        dims = cast("Sequence[int]", node.args[1])
        return {d % 4 for d in dims} <= {2, 3} and len(_shape(node.args[0])) == 4

    def _zeros_of(self, argument: object) -> torch.Tensor | None:
        """Which channels of an argument are zero; None if none is, or if it is no node."""
        return self.zero.get(argument) if isinstance(argument, fx.Node) else None

    def _first(self, node: fx.Node) -> torch.Tensor | None:
        picked = node.target is not operator.getitem or node.args[1] == 0
        return self._zeros_of(node.args[0]) if picked else None

    def _layer(self, node: fx.Node) -> torch.Tensor | None:
        """Mask weights that read zeros, if that is allowed. Pruned filters output zeros once their bias is zero."""
        layer = _layer_of(node, self.program, self.owners)
        if layer is None:
            return None
        weight = f"{layer.name}.weight"
        zeros = self._zeros_of(node.args[0])
        alone = self._read_once(node.args[1])
        if zeros is not None and layer.reason in ("", FINAL) and alone:
            whole = torch.ones(layer.weight.shape, dtype=torch.bool, device=layer.weight.device)
            self.masks[weight] = self.masks.get(weight, whole) & self._readers(layer, zeros)
        if layer.name not in self.chosen:
            return None
        gone = ~self.chosen[layer.name].flatten(1).any(1)
        bias = node.args[2] if len(node.args) > 2 else None
        if bias is None:
            return gone
        return gone if self._mask_channels(bias, gone) else None

    def _readers(self, layer: PrunableLayer, zeros: torch.Tensor) -> torch.Tensor:
        """False at the weights [k, c / groups, r, s] that read a channel of zeros."""
        k, each = layer.weight.shape[:2]
        live = ~zeros.view(layer.groups, 1, each).expand(layer.groups, k // layer.groups, each).reshape(k, each)
        return live[:, :, None, None].expand(layer.weight.shape)

    def _norm(self, node: fx.Node) -> torch.Tensor | None:
        zeros = self._zeros_of(node.args[0])
        if zeros is None:
            return None
        done = [self._mask_channels(parameter, zeros) for parameter in node.args[1:3]]
        return zeros if all(done) else None

    def _mask_channels(self, parameter: Any, zeros: torch.Tensor) -> bool:
        """Mask a parameter [channels] where channels are zero; False if it is no parameter or another node reads it too."""
        name = _parameter(parameter, self.program)
        if not name or not self._read_once(parameter):
            return False
        self.masks[name] = ~zeros
        return True

    def _read_once(self, parameter: Any) -> bool:
        return isinstance(parameter, fx.Node) and len(parameter.users) == 1

    def _reshape(self, node: fx.Node) -> torch.Tensor | None:
        """[n, c, ...] to [n, c * pixels]: each channel becomes as many columns as it has pixels."""
        zeros = self._zeros_of(node.args[0])
        before, after = _shape(node.args[0]), _shape(node)
        if zeros is None or after[0] != before[0] or len(after) < 2:
            return None
        if after[1] == before[1]:
            return zeros
        pixels = math.prod(before[2:])
        return zeros.repeat_interleave(pixels) if len(after) == 2 and after[1] == before[1] * pixels else None

    def _add(self, node: fx.Node) -> torch.Tensor | None:
        both = [self._zeros_of(arg) for arg in node.args[:2]]
        known = [zeros for zeros in both if zeros is not None]
        return known[0] & known[1] if len(known) == 2 and known[0].shape == known[1].shape else None

    def _cat(self, node: fx.Node) -> torch.Tensor | None:
        parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        if dim != 1 or not isinstance(parts, (list, tuple)):
            return None
        known = [self._zeros_of(part) for part in parts]
        device = next((zeros.device for zeros in known if zeros is not None), None)
        if device is None:
            return None
        none = [torch.zeros(_shape(part)[1], dtype=torch.bool, device=device) for part in parts]
        return torch.cat([live if zeros is None else zeros for zeros, live in zip(known, none, strict=True)])
