"""Framework: the interface that `convoy compare` times.

Modules here are imported in child processes alone, and none imports torch unless its framework is built on it: what a framework
needs of memory and of start-up time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """A framework cannot do a case; the message says why."""


@dataclass(slots=True)
class BuiltModel:
    """A framework's net, ready to be run.

    Attributes:
        run: one call (inference) as a user makes it, copies of inputs included, or one step (training); may return before the
            device has done it.
        check: the outputs, called once and before anything else, so that training is checked from the weights as they were.
        wait: return when the device is done; None: `run` returns when it is done.
        replay: the device's work of one call alone, as one captured CUDA graph; None: the framework offers none.
        peak_memory: most bytes of device memory that the framework had allocated, None where it does not tell: then there is no
            figure, for a process's own memory says nothing of a GPU's. Without such a function the process's own is what counts.
        restart_peak: count that anew, called when the ways that were not the fastest are gone.
        kinds: milliseconds of one call by layer kind; None: the framework offers no such thing.
        setting: added to the configuration's description, where it is known only after building.
        notes: lines for people.
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
    """One way to set a framework.

    Attributes:
        setting: words for the row.
        build: builds the net so.
        chooses: building it chooses by the clock, so that it has the device for itself.
        spare: it is tried only where no way before it worked.
    """

    setting: str
    build: Callable[[], BuiltModel]
    chooses: bool = True
    spare: bool = False


class Framework(Protocol):
    """One framework. Its module is imported when it is known to be installed."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """The best known ways to run a case, the likeliest first; the fastest of them is measured.

        Raises:
            UnsupportedCaseError: it cannot do the case.
        """
        ...


@dataclass(frozen=True, slots=True)
class CaseInputs:
    """The folder that a comparison shares with its children: weights, input, labels, exact results, ONNX file.

    Attributes:
        folder: where it lies.
        facts: properties found when it was made (`transform_input`, tolerances, ...).
    """

    folder: Path
    facts: Mapping[str, Any]

    @property
    def weights_path(self) -> Path:
        """Weights in fp32, by torch's names."""
        return self.folder / "weights.safetensors"

    @property
    def onnx_path(self) -> Path:
        """The exported model, where an export was asked for."""
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
        """The exact results, in float64 where that was affordable."""
        return self._read("exact")

    def _read(self, name: str) -> Outputs:
        import safetensors.numpy

        return cast("Any", safetensors.numpy).load_file(self.folder / f"{name}.safetensors")


def net_of(case: Case) -> str:
    """The case's net among those that have a definition; raises UnsupportedCaseError for others."""
    if case.model not in NETS:
        raise UnsupportedCaseError(f"{case.model} is defined for PyTorch alone; here are {', '.join(NETS)}")
    return case.model
