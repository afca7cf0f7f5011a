"""training_step as people use it: losses that hold tensors, batches of any nesting, what only PyTorch can run."""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convoy
from convoy.errors import REPORT, InputError, InternalError, PlanError
from convoy.pipeline.check import end_to_end, end_to_end_check
from convoy.pipeline.check.end_to_end import Latency
from convoy.pipeline.selection_input import selection_problem
from convoy.selection import SelectionProblem
from tests.unit.training.training_pairs import Net, Pair, called, images, labels, pair, sgd

WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5, 0.7])


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    folder = tmp_path_factory.mktemp("uses")
    return convoy.Settings(
        effort="none", isolate=False, solver="baseline", only_engines=("aten",), db=folder / "perf.db"
    )


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan runs, whether it is faster or not; a wrong one does not."""

    def untimed(runs: dict[str, Callable[[], object]], **_: Any) -> dict[str, Latency]:
        for run in runs.values():
            run()
        return {name: Latency(name, (1.0,)) for name in runs}

    monkeypatch.setattr(end_to_end_check, "interleave", untimed)
    monkeypatch.setattr(end_to_end, "why_slow", lambda *_: "")


def assert_planned(found: Pair) -> None:
    """A plan of steps runs, not PyTorch."""
    assert found.step.program.runnable is not None, found.step.notes


def stock_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


class Uncertainty(nn.Module):
    """Learned weights of two losses (Kendall et al.), and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([0.1, -0.2]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.seen += len(target)
        a, b = F.cross_entropy(output, target), output.square().mean()
        return a * torch.exp(-self.log[0]) + b * torch.exp(-self.log[1]) + self.log.sum()


class Holder:
    """An object with a method for loss, as a trainer has one."""

    def __init__(self) -> None:
        self.weight, self.factor, self.steps = WEIGHT.clone(), 0.5, 0

    def scaled(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scaled(F.cross_entropy(output, target, weight=self.weight))


def perceptual(_: nn.Module) -> Any:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False).eval()
    return lambda output, target: F.cross_entropy(output, target) + net(output[:, :, None, None]).square().mean()


def teacher_in_training_mode(_: nn.Module) -> Any:
    torch.manual_seed(5)
    net = Net().requires_grad_(False)
    x = images()
    return lambda output, target: F.cross_entropy(output, target) + F.mse_loss(output, net(x).detach())


def closure_over_a_parameter(_: nn.Module) -> Any:
    scale = nn.Parameter(torch.ones(5))
    return lambda output, target: F.cross_entropy(output * scale, target)


def decay(model: nn.Module) -> Any:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return lambda output, target: F.cross_entropy(output, target) + 0.1 * sum(p.square().sum() for p in weights)


LOSSES: dict[str, Callable[[nn.Module], Any]] = {
    "class weights": lambda _: nn.CrossEntropyLoss(weight=WEIGHT.clone()),
    "closure": lambda _: lambda output, target: F.cross_entropy(output, target, weight=WEIGHT),
    "partial": lambda _: functools.partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1),
    "pos_weight": lambda _: (
        lambda output, target: F.binary_cross_entropy_with_logits(
            output, F.one_hot(target, 5).float(), pos_weight=WEIGHT
        )
    ),
    "method": lambda _: Holder().loss,
    "learned": lambda _: Uncertainty(),
    "frozen net": perceptual,
    "net in training mode": teacher_in_training_mode,
    "parameter in a closure": closure_over_a_parameter,
    "the model's own weights": decay,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_hold_tensors_train_as_in_pytorch(name: str, settings: convoy.Settings):
    batch = images(), labels()
    found = pair(Net, LOSSES[name], batch, settings)
    assert_planned(found)
    found.train(batch, batch, batch)


def test_tensors_that_a_loss_holds_are_read_anew_in_every_step(settings: convoy.Settings):
    weight = WEIGHT.clone()
    batch = images(), labels()
    found = pair(Net, lambda _: lambda o, t: F.cross_entropy(o, t, weight=weight), batch, settings)
    found.train(batch)
    weight.mul_(torch.tensor([5.0, 1.0, 0.1, 1.0, 2.0]))
    found.train(batch, batch)
    assert_planned(found)


def test_parameters_of_a_loss_outside_of_the_optimizer_get_gradients_and_stay(settings: convoy.Settings):
    torch.manual_seed(0)
    model, loss = Net(), Uncertainty()
    step = convoy.training_step(model, loss, sgd(list(model.parameters())), (images(), labels()), settings=settings)
    before = loss.log.detach().clone()
    step(images(), labels())
    assert torch.equal(loss.log, before)
    assert loss.log.grad is not None


class Two(nn.Module):
    """A net of two images."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.fc((self.a(first) - self.b(second)).relu().mean((2, 3)))


class Nested(Two):
    """A net whose one argument is a dictionary."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch["first"], batch["rest"][0])


X = images()
BATCHES: dict[str, tuple[type[nn.Module], tuple[Any, ...], Any, Any]] = {
    "tuple": (Two, ((X, X.flip(0)), labels()), stock_loss, called),
    "same tensor twice": (Two, ((X, X), labels()), stock_loss, called),
    "list": (Two, ([X, X.flip(0)], labels()), stock_loss, lambda model, x: model(*x)),
    "dictionary by name": (Two, ({"second": X, "first": X.flip(0)}, labels()), stock_loss, called),
    "dictionary": (
        Nested, ({"first": X, "rest": [X.flip(0)]}, labels()), stock_loss, lambda model, x: model(x),
    ),
    "number": (Net, (X, labels(), 0.5), lambda o, t, k: k * F.cross_entropy(o, t), called),
    "dictionary of targets": (
        Net, (X, {"y": labels(), "s": 0.1}), lambda o, t: F.cross_entropy(o, t["y"], label_smoothing=t["s"]), called,
    ),
    "word and None": (
        Net, (X, labels(), None, "sum"), lambda o, t, w, r: F.cross_entropy(o, t, weight=w, reduction=r), called,
    ),
    "no target": (Net, (X,), lambda o: o.square().mean(), called),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_any_nesting_train_as_in_pytorch(name: str, settings: convoy.Settings):
    make, batch, loss, call = BATCHES[name]
    found = pair(make, lambda _: loss, batch, settings, call=call)
    assert_planned(found)
    found.train(batch, batch)


def test_tensors_that_were_one_in_the_example_need_not_be_in_a_call(settings: convoy.Settings):
    def loss(output: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, a) + 2 * F.cross_entropy(output, b)

    x, y = images(), labels()
    found = pair(Two, lambda _: loss, ((x, x), y, y), settings)
    assert_planned(found)
    found.train(((x, x.flip(0)), y, y.flip(0)), ((x[:1].expand(4, 3, 9, 9), x), y, y))
    whole = torch.cat([x, x.flip(0)])
    found = pair(Two, lambda _: loss, ((whole[:4], whole[2:6]), y, y), settings)
    found.train(((whole[4:], whole[1:5]), y, y.flip(0)))
    assert_planned(found)


def test_a_number_that_was_another_runs_pytorchs_step(settings: convoy.Settings):
    found = pair(Net, lambda _: lambda o, t, k: k * F.cross_entropy(o, t), (images(), labels(), 1), settings)
    with pytest.warns(UserWarning, match="convoy: no plan for this batch"):
        found.train((images(), labels(), True), (images(), labels(), 2.5))


class Casts(nn.Module):
    """uint8 in, a constant, a plain tensor for attribute, a cast to fp32, a warp."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.mean = nn.Conv2d(3, 8, 3), nn.Linear(8, 5), torch.rand(1, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() / 255 - self.mean) / torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        grid = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return self.fc(self.conv(F.grid_sample(x, grid, align_corners=False)).mean((2, 3)).float())


class Tied(nn.Module):
    """Weights that two layers share, a layer that is called twice, a layer that is not called, two biases of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.b.weight = self.a.weight
        self.idle, self.fc = nn.Conv2d(3, 3, 1), nn.Linear(3, 5)
        self.one, self.two = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.b(self.b(self.a(x).relu())).mean((2, 3))) + self.one + self.two


class Moving(nn.Module):
    """A buffer that forward replaces, and one that it counts up by two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += 2
        return self.fc(x - self.mean)


class Norms(nn.Module):
    """Norms and activations of many kinds, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group, self.layer = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.instance, self.drop, self.fc = nn.InstanceNorm2d(8, affine=True), nn.Dropout(0.3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.instance(F.silu(self.group(self.conv(x))))).mean((2, 3))
        return self.fc(self.drop(self.layer(x)))


def normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would have people use the newer forms
            net.conv = wrap(net.conv)
        return net

    return make


def frozen() -> nn.Module:
    net = Net()
    net.conv.requires_grad_(False)
    net.bn.eval()
    return net


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "casts": (Casts, (images() * 99).to(torch.uint8)),
    "tied": (Tied, images()),
    "moving": (Moving, images()),
    "norms": (Norms, images()),
    "frozen": (frozen, images()),
    "spectral_norm": (normed(nn.utils.spectral_norm), images()),
    "weight_norm": (normed(nn.utils.weight_norm), images()),
    "parametrized": (normed(nn.utils.parametrizations.weight_norm), images()),
    "float64": (lambda: Net().double(), images().double()),
    "channels_last": (
        lambda: Net().to(memory_format=torch.channels_last),
        images().to(memory_format=torch.channels_last),
    ),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), images()),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds_train_as_in_pytorch(name: str, settings: convoy.Settings):
    make, x = MODELS[name]
    found = pair(make, lambda _: stock_loss, (x, labels()), settings)
    assert_planned(found)
    found.train(*[(x, labels())] * 3)


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "fused adam": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "groups": lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.01}, {"params": p[1:]}], 0.1),
    "some parameters": lambda p: torch.optim.SGD(p[-2:], 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_as_in_pytorch(name: str, settings: convoy.Settings):
    batch = images(), labels()
    found = pair(Net, lambda _: stock_loss, batch, settings, optimizer=OPTIMIZERS[name])
    assert_planned(found)
    found.train(batch, batch, batch)


def test_gradients_that_were_left_behind_move_nothing(settings: convoy.Settings):
    """The loop of PyTorch's users has `zero_grad` in it."""
    batch = images(), labels()
    found = pair(frozen, lambda _: stock_loss, batch, settings)
    assert_planned(found)
    for model in (found.model, found.stock):
        model.conv.weight.grad = torch.ones_like(model.conv.weight)
    found.train(batch)


# --- default settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "loss", "amp"),
    [(Net, LOSSES["class weights"], None), (Norms, lambda _: stock_loss, None), (Net, decay, torch.bfloat16)],
    ids=["class weights", "norms", "bf16"],
)
def test_all_engines_train_as_in_pytorch(make: Any, loss: Any, amp: torch.dtype | None, tmp_path: Path):
    batch = images(), labels()
    found = pair(make, loss, batch, convoy.Settings(effort="none", db=tmp_path / "perf.db"), amp=amp)
    assert_planned(found)
    found.train(batch, batch, batch, rtol=2e-2 if amp else 1e-4, atol=1e-2 if amp else 1e-5)


