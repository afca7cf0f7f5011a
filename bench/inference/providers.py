"""Providers of whole nets, each a framework of `convoy compare` with one setting, so that each has rows of its own."""

from __future__ import annotations

from convoy.compare.frameworks import FRAMEWORKS, Entry
from convoy.compare.frameworks.torch_eager import Torch
from convoy.compare.frameworks.torch_inductor import Inductor

EAGER = Torch(graph=False)
GRAPH = Torch(("nchw",))
GRAPH_NHWC = Torch(("channels_last",))
DEFAULT = Inductor(("default",))
CONV_1X1 = Inductor(("conv_1x1_as_mm",))
DESCENT = Inductor(("coordinate descent",))
AUTOTUNE = Inductor(("max-autotune",))

_HERE = "bench.inference.providers"

PROVIDERS = {
    entry.id: entry
    for entry in (
        Entry("convoy", FRAMEWORKS["convoy"].location, ("torch",)),
        Entry("torch.eager", f"{_HERE}:EAGER", ("torch",)),
        Entry("torch.graph", f"{_HERE}:GRAPH", ("torch",)),
        Entry("torch.graph.nhwc", f"{_HERE}:GRAPH_NHWC", ("torch",)),
        Entry("inductor.default", f"{_HERE}:DEFAULT", ("torch",)),
        Entry("inductor.conv_1x1_as_mm", f"{_HERE}:CONV_1X1", ("torch",)),
        Entry("inductor.coordinate-descent", f"{_HERE}:DESCENT", ("torch",)),
        Entry("inductor.max-autotune", f"{_HERE}:AUTOTUNE", ("torch",)),
        *(FRAMEWORKS[name] for name in ("jax", "onnxruntime", "openvino")),
    )
}
"""By the name that rows have. `torch.eager` is the faster memory format; `jax`, `onnxruntime` and `openvino` choose their own."""
