"""From an exported ATen program to a draft of ATen nodes: values, constants, arguments and structure as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from convoy.capture.draft import Draft, spec_of
from convoy.capture.lower_nodes import NodeLowering
from convoy.capture.node_names import ModulePathNames
from convoy.capture.recording.recorded_program import RecordedProgram
from convoy.capture.structure import ConstantLeaf, Leaf, Structure
from convoy.errors import CaptureError


@dataclass(slots=True)
class Lowered:
    """A draft, how the model nests arguments and results, names of arguments that it overwrites, strides of outputs.

    `returned` holds outputs that are the model's own tensors: index of the output, qualified name of the tensor.
    """

    draft: Draft
    arguments: Structure
    results: Structure
    overwritten: tuple[str, ...] = ()
    strides: tuple[tuple[int, ...] | None, ...] = ()
    returned: tuple[tuple[int, str], ...] = ()


def lower(program: ExportedProgram | RecordedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
    """Turn an exported, decomposed program into a draft.

    Raises:
        CaptureError: naming what a graph cannot hold: a shape that depends on data, a buffer that changes from call to
            call, an operator that is not ATen's, a dtype without a name.
    """
    return _Lowering(program).run(plain=all(isinstance(arg, torch.Tensor) for arg in (*args, *kwargs.values())))


class _Lowering(NodeLowering):
    def __init__(self, program: ExportedProgram | RecordedProgram) -> None:
        super().__init__(_device(program), ModulePathNames(program.graph.nodes))
        self.program = program
        self.overwritten: list[str] = []
        self.strides: list[tuple[int, ...] | None] = []
        self.returned: list[tuple[int, str]] = []

    def run(self, *, plain: bool) -> Lowered:
        nodes = list(self.program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        specs = self.program.graph_signature.input_specs
        leaves = self._inputs([(n, s) for n, s in zip(placeholders, specs, strict=True)])
        for node in nodes:
            if node.op == "call_function":
                self.call(node)
            elif node.op not in ("placeholder", "output"):
                raise CaptureError(f"the exported program holds {node.format_node()}, which a graph cannot hold")
        nesting = self.program.call_spec
        assert nesting.in_spec is not None
        assert nesting.out_spec is not None
        results = self._outputs(next(node for node in nodes if node.op == "output"))
        arguments = Structure(nesting.in_spec, leaves, plain=plain and all(leaf is None for leaf in leaves))
        nested = Structure.of_results(nesting.out_spec, results)
        return Lowered(
            self.draft, arguments, nested, tuple(self.overwritten), tuple(self.strides), tuple(self.returned)
        )

    def _inputs(self, placeholders: list[tuple[fx.Node, Any]]) -> list[Leaf]:
        """Define inputs first, so that they keep their names, then constants."""
        leaves: list[Leaf] = []
        for node, spec in placeholders:
            if spec.kind is not InputKind.USER_INPUT:
                continue
            if isinstance(spec.arg, TensorArgument):
                self.input(node, node.name)
                leaves.append(None)
            elif isinstance(spec.arg, ConstantArgument):
                self.found[node] = ConstantLeaf(spec.arg.value)
                leaves.append(ConstantLeaf(spec.arg.value))
            else:
                raise CaptureError(f"the model's argument {node.name} is a {type(spec.arg).__name__}, and no tensor")
        held: dict[tuple[Any, ...], str] = {}
        for node, spec in placeholders:
            if spec.kind is not InputKind.USER_INPUT:
                self.found[node] = self._constant(node, spec, held)
        return leaves

    def _constant(self, node: fx.Node, spec: Any, held: dict[tuple[Any, ...], str]) -> str:
        """Keep a parameter, buffer or lifted tensor; one that two names share is kept once."""
        kept = {**self.program.state_dict, **self.program.constants}
        tensor = kept.get(spec.target)
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) or not isinstance(
            tensor, torch.Tensor
        ):
            raise CaptureError(f"the model holds {spec.target} ({spec.kind.name.lower()}), which a graph cannot hold")
        node.meta["convoy_target"] = spec.target
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in held:
            return held[place]
        spec_of(tensor, spec.target)
        held[place] = self.draft.add_constant(spec.target, tensor.to(self.draft.device))
        return held[place]

    def _outputs(self, output: fx.Node) -> list[Leaf]:
        leaves: list[Leaf] = []
        returned = output.args[0]
        assert isinstance(returned, (list, tuple))
        for value, spec in zip(returned, self.program.graph_signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                self.overwritten.append(str(spec.target))
                self.draft.notes.append(
                    f"the model overwrites its argument {spec.target}; the optimised model does not"
                )
            elif spec.kind is not OutputKind.USER_OUTPUT:
                raise CaptureError(f"the model changes {spec.target} when it is called ({spec.kind.name.lower()})")
            else:
                leaves.append(self._output(value))
                if leaves[-1] is None:
                    assert isinstance(value, fx.Node)
                    if "convoy_target" in value.meta:
                        self.returned.append((len(self.strides), value.meta["convoy_target"]))
                    self.strides.append(_strides_of(value))
        return leaves

    def _output(self, value: Any) -> Leaf:
        found = self.found[value] if isinstance(value, fx.Node) else ConstantLeaf(value)
        if isinstance(found, ConstantLeaf):
            return found
        if not isinstance(found, str) or not found:
            raise CaptureError(f"the model returns {value}, which is no tensor")
        self.draft.outputs.append(found)
        return None


def _strides_of(node: fx.Node) -> tuple[int, ...] | None:
    """Strides of a value in PyTorch; None if its elements share memory, which no kernel writes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(
        s == 0 and size > 1 for s, size in zip(value.stride(), value.shape, strict=True)
    ):
        return None
    return tuple(value.stride())


def _device(program: ExportedProgram | RecordedProgram) -> torch.device:
    """The one device of a model: its inputs', or its parameters' where it has no tensor for input."""
    signature = program.graph_signature
    named = {spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT}
    values = [(node, node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"]
    inputs = {value.device for node, value in values if node.name in named and isinstance(value, torch.Tensor)}
    devices = inputs or {tensor.device for tensor in program.state_dict.values()}
    if len(devices) > 1:
        raise CaptureError(f"the model's tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
    return next(iter(devices), torch.device("cpu"))
