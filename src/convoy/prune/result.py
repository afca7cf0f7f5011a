"""Results of pruning, as data: `to_dict` is the schema of `convoy prune --json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PrunedLayer:
    """One convolution or linear layer.

    Attributes:
        name: path of its module.
        shape: of its weight.
        zeros_before: number of its weights that were zero before pruning.
        zeros_after: the same after pruning.
        kept_norm: L2 norm of the weight after pruning, before any fine-tuning, divided by that before; 1 for a weight of zeros.
        reason: why it was not pruned; empty if it was.
    """

    name: str
    shape: tuple[int, ...]
    zeros_before: int
    zeros_after: int
    kept_norm: float
    reason: str = ""

    @property
    def weights(self) -> int:
        """Number of weights."""
        count = 1
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Top-1 accuracy, 0..1: before pruning, after it, and after fine-tuning.

    Attributes:
        data: source of the images.
        images: number of images.
        before: before pruning.
        pruned: after pruning.
        finetuned: after fine-tuning; None if there was none.
    """

    data: str
    images: int
    before: float
    pruned: float
    finetuned: float | None = None


@dataclass(frozen=True, slots=True)
class Finetune:
    """Settings of a fine-tuning run, and the mean loss of each epoch."""

    data: str
    images: int
    epochs: int
    lr: float
    seed: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PruneSummary:
    """Result of `convoy prune`.

    Attributes:
        model: the name that the user gave.
        pattern: the pattern of zeros.
        sparsity: as requested, or as the pattern implies.
        scope: `layer` or `global`.
        layers: in order of registration.
        accuracy: None without test data.
        finetune: None if none was requested.
        notes: remarks for the reader, one line each.
    """

    model: str
    pattern: str
    sparsity: float
    scope: str
    layers: tuple[PrunedLayer, ...]
    accuracy: Accuracy | None = None
    finetune: Finetune | None = None
    notes: tuple[str, ...] = ()

    def about(self) -> dict[str, str]:
        """A short form as strings, which is stored with the weights."""
        words = {"model": self.model, "pattern": self.pattern, "sparsity": f"{self.sparsity:g}", "scope": self.scope}
        if self.accuracy is not None:
            after = self.accuracy.pruned if self.accuracy.finetuned is None else self.accuracy.finetuned
            words |= {"accuracy_before": f"{self.accuracy.before:.4f}", "accuracy": f"{after:.4f}"}
            words |= {"accuracy_images": f"{self.accuracy.images} of {self.accuracy.data}"}
        return words

    def to_dict(self) -> dict[str, Any]:
        """JSON's types, nested."""
        return dataclasses.asdict(self)
