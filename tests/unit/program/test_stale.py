"""Every kind of change to a module behind an optimised one: seen, and PyTorch's result.

See docs/concepts/stale-weights.md.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune

import convoy
from convoy.pipeline.check import end_to_end
from convoy.program.optimized_module import OptimizedModule
from convoy.program.state.contents import contents_checks
from convoy.training.step import TrainingStep
from convoy.training.step_program import StepOptions, StepProgram

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([1, 3])


class Scaled(nn.Module):
    """A layer with state of every kind that is no parameter."""

    def __init__(self, offset: torch.Tensor | float) -> None:
        super().__init__()
        self.factor = 1.5
        self.steps = [1.0, 2.0]
        self.table = {"shift": (0.25, [0.5])}
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, further = self.table["shift"]
        return x * self.factor + self.steps[0] + self.offset + shift + further[0]


class Net(nn.Module):
    def __init__(self, offset: torch.Tensor | float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act: nn.Module = nn.ReLU()
        self.scaled = Scaled(offset)
        self.gain = nn.Parameter(torch.ones(1))
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scaled(self.pool(self.act(self.norm(self.conv(x))))).flatten(1) * self.gain)


def net(*, plain_tensor: bool = True) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(torch.tensor(0.5) if plain_tensor else 0.5).eval()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("stale") / "perf.db")


@pytest.fixture(scope="module")
def tuned(settings: convoy.Settings) -> OptimizedModule:
    """A module with a program, whatever the clock says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "falls_back", lambda *_: (False, ""))
        made = convoy.optimize(net(), (X,), settings=settings)
    assert not made.plan.baseline
    return made


@pytest.fixture(scope="module")
def step_program(settings: convoy.Settings) -> StepProgram:
    """A program with steps of its own, whatever the clock says; it serves every model with these parameters."""
    model = net(plain_tensor=False).train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "falls_back", lambda *_: (False, ""))
        step = convoy.training_step(model, cross_entropy, sgd(model), (X, Y), settings=settings)
    assert not step.plan.baseline
    return step.program


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scale_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor * 2 for name, tensor in model.state_dict().items()}


def load_in_place(model: Net) -> None:
    model.load_state_dict(scale_state(model))


def assign(model: Net) -> None:
    model.load_state_dict(scale_state(model), assign=True)


def write(model: Net) -> None:
    with torch.no_grad():
        model.conv.weight.mul_(0.5)


def write_buffer(model: Net) -> None:
    model.norm.running_mean.add_(1)


def replace_parameter(model: Net) -> None:
    model.conv.weight = nn.Parameter(model.conv.weight.detach() * 3)


def replace_single(model: Net) -> None:
    """By one of the same value, whose later change must be seen as well."""
    model.gain = nn.Parameter(torch.ones(1))
    with torch.no_grad():
        model.gain.mul_(4)


def set_data(model: Net) -> None:
    model.conv.weight.data = model.conv.weight.data * 3


def from_vector(model: Net) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def half_and_back(model: Net) -> None:
    """Rounds; allocators like to give the same address again."""
    model.half().float()


def swap_data(model: Net) -> None:
    one, other = model.norm.weight, model.norm.bias
    one.data, other.data = other.data, one.data


def replace_layer(model: Net) -> None:
    model.act = nn.Sigmoid()


def replace_head(model: Net) -> None:
    model.head = nn.Linear(64, 7)


def change_class(model: Net) -> None:
    model.act.__class__ = nn.Sigmoid


def replace_forward(model: Net) -> None:
    model.act.forward = torch.sigmoid  # type: ignore[method-assign]


def change_eps(model: Net) -> None:
    model.norm.eps = 1.0


def change_stride(model: Net) -> None:
    model.pool.stride = 1
    model.pool.kernel_size = 1
    model.pool = nn.AvgPool2d(2)
    model.pool.divisor_override = 3


def change_attribute(model: Net) -> None:
    model.scaled.factor = 2.5


def change_list(model: Net) -> None:
    model.scaled.steps[0] = 3.0


def change_nested(model: Net) -> None:
    model.scaled.table["shift"][1].insert(0, 7.0)


def change_plain_tensor(model: Net) -> None:
    model.scaled.offset.add_(1)


def replace_plain_tensor(model: Net) -> None:
    model.scaled.offset = torch.tensor(2.5)


def forward_hook(model: Net) -> None:
    model.act.register_forward_hook(lambda module, args, output: output * 2)


def pre_hook(model: Net) -> None:
    model.act.register_forward_pre_hook(lambda module, args: (args[0] - 0.1,))


def weight_norm(model: Net) -> None:
    parametrizations.weight_norm(model.conv)
    with torch.no_grad():
        model.conv.parametrizations.weight.original0.mul_(2)


def old_weight_norm(model: Net) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.conv)
    with torch.no_grad():
        model.conv.weight_g.mul_(2)


def prune_later(model: Net) -> None:
    prune.l1_unstructured(model.conv, "weight", amount=0.5)


def train_inner(model: Net) -> None:
    model.norm.train(not model.norm.training)