# --- what only PyTorch can run ------------------------------------------------------------------------------------------


class Counting(Net):
    """Python that a graph would leave out: counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Storing(Net):
    """Stores a tensor for its loss."""

    feature: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.feature = x.mean()
        return super().forward(x)


class Choosing(Net):
    """Asks for a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Drawing(Net):
    """Draws from Python's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + random.random())


class Overwriting(Net):
    """Overwrites its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(1.01))


def hooked(register: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        fired: list[int] = []
        net.fired = fired  # type: ignore[assignment]
        getattr(net.conv, register)(lambda *_: fired.append(1))
        return net

    return make


def appends(_: nn.Module) -> Any:
    history: list[torch.Tensor] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        history.append(output.detach())
        return F.cross_entropy(output, target)

    loss.history = history  # type: ignore[attr-defined]
    return loss


PYTHON: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "counter": (Counting, lambda _: stock_loss, "changes the attribute 'calls'"),
    "stored tensor": (Storing, lambda m: lambda o, t: F.cross_entropy(o, t) * m.feature, "'feature'"),
    "item": (Choosing, lambda _: stock_loss, "values of a tensor decide what runs, as with"),
    "python's random": (Drawing, lambda _: stock_loss, "draws random numbers"),
    "input overwritten": (Overwriting, lambda _: stock_loss, "overwrites the batch"),
    "forward hook": (hooked("register_forward_hook"), lambda _: stock_loss, "conv (Conv2d) has a forward hook"),
    "backward hook": (hooked("register_full_backward_hook"), lambda _: stock_loss, "conv (Conv2d) has a backward hook"),
    "list of losses": (Net, appends, "changes 'history'"),
    "scripted": (lambda: torch.jit.script(Net()), lambda _: stock_loss, "ScriptModule"),
    "complex": (lambda: nn.Linear(9, 5, dtype=torch.complex64), lambda _: lambda o, t: o.abs().mean(), "complex64"),
}


