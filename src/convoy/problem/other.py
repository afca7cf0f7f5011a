"""The problems that are not convolutions: a linear layer, a subgraph of operators, a change of layout."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from convoy.errors import InputError
from convoy.problem.conv import NO_EPILOGUE, NUMERICS, Epilogue
from convoy.problem.spec import DTYPE_BYTES, FLOAT_DTYPES, LAYOUTS, VOLUME_LAYOUTS, TensorSpec


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A fully connected layer: y[n, k] = activation(x[n, c] · weight[k, c]^T + bias + residual)."""

    n: int
    c: int
    k: int
    dtype: str = "fp32"
    numerics: str = "as_torch"
    epilogue: Epilogue = NO_EPILOGUE

    def __post_init__(self) -> None:
        for name, least in (("n", 0), ("c", 1), ("k", 1)):
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"an integer of at least {least}")
        if self.dtype not in FLOAT_DTYPES:
            raise InputError("dtype", self.dtype, "one of " + ", ".join(sorted(FLOAT_DTYPES)))
        if self.numerics not in NUMERICS:
            raise InputError("numerics", self.numerics, "one of " + ", ".join(NUMERICS))
        if self.epilogue.pool is not None:
            raise InputError("epilogue", str(self.epilogue), "no pooling after a linear layer")

    layout = "any"
    """A linear layer's values are matrices: no layout to choose."""

    @property
    def x_spec(self) -> TensorSpec:
        """x: [n, c]."""
        return TensorSpec((self.n, self.c), self.dtype)

    @property
    def weight_spec(self) -> TensorSpec:
        """Weight: [k, c]."""
        return TensorSpec((self.k, self.c), self.dtype)

    @property
    def y_spec(self) -> TensorSpec:
        """y: [n, k]."""
        return TensorSpec((self.n, self.k), self.dtype)

    @property
    def reduction_length(self) -> int:
        """Products that are summed for one output element."""
        return self.c

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.n * self.c * self.k

    @property
    def bytes_min(self) -> int:
        """Least bytes to move: each tensor once."""
        total = self.x_spec.size_bytes + self.weight_spec.size_bytes + self.y_spec.size_bytes
        total += self.k * DTYPE_BYTES[self.dtype] if self.epilogue.bias else 0
        return total + (self.y_spec.size_bytes if self.epilogue.residual else 0)

    @property
    def key(self) -> str:
        """Canonical text, read back by `parse`."""
        return f"linear:n{self.n}c{self.c}k{self.k}:{self.dtype}:{self.numerics}:{self.epilogue}"

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> LinearProblem:
        """Inverse of `key`."""
        match = re.fullmatch(r"linear:n(\d{1,9})c(\d{1,9})k(\d{1,9}):(\w{1,8}):(\w{1,10}):([\w+]{1,64})", key, re.ASCII)
        if match is None:
            raise InputError("problem", key, "a key such as " + LinearProblem(1, 2, 3).key)
        n, c, k = (int(g) for g in match.groups()[:3])
        return LinearProblem(n, c, k, match[4], match[5], Epilogue.parse(match[6]))


@dataclass(frozen=True, slots=True)
class SubgraphProblem:
    """A subgraph that keeps its operators: pooling, concatenation, pointwise work, normalisation.

    `text` is the subgraph in the graph's text form (`convoy.graph.text`), with canonical names, so that two equal subgraphs,
    of one net or of two, are one problem. `layout` is the memory format of every 4-D input and output;
    `ncdhw` and `ndhwc` say it of the 5-D ones too. `bytes_min` and
    `label` (the operators, for people) are derived when the subgraph is extracted and are not part of the key.
    """

    text: str
    layout: str = "nchw"
    bytes_min: int = 0
    label: str = ""
    flops = 0

    @property
    def key(self) -> str:
        """`subgraph:LAYOUT:` and 24 hex digits of the text's SHA-256; the text itself is stored beside it."""
        return f"subgraph:{self.layout}:{hashlib.sha256(self.text.encode()).hexdigest()[:24]}"

    def with_layout(self, layout: str) -> SubgraphProblem:
        """The same subgraph in another memory format."""
        return replace(self, layout=layout)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubgraphProblem) and (self.text, self.layout) == (other.text, other.layout)

    def __hash__(self) -> int:
        return hash((self.text, self.layout))

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class LayoutProblem:
    """Copy a 4-D or 5-D value from one memory format to another."""

    spec: TensorSpec
    source: str
    layout: str
    flops = 0

    def __post_init__(self) -> None:
        if len(self.spec.shape) not in (4, 5):
            raise InputError("spec", str(self.spec), "a 4-D or 5-D tensor")
        allowed = LAYOUTS if len(self.spec.shape) == 4 else VOLUME_LAYOUTS
        for name in ("source", "layout"):
            if getattr(self, name) not in allowed:
                raise InputError(name, getattr(self, name), "one of " + ", ".join(allowed))

    @property
    def bytes_min(self) -> int:
        """Read once, written once."""
        return 2 * self.spec.size_bytes

    @property
    def key(self) -> str:
        """Canonical text, read back by `parse`."""
        return f"layout:{self.source}:{self.layout}:{self.spec}"

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> LayoutProblem:
        """Inverse of `key`."""
        parts = key.split(":")
        if len(parts) != 4 or parts[0] != "layout":
            raise InputError("problem", key, "a key such as layout:nchw:nhwc:fp32[1,3,8,8]")
        return LayoutProblem(TensorSpec.parse(parts[3]), parts[1], parts[2])
