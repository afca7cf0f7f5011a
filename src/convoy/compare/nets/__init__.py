"""Nets of torchvision once, over the few operators that each framework has: same weights, same outputs, in its own graph.

A framework gives an `Operators` (its own layers or functions, in its own layout) and gets its own graph of the net. Names are
those of torchvision's parameters, and sizes are read from the weights, so that weights are copied over by name. What is
random in training (dropout, stochastic depth) is left out. Each module names its net's paper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from convoy.compare.nets.alexnet import alexnet
from convoy.compare.nets.densenet import densenet121
from convoy.compare.nets.efficientnet import efficientnet_b0
from convoy.compare.nets.googlenet import googlenet, transform_input
from convoy.compare.nets.inception import inception_v3
from convoy.compare.nets.mobilenet import mobilenet_v2
from convoy.compare.nets.operators import Array, Operators
from convoy.compare.nets.resnet import resnet50
from convoy.compare.nets.vgg import vgg

NETS: Final[dict[str, Callable[[Operators, Array], Array]]] = {
    "alexnet": alexnet,
    "vgg16": partial(vgg, blocks=(2, 2, 3, 3, 3)),
    "vgg19": partial(vgg, blocks=(2, 2, 4, 4, 4)),
    "googlenet": googlenet,
    "inception_v3": inception_v3,
    "resnet50": resnet50,
    "densenet121": densenet121,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
}
"""The nets by their name in torchvision."""

__all__ = ["NETS", "Operators", "transform_input"]
