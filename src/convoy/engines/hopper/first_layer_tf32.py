"""cuda.first_layer_tf32: cuda.first_layer for fp32 layers that may use TF32 products (docs/kernels/first-layers.md)."""

from __future__ import annotations

from typing import ClassVar

from convoy.engines.hopper.first_layer import FirstLayerEngine


class FirstLayerTf32Engine(FirstLayerEngine):
    """As cuda.first_layer; x is rounded to TF32 in shared memory, and results stay fp32."""

    id = "cuda.first_layer_tf32"
    devices = ("cuda",)
    writes_slices = True
    dtypes: ClassVar[frozenset[str]] = frozenset({"fp32"})
    strides: ClassVar[frozenset[int]] = frozenset({1, 2, 4})


ENGINE = FirstLayerTf32Engine()