CHANGES: dict[str, Callable[[Net], object]] = {
    function.__name__: function
    for function in (
        load_in_place, assign, write, write_buffer, replace_parameter, replace_single, set_data, from_vector, half_and_back,
        swap_data, replace_layer, replace_head, change_class, replace_forward, change_eps, change_stride, change_attribute,
        change_list, change_nested, change_plain_tensor, replace_plain_tensor, forward_hook, pre_hook, weight_norm,
        old_weight_norm, prune_later, train_inner,
    )
}  # fmt: skip


@pytest.fixture
def fast(tuned: OptimizedModule) -> OptimizedModule:
    return copy.deepcopy(tuned)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_falls_back_until_refresh(name: str, fast: OptimizedModule):
    model = fast.model
    before = fast(X)
    CHANGES[name](model)
    saved = copy.deepcopy(model.norm.state_dict())
    with torch.no_grad():
        wanted = model(X)
        assert wanted.shape != before.shape or not torch.equal(wanted, before)
        with pytest.warns(UserWarning, match="refresh") as said:
            assert torch.equal(fast(X), wanted)
        assert [one.filename for one in said] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.norm.load_state_dict(saved)
            assert torch.equal(fast(X), wanted)  # and says so once


REFRESHED = sorted(set(CHANGES) - {"train_inner"})
"""A program computes evaluation: training mode falls back for as long as it is on."""


@pytest.mark.parametrize("name", REFRESHED)
def test_refresh_follows_a_change_and_sees_the_next(name: str, fast: OptimizedModule):
    model = fast.model
    CHANGES[name](model)
    fast.refresh()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fast.stale() is None
        torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.head.bias.add_(1)
        if not fast.plan.baseline:
            with pytest.warns(UserWarning, match="refresh"):
                assert torch.equal(fast(X), model(X))
        assert torch.equal(fast(X), model(X))


def write_through_data(model: Net) -> None:
    model.conv.weight.data.mul_(0.5)


def write_through_numpy(model: Net) -> None:
    model.norm.running_mean.numpy()[:] += 1


def write_through_pointer(model: Net) -> None:
    ctypes.memset(model.head.weight.data_ptr(), 0, 64)


def swap_filters(model: Net) -> None:
    """The same values in other places."""
    weight = model.conv.weight.data
    weight[:2] = weight[:2].flip(0).clone()


UNCOUNTED = {
    function.__name__: function
    for function in (write_through_data, write_through_numpy, write_through_pointer, swap_filters)
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_writes_that_nothing_counts_are_seen_by_their_contents(name: str, tuned: OptimizedModule):
    fast = copy.deepcopy(tuned)
    model = net()
    careful = OptimizedModule(model, tuned.programs[0], (X,), {}, tuned.program_cache.tuner, "contents")
    with torch.no_grad():
        before = fast(X)
        assert torch.equal(careful(X), before)
        UNCOUNTED[name](fast.model)
        UNCOUNTED[name](model)
        wanted = model(X)
        assert not torch.equal(wanted, before)
        assert torch.equal(fast(X), before)  # as docs/concepts/stale-weights.md says
        fast.refresh()
        torch.testing.assert_close(fast(X), wanted, rtol=1e-4, atol=1e-5)
        with pytest.warns(UserWarning, match="contents of a parameter or buffer were changed after tuning"):
            assert torch.equal(careful(X), wanted)
        assert careful.stale() is not None
        careful.refresh()
        assert careful.stale() is None
        torch.testing.assert_close(careful(X), wanted, rtol=1e-4, atol=1e-5)


def test_the_setting_reaches_the_module(settings: convoy.Settings, tuned: OptimizedModule, tmp_path: Path):
    tuned.save(tmp_path / "plan.json")
    careful = dataclasses.replace(settings, check="contents")
    fast = convoy.load(net(), tmp_path / "plan.json", (X,), settings=careful)
    assert fast.stale() is None
    fast.model.conv.weight.data.mul_(2)
    assert fast.stale() == "the contents of a parameter or buffer were changed"
    assert copy.deepcopy(fast).stale() == fast.stale()
    with pytest.raises(convoy.InputError, match="check: got 'sums', expected one of identity, contents"):
        convoy.Settings(check="sums")


def test_sums_of_contents_tell_every_bit_apart():
    generator = torch.Generator().manual_seed(5)
    tensors = [
        torch.randn(3000, generator=generator),
        torch.randn(4, 3, 5, 5, generator=generator).contiguous(memory_format=torch.channels_last),
        torch.randn(7, 9, generator=generator).half().t(),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(6, dtype=torch.complex64, generator=generator),
        torch.zeros(()),
    ]
    (check,) = contents_checks([*tensors, torch.empty(0), torch.empty(3, device="meta")])
    assert check.change() is None
    for tensor in tensors:
        flat = tensor.view(torch.uint8).flatten() if tensor.dtype is torch.bool else tensor
        kept = flat.clone()
        place = (0,) * flat.dim()
        flat[place] = 1 - flat[place]
        assert check.change() is not None
        flat.copy_(kept)
        assert check.change() is None
    tensors[0][[0, 2000]] = tensors[0][[2000, 0]]
    assert check.change() is not None


class Holder(nn.Module):
    """A module that reads what no module, tensor or container holds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.options = SimpleNamespace(scale=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * self.options.scale


def test_a_cast_model_under_a_step_runs_pytorchs_step(settings: convoy.Settings):
    """A net without buffers: `double` changes nothing but `.data` of its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "falls_back", lambda *_: (False, ""))
        step = convoy.training_step(model, cross_entropy, sgd(model), (X, Y), settings=settings)
    model.double()
    with pytest.raises(RuntimeError, match=r"dtype|type"), pytest.warns(UserWarning, match="got another dtype"):
        step(X, Y)  # as PyTorch says
    model.float()
    assert step(X, Y).dtype is torch.float32


