"""Model names to modules (torchvision, timm, nets for CIFAR-10, a file's factory, .pt2); images and data sets to tensors."""

from __future__ import annotations

from convoy.zoo.check_images import UnreadableImage, check_images
from convoy.zoo.data_identity import data_tokens
from convoy.zoo.datasets import Dataset, classes_of, has_test_images, load_dataset, own_splits
from convoy.zoo.example import (
    Preprocessing,
    check_inputs,
    example_args,
    input_size,
    preprocessing,
)
from convoy.zoo.head import fit_head
from convoy.zoo.images import load_images
from convoy.zoo.model_names import model_names, parse_dtype
from convoy.zoo.models import load_model
from convoy.zoo.own_example import example_batch, example_size, own_dtype, shape_error
from convoy.zoo.torchvision_import import import_torchvision
from convoy.zoo.weights import class_names_of
from convoy.zoo.weights_info import WeightsInfo, read_info

__all__ = [
    "Dataset",
    "Preprocessing",
    "UnreadableImage",
    "WeightsInfo",
    "check_images",
    "check_inputs",
    "class_names_of",
    "classes_of",
    "data_tokens",
    "example_args",
    "example_batch",
    "example_size",
    "fit_head",
    "has_test_images",
    "import_torchvision",
    "input_size",
    "load_dataset",
    "load_images",
    "load_model",
    "model_names",
    "own_dtype",
    "own_splits",
    "parse_dtype",
    "preprocessing",
    "read_info",
    "shape_error",
]
