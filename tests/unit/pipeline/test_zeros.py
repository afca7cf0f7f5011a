"""From the user's inputs to the plan: zeros are counted, engines that skip them are timed for that share, the choice names it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.engines.activation_sparsity import CURVE, SparsityShares, bucket_of
from convoy.engines.compilers import host_compiler
from convoy.perfdb import Database
from convoy.pipeline.optimize import OptimizeResult, optimize_model
from convoy.pipeline.replay.load import load
from convoy.settings import Settings
from convoy.tune import SearchResult

pytestmark = pytest.mark.skipif(not host_compiler.compiler(), reason="no C compiler")


class Net(nn.Module):
    """Two equal convolutions, the second of which reads more zeros; a pooling behind the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(32, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.third = nn.Conv2d(32, 64, 3, padding=1)
        with torch.no_grad():
            assert self.first.bias is not None
            assert self.second.bias is not None
            self.first.bias.fill_(-0.6)
            self.second.bias.fill_(-0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.max_pool2d(torch.relu(self.third(x)), 2)


def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 32, 16, 16, generator=generator).contiguous(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = tmp_path_factory.mktemp("zeros") / "perf.db"
    return Settings(
        db=path, isolate=False, only_engines=("zeroskip.cpu",), layout="nhwc", solver="single", numerics="strict"
    )


@pytest.fixture(scope="module")
def found(settings: Settings) -> OptimizeResult:
    """Chosen as if PyTorch took a hundred times as long: a busy machine's clock must not decide what is chosen."""
    module = importlib.import_module("convoy.pipeline.tune_in_time")
    measure = module.measure

    def slowly(*args: Any, **options: Any) -> SearchResult:
        result = measure(*args, **options)
        slow = {
            key: [replace(r, median_us=100 * r.median_us) if r.config.engine == "aten" else r for r in rows]
            for key, rows in result.rows.items()
        }
        return replace(result, rows=slow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "measure", slowly)
        return optimize_model(Net().eval(), (inputs(),), name="net", settings=settings)


def shares() -> list[float]:
    model, x = Net().eval(), inputs()
    with torch.no_grad():
        maps = [x, torch.relu(model.first(x)), torch.relu(model.second(torch.relu(model.first(x))))]
    return [float((m == 0).double().mean()) for m in maps]


def test_a_layer_says_what_its_input_is_like_and_its_candidates_are_for_that(found: OptimizeResult) -> None:
    layers = {layer.name.split("+")[0]: layer for layer in found.summary.layers if layer.engine == "zeroskip.cpu"}
    assert len(layers) == 3
    for layer, share in zip(layers.values(), shares(), strict=True):
        assert layer.zeros == pytest.approx(share, abs=1e-6)
        assert layer.knobs == f"skip=auto,zeros={bucket_of(share)}"
        assert {c.knobs for c in layer.candidates if c.engine == "zeroskip.cpu"} == {layer.knobs}
        assert layer.dead_channels is not None
        assert layer.dead_channels <= layer.zeros
        assert {p.zeros for p in layer.curve} <= {*CURVE, *map(bucket_of, shares())}
        assert len(layer.curve) > 1
    assert len({bucket_of(share) for share in shares()}) > 1, "the net shows something"


def test_convolution_and_pooling_are_offered_as_one_step(found: OptimizeResult, settings: Settings) -> None:
    """The clock decides whether they run as one."""
    with Database.open(settings.db, shipped=False) as database:
        pooled = [row for row in database.rows() if "max2x2s2x2p0x0" in row.problem]
    assert {row.config.engine for row in pooled} == {"aten", "zeroskip.cpu"}
    assert all(row.ok for row in pooled)


def test_where_there_is_no_memory_to_count_zeros_the_plan_says_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> dict[str, SparsityShares]:
        raise torch.OutOfMemoryError("CUDA out of memory, planted")

    monkeypatch.setattr("convoy.pipeline.measure_net.zero_shares", full)
    result = optimize_model(Net().eval(), (inputs(),), name="net", settings=settings)
    assert any("zeros could not be counted for lack of memory" in note for note in result.plan.notes)
    for layer in result.summary.layers:
        assert layer.zeros is None
        ours = [c for c in layer.candidates if c.engine == "zeroskip.cpu" and c.status == "ok"]
        assert {c.knobs for c in ours} <= {"skip=auto,zeros=0"}
    with torch.no_grad():
        assert torch.allclose(result.program(inputs()), Net().eval()(inputs()), atol=1e-5)


def test_other_inputs_are_computed_as_rightly_and_the_plan_can_be_replayed(
    found: OptimizeResult, settings: Settings, tmp_path: Path
) -> None:
    if found.plan.baseline:
        pytest.skip("on this machine, now, PyTorch was faster")
    path = tmp_path / "net.plan.json"
    found.program.save(path)
    again = load(Net().eval(), path, inputs(), settings=settings)
    for x in (inputs(), torch.zeros_like(inputs()), inputs().abs() + 1):
        with torch.no_grad():
            wanted = Net().eval().double()(x.double())
            torch.testing.assert_close(again(x).double(), wanted, rtol=1e-5, atol=1e-5)
            assert torch.equal(found.program(x), again(x))
