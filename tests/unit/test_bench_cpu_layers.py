"""bench/layers/cpu_layer_tables.py: sums by net, dtype, batch and kind of layer."""

from __future__ import annotations

import importlib


def row(dtype: str, provider: str, us: float, times: int = 1, kind: str = "1x1", layer: str = "a") -> dict[str, str]:
    note = f"kind={kind} times={times} flops=1000000 x=1"
    return {
        "subject": f"net {layer}:{dtype}", "batch": "1", "dtype": dtype, "provider": f"convoy.{provider}", "p50": str(us),
        "note": note, "ok": "true", "commit": "abc", "device": "a CPU", "versions": "torch=2",
    }  # fmt: skip


def test_layers_of_a_kind_are_added_up_by_dtype_and_ours_are_each_layers_fastest() -> None:
    rows = [
        row("fp32", "aten", 3000), row("fp32", "onednn", 2000), row("fp32", "cpu.direct", 1500),
        row("fp32", "cpu.winograd", 1000), row("fp32", "aten", 500, 2, layer="b"),
        row("fp32", "onednn", 1000, 2, layer="b"), row("fp32", "cpu.direct", 500, 2, layer="b"),
        row("bf16", "aten", 300), row("bf16", "onednn", 200), row("bf16", "cpu.direct", 100),
        row("fp32", "aten", 10, kind="groups_of_8"), row("fp32", "onednn", 30, kind="groups_of_8"),
        row("fp32", "cpu.grouped", 20, kind="groups_of_8"),
    ]  # fmt: skip
    table = importlib.import_module("bench.layers.cpu_layer_tables").cpu_layers_table(rows, "Layers")
    assert table.splitlines()[-3:] == [
        "| net | fp32 | 1 | 1x1 | 4.00 | 4.00 | 2.00 | 2.00x | 2 |",
        "| net | bf16 | 1 | 1x1 | 0.30 | 0.20 | 0.10 | 2.00x | 10 |",
        "| net | fp32 | 1 | groups of 8 | 0.01 | 0.03 | 0.02 | 0.50x | 50 |",
    ]
    assert table.startswith("Layers, fp32 and bf16, a CPU, commit abc,")
