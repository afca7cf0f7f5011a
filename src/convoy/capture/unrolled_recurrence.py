"""Recurrent layers in a training step on a CPU: AOTAutograd takes them apart, time step by time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from convoy.errors import CaptureError

MOST_TIME_STEPS: Final = 32
"""Time steps, over layers and directions, that are still worth a graph. Each becomes about 30 nodes of forward and backward
pass: a step of an LSTM with 40 took 20 s to capture, and Inductor 50 s for the nodes between its layers (two cores)."""

_RECURRENT: Final[dict[object, str]] = {
    torch.lstm: "LSTM", torch.gru: "GRU", torch.rnn_tanh: "RNN", torch.rnn_relu: "RNN",
}  # fmt: skip


class RecurrenceGuard(TorchFunctionMode):
    """While active, a recurrent layer with many time steps on a CPU is refused before it is traced.

    On a GPU such a layer stays one operator, cuDNN's.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, unless it is such a layer.

        Raises:
            CaptureError: it is.
        """
        kind = _RECURRENT.get(func)
        if kind is not None and len(args) > 8 and args[0].device.type == "cpu":  # as torch.nn's layers call it
            steps = _time_steps(args)
            if steps > MOST_TIME_STEPS:
                raise CaptureError(
                    f"the {kind} runs {steps} time steps, which a graph on a CPU would hold one by one (at most "
                    f'{MOST_TIME_STEPS}); torch.compile(model, backend="convoy") leaves the {kind} to PyTorch'
                )
        return func(*args, **(kwargs or {}))


def _time_steps(args: Sequence[Any]) -> int:
    """Time steps of all layers and directions of a call of `torch.lstm` and its like, in its padded or its packed form.

    Padded: (input, state, weights, biases?, layers, dropout, train, bidirectional, batch_first). Packed, which is one position
    longer in front and has no last argument: (data, batch_sizes, state, ...).
    """
    if isinstance(args[3], bool):
        layers, both, batch_first = args[4], args[7], args[8]
        length = args[0].shape[1 if batch_first else 0]
    else:
        layers, both, length = args[5], args[8], args[1].shape[0]
    return int(length) * int(layers) * (1 + bool(both))
