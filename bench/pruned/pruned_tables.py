"""The tables of bench/pruned/pruned.py and bench/pruned/pruned_net.py, for bench/pages/write_tables.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.shared.rows import Row

SPARSE_LIBRARIES = ("cusparse", "mkl.sparse")
DENSE_LIBRARIES = ("cudnn.best", "convoy.onednn")


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """Rows that one line of a table sums up: what a layer's note says, without the layer."""

    layers: str
    dtype: str
    pattern: str
    batch: int
    zeros: float = 0.0

    @property
    def cells(self) -> tuple[str, ...]:
        """As a table's first cells."""
        return self.layers, self.dtype, self.pattern, str(self.batch)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of at least one value."""
    return math.exp(sum(map(math.log, values)) / len(values))


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    yield from ("| " + " | ".join(line) + " |" for line in lines)


def layers_of(name: str) -> str:
    """What a layer is one of."""
    return "ten operators" if name.startswith("op") else name.partition(":")[0]


def pruned_table(rows: Sequence[Row], title: str) -> str:
    """Gains of engines for pruned weights over dense libraries, the fastest dense engine and sparse libraries; break-evens.

    A row's note begins with the layer, then `dense`, or the pattern and the share of zeros. Dense rows with TF32 are left out.
    """
    right = [row for row in rows if row["ok"] == "true" and row["numerics"] != "as_torch"]
    timed = [row for row in right if row["metric"] == "kernel_us"]
    dense: dict[tuple[str, str, str], dict[str, float]] = {}
    sparse: dict[Case, dict[str, dict[str, float]]] = {}
    for row in timed:
        name, pattern, *rest = row["note"].split()
        if pattern == "dense":
            found = dense.setdefault((name, row["dtype"], row["batch"]), {})
        else:
            case = Case(layers_of(name), row["dtype"], pattern, int(row["batch"]), float(rest[0]))
            found = sparse.setdefault(case, {}).setdefault(name, {})
        found[row["provider"]] = min(float(row["p50"]), found.get(row["provider"], math.inf))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [f"{title}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}", ""]
    heads = ["layers", "dtype", "pattern", "batch", "zeros", "of them", "over the dense library: mean", "worst"]
    heads += ["over the fastest dense engine: mean", "worst", "over the sparse library: mean", "worst"]
    lines += table(heads, [gains(case, sparse[case], dense) for case in sorted(sparse)])
    evens = break_evens([row for row in right if row["metric"] == "break_even"])
    return "\n".join(
        [*lines, *(["", "From which share of zeros on it is faster, the median layer:", ""] if evens else []), *evens]
    )


def gains(
    case: Case, layers: dict[str, dict[str, float]], dense: dict[tuple[str, str, str], dict[str, float]]
) -> list[str]:
    """One line: what is gained over each kind of rival."""
    over: dict[str, list[float]] = {"library": [], "fastest": [], "sparse": []}
    for name, times in layers.items():
        ours = min((us for provider, us in times.items() if provider not in SPARSE_LIBRARIES), default=0.0)
        known = dense.get((name, case.dtype, str(case.batch)), {})
        rivals = {
            "library": [us for provider, us in known.items() if provider in DENSE_LIBRARIES],
            "fastest": [*known.values()],
            "sparse": [us for provider, us in times.items() if provider in SPARSE_LIBRARIES],
        }
        for rival, found in rivals.items():
            if ours and found:
                over[rival].append(min(found) / ours)
    cells = [f"{f(values):.2f}x" if values else "" for values in over.values() for f in (geometric_mean, min)]
    return [*case.cells, f"{case.zeros:.0%}", str(len(layers)), *cells]


def break_evens(rows: Sequence[Row]) -> list[str]:
    """Median break-even sparsities over dense libraries and the fastest dense engine; a layer that has none counts as 1."""
    found: dict[Case, dict[str, list[float]]] = {}
    for row in rows:
        name, pattern = row["note"].split()
        rival = "library" if row["provider"] in DENSE_LIBRARIES else row["provider"]
        case = Case(layers_of(name), row["dtype"], pattern, int(row["batch"]))
        share = float(row["p50"])
        found.setdefault(case, {}).setdefault(rival, []).append(1.0 if math.isnan(share) else share)
    lines = [
        [*case.cells, *(shown(shares.get(rival, ())) for rival in ("library", "convoy.dense"))]
        for case, shares in sorted(found.items(), key=lambda pair: pair[0])
    ]
    heads = ("layers", "dtype", "pattern", "batch", "than the dense library", "than the fastest dense engine")
    return [*table(heads, lines)] if lines else []


def shown(shares: Sequence[float]) -> str:
    """The median of shares of zeros."""
    if not shares:
        return ""
    middle = statistics.median(shares)
    return f"{middle:.0%} of {len(shares)} layers" if middle < 1 else f"never, of {len(shares)} layers"


def pruned_net_table(rows: Sequence[Row], title: str) -> str:
    """Whole nets, dense and pruned."""
    dense = {(row["subject"], row["dtype"], row["batch"]): row for row in rows if " " not in row["subject"]}
    lines: list[list[str]] = []
    for row in rows:
        net, _, rest = row["subject"].partition(" ")
        before = dense.get((net, row["dtype"], row["batch"]))
        if rest and before is not None and row["ok"] == before["ok"] == "true":
            pattern, zeros = rest.split()
            gain = float(before["p50"]) / float(row["p50"])
            cells = [f"{float(r['p50']):.3f}" for r in (before, row)]
            lines.append([net, row["dtype"], row["batch"], pattern, f"{float(zeros):.0%}", *cells, f"{gain:.2f}x"])
    heads = ("net", "dtype", "batch", "pattern", "zeros", "dense, ms", "pruned, ms", "gain")
    about = f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['versions']}"
    return "\n".join([about, "", *table(heads, lines)])
