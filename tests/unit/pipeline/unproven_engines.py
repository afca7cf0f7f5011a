"""Engines that predictions may favour and that are wrong: always, or on inputs that no candidate is tried on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.library.aten import Aten
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

Launch = Callable[[Buffers, torch.Tensor | None], None]


class Wrong(Engine):
    """Half as much again as ATen's result."""

    id = "wrong"
    family = "library"

    def supports(self, problem: Problem, target: Target) -> Support:
        return Support.yes() if isinstance(problem, ConvProblem) else Support.no("convolutions only")

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        inner = Aten().build(problem, knobs, target)
        plain: Launch = inner.launch

        def launch(buffers: Buffers, workspace: torch.Tensor | None) -> None:
            plain(buffers, workspace)
            result = buffers.results[0]
            assert result is not None
            if self.strikes(buffers):
                result.mul_(1.5)

        inner.launch = launch  # type: ignore[method-assign]
        return inner

    def strikes(self, buffers: Buffers) -> bool:
        del buffers
        return True


class Shy(Wrong):
    """Wrong where x has values that test data never has."""

    id = "shy"

    def strikes(self, buffers: Buffers) -> bool:
        return bool(buffers.args[0].abs().max() > 50)
