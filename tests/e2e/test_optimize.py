"""The whole pipeline on small nets: same numbers, plans that replay, and every way back to the stock module."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.capture import Captured
from convoy.perfdb import Database
from convoy.pipeline import optimize_model
from convoy.pipeline.check import end_to_end
from convoy.program import OptimizedModule
from convoy.program.cuda.cuda_graph import CudaGraphProgram
from convoy.program.eager import EagerProgram
from tests.e2e import planted


def run_plan(net: nn.Module, x: torch.Tensor, settings: convoy.Settings, path: Path) -> OptimizedModule:
    """Optimise by the exact choice, even where the stock module would be as fast: the plan itself is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "is_faster", lambda *_: True)
        fast = convoy.optimize(net, (x,), settings=settings)
    fast.save(path)
    return fast


def test_the_result_is_the_stock_modules(net, x, settings, tmp_path) -> None:
    fast = run_plan(net, x, settings, tmp_path / "p.json")
    assert isinstance(fast.programs[0].runnable, EagerProgram)
    for seed in range(3):
        given = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        for tensor in (given, given.contiguous(memory_format=torch.channels_last)):
            torch.testing.assert_close(fast(tensor), net(tensor), rtol=1e-4, atol=1e-5)


def test_outputs_do_not_alias_the_next_calls(net, x, settings, tmp_path) -> None:
    fast = run_plan(net, x, settings, tmp_path / "p.json")
    first = fast(x)
    kept = first.clone()
    fast(x + 1)
    assert torch.equal(first, kept)


def test_a_saved_plan_gives_the_same_bits_and_measures_nothing(net, x, settings, tmp_path) -> None:
    path = tmp_path / "p.json"
    fast = run_plan(net, x, settings, path)
    again = convoy.load(net, path, (x,), settings=dataclasses.replace(settings, db=tmp_path / "none.db"))
    assert torch.equal(again(x), fast(x))
    assert not (tmp_path / "none.db").exists()


