"""The one place that imports torchvision, for wheels whose compiled part does not fit the torch beside them."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch

from convoy.errors import InputError

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def import_torchvision() -> ModuleType:
    """Import torchvision and return it.

    A CUDA build of torchvision beside a CPU build of torch cannot load its operators, and its import then fails because the
    schema of `nms` is missing. Classifiers need no such operator: once the import has failed for that reason, the schemas
    alone are declared and the import is tried again.

    Raises:
        InputError: torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise InputError("torchvision", None, "torchvision to be installed", "Run: pip install torchvision") from error
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for schema in _SCHEMAS:
        cast("Any", _LIBRARY).define(schema)
    return importlib.import_module("torchvision")


def torchvision_weights(name: str) -> Any:
    """Torchvision's enumeration of the weights of a model, whose member `DEFAULT` is the best; raises ValueError if unknown."""
    import_torchvision()
    return cast("Any", importlib.import_module("torchvision.models")).get_model_weights(name)


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
"""Kept for the life of the process: torch forgets a fragment's schemas when its Library is collected."""