def test_other_objects_attributes_are_not_seen_and_refresh_follows_them(settings: convoy.Settings):
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(end_to_end, "falls_back", lambda *_: (False, ""))
        fast = convoy.optimize(Holder(), (X,), settings=settings)
        before = fast(X)
        fast.model.options.scale = 3.0
        assert torch.equal(fast(X), before)
        fast.refresh()
        torch.testing.assert_close(fast(X), fast.model(X), rtol=1e-4, atol=1e-5)


def test_a_copy_is_in_the_training_mode_that_was_switched_on(fast: OptimizedModule):
    fast.model.norm.train()
    twin = copy.deepcopy(fast)
    stock = copy.deepcopy(fast.model)
    with torch.no_grad(), pytest.warns(UserWarning, match="training flag of norm"):
        torch.testing.assert_close(twin(X), stock(X))
    torch.testing.assert_close(twin.model.norm.running_mean, stock.norm.running_mean)
    assert twin.model.norm.training


def test_training_mode_switched_off_again_is_no_change(fast: OptimizedModule):
    before = fast(X)
    fast.train()
    fast.eval()
    fast.model.norm.train()
    assert fast.stale() == "the training flag of norm was changed"
    fast.model.norm.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(X), before)


def test_functional_call_runs_the_stock_module(fast: OptimizedModule):
    before = fast(X)
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = torch.func.functional_call(fast.model, {"conv.weight": weight}, (X,))
        with pytest.warns(UserWarning, match=r"conv\.weight was replaced"):
            found = torch.func.functional_call(fast, {"conv.weight": weight}, (X,))
    assert torch.equal(found, wanted)
    assert torch.equal(fast(X), before)


def test_a_global_hook_fires(fast: OptimizedModule):
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with pytest.warns(UserWarning, match="hook"):
            fast(X)
    finally:
        handle.remove()
    assert fast.model.act in seen
    assert fast.stale() is None


def test_a_module_tuned_in_training_mode_falls_back_in_evaluation(tuned: OptimizedModule):
    model = net().train()
    model.norm.eval()
    fast = OptimizedModule(model, tuned.programs[0], (X,), {}, tuned.program_cache.tuner)
    other, mean = torch.cat([X, X]), model.norm.running_mean.clone()
    with torch.no_grad():
        wanted = net()(other)
        with pytest.warns(UserWarning, match="no plan for these input shapes"):
            assert torch.equal(fast(other), wanted)
        model.norm.eps = 0.5
        with pytest.warns(UserWarning, match=r"norm\.eps was changed"):
            fast(X)
    assert torch.equal(mean, model.norm.running_mean)
    assert model.training
    assert not model.norm.training


STEP_KEEPS = {"load_in_place", "write", "write_buffer", "set_data", "from_vector", "half_and_back", "swap_data"}
"""Changes of values: they are inputs of a step's program."""


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "change_plain_tensor"])
def test_a_changed_model_under_a_step_runs_pytorchs_step(name: str, step_program: StepProgram):
    model = net(plain_tensor=False).train()
    step = TrainingStep(model, cross_entropy, sgd(model), StepOptions(), step_program)
    stock = net(plain_tensor=False).train()
    optimizer = sgd(stock)
    CHANGES[name](model)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        CHANGES[name](stock)
    if name == "replace_head":
        stock.head.load_state_dict(model.head.state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = step(X, Y)
    wanted = cross_entropy(stock(X), Y)
    wanted.backward()
    optimizer.step()
    assert bool(said) == (name not in STEP_KEEPS), [str(one.message) for one in said]
    assert {one.filename for one in said} <= {__file__}
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-4, atol=1e-5)
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_unchanged_it_runs_the_program(fast: OptimizedModule, monkeypatch: pytest.MonkeyPatch):
    wanted = fast.model(X).detach()
    monkeypatch.setattr(Net, "forward", None)  # replaced on the class: seen
    assert fast.stale() == "Net.forward was replaced"
    monkeypatch.undo()
    assert fast.stale() is None
    runs: list[int] = []
    program = fast.programs[0]
    monkeypatch.setattr(type(program), "__call__", counted(type(program).__call__, runs))
    torch.testing.assert_close(fast(X), wanted, rtol=1e-4, atol=1e-5)
    assert runs == [1]


def counted(call: Any, runs: list[int]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return call(*args, **kwargs)

    return run
