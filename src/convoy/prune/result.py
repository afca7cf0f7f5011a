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
        zeros_before: zeros among its weights before.
        zeros_after: and after.
        kept_norm: norm of the weight after pruning over that before, before any fine-tune; 1 for a weight of zeros.
        reason: why it was not pruned; empty where it was.
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
    """Share of test images that the model gets right: as it was, pruned, and fine-tuned where it was.

    Attributes:
        data: where the images came from.
        images: how many.
        before: before pruning.
        pruned: after it.
        finetuned: after the fine-tune; None where there was none.
    """

    data: str
    images: int
    before: float
    pruned: float
    finetuned: float | None = None


@dataclass(frozen=True, slots=True)
class Finetune:
    """The fine-tuning run, and the mean loss of each of its epochs."""

    data: str
    images: int
    epochs: int
    lr: float
    seed: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PruneSummary:
    """Everything that `convoy prune` found out.

    Attributes:
        model: the name that the user gave.
        pattern: where zeros may lie.
        sparsity: the share of zeros asked for, or the pattern's own.
        scope: `layer` or `global`.
        layers: in order of registration.
        accuracy: where there was data.
        finetune: where it was asked for.
        notes: remarks for the reader, a line each.
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
        """A short form, which is stored with the weights."""
        words = {"model": self.model, "pattern": self.pattern, "sparsity": f"{self.sparsity:g}", "scope": self.scope}
        if self.accuracy is not None:
            after = self.accuracy.pruned if self.accuracy.finetuned is None else self.accuracy.finetuned
            words |= {"accuracy_before": f"{self.accuracy.before:.4f}", "accuracy": f"{after:.4f}"}
            words |= {"accuracy_images": f"{self.accuracy.images} of {self.accuracy.data}"}
        return words

    def to_dict(self) -> dict[str, Any]:
        """JSON's types, nested."""
        return dataclasses.asdict(self)
