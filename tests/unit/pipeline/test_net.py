"""The stages' small decisions: which engines compete, which formats are allowed, where things lie."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from convoy.engines.competition import competing_engines
from convoy.engines.manifest import MANIFEST, entry, load_engine
from convoy.errors import InputError
from convoy.measurement.device import memory_limit
from convoy.pipeline.net import allowed_layouts, memory_format
from convoy.pipeline.optimize import optimize_model
from convoy.pipeline.plan_target import device_of
from convoy.settings import LayoutChoice, Settings


def test_who_competes() -> None:
    usual = [name for name in MANIFEST if load_engine(name).is_offered(Settings())]
    assert competing_engines(Settings(engines=())) == usual
    assert competing_engines(Settings(engines=(), only_engines=("gemm",))) == ["aten", "gemm"]
    assert competing_engines(Settings(engines=("x=y:Z",), only_engines=("x",))) == ["aten", "x"]
    assert "batches" not in competing_engines(Settings())
    assert "batches" in competing_engines(Settings(memory_budget_bytes=1 << 20))
    assert "batches" in competing_engines(Settings(only_engines=("batches",)))
    assert "pruned.csr" not in usual
    assert "pruned.csr" in competing_engines(Settings(engines=(entry("pruned.csr"),)))
    assert "pruned.csr" in competing_engines(Settings(), published=True)
    without = competing_engines(Settings(engines=(), deny_engines=("onednn",)))
    assert set(usual) - set(without) == {"onednn"}
    for words in ({"only_engines": ("nobody",)}, {"deny_engines": ("nobody",)}, {"deny_engines": ("onednn", "aten")}):
        with pytest.raises(InputError, match=next(iter(words))):
            competing_engines(Settings(engines=(), **words))
    with pytest.raises(InputError, match=r"deny_engines.*only_engines does not name.*Both name gemm"):
        competing_engines(Settings(engines=(), only_engines=("onednn", "gemm"), deny_engines=("gemm",)))


@pytest.mark.parametrize(
    ("choice", "first", "wanted"),
    [
        (LayoutChoice.AUTO, "nchw", ("nchw", "nhwc")),
        (LayoutChoice.AUTO, "nhwc", ("nhwc", "nchw")),
        (LayoutChoice.NCHW, "nchw", ("nchw",)),
        (LayoutChoice.NHWC, "nchw", ("nchw", "nhwc")),
        (LayoutChoice.NHWC, "nhwc", ("nhwc",)),
    ],
)
def test_the_callers_format_is_always_allowed_and_first(
    choice: LayoutChoice, first: str, wanted: tuple[str, ...]
) -> None:
    assert allowed_layouts(choice, first) == wanted


def test_memory_formats() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert memory_format(x) == "nchw"
    assert memory_format(x.contiguous(memory_format=torch.channels_last)) == "nhwc"
    assert memory_format(torch.zeros(2, 1, 4, 5)) == "nchw"  # both at once
    assert memory_format(x[:, :, ::2]) == "nchw"


def test_the_device_is_where_everything_lies() -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)
    assert device_of(model, (x,), {}) == "cpu"
    assert device_of(nn.ReLU(), (), {"x": [x]}) == "cpu"
    with pytest.raises(InputError, match="at least one tensor"):
        device_of(model, (3,), {})
    assert device_of(model, (SimpleNamespace(image=x),), {}) == "cpu"  # pytree does not look inside
    with pytest.raises(InputError, match="on one device"):
        device_of(model, (x.to("meta"),), {})
    with pytest.raises(InputError, match="cpu or cuda"):
        device_of(nn.ReLU(), (x.to("meta"),), {})


def test_every_layer_build_and_check_looks_at_what_memory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookers: list[str] = []

    class Watched(memory_limit.MemoryLimit):
        """Writes down who looks, and allows all there is."""

        def apply(self) -> None:
            lookers.append(traceback.extract_stack()[-3].name)

    monkeypatch.setattr(memory_limit, "_limits", [Watched(0, None, 0)])
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    settings = Settings(db=tmp_path / "perf.db", isolate=False, only_engines=("gemm",))
    result = optimize_model(net, (torch.randn(1, 3, 8, 8),), name="net", settings=settings)
    assert lookers.count("_bench_for") >= len(result.plan.steps) or result.plan.baseline
    assert {"_bench_for", "measure", "build_program", "both"} <= set(lookers)
    assert lookers.index("build_program") > lookers.index("measure"), "first with what the measuring process leaves"
