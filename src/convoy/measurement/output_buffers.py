"""Landing: where the launches of one problem write, the same memory for all its candidates."""

from __future__ import annotations

from typing import Final

import torch

from convoy.engines.base import Executable
from convoy.measurement.data import result_specs
from convoy.measurement.guards import ALIGNMENT, GuardedBuffer
from convoy.problem import Problem

FRESH: Final = ("cpu",)
"""Devices on which the finished program makes its results anew in each call; on a GPU a graph is captured, whose buffers stay."""


class OutputBuffers:
    """Results and workspace of a problem's candidates, which run one after the other.

    With buffers of its own for each, two dozen candidates that wait to be timed together would hold two dozen results: 5 GB of a
    layer of ResNet-50 at batch 128.

    Args:
        problem: whose results.
        device: where.
    """

    def __init__(self, problem: Problem, device: str) -> None:
        self._specs = result_specs(problem)  # not at each launch: a piece's text is parsed for them
        self._layout, self._device = problem.layout, device
        self._templates: list[torch.Tensor] = []
        self._raw: torch.Tensor | None = None

    @property
    def is_held(self) -> bool:
        """Whether memory is held."""
        return bool(self._templates) or self._raw is not None

    def clear(self) -> None:
        """Let go of it; the next launch makes it anew. Not beside a captured launch that is replayed again."""
        self._templates, self._raw = [], None

    def results(self, executable: Executable) -> list[torch.Tensor | None]:
        """The results' buffers as the finished program will give them; None each where the executable makes them itself."""
        if executable.allocates_results:
            return [None] * len(self._specs)
        if not self._templates:
            self._templates = [GuardedBuffer(spec, self._layout, self._device).tensor for spec in self._specs]
        if self._device in FRESH:
            return [torch.empty_like(template) for template in self._templates]
        return list(self._templates)

    def workspace(self, size: int) -> torch.Tensor | None:
        """So many bytes as `Executable.launch` is promised them; None for none. What is there already grows where it is less.

        A launch that was captured before it grew must not be replayed after.
        """
        if not size:
            return None
        if self._raw is None or self._raw.numel() < size + ALIGNMENT:
            self._raw = None  # first: there may be no room for both
            self._raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=self._device)
        start = -self._raw.data_ptr() % ALIGNMENT
        return self._raw[start : start + size]
