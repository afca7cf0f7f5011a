"""Models that cannot be captured whole: programs compute the largest modules that can be, PyTorch the rest."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import convoy
from convoy.errors import CaptureError
from convoy.pipeline.by_parts.module_calls import depends_on_data, module_calls
from convoy.pipeline.by_parts.partwise_module import PartwiseModule
from convoy.pipeline.check import parts_check
from convoy.pipeline.check.least_error import least_error
from convoy.pipeline.isolation import isolate
from tests.unit.pipeline.untimed import plans_kept


def body() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


class Detector(nn.Module):
    """As torchvision's: a list of images, a body, a head called for each level, a choice that depends on data, a second head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()
        self.head = nn.Conv2d(4, 5, 1)
        self.levels = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)])
        self.second = nn.Linear(5, 2)

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        x = self.body(torch.stack(images) * 2 - 1)
        scores = torch.cat([self.head(level(x)).flatten(2) for level in self.levels], 2)
        found = []
        for image in scores:
            best = image[:, image[0] > image[0].median()].t()
            found.append(
                {"scores": best, "labels": best.argmax(1), "boxes": self.second(best[best[:, 1] > best.mean()])}
            )
        return found


def images() -> list[torch.Tensor]:
    return [image.clone() for image in torch.rand(2, 3, 8, 10, generator=torch.Generator().manual_seed(3))]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with plans_kept():
        yield


def test_items_and_attributes_are_the_stock_modules(settings: convoy.Settings):
    class Layers(nn.Sequential):
        bias = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + self.bias if bool(y.sum() > 0) else y - self.bias

    model = Layers(body(), nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())).eval()
    fast = optimized(model, (torch.rand(2, 3, 8, 8),), settings)
    assert len(fast) == 2
    assert fast[1] is model[1]
    assert list(fast[:1]) == [model[0]]
    fast.bias = 3.0
    assert model.bias == 3.0
    x = torch.rand(2, 3, 8, 8)
    with pytest.warns(UserWarning, match="the stock module runs"), torch.no_grad():
        assert torch.equal(fast(x), model(x))
    fast[1] = nn.Identity()
    fast.refresh()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def optimized(model: nn.Module, args: tuple[object, ...], settings: convoy.Settings) -> PartwiseModule:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = convoy.optimize(model, args, settings=settings)
    assert isinstance(fast, PartwiseModule), [str(warning.message) for warning in caught]
    told = [str(warning.message) for warning in caught if "convoy" in str(warning.message)]
    assert len(told) == 1
    assert all(part.path in told[0] for part in fast.parts)
    assert caught[0].filename == __file__
    return fast


def check(fast: nn.Module, model: nn.Module, *args: object) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(*args), model(*args), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def detector(settings: convoy.Settings) -> tuple[PartwiseModule, nn.Module]:
    model = seeded(Detector)
    with plans_kept():
        return optimized(model, (images(),), settings), model


def test_a_detector_runs_by_parts(detector: tuple[PartwiseModule, nn.Module]) -> None:
    fast, model = detector
    # `levels` is called by nobody, so its convolutions are parts; `second` is given as many rows as the image has boxes.
    assert [part.path for part in fast.parts] == ["body", "head", "levels.0", "levels.1"]
    assert len(fast.parts[1].program.plans) == 2, "one program of the head for each level"
    assert sum(part.share for part in fast.parts) > 0
    check(fast, model, images())
    check(fast, model, [image.flip(0) for image in images()])
    assert not fast(images())[0]["scores"].requires_grad
    assert set(fast.state_dict()) == set(model.state_dict())


def test_other_sizes_run_by_stock_parts_until_they_are_tuned(detector: tuple[PartwiseModule, nn.Module]) -> None:
    fast, model = copy.deepcopy(detector)
    other = [image[:, :6] for image in images()]
    with pytest.warns(UserWarning, match="no plan for these input shapes"), torch.no_grad():
        torch.testing.assert_close(fast(other), model(other), rtol=1e-4, atol=1e-5)
    fast.tune((other,))
    fast.renew()
    check(fast, model, other)
    assert [len(part.program.plans) for part in fast.parts] == [2, 4, 2, 2]


