"""capture_inference: a module in eval mode, by torch.export, as a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from convoy.capture.captured import Captured
from convoy.capture.fold import fold_batch_norms
from convoy.capture.lower import Lowering
from convoy.errors import CaptureError, InputError
from convoy.graph.verify import verify


def capture_inference(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Captured:
    """Export a module and lower it to a graph; inference batch norm after a convolution is folded into its weight.

    Args:
        model: any module; captured as in eval mode, its training flags stay as they are.
        args: example inputs; their shapes become the graph's.
        kwargs: example keyword inputs.

    Raises:
        CaptureError: with the exporter's own words, for a model that cannot be exported, or that changes its buffers.
    """
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            exported = torch.export.export(model, args, kwargs or {})
            # With no decompositions but those of in-place and view semantics, operators stay what users wrote.
            exported = exported.run_decompositions({})
            return _lower(exported)
    except CaptureError:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        KeyError,
        NotImplementedError,
    ) as error:
        words = f"{type(error).__name__}: {error}".strip()
        raise CaptureError(f"the model cannot be exported: {words[:2000]}") from error
    finally:
        for module, training in flags.items():
            module.training = training


def _lower(exported: torch.export.ExportedProgram) -> Captured:
    signature = exported.graph_signature
    for spec in signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(f"the model writes to {spec.target or 'an input'} when it is called ({spec.kind.name})")
    tensors = {**dict(exported.named_parameters()), **dict(exported.named_buffers()), **exported.constants}
    given: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    leaves: list[int] = []
    position = 0
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, TensorArgument):
                inputs.append(spec.arg.name)
                leaves.append(position)
            position += 1
        elif isinstance(spec.arg, TensorArgument) and spec.target in tensors:
            given[spec.arg.name] = tensors[spec.target].detach()
        else:
            raise CaptureError(f"the model holds {spec.target}, a {spec.kind.name}, which is no tensor")
    lowering = Lowering(
        exported.graph, inputs, given, {s.arg.name: s.target for s in signature.input_specs if s.target}
    )
    outputs: list[str] = []
    places: list[int | tuple[None, Any]] = []
    for spec in signature.output_specs:
        if isinstance(spec.arg, TensorArgument):
            places.append(len(outputs))
            outputs.append(lowering.name_of(spec.arg.name))
        elif isinstance(spec.arg, ConstantArgument):
            places.append((None, spec.arg.value))
        else:
            raise CaptureError(f"the model returns a {type(spec.arg).__name__}, which is no tensor")
    graph, constants = fold_batch_norms(*lowering.finish(outputs))
    try:
        verify(graph)
    except InputError as error:
        raise CaptureError(f"the captured graph is malformed: {error}") from error
    return Captured(
        graph=graph,
        constants=constants,
        notes=(),
        in_spec=exported.call_spec.in_spec,
        tensor_leaves=tuple(leaves),
        out_spec=exported.call_spec.out_spec,
        out_leaves=tuple(places),
    )
