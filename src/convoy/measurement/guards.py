"""Guarded buffers: a known pattern around them, garbage inside, and checksums of memory that nobody may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.subgraph import torch_format
from convoy.engines.torch_operators import DTYPES
from convoy.measurement.data import Data, dense, result_specs
from convoy.problem import Problem, TensorSpec
from convoy.typed_torch import split

GUARD_BYTES: Final = 4096
"""Watched bytes on each side: more than a vector store or a row of a tile can miss by."""

PART_ROWS: Final = 2048
"""Rows of 4 KiB that are summed together: 8 MiB."""

ALIGNMENT: Final = 256
_PATTERN: Final = 0xA5
_GARBAGE: Final = 0xFF  # NaN in every floating dtype


class GuardedBuffer:
    """A buffer with guard bytes before and after it, filled with values that no program may rely on (NaN).

    Args:
        spec: shape and dtype; for a workspace, a flat `u8` spec.
        layout: memory format of a 4-D buffer.
        device: its device.
        name: its name in messages about an overrun.
    """

    def __init__(self, spec: TensorSpec, layout: str, device: str | torch.device, name: str = "result 0") -> None:
        size = spec.size_bytes
        raw = torch.full((size + 2 * GUARD_BYTES + ALIGNMENT,), _PATTERN, dtype=torch.uint8, device=device)
        start = GUARD_BYTES + -(raw.data_ptr() + GUARD_BYTES) % ALIGNMENT
        self.name = name
        self._before, inner, self._after = raw[:start], raw[start : start + size], raw[start + size :]
        inner.fill_(1 if spec.dtype == "bool" else _GARBAGE)
        flat = inner.view(DTYPES[spec.dtype])
        if torch_format(layout, len(spec.shape)) != torch.contiguous_format:
            n, c, *sides = spec.shape
            self.tensor = flat.view(n, *sides, c).movedim(-1, 1)
        else:
            self.tensor = flat.view(spec.shape)

    def intact(self) -> bool:
        """Whether the guard bytes are unchanged."""
        return bool((self._before == _PATTERN).all()) and bool((self._after == _PATTERN).all())


def overrun(buffers: Iterable[GuardedBuffer]) -> str:
    """Names of the buffers whose guard bytes were overwritten; empty if all are intact."""
    return ", ".join(buffer.name for buffer in buffers if not buffer.intact())


def checksum(tensors: Sequence[object]) -> list[torch.Tensor]:
    """Sums of the tensors' 32-bit words over rows and columns of a table of 1024 columns, modulo 2^32.

    A changed value always shows, and so do two values that changed places. Opaque tensors are read dense. A large table is
    summed in parts: PyTorch needs memory for a sum, up to four times the tensor's own with int64 and a whole table, which
    left no memory to measure layers of ResNet-50 at batch 128 (H100, commit 95540a1).
    """
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES.values():
            continue
        values = dense(tensor).detach()
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True)).reshape(-1)
        octets = values.contiguous().view(torch.uint8)
        whole = len(octets) // 4096 * 4096
        table = octets[:whole].view(torch.int32).reshape(-1, 1024)
        for part in split(table, PART_ROWS):
            sums += [part.sum(1, dtype=torch.int32), part.sum(0, dtype=torch.int32)]
        sums.append(octets[whole:].clone())
    return sums


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """What one guarded launch left: its results, its fault (empty if it did nothing wrong), and its packed constants."""

    results: list[torch.Tensor | None]
    fault: str = ""
    packed: Packed = ()


def run_guarded(executable: Executable, problem: Problem, data: Data) -> GuardedRun:
    """Pack and launch once, on guarded results full of NaN and a guarded workspace full of garbage.

    The fault names the overrun buffer, or says that args or packed constants were written to. The launch's exceptions pass
    through.
    """
    device = next((tensor.device for tensor in (*data.args, *data.constants)), torch.device("cpu"))
    outputs = [
        GuardedBuffer(spec, problem.layout, device, f"result {index}")
        for index, spec in enumerate(result_specs(problem))
    ]
    scratch = GuardedBuffer(TensorSpec((executable.workspace_bytes,), "u8"), "any", device, "the workspace")
    given: list[torch.Tensor | None] = [None if executable.allocates_results else o.tensor for o in outputs]
    packed = executable.pack(data.constants)
    before_args, before_constants = checksum(data.args), checksum((*data.constants, *packed))
    buffers = Buffers(data.args, given, packed)
    executable.launch(buffers, scratch.tensor if executable.workspace_bytes else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    faults = [
        f"wrote outside {names}" if (names := overrun((*outputs, scratch))) else "",
        "" if _same(before_args, checksum(data.args)) else "wrote to its args",
        "" if _same(before_constants, checksum((*data.constants, *packed))) else "wrote to its constants",
    ]
    if not executable.allocates_results and any(r is not o.tensor for r, o in zip(given, outputs, strict=True)):
        faults.append("replaced a result's buffer that it was given")
    return GuardedRun(buffers.results, "; ".join(filter(None, faults)), packed)


def _same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