def test_a_replaced_tensor_of_the_stock_module_is_noticed(detector: tuple[PartwiseModule, nn.Module]) -> None:
    fast, model = copy.deepcopy(detector)
    assert fast.stale() is None
    with torch.no_grad():
        model.second.weight = nn.Parameter(model.second.weight + 1)
        model.body[0].weight.mul_(2)
        assert "second" in str(fast.stale())
        with pytest.warns(UserWarning, match=r"second\.weight was replaced after tuning.*refresh"):
            torch.testing.assert_close(fast(images()), model(images()))
    fast.refresh()
    assert fast.stale() is None
    check(fast, model, images())


def hook_inside(model: nn.Module) -> None:
    model.body[1].register_forward_hook(lambda _, __, made: made * 2)


def hook_outside(model: nn.Module) -> None:
    model.register_forward_hook(lambda _, __, made: made[:1])


def attribute(model: nn.Module) -> None:
    model.body[1].eps = 5.0


def layer(model: nn.Module) -> None:
    model.body[2] = nn.SiLU()


def memory(model: nn.Module) -> None:
    model.second.weight.data = model.second.weight.data * 3


def training(model: nn.Module) -> None:
    model.body.train()


@pytest.mark.parametrize("change", [hook_inside, hook_outside, attribute, layer, memory, training])
def test_every_change_of_the_stock_module_is_noticed(
    detector: tuple[PartwiseModule, nn.Module], change: Callable[[nn.Module], None]
) -> None:
    fast, model = copy.deepcopy(detector)
    change(model)
    assert fast.stale() is not None
    stale = copy.deepcopy(fast)
    with torch.no_grad():
        wanted = copy.deepcopy(model)(images())
        assert str(wanted) != str(detector[1](images()))
        for one in (fast, stale):
            with pytest.warns(UserWarning, match="after tuning: the stock module runs; call .refresh"):
                torch.testing.assert_close(one(images()), wanted)


def test_training_mode_reaches_the_stock_module(detector: tuple[PartwiseModule, nn.Module]) -> None:
    fast, model = copy.deepcopy(detector)
    fast.train()
    assert model.body[1].training
    with pytest.warns(UserWarning, match="the module is in training mode"):
        fast(images())[0]["scores"].sum().backward()
    assert model.head.weight.grad is not None
    fast.eval()
    assert not any(module.training for module in model.modules())


def test_a_pickle_runs_by_parts(detector: tuple[PartwiseModule, nn.Module]) -> None:
    fast, model = detector
    again = pickle.loads(pickle.dumps(fast))
    assert [part.path for part in again.parts] == [part.path for part in fast.parts]
    assert not any(part.program.plan.baseline for part in again.parts)
    check(again, model, images())


def test_an_optimized_model_is_optimized_from_its_stock_module(detector: tuple[PartwiseModule, nn.Module]) -> None:
    fast, model = detector
    assert fast.stock is model


class Rough(nn.Module):
    """A block with control flow that depends on data inside another, whose convolutions have parts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = body()
        self.last = nn.Conv2d(4, 3, 1)
        self.same = self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.same(y) if float(y.sum()) > 0 else self.last(y)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rough, self.smooth = Rough(), body()
        self.before = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0
        y = self.before(x)
        return self.smooth(self.rough(y) + x)


def test_parts_lie_in_modules_that_cannot_be_captured(settings: convoy.Settings) -> None:
    model, x = seeded(Nested), torch.randn(1, 3, 8, 8)
    fast = optimized(model, (x,), settings)
    # `before` overwrites its argument, which the sum reads: of it the convolution alone is a part.
    assert [part.path for part in fast.parts] == ["rough.inner", "rough.last", "smooth", "before.1"]
    assert fast.model.rough.same is fast.model.rough.last, "under both names"
    check(fast, model, x)


class Steep(nn.Module):
    """Its output depends on the sign of a difference that rounding makes: `gain` says how much."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(3, 4, 3), gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        exact = self.conv.weight.double().flatten(1) @ nn.functional.unfold(x.double(), 3)
        exact = (exact + self.conv.bias.double()[:, None]).view(y.shape)
        return y + self.gain * torch.sign(y - exact).float() * float(y.abs().sum() > 0)