def test_the_second_run_takes_everything_from_the_database(x, settings, tmp_path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    settings = dataclasses.replace(settings, db=tmp_path / "own.db")
    first = optimize_model(net, (x,), name="net", settings=settings).summary
    second = optimize_model(net, (x,), name="net", settings=settings).summary
    assert first.tuning.measured > 0
    assert (second.tuning.measured, second.tuning.from_database) == (0, first.tuning.measured)


def test_threads_share_one_program(net, x, settings, tmp_path) -> None:
    fast = run_plan(net, x, settings, tmp_path / "p.json")
    wrong: list[float] = []

    def call(seed: int) -> None:
        given = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            wanted = net(given)
        errors = [float((fast(given) - wanted).abs().max()) for _ in range(20)]
        wrong.extend(error for error in errors if not error < 1e-4)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_shapes_run_the_stock_module_with_one_warning(net, x, settings, tmp_path) -> None:
    fast = run_plan(net, x, settings, tmp_path / "p.json")
    other = torch.cat([x, x])
    with pytest.warns(UserWarning, match="no plan for these input shapes"):
        assert torch.equal(fast(other), net(other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(other)
    fast.tune((other,))
    assert len(fast.plans) == 2
    torch.testing.assert_close(fast(other), net(other), rtol=1e-4, atol=1e-5)


def test_changed_weights_are_noticed_and_packed_anew(net, x, settings, tmp_path) -> None:
    fast = run_plan(net, x, settings, tmp_path / "p.json")
    with torch.no_grad():
        net.left[0].weight.mul_(2)
    with pytest.warns(UserWarning, match="refresh"):
        assert torch.equal(fast(x), net(x))
    fast.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


def test_weights_are_not_kept_as_they_were_captured(settings, tmp_path) -> None:
    """Folded into the convolution, they are new tensors, and packed they are others: one set is enough."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    made: list[weakref.ref[torch.Tensor]] = []
    before = Captured.__init__

    def watched(self, *args, **words) -> None:
        before(self, *args, **words)
        made.extend(weakref.ref(tensor) for tensor in self.constants.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captured, "__init__", watched)
        fast = run_plan(
            net, torch.randn(1, 3, 8, 8), dataclasses.replace(settings, only_engines=("gemm",)), tmp_path / "p"
        )
    gc.collect()
    kept = {id(tensor) for one in made if (tensor := one()) is not None}
    bound = fast.programs[0].runnable.bound
    assert made
    assert kept <= {id(tensor) for step in bound.steps for tensor in step.constants}


class AsOnAGpu(CudaGraphProgram):
    """A program that looks as if it ran beside the host, and notes what happens when."""

    def __init__(self, program, seen) -> None:
        self._program, self._seen = program, seen

    def __call__(self, inputs):
        self._seen.append("launched")
        return self._program(inputs)


def test_on_a_gpu_the_weights_are_looked_at_behind_the_launch(net, x, settings, tmp_path, monkeypatch) -> None:
    fast = run_plan(net, x, settings, tmp_path / "p.json")
    program, seen, state = fast.programs[0], [], fast.program_cache.state
    looked = state.change
    right = fast(x)
    object.__setattr__(program, "runnable", AsOnAGpu(program.runnable, seen))
    monkeypatch.setattr(state, "change", lambda: seen.append("checked") or looked())
    assert torch.equal(fast(x), right)
    assert seen == ["launched", "checked"]
    with torch.no_grad():
        net.left[0].weight.mul_(2)
    with pytest.warns(UserWarning, match="refresh"):
        assert torch.equal(fast(x), net(x))


def test_gradients_and_training_run_the_stock_module(net, x, settings, tmp_path) -> None:
    fast = run_plan(net, x, settings, tmp_path / "p.json")
    with pytest.warns(UserWarning, match="gradient"):
        y = fast(x.clone().requires_grad_())
    assert y.requires_grad
    fast.train()
    with pytest.warns(UserWarning, match="training"):
        fast(x)


def test_a_plan_of_another_model_target_or_shape_is_refused(net, x, settings, tmp_path) -> None:
    path = tmp_path / "p.json"
    run_plan(net, x, settings, path)
    with pytest.raises(convoy.PlanError, match="plan of this model"):
        convoy.load(nn.Conv2d(3, 4, 3), path, (x,))
    with pytest.raises(convoy.PlanError):
        convoy.load(net, path, (torch.cat([x, x]),))
    data = json.loads(path.read_text(encoding="utf-8"))
    data["target"]["digest"] = "0" * 16
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(convoy.PlanError, match="target"):
        convoy.load(net, path, (x,))


def test_faulty_engines_are_recorded_and_the_model_still_works(net, x, tmp_path, monkeypatch) -> None:
    settings = convoy.Settings(db=tmp_path / "perf.db", engines=planted.ALL, timeout_s=3.0)
    small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    result = optimize_model(small, (x,), name="small", settings=settings)
    torch.testing.assert_close(result.program(x), small(x), rtol=1e-4, atol=1e-5)
    found: dict[str, set[str]] = {}
    with Database.open(settings.db, shipped=False) as database:
        for row in database.rows():
            if row.config.engine in planted.EXPECTED:
                found.setdefault(row.config.engine, set()).add(str(row.status))
    assert found == {engine: {status} for engine, status in planted.EXPECTED.items()}
    again = optimize_model(small, (x,), name="small", settings=settings)
    assert again.summary.tuning.measured == 0


def test_an_unknown_engine_and_a_budget_too_small_are_named(net, x, settings) -> None:
    with pytest.raises(convoy.InputError, match="only_engines"):
        convoy.optimize(net, (x,), settings=dataclasses.replace(settings, only_engines=("nobody",)))
    with pytest.raises(convoy.ConvoyError, match="at least"):
        convoy.optimize(net, (x,), settings=dataclasses.replace(settings, memory_budget_bytes=1000))


class Branches(nn.Module):
    """Control flow that depends on data: cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y * 2 if float(y.sum()) > 0 else y - 1


@pytest.mark.parametrize("faster", [True, False])
def test_a_model_that_cannot_be_exported_is_optimised_by_parts(x, settings, monkeypatch, faster) -> None:
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: faster)
    model = Branches().eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = optimize_model(model, (x,), name="branches", settings=settings)
    swapped = [type(module).__name__ for module in result.program.modules()].count("OptimizedModule")
    told = [str(warning.message) for warning in caught if "convoy" in str(warning.message)]
    if faster:
        assert result.summary.notes[0] in told[0]
        assert told[0].startswith("convoy: branches was optimized by parts: Convoy runs conv (")
        assert (swapped, len(told)) == (1, 1)
    else:
        assert [one.startswith("convoy: the model cannot be exported") for one in told] == [True]
        assert (swapped, result.program.model) == (1, model)
    for sign in (1, -1):
        torch.testing.assert_close(result.program(x * sign), model(x * sign), rtol=1e-4, atol=1e-5)


class Several(nn.Module):
    """Two inputs, nested outputs, a constant among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> dict[str, object]:
        y = self.conv(a)
        return {"sum": y + self.conv(b) * scale, "parts": (y, 7), "input": a}


def test_several_inputs_and_nested_outputs(x, settings) -> None:
    model = Several().eval()
    fast = convoy.optimize(model, (x, x + 1), {"scale": 0.5}, settings=settings)
    found, wanted = fast(x, x + 1, scale=0.5), model(x, x + 1, scale=0.5)
    torch.testing.assert_close(found["sum"], wanted["sum"], rtol=1e-4, atol=1e-5)
    assert found["parts"][1] == 7
    assert torch.equal(found["input"], x)


def test_torch_compile_finds_the_backend(net, x, settings, monkeypatch) -> None:
    monkeypatch.setenv("CONVOY_DB", str(settings.db))
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="convoy", options={"isolate": False})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
