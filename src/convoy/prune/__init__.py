"""Prune a model by magnitude, measure its accuracy, and find the sparsity that makes a layer faster (docs/how-to/prune.md)."""

from __future__ import annotations

from convoy.prune.accuracy import accuracy
from convoy.prune.advise import PATTERNS, Advice, advise, break_even
from convoy.prune.magnitude import Recipe
from convoy.prune.model import Pruned, prune_model
from convoy.prune.patterns import Pattern, parse_pattern
from convoy.prune.result import Accuracy, Finetune, PrunedLayer, PruneSummary
from convoy.prune.save import check_weights_path, describe_weights, save_weights

__all__ = [
    "PATTERNS",
    "Accuracy",
    "Advice",
    "Finetune",
    "Pattern",
    "PruneSummary",
    "Pruned",
    "PrunedLayer",
    "Recipe",
    "accuracy",
    "advise",
    "break_even",
    "check_weights_path",
    "describe_weights",
    "parse_pattern",
    "prune_model",
    "save_weights",
]
