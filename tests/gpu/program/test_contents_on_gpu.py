"""Tests that need a GPU: check="contents", loaded plans, pickles, copies and captured steps, on tiny nets."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import convoy
from tests.gpu.program.branches import keep_ours

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TF32 = 2e-3
"""Relative error of two nets whose products have TF32's ten bits, summed over a few layers."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contents") / "perf.db"


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_ours(patch)
        yield


def settings(db: Path, **more: Any) -> convoy.Settings:
    return convoy.Settings(effort="none", db=db, isolate=False, **more)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3)).to(DEVICE).eval()


def example(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def optimised(db: Path, **more: Any) -> nn.Module:
    fast = convoy.optimize(net(), (example(),), settings=settings(db, **more))
    assert not fast.plan.baseline, fast.plan.notes
    return fast


@torch.no_grad()
def test_a_write_through_data_is_seen_in_the_second_call_at_the_latest(db: Path):
    fast, x = optimised(db, check="contents"), example(2)
    for _ in range(3):
        before = fast(x)
        torch.cuda.synchronize()
    assert fast.stale() is None
    fast.model[0].weight.data.mul_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call may see it too
        fast(x)
        torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fast(x)
    wanted = fast.model(x)
    assert error(before, wanted) > 10 * TF32  # the write shows
    assert error(found, wanted) < TF32
    assert fast.stale() is not None
    fast.refresh()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convoy")
        for _ in range(3):
            assert error(fast(x), wanted) < TF32
            torch.cuda.synchronize()


@torch.no_grad()
def test_a_call_with_the_contents_check_waits_for_nothing(db: Path):
    fast, x = optimised(db, check="contents"), example(3)
    fast(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            fast(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def test_a_loaded_plan_with_cudnn_runs_as_it_was_made(db: Path, tmp_path: Path):
    fast = optimised(db, only_engines=("cudnn", "inductor"))
    if not any(step.config.engine == "cudnn" for step in fast.plan.steps):
        pytest.skip("cuDNN has no plan for these layers here")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convoy")
        loaded = convoy.load(net(), fast.save(tmp_path / "plan.json"), (example(),), settings=settings(db))
    assert not [note for note in loaded.plan.notes if "as PyTorch runs it" in note]
    assert [step.config for step in loaded.plan.steps] == [step.config for step in fast.plan.steps]
    assert error(loaded(example(4)), fast.model(example(4))) < TF32


@torch.no_grad()
def test_a_pickle_holds_a_module_on_the_device_that_runs_by_its_plan(db: Path):
    fast = optimised(db)
    again = pickle.loads(pickle.dumps(fast))
    assert next(again.model.parameters()).is_cuda
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convoy")
        assert error(again(example(5)), fast.model(example(5))) < TF32
    assert not again.plan.baseline


@torch.no_grad()
def test_a_copy_has_static_outputs_of_its_own(db: Path):
    fast = optimised(db, static_outputs=True)
    own, x, other = copy.deepcopy(fast), example(6), example(7)
    first = fast(x)
    kept = first.clone()
    second = own(other)
    torch.cuda.synchronize()
    assert torch.equal(first, kept)  # the copy's call did not write there
    assert error(second, fast.model(other)) < TF32
    fast(other)
    torch.cuda.synchronize()
    assert error(first, fast.model(other)) < TF32  # and the original's next call does


class Weighted(nn.Module):
    """Two losses, weighted by numbers that are learned: exp(-s) · loss + s."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = torch.stack([F.cross_entropy(made, target), made.square().mean()])
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


class Heads(nn.Module):
    """Takes a dict of images and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.fc = net(), nn.Linear(10, 5)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.fc(torch.cat([self.trunk(batch["image"]).mean((2, 3)), batch["numbers"]], 1))


def dict_batch(n: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, numbers = torch.randn(n, 8, 16, 16, generator=generator), torch.randn(n, 2, generator=generator)
    return {"image": image.to(DEVICE), "numbers": numbers.to(DEVICE)}, (torch.arange(n) % 5).to(DEVICE)


def test_a_captured_step_with_learned_loss_weights_and_dict_batches_of_different_sizes(db: Path):
    torch.manual_seed(3)
    model, loss = Heads().to(DEVICE).train(), Weighted().to(DEVICE)
    stock, stock_loss = copy.deepcopy(model), copy.deepcopy(loss)
    sgd, theirs = (
        torch.optim.SGD([*m.parameters(), *w.parameters()], 0.02) for m, w in ((model, loss), (stock, stock_loss))
    )
    step = convoy.training_step(model, loss, sgd, dict_batch(6, 0), settings=settings(db))
    assert not step.plan.baseline, step.notes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another size PyTorch's step may run, and says so
        for index, n in enumerate((6, 6, 6, 3, 6, 6, 4, 6)):
            batch, target = dict_batch(n, index)
            ours = step(batch, target)
            theirs.zero_grad()
            wanted = stock_loss(stock(batch), target)
            wanted.backward()
            theirs.step()
            assert error(ours.detach(), wanted.detach()) < 5e-3, (index, n)
    for mine, other in zip(
        (*model.parameters(), *loss.parameters()), (*stock.parameters(), *stock_loss.parameters()), strict=True
    ):
        assert error(mine.detach(), other.detach()) < 5e-3
    assert not torch.equal(loss.log_variances.detach(), torch.tensor([0.1, -0.2], device=DEVICE))
