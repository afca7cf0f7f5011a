"""Whether code draws random numbers from PyTorch's generators."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WatchGenerators(TorchDispatchMode):
    """While it is entered, `drawn` becomes true as soon as an operator moves a default generator.

    Operators that may draw numbers have a tag. An attention has it too, and draws numbers only with dropout.
    """

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator."""
        if self.drawn or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = _states()
        made = func(*args, **(kwargs or {}))
        self.drawn = not all(map(torch.equal, before, _states()))
        return made


def _states() -> list[torch.Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]
