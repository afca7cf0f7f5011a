"""Layer kinds of a profiler's events, by their names. Plain Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, cast

KINDS: Final = ("conv", "linear", "norm", "pool", "pointwise", "copy", "optimizer", "fused", "other")
"""In the order in which they are shown; `fused` is for kernels that a compiler fused."""

_PATTERNS: Final = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("optimizer", r"sgd|optimizer|multi_tensor|foreach"),
        ("norm", r"batch_?norm|bn_fw|bn_bw|native_norm|normalization"),
        ("conv", r"conv|fprop|dgrad|wgrad|winograd|implicit_gemm"),
        ("pool", r"pool"),
        ("linear", r"gemm|addmm|::mm\b|matmul|linear|inner_?product|fully_?connected|gemv"),
        ("copy", r"copy|memcpy|memset|transpose|reorder|clone|convert|nchwtonhwc|nhwctonchw|permute|fill_|zero_"),
        ("fused", r"triton_|cpp_fused|compiled ?region|compiledfxgraph|compiledfunction|subgraph|inductor"),
        (
            "pointwise",
            r"relu|add|mul|elementwise|eltwise|pointwise|clamp|concat|cat\b|softmax|nll|threshold|mean|reduce",
        ),
    )
)


def kind_of(name: str) -> str:
    """The kind of an event: the first whose words are in its name, or `other`."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def by_kind(events: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum (name, time) pairs up by kind, in `KINDS`' order, without kinds that took nothing."""
    sums = dict.fromkeys(cast("Sequence[str]", KINDS), 0.0)
    for name, time in events:
        sums[kind_of(name)] += time
    return {kind: time for kind, time in sums.items() if time > 0}
