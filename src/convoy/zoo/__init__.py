"""Model names to modules (torchvision, timm, a file's factory, .pt2) and images to tensors."""

from __future__ import annotations

from convoy.zoo.example import Preprocessing, example_args, preprocessing
from convoy.zoo.images import load_images
from convoy.zoo.models import input_size, load_model, model_names, parse_dtype
from convoy.zoo.torchvision_import import import_torchvision

__all__ = [
    "Preprocessing",
    "example_args",
    "import_torchvision",
    "input_size",
    "load_images",
    "load_model",
    "model_names",
    "parse_dtype",
    "preprocessing",
]
