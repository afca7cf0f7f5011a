"""Which figures of a run's rows rest on predicted times. Pages mark them, and a difference of two runs does not judge them."""

from __future__ import annotations

from convoy.compare.runs.rows import Row


def has_predicted_total(row: Row) -> bool:
    """Whether a strategy's total contains a predicted time; of files without that count, whether any problem was predicted."""
    return bool(row.detail.get("predicted_steps", row.detail.get("predicted", 0)))


def has_predicted_layers(row: Row) -> bool:
    """Whether the time of one of a Convoy program's steps is predicted."""
    return any(layer.get("predicted") for layer in row.detail.get("layers", ()))
