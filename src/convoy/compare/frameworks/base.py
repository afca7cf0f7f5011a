"""Framework: the interface that `convoy compare` times.

Modules of this folder are imported in child processes only. They import torch only if their framework is built on it, because
a framework's memory and start-up time are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from convoy.compare.case import Case
from convoy.compare.nets import NETS

Outputs = dict[str, np.ndarray[Any, Any]]
"""Values that are checked. Inference: `out0`, `out1`, ... Training: `loss0` and `loss1` (before and after the first step) and, as
`grad:NAME`, the gradients of the first step by torch's parameter names and in torch's shapes."""


class UnsupportedCaseError(Exception):
    """A framework does not support a case; the message says why."""


@dataclass(slots=True)
class BuiltModel:
    """A framework's net, ready to be run.

    Attributes:
        run: one call (inference) as a user makes it, including copies of inputs, or one step (training). It may return before
            the device has finished.
        check: returns the outputs. It is called once, before `run`, so that training is checked from the initial weights.
        wait: returns when the device has finished; None if `run` waits itself.
        replay: only the device's work of one call, as one captured CUDA graph; None if the framework offers none.
        peak_memory: returns the most bytes of device memory that the framework had allocated, or None if it does not tell; the
            row then has no figure. Without this function the process's own memory is reported.
        restart_peak: restarts that count; called when only the fastest configuration is left.
        kinds: returns milliseconds of one call by layer kind; None if the framework has no profiler.
        setting: added to the configuration's description, if it is known only after building.
        notes: lines for the reader.
        detail: JSON for the row.
    """

    run: Callable[[], object]
    check: Callable[[], Outputs]
    wait: Callable[[], object] | None = None
    replay: Callable[[], object] | None = None
    peak_memory: Callable[[], int | None] | None = None
    restart_peak: Callable[[], object] | None = None
    kinds: Callable[[], dict[str, float]] | None = None
    setting: str = ""
    notes: list[str] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrameworkConfig:
    """One configuration of a framework.

    Attributes:
        setting: its description in the row.
        build: builds the net.
        chooses: whether building measures times, so that it needs the device to itself.
        spare: whether it is tried only if no configuration before it worked.
    """

    setting: str
    build: Callable[[], BuiltModel]
    chooses: bool = True
    spare: bool = False


class Framework(Protocol):
    """One framework. Its module is imported only if the framework is installed."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """The best known configurations for a case, the most promising first; the fastest of them is measured.

        Raises:
            UnsupportedCaseError: the framework does not support the case.
        """
        ...


@dataclass(frozen=True, slots=True)
class CaseInputs:
    """The folder that a comparison shares with its children: weights, input, labels, exact results, ONNX file.

    Attributes:
        folder: its path.
        facts: properties found when it was written (`transform_input`, tolerances, ...).
        turn: gives a context in which this process has the device to itself; for builds with `chooses=False` that measure times
            for a moment only. It must not be entered twice.
    """

    folder: Path
    facts: Mapping[str, Any]
    turn: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def weights_path(self) -> Path:
        """File of the weights, fp32, by torch's names."""
        return self.folder / "weights.safetensors"

    @property
    def onnx_path(self) -> Path:
        """File of the exported model; missing if no framework needs it."""
        return self.folder / "model.onnx"

    def weights(self) -> Outputs:
        """Weights by torch's names, fp32."""
        return self._read("weights")

    def input(self) -> np.ndarray[Any, Any]:
        """[n, c, h, w], fp32."""
        return self._read("input")["input"]

    def labels(self) -> np.ndarray[Any, Any]:
        """[n], int64: classes for training's loss."""
        return self._read("input")["labels"]

    def exact(self) -> Outputs:
        """The reference results, in float64 if that was affordable."""
        return self._read("exact")

    def _read(self, name: str) -> Outputs:
        import safetensors.numpy

        return cast("Any", safetensors.numpy).load_file(self.folder / f"{name}.safetensors")


def net_of(case: Case) -> str:
    """Name of the case's net; raises UnsupportedCaseError if `convoy.compare.nets` does not define it."""
    if case.model not in NETS:
        raise UnsupportedCaseError(f"{case.model} is defined for PyTorch alone; here are {', '.join(NETS)}")
    return case.model