@pytest.mark.parametrize("name", PYTHON)
def test_what_a_graph_would_leave_out_runs_as_in_pytorch_with_one_warning(name: str, settings: convoy.Settings):
    make, loss, words = PYTHON[name]
    x = images().to(torch.complex64) if name == "complex" else images()
    random.seed(1)
    state = random.getstate()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = pair(make, loss, (x, labels()), settings)
    (warning,) = [one for one in said if str(one.message).startswith("convoy: ")]
    assert words in str(warning.message)
    assert Path(warning.filename).name == "training_pairs.py"
    assert found.step.plan.baseline
    assert any(words in note for note in found.step.notes)
    assert random.getstate() == state
    if hasattr(found.model, "fired"):
        assert not found.model.fired
    if hasattr(found.loss_fn, "history"):
        assert not found.loss_fn.history
    if name == "python's random":
        return  # both draw from one generator
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found.train(*[(x.clone(), labels()) for _ in range(2)], rtol=0, atol=0)
    assert not [one for one in said if str(one.message).startswith("convoy: ")]
    if hasattr(found.model, "fired"):
        assert len(found.model.fired) == len(found.stock.fired) == 2
    if hasattr(found.loss_fn, "history"):
        assert all(type(one) is torch.Tensor for one in found.loss_fn.history)
        assert len(found.loss_fn.history) == 2


