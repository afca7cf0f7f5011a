"""Nothing of the user's is touched: every state is after each public call what it was before, over modules that notice runs."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.pipeline.check import end_to_end, end_to_end_check
from convoy.pipeline.check.end_to_end import Latency
from tests.unit.pipeline.nasty_modules import MODELS, Branches, CountsInABuffer, changes, state_of, state_of_process

COMPILED = ("CountsInABuffer", "CountsInPython", "OverwritesItsInput", "Caches", "Branches", "hooked", "learning")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.fixture(autouse=True)
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program runs three times, and Convoy's are found faster."""

    def timed(runs, **_):
        for run in (*runs.values(), *runs.values(), *runs.values()):
            run()
        return {name: Latency(name, (1.0 if "convoy" in name else 2.0,)) for name in runs}

    monkeypatch.setattr(end_to_end_check, "interleave", timed)
    monkeypatch.setattr(end_to_end, "interleave", timed)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]()
    return model if name in ("frozen", "Merges") else model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_optimize_and_load(name: str, settings: convoy.Settings, tmp_path: Path) -> None:
    model, twin, given = made(name), made(name), x()
    before = state_of(model, (given,))
    fast = convoy.optimize(model, given, settings=settings)
    assert changes(before, state_of(model, (given,))) == []
    (path,) = fast.save(tmp_path / "net.plan.json")
    convoy.load(model, path, given, settings=settings)
    assert changes(before, state_of(model, (given,))) == []
    if name == "Merges":  # the stock module has not merged its weights yet
        return
    # One call does to the module and its argument what one of the stock module does.
    other = x()
    process = state_of_process()
    with torch.no_grad():
        torch.manual_seed(2)
        found = fast(given)
        torch.manual_seed(2)
        wanted = twin.eval()(other)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(given, other)
    for (buffer, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs), buffer
    for (parameter, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs), parameter
    if name not in ("Draws", "DrawsInPython", "Switches"):
        assert set(changes(process, state_of_process())) <= {"torch's random state"}


def test_what_a_module_overwrites_while_its_layers_are_swapped(settings: convoy.Settings) -> None:
    model = Branches().eval()
    fast = convoy.optimize(model, x(), settings=settings)
    assert [type(part).__name__ for part in fast.modules()].count("OptimizedModule") == 1, "the convolution was swapped"
    given = x()
    with torch.no_grad():
        fast(given)
    assert model.frames == 1
    assert torch.equal(given, x() * 1.5)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind_where_tuning_ends_early(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        torch.rand(3)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        raise error

    monkeypatch.setattr(end_to_end_check, "interleave", fails)
    model, given = made("frozen"), x()
    before = state_of(model, (given,))
    with pytest.raises(error):
        convoy.optimize(model, given, settings=convoy.Settings(effort="none", db=tmp_path / "perf.db"))
    assert changes(before, state_of(model, (given,))) == []


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_does_what_one_call_does(
    name: str, settings: convoy.Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which torch.compile sets, with any backend
    torch._dynamo.reset()
    model, given = made(name).eval(), x()
    twin, other = made(name).eval(), x()
    options = {"effort": "none", "db": settings.db}
    process = state_of_process()
    with torch.no_grad():
        torch.manual_seed(2)
        found = torch.compile(model, backend="convoy", options=options)(given)
        torch.manual_seed(2)
        wanted = twin(other)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(given, other)
    for (tensor, mine), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), tensor
    drawn = {"torch's random state", "Python's random state", "NumPy's random state"}
    assert set(changes(process, state_of_process())) <= drawn


def test_training_step(settings: convoy.Settings) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 3)
    )
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batch = (x(), torch.tensor([1]))
    before = state_of(model, batch)
    convoy.training_step(model, nn.functional.cross_entropy, optimizer, batch, settings=settings)
    assert changes(before, state_of(model, batch)) == []
    assert not optimizer.state


def test_conv2d(settings: convoy.Settings) -> None:
    layer, given = nn.Conv2d(3, 4, 3), x()
    before = state_of(layer, (given,))
    convoy.conv2d(given, layer.weight, layer.bias, settings=settings)
    assert changes(before, state_of(layer, (given,))) == []


def test_many_threads_optimise_at_once(settings: convoy.Settings) -> None:
    found: list[str] = []
    nets = [CountsInABuffer() if n % 2 else nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()) for n in range(12)]
    before = state_of_process()

    def optimize(model: nn.Module) -> None:
        try:
            fast = convoy.optimize(model.eval(), x(), settings=settings)
            with torch.no_grad():
                torch.testing.assert_close(fast(x()), model(x()), rtol=1e-4, atol=1e-5)
            found.append("right")
        except Exception as error:
            found.append(repr(error))

    threads = [threading.Thread(target=optimize, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["right"] * 12
    assert changes(before, state_of_process()) == []
