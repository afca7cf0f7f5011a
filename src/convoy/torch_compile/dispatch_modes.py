"""without_modes: switches off the modes of the caller's thread while a graph is tuned."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def modes_forbid_tuning() -> bool:
    """Whether a dispatch mode or a transform of `torch.func` is active, under which PyTorch must run the graph."""
    core: Any = torch._C
    return bool(core._len_torch_dispatch_stack() or core._functorch.peek_interpreter_stack())


@contextmanager
def without_modes(*, autocast: bool = True, gradients: bool = False) -> Generator[None]:
    """Run as in a new thread, but without gradients: no inference mode, dispatch modes, function modes or tracing context.

    AOTAutograd first calls a compiled forward pass under a dispatch mode of its own, in which Inductor cannot trace. A user may
    have set a default device, which is a function mode, or count operators by a dispatch mode.

    Args:
        autocast: whether the caller's autocast is switched off as well.
        gradients: whether gradients are recorded.
    """
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        stack.enter_context(tracing(None))
        stack.enter_context(_disable_current_modes())  # pyright: ignore[reportUnknownArgumentType]
        stack.enter_context(_without_function_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        for device in ("cpu", "cuda") if autocast else ():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _without_function_modes() -> Generator[None]:
    """Take all function modes off the thread's stack for a while. Disabling them would disable the exporter's own too."""
    from torch._C import _len_torch_function_stack
    from torch.overrides import _pop_mode, _push_mode  # pyright: ignore[reportUnknownVariableType]

    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # pyright: ignore[reportUnknownMemberType]
