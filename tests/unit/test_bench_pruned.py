"""The tables of pruned weights: what is divided by what, and what is left out."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("bench.pruned.pruned_tables")


def row(note: str, provider: str, p50: float, **rest: str) -> dict[str, str]:
    words = {"metric": "kernel_us", "numerics": "strict", "dtype": "fp32", "batch": "1", "ok": "true"}
    about = {"device": "a GPU", "commit": "abcdef0", "versions": "torch=2", "subject": "a problem"}
    return {**words, **about, "note": note, "provider": provider, "p50": str(p50), **rest}


ROWS = [
    row("op1 dense", "cudnn.best", 8.0),
    row("op1 dense", "cudnn.best", 1.0, numerics="as_torch"),
    row("op1 dense", "convoy.triton.split_fp32", 4.0),
    row("op1 unstructured 0.9 filters=4", "convoy.pruned.cuda", 2.0),
    row("op1 unstructured 0.9", "convoy.pruned.csr", 3.0),
    row("op1 unstructured 0.9", "convoy.pruned.c", 0.1, ok="false"),
    row("op1 unstructured 0.9", "cusparse", 20.0),
    row("op2 dense", "cudnn.best", 4.0),
    row("op2 unstructured 0.9", "convoy.pruned.cuda", 4.0),
    row("resnet50:3x3:64x56:64/1 dense", "cudnn.best", 6.0),
    row("resnet50:3x3:64x56:64/1 unstructured 0.9", "convoy.pruned.cuda", 1.0),
    *(row(f"op{i} unstructured", "convoy.dense", p, metric="break_even") for i, p in ((1, 0.5), (2, float("nan")))),
    row("op1 unstructured", "cudnn.best", 0.5, metric="break_even"),
]


def test_gains_are_over_strict_rows_and_right_ones(tables: ModuleType) -> None:
    text = tables.pruned_table(ROWS, "t")
    assert (
        "| ten operators | fp32 | unstructured | 1 | 90% | 2 | 2.00x | 1.00x | 1.41x | 1.00x | 10.00x | 10.00x |"
        in text
    )
    assert "| resnet50 | fp32 | unstructured | 1 | 90% | 1 | 6.00x | 6.00x | 6.00x | 6.00x |  |  |" in text


def test_a_layer_without_a_break_even_counts_as_all_zeros(tables: ModuleType) -> None:
    text = tables.pruned_table(ROWS, "t")
    assert "| ten operators | fp32 | unstructured | 1 | 50% of 1 layers | 75% of 2 layers |" in text
    assert tables.shown([1.0, 1.0]) == "never, of 2 layers"


def test_nets_stand_beside_their_dense_selves(tables: ModuleType) -> None:
    rows = [
        row("", "convoy", p, metric="latency_ms", subject=subject)
        for subject, p in (("n", 3.0), ("n unstructured 0.9", 1.5), ("n channel 0.5", 2.0))
    ]
    rows[2]["ok"] = "false"
    text = tables.pruned_net_table(rows, "t")
    assert "| n | fp32 | 1 | unstructured | 90% | 3.000 | 1.500 | 2.00x |" in text
    assert "channel" not in text


def test_masks_have_their_share_of_zeros_and_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = importlib.import_module("bench.pruned.pruned_layers")
    ((_, problem),) = layers.operators([6], 1, "fp32")
    for pattern, sparsity in (("unstructured", 0.9), ("channel", 0.5), ("2:4", 0.5), ("block:1x8", 0.75)):
        mask = layers.masked(problem, sparsity, pattern).mask
        assert mask == layers.masked(problem, sparsity, pattern).mask
        assert mask.sparsity == pytest.approx(sparsity, abs=1e-4)
    names = [name for name, _ in layers.resnet_layers(1, "fp32", 256)]
    assert len(set(names)) == len(names) > 4
    assert not any(" " in name for name in names), "a note is read by its words"
