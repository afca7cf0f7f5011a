"""RecordedProgram: the parts of an `ExportedProgram` that lowering reads, from one run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx
from torch.export.graph_signature import InputSpec, OutputSpec
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class RecordedSignature:
    """Which inputs and outputs a recorded graph has, as in `torch.export`'s signature."""

    input_specs: tuple[InputSpec, ...]
    output_specs: tuple[OutputSpec, ...]


@dataclass(frozen=True, slots=True)
class RecordedNesting:
    """How arguments and results nest."""

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    """What `lower` reads of an `ExportedProgram`, from a run.

    Attributes:
        graph: the calls, without writes.
        graph_signature: inputs and outputs.
        state_dict: the model's parameters and buffers by name.
        call_spec: how arguments and results nest.
        constants: further tensors by name; none.
    """

    graph: fx.Graph
    graph_signature: RecordedSignature
    state_dict: dict[str, torch.Tensor]
    call_spec: RecordedNesting
    constants: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
