"""torch.compile(model, backend="convoy") in training, with every engine of this machine: PyTorch's losses and gradients."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.torch_compile import compiled_passes
from convoy.torch_compile.training_graph import TracedGraph
from tests.unit.pipeline.untimed import keep_plans


class Residual(nn.Module):
    def __init__(self, act: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm, self.act = norm, act
        self.point = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.point(self.act(self.norm(self.depthwise(x))))


NETS: dict[str, Callable[[], list[nn.Module]]] = {
    "relu-bn": lambda: [nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)],
    "silu-groupnorm-residual": lambda: [nn.GroupNorm(2, 8), nn.SiLU(), Residual(nn.ReLU6(), nn.BatchNorm2d(8))],
    "gelu-layernorm": lambda: [nn.LayerNorm([8, 8, 8]), nn.GELU(), nn.AvgPool2d(2)],
    "hardswish-depthwise": lambda: [Residual(nn.Hardswish(), nn.Identity()), nn.Dropout(0.0)],
}


def net(name: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *NETS[name](), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(4))
Y = torch.tensor([0, 3, 1, 4])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"effort": "none", "db": tmp_path_factory.mktemp("training") / "perf.db"}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TracedGraph]]:
    """The passes that were compiled, in order. Their plans are kept, whatever the clock says."""
    torch.compiler.reset()
    made: list[TracedGraph] = []

    class Remembered(TracedGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(compiled_passes, "TracedGraph", Remembered)
    keep_plans(monkeypatch)
    yield made
    torch.compiler.reset()


def train(
    model: Callable[..., Any], module: nn.Module, steps: int = 2, loss: Callable[..., Any] = cross_entropy
) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss(model(X), Y)
        found.backward()
        optimizer.step()
        losses.append(found.detach())
    return losses


def agree(module: nn.Module, stock: nn.Module, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(
            module.state_dict()[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def has_plans(graphs: list[TracedGraph]) -> bool:
    return bool(graphs) and all(graph.plan is not None and not graph.plan.baseline for graph in graphs)


@pytest.mark.parametrize("name", NETS)
def test_an_eager_loop_trains_as_before(graphs: list[TracedGraph], options: dict[str, Any], name: str):
    module, stock = net(name), net(name)
    found = train(torch.compile(module, backend="convoy", options=options, fullgraph=True), module)
    torch.testing.assert_close(found, train(stock, stock), rtol=1e-4, atol=1e-5)
    agree(module, stock)
    assert len(graphs) == 2
    assert has_plans(graphs)


def test_passes_have_pytorchs_operators_of_upsampling_and_silu(graphs: list[TracedGraph], options: dict[str, Any]):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(13))
    module.append(nn.Flatten()).append(nn.Linear(4 * 13 * 13, 5))
    stock = copy.deepcopy(module)
    train(torch.compile(module, backend="convoy", options=options, fullgraph=True), module)
    train(stock, stock)
    agree(module, stock)
    called = [str(node.target) for graph in graphs for node in graph._module.graph.nodes if node.op == "call_function"]
    assert {f"aten.{name}.default" for name in ("silu", "upsample_bilinear2d", "upsample_nearest2d")} <= {*called}
    assert {f"aten.{name}_backward.default" for name in ("silu", "upsample_bilinear2d", "upsample_nearest2d")} <= {
        *called
    }
    assert not any("index" in name or "fill" in name for name in called)


def test_passes_are_tuned_outside_the_modes_of_their_first_call(
    graphs: list[TracedGraph], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """AOTAutograd calls a forward pass the first time under a dispatch mode, in which Inductor cannot trace a batch norm."""
    module = nn.Sequential(nn.BatchNorm2d(3), nn.SiLU())
    seen: list[tuple[int, int, bool, bool]] = []

    def state(*_: object) -> None:
        modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        seen.append((*modes, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    monkeypatch.setattr(TracedGraph, "_runnable", state)
    with torch.device("cpu"):
        torch.compile(module, backend="convoy", options=options)(X).sum().backward()
    assert seen == [(0, 0, False, False)] * 2


def test_module_compile_with_a_graph_break(graphs: list[TracedGraph], options: dict[str, Any]):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.last(x.mean((2, 3)))

    torch.manual_seed(0)
    module = Broken()
    stock = copy.deepcopy(module)
    module.compile(backend="convoy", options=options)
    train(module, module)
    train(stock, stock)
    agree(module, stock)
    assert len(graphs) == 4


def test_a_compiled_loss_and_a_frozen_layer(graphs: list[TracedGraph], options: dict[str, Any]):
    module, stock = net("relu-bn"), net("relu-bn")
    for one in (module, stock):
        one[0].requires_grad_(False)
    weight = torch.rand(5)

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, target, weight=weight, label_smoothing=0.1)

    train(module, module, loss=torch.compile(loss, backend="convoy", options=options))
    train(stock, stock, loss=loss)
    agree(module, stock)


def test_autocast(graphs: list[TracedGraph], options: dict[str, Any]):
    """Rounding to bf16 differs from kernel to kernel: gradients agree as far as bf16 does."""
    module, stock = net("relu-bn"), net("relu-bn")
    compiled = torch.compile(module, backend="convoy", options=options)
    with torch.autocast("cpu", torch.bfloat16):
        train(compiled, module, 1)
        train(stock, stock, 1)
        assert has_plans(graphs)
        module.eval(), stock.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(X), module(X), rtol=0.05, atol=0.02)
    agree(module, stock, rtol=0.05, atol=5e-3)


def test_an_evaluation_between_steps_sees_the_new_weights(graphs: list[TracedGraph], options: dict[str, Any]):
    module, stock = net("relu-bn"), net("relu-bn")
    compiled = torch.compile(module, backend="convoy", options=options)
    for _ in range(3):
        train(compiled, module, 1)
        train(stock, stock, 1)
        module.eval(), stock.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(X), stock(X), rtol=1e-4, atol=1e-5)
        module.train(), stock.train()


def test_a_last_batch_of_another_size(graphs: list[TracedGraph], options: dict[str, Any]):
    module, stock = net("relu-bn"), net("relu-bn")
    compiled = torch.compile(module, backend="convoy", options=options)
    for one, call in ((module, compiled), (stock, stock)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
        for size in (4, 3, 4, 3, 4, 3):
            optimizer.zero_grad()
            cross_entropy(call(X[:size]), Y[:size]).backward()
            optimizer.step()
    agree(module, stock)
    assert len(graphs) == 6
    assert has_plans(graphs)


def test_complex_values_run_as_traced_forwards_and_backwards(graphs: list[TracedGraph], options: dict[str, Any]):
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.fft.rfft2(self.conv(x)).abs().mean((2, 3)))

    torch.manual_seed(0)
    module = Spectrum()
    stock = copy.deepcopy(module)
    compiled = torch.compile(module, backend="convoy", options=options)
    with pytest.warns(UserWarning, match="complex64") as told:
        train(compiled, module)
    assert {one.filename for one in told} == {__file__}
    assert len(told) == len(graphs) == 2
    train(stock, stock)
    agree(module, stock)


def test_threads_that_call_for_the_first_time_at_once(graphs: list[TracedGraph], options: dict[str, Any]):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    compiled = torch.compile(module, backend="convoy", options=options)
    made: dict[int, torch.Tensor] = {}

    def call(index: int) -> None:
        with torch.no_grad():
            made[index] = compiled(X)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert len(made) == 3
    for found in made.values():
        torch.testing.assert_close(found, module(X), rtol=1e-4, atol=1e-5)
