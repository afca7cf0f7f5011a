"""Any number of samples by the programs of a package, which have fixed batch sizes: split into batches, the last one padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from convoy.errors import InputError
from convoy.package.cuda.recorded_graph import RecordedGraph
from convoy.package.program_file import PackedProgram


def batch_sizes(programs: Sequence[PackedProgram | RecordedGraph]) -> tuple[int, ...]:
    """Batch sizes of the programs, ascending; empty if the first program's inputs and outputs are no batches of one size.

    A program whose samples have other shapes than the first one's does not count.
    """
    first = programs[0]
    found: set[int] = set()
    for program in programs:
        specs = [one.spec for one in (*program.inputs, *program.outputs)]
        sizes = {spec.shape[0] if spec.shape else 0 for spec in specs}
        same = [one.spec.shape[1:] for one in program.inputs] == [one.spec.shape[1:] for one in first.inputs]
        if len(sizes) == 1 and same:
            found |= sizes - {0}
        elif program is first:
            return ()
    return tuple(sorted(found))


def batches_of(samples: int, sizes: Sequence[int]) -> list[int]:
    """Batch sizes that hold some samples together: the largest as often as it is full, then the smallest that holds the rest."""
    found: list[int] = []
    while samples > 0:
        found.append(next((size for size in sizes if size >= samples), sizes[-1]))
        samples -= found[-1]
    return found


def run_samples(
    call: Callable[..., Any], programs: Sequence[PackedProgram | RecordedGraph], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run on any number of samples.

    Args:
        call: the net.
        programs: its programs.
        inputs: of the shapes of the programs' inputs, but with any number of samples in front, at least one.

    Returns:
        The outputs, in the order of the programs' outputs, with a result for each sample.

    Raises:
        InputError: the programs are no batches, or the inputs are of other shapes or dtypes.
    """
    sizes = batch_sizes(programs)
    if not sizes:
        shapes = ", ".join(str(one.spec) for one in programs[0].inputs)
        raise InputError("inputs", shapes, "a package whose inputs and outputs are batches", "Call the package itself.")
    counts = {tensor.shape[0] if tensor.dim() else 0 for tensor in inputs}
    if len(inputs) != len(programs[0].inputs) or len(counts) != 1 or 0 in counts:
        expected = f"{len(programs[0].inputs)} tensors with equally many samples"
        raise InputError("inputs", [list(tensor.shape) for tensor in inputs], expected)
    begin, samples = 0, counts.pop()
    parts: list[list[torch.Tensor]] = []
    for size in batches_of(samples, sizes):
        count = min(size, samples - begin)
        given = [_padded(tensor[begin : begin + count], size) for tensor in inputs]
        leaves = pytree.tree_leaves(call(**{one.name: x for one, x in zip(programs[0].inputs, given, strict=True)}))
        parts.append([one[:count] for one in leaves if isinstance(one, torch.Tensor)])
        begin += count
    return tuple(one[0] if len(one) == 1 else torch.cat(one) for one in zip(*parts, strict=True))


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A batch filled up with zeros."""
    missing = size - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
