"""cuda.first_layer_tf32: cuda.first_layer where PyTorch would take TF32 products (docs/kernels/first-layers.md)."""

from __future__ import annotations

from typing import ClassVar

from convoy.engines.hopper.first_layer import FirstLayerEngine


class FirstLayerTf32Engine(FirstLayerEngine):
    """A unit is one pixel; x is rounded as it is put down, results stay fp32 from the sum to the store."""

    id = "cuda.first_layer_tf32"
    devices = ("cuda",)
    writes_slices = True
    dtypes: ClassVar[frozenset[str]] = frozenset({"fp32"})
    strides: ClassVar[frozenset[int]] = frozenset({1, 2, 4})


ENGINE = FirstLayerTf32Engine()