def test_a_loss_that_fails_fails_as_in_pytorch(settings: convoy.Settings):
    model = Net()
    with pytest.warns(UserWarning, match="no attribute 'nothing'"):
        step = convoy.training_step(
            model, lambda o, t: o.nothing, sgd(list(model.parameters())), (images(), labels()), settings=settings
        )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        step(images(), labels())


def test_the_plan_of_a_step_that_was_not_captured_is_saved_read_and_pickled(settings: convoy.Settings, tmp_path: Path):
    batch = images(), labels()
    with pytest.warns(UserWarning, match="changes the attribute"):
        found = pair(Counting, lambda _: stock_loss, batch, settings)
    path = found.step.save(tmp_path / "plan.json")
    loaded = pickle.loads(pickle.dumps(found.step))
    assert loaded.plan.baseline
    assert torch.equal(loaded(*batch), found.step(*batch))
    model = Counting()
    with pytest.warns(UserWarning, match="changes the attribute"):
        convoy.training_step(model, stock_loss, sgd(list(model.parameters())), batch, plan=path)
    model = Net()
    with pytest.raises(PlanError, match="this model, loss and batch"):
        convoy.training_step(model, stock_loss, sgd(list(model.parameters())), batch, plan=path)


def test_a_tuning_that_fails_leaves_pytorchs_step(
    settings: convoy.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a compiler fell over\nat length")

    monkeypatch.setattr("convoy.training.training_job.build_fastest", fails)
    settings = dataclasses.replace(settings, db=tmp_path / "perf.db")  # without the plan of another test
    batch = images(), labels()
    with pytest.warns(
        UserWarning, match="tuning failed, with RuntimeError: a compiler fell over: PyTorch's own step runs"
    ):
        found = pair(Net, lambda _: stock_loss, batch, settings)
    found.train(batch, batch, rtol=0, atol=0)


def test_a_fault_inside_selection_leaves_pytorchs_step_and_blames_no_argument(
    settings: convoy.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A time that is no number, as a faulty engine's estimate may be, is found when the selection problem is checked."""

    def planted(*args: Any, **options: Any) -> SelectionProblem:
        made = selection_problem(*args, **options)
        return dataclasses.replace(
            made, candidates=tuple(dataclasses.replace(one, median_us=math.nan) for one in made.candidates)
        )

    monkeypatch.setattr("convoy.pipeline.select.selection_problem", planted)
    fresh = dataclasses.replace(settings, db=tmp_path / "perf.db")
    batch = images(), labels()
    fault = r"selection: candidates\[0\]\.median_us of the selection problem has nan, expected a finite number"
    with pytest.warns(UserWarning, match=rf"tuning failed, with InternalError: {fault}.*PyTorch's own step runs"):
        found = pair(Net, lambda _: stock_loss, batch, fresh)
    found.train(batch, batch, rtol=0, atol=0)
    with pytest.raises(InternalError, match=rf"{fault} of at least 0\. {REPORT}"):
        convoy.optimize(Net().eval(), (batch[0],), settings=fresh)


FACTOR = 0.5


def test_numbers_that_a_loss_reads_are_watched(settings: convoy.Settings, monkeypatch: pytest.MonkeyPatch):
    """A captured step holds them: once another is there, PyTorch's own step runs, and says which."""
    held, table = Holder(), {"factor": 0.5}
    changes: dict[str, tuple[Any, Callable[[], object]]] = {
        "loss.factor": (held.loss, lambda: setattr(held, "factor", 2.0)),
        "table": (lambda o, t: F.cross_entropy(o, t) * table["factor"], lambda: table.update(factor=2.0)),
        "FACTOR": (
            lambda o, t: F.cross_entropy(o, t) * FACTOR,
            lambda: monkeypatch.setattr(f"{__name__}.FACTOR", 2.0),
        ),
    }
    batch = images(), labels()
    for name, (loss, change) in changes.items():
        found = pair(Net, lambda _, loss=loss: loss, batch, settings)
        held.steps += 1  # nothing that the loss reads
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.train(batch)
        change()
        with pytest.warns(UserWarning, match=f"convoy: '{name}', which the model or its loss reads, was changed"):
            found.train(batch)


def test_autocast_around_a_call_counts(settings: convoy.Settings):
    batch = images(), labels()
    found = pair(Net, lambda _: stock_loss, batch, settings)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="convoy: autocast"):
        found.train(batch, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        inside = pair(Net, lambda _: stock_loss, batch, settings)
        assert inside.step.program.amp == torch.bfloat16
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            inside.train(batch, batch, rtol=2e-2, atol=1e-2)
    assert_planned(inside)


def test_anomaly_detection_names_what_gives_nan(settings: convoy.Settings):
    batch = images(), labels()
    found = pair(Net, lambda _: stock_loss, batch, settings)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="convoy: anomaly detection is on"):
        found.train(batch)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Traceback of forward call"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        found.step(images() * float("nan"), labels())
    assert_planned(found)


class ScaledNet(Net):
    """A tensor that the model makes in its code has the default dtype, and so has the loss then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.linspace(0.5, 1.5, 5)


def test_another_default_dtype_counts(settings: convoy.Settings):
    batch = images(), labels()
    found = pair(ScaledNet, lambda _: stock_loss, batch, settings)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.warns(
            UserWarning, match=r"convoy: the default dtype is torch\.float64 and was torch\.float32 when"
        ):
            found.train(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    found.train(batch)
    assert_planned(found)


def test_a_batch_that_requires_a_gradient_gets_one(settings: convoy.Settings):
    found = pair(Net, lambda _: stock_loss, (images(), labels()), settings)
    x = images().requires_grad_()
    with pytest.warns(UserWarning, match="requires a gradient"):
        found.step(x, labels())
    assert x.grad is not None


class NormedPart(nn.Module):
    """A group norm of a part of the channels, as SHViT's attention has it: its input and its gradient are slices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 4), nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, rest = self.first(x).split([4, 4], 1)
        return self.last(torch.cat([self.norm(part), rest], 1)).mean((2, 3))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_group_norm_reads_a_slice(settings: convoy.Settings, memory_format: torch.memory_format):
    x = images().contiguous(memory_format=memory_format)
    found = pair(lambda: NormedPart().to(memory_format=memory_format), lambda _: stock_loss, (x, labels()), settings)
    assert_planned(found)
    found.train((x, labels()), (x, labels()))


class Positions(nn.Module):
    """A learned convolution of an image of positions that is the same in every call, as EdgeNeXt has it."""

    def __init__(self, sides: int) -> None:
        super().__init__()
        self.first = (nn.Conv2d, nn.Conv3d)[sides - 2](3, 4, 3)
        self.place = (nn.Conv2d, nn.Conv3d)[sides - 2](2, 4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        rows = torch.arange(y.shape[-2], dtype=torch.float32).sin()[:, None].expand(y.shape[-2:])
        image = torch.stack([rows, rows.cos()]).view(1, 2, *[1] * (y.dim() - 4), *rows.shape)
        return self.head((y + self.place(image)).flatten(2).mean(2))


@pytest.mark.parametrize("sides", [2, 3])
def test_a_convolution_reads_a_constant_image(settings: convoy.Settings, sides: int):
    x = images() if sides == 2 else images()[:, :, None].repeat(1, 1, 3, 1, 1)
    found = pair(lambda: Positions(sides), lambda _: stock_loss, (x, labels()), settings)
    assert_planned(found)
    found.train((x, labels()), (x, labels()))


# --- arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "optimizer: got 'LBFGS'.*no closure"),
        ({"optimizer": lambda _: torch.optim.SGD(Net().parameters(), 0.1)}, r"optimizer: .*conv\.weight.*holds none"),
        ({"optimizer": lambda _: "sgd"}, "optimizer: got 'str'"),
        ({"batch": (images()[:0], labels()[:0])}, r"batch: .*\[0, 3, 9, 9\]"),
        ({"batch": (1.0, "x")}, "batch: got 'no tensor'"),
        ({"model": "resnet18"}, "model: got 'str'"),
        ({"loss_fn": 3}, "loss_fn: got 3"),
        ({"accumulate": "3"}, "accumulate: got '3'"),
        ({"accumulate": True}, "accumulate: got True"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm: got '1'"),
        ({"scaler": 1}, "scaler: got 'int'"),
    ],
)
def test_arguments_that_no_step_can_be_made_of_are_named(change: dict[str, Any], words: str):
    model = Net()
    given: dict[str, Any] = {"model": model, "loss_fn": stock_loss, "batch": (images(), labels())} | change
    optimizer = given.pop("optimizer", lambda m: torch.optim.SGD(m.parameters(), 0.1))
    with pytest.raises(InputError, match=words):
        convoy.training_step(given.pop("model"), given.pop("loss_fn"), optimizer(model), given.pop("batch"), **given)


def test_an_empty_batch_is_refused_in_a_call_too(settings: convoy.Settings):
    found = pair(Net, lambda _: stock_loss, (images(), labels()), settings)
    before = {name: value.clone() for name, value in found.model.state_dict().items()}
    with pytest.raises(InputError, match="at least one image"):
        found.step(images()[:0], labels()[:0])
    assert all(torch.equal(value, before[name]) for name, value in found.model.state_dict().items())
