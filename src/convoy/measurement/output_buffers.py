"""The buffers that a problem's launches write to, shared by all its candidates."""

from __future__ import annotations

from typing import Final

import torch

from convoy.engines.base import Executable
from convoy.measurement.data import result_specs
from convoy.measurement.guards import ALIGNMENT, GuardedBuffer
from convoy.problem import Problem

ALLOCATING_DEVICES: Final = ("cpu",)
"""Devices on which the finished program allocates its results in every call; on a GPU the captured graph keeps its buffers."""


class OutputBuffers:
    """Results and workspace of a problem's candidates, which run one after another.

    With buffers of their own, two dozen candidates that wait to be timed together would hold two dozen results: 5 GB for one
    layer of ResNet-50 at batch 128.

    Args:
        problem: the problem.
        device: the device.
    """

    def __init__(self, problem: Problem, device: str) -> None:
        self._specs = result_specs(problem)  # once: a subgraph's text is parsed for them
        self._layout, self._device = problem.layout, device
        self._templates: list[torch.Tensor] = []
        self._raw: torch.Tensor | None = None

    @property
    def is_held(self) -> bool:
        """Whether any memory is held."""
        return bool(self._templates) or self._raw is not None

    def clear(self) -> None:
        """Free the memory; the next launch allocates it again. A captured launch must not be replayed afterwards."""
        self._templates, self._raw = [], None

    def results(self, executable: Executable) -> list[torch.Tensor | None]:
        """The result buffers as the finished program passes them; None for each if the executable allocates them itself."""
        if executable.allocates_results:
            return [None] * len(self._specs)
        if not self._templates:
            self._templates = [GuardedBuffer(spec, self._layout, self._device).tensor for spec in self._specs]
        if self._device in ALLOCATING_DEVICES:
            return [torch.empty_like(template) for template in self._templates]
        return list(self._templates)

    def workspace(self, size: int) -> torch.Tensor | None:
        """A workspace of this size, aligned as `Executable.launch` expects it; None for size 0. It grows if it is too small.

        A launch that was captured before it grew must not be replayed afterwards.
        """
        if not size:
            return None
        if self._raw is None or self._raw.numel() < size + ALIGNMENT:
            self._raw = None  # freed first: memory may not suffice for both
            self._raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=self._device)
        start = -self._raw.data_ptr() % ALIGNMENT
        return self._raw[start : start + size]