class Counts(nn.Module):
    """Its outputs depend on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.log = body(), 0, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return self.body(x) * (self.calls + len(self.log))


def test_a_model_that_counts_its_calls_counts_on(settings: convoy.Settings) -> None:
    x = torch.stack(images())
    model, stock = seeded(Counts), seeded(Counts)
    with pytest.warns(UserWarning, match="changes its attribute (calls|log) in every call"):
        fast = convoy.optimize(model, (x,), settings=settings)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), stock(x), rtol=1e-4, atol=1e-5)
    assert model.calls == fast.calls == 3  # a copy runs; what it keeps is the stock module's


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_weights_that_no_graph_holds_are_not_taken_for_written(dtype: torch.dtype, settings: convoy.Settings) -> None:
    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3, 3, 3).to(dtype), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(x, self.weight.to(x.dtype))

    x = torch.ones(1, 3, 8, 8, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    model = Converts().eval()
    with pytest.warns(UserWarning, match="complex64|float8") as found:
        fast = convoy.optimize(model, (x,), settings=settings)
    assert not [one for one in found if "writes to its parameters" in str(one.message)]
    torch.testing.assert_close(fast(x), model(x))


class Argument:
    """Holds a tensor, unknown to pytree."""

    def __init__(self, image: torch.Tensor) -> None:
        self.image = image


def test_a_model_of_objects_runs_by_parts(settings: convoy.Settings) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body()

        def forward(self, argument: Argument) -> torch.Tensor:
            return self.body(argument.image)

    model, argument = Takes().eval(), Argument(torch.stack(images()))
    with pytest.warns(UserWarning, match="by parts: Convoy runs body"):
        fast = convoy.optimize(model, (argument,), settings=settings)
    torch.testing.assert_close(fast(argument), model(argument), rtol=1e-4, atol=1e-5)


def test_what_rounding_decides_may_differ_and_what_it_does_not_may_not() -> None:
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    for planted, allowed in ((1 + 1e-7, True), (1.5, False)):
        torch.manual_seed(0)
        model = Steep().eval()

        def copies(model: nn.Module = model, planted: float = planted) -> tuple[object, object]:
            stock, trial = isolate(model, (x,), {}), isolate(model, (x,), {})
            trial.model.conv.register_forward_hook(lambda *given: given[2] * planted)
            return stock, trial

        summary = type("Summary", (), {"rel_l2_error": 1e-7, "baseline_rel_l2_error": 1e-7})()
        if allowed:
            errors, note = parts_check.check_outputs(copies, {"conv": summary}, "strict", "why")
            assert errors.rel_l2_error > least_error("strict")
            assert "rounding" in note
        else:
            model.gain = 0.0
            with pytest.raises(CaptureError, match=r"why; .*rounding explains"):
                parts_check.check_outputs(copies, {"conv": summary}, "strict", "why")


class Iterates(nn.Module):
    """Calls its layers both as a whole, which a program computes, and one by one, which PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        for layer in self.layers:
            y = layer(y) if float(y.sum()) != 7 else y
        return y


class Joins(Iterates):
    """Joins its layers to others by `+`, which takes an `nn.Sequential` alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        for layer in self.layers + nn.Sequential(nn.ReLU()):
            y = layer(y) if float(y.sum()) != 7 else y
        return y


def test_a_model_that_iterates_over_a_part_gets_the_parts_layers(settings: convoy.Settings) -> None:
    model, x = seeded(Iterates), torch.randn(1, 3, 4, 4)
    check(optimized(model, (x,), settings), model, x)


def test_a_model_that_cannot_run_with_its_parts_replaced_stays_stock(settings: convoy.Settings) -> None:
    model, x = seeded(Joins), torch.randn(1, 3, 4, 4)
    with pytest.warns(UserWarning, match=r"replaced it raises TypeError.*PyTorch runs Joins as it is"):
        fast = convoy.optimize(model, (x,), settings=settings)
    check(fast, model, x)


def test_calls_are_recorded_and_nothing_is_left_behind() -> None:
    model = seeded(Detector).train()
    calls = module_calls(model, (images(),), {})
    assert list(calls) == ["", "body", "body.0", "body.1", "body.2", "levels.0", "head", "levels.1", "second"]
    assert [len(found.examples) for found in calls.values()] == [1, 1, 1, 1, 1, 1, 2, 1, 2]
    assert calls[""].seconds >= calls["body"].seconds > 0
    assert model.training
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert depends_on_data(calls, isolate(model, (images(),), {})) == {"second"}
    with pytest.raises(RuntimeError):
        module_calls(model, ([torch.rand(5, 8, 8)],), {})
    assert not any(module._forward_pre_hooks for module in model.modules())
