"""torch.compile(model, backend="convoy") without gradients: each call's own weights, and PyTorch where nothing else is right."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from convoy.torch_compile import backend, symbolic_graph
from convoy.torch_compile.inference_graph import InferenceGraph
from tests.unit.pipeline.untimed import keep_plans


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"effort": "none", "db": tmp_path_factory.mktemp("dynamo") / "perf.db"}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[InferenceGraph]]:
    """The graphs that were compiled, in order. Their plans are kept, whatever the clock says."""
    torch.compiler.reset()
    made: list[InferenceGraph] = []

    class Remembered(InferenceGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(backend, "InferenceGraph", Remembered)
    keep_plans(monkeypatch)
    with torch.no_grad():
        yield made
    torch.compiler.reset()


X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def new_parameter(block: Block) -> None:
    block.conv.weight = nn.Parameter(torch.randn_like(block.conv.weight))


def in_place(block: Block) -> None:
    block.conv.weight.mul_(2)
    block.norm.running_mean.add_(1)


def assigned(block: Block) -> None:
    block.load_state_dict({name: value + 1 for name, value in block.state_dict().items()}, assign=True)


def other_memory(block: Block) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(block.parameters()) * 2, block.parameters())


def written_through_data(block: Block) -> None:
    block.conv.weight.data.mul_(2)
    torch.autograd.graph.increment_version(block.parameters())


def test_blocks_of_one_class_each_run_with_their_own_weights(graphs: list[InferenceGraph], options: dict[str, Any]):
    blocks = [Block().eval() for _ in range(4)]
    compiled = [torch.compile(block, backend="convoy", options=options) for block in blocks]
    for _ in range(2):
        for fast, block in zip(compiled, blocks, strict=True):
            close(fast(X), block(X))
    (graph,) = graphs
    assert graph.plan is not None
    assert not graph.plan.baseline
    assert len(graph.sets) == 4


def test_a_launch_before_the_weights_are_looked_at_is_thrown_away_where_they_are_others(
    graphs: list[InferenceGraph], options: dict[str, Any]
):
    """As on a GPU, where the program of the last call is launched first."""
    blocks = [Block().eval() for _ in range(2)]
    compiled = [torch.compile(block, backend="convoy", options=options) for block in blocks]
    compiled[0](X)
    graphs[0]._launches_early = True
    for _ in range(2):
        for fast, block in zip(compiled, blocks, strict=True):
            close(fast(X), block(X))
            in_place(block)
            close(fast(X), block(X))


@pytest.mark.parametrize("change", [new_parameter, in_place, assigned, other_memory, written_through_data])
def test_new_weights_are_packed_under_the_same_plan(
    graphs: list[InferenceGraph], options: dict[str, Any], change: Callable[[Block], None]
):
    block = Block().eval()
    compiled = torch.compile(block, backend="convoy", options=options)
    close(compiled(X), block(X))
    plan = graphs[0].plan
    change(block)
    close(compiled(X), block(X))
    close(compiled(X), block(X))
    assert [graph.plan for graph in graphs] == [plan]
    assert len(graphs[0].sets) == 1


def test_a_copy_and_a_module_compiled_in_place(graphs: list[InferenceGraph], options: dict[str, Any]):
    block = Block().eval()
    average = copy.deepcopy(block)
    for module in (block, average):
        module.compile(backend="convoy", options=options)
    close(block(X), block.forward(X))
    for kept, new in zip(average.parameters(), block.parameters(), strict=True):
        kept.lerp_(new * 3, 0.5)
    close(average(X), average.forward(X))
    close(block(X), block.forward(X))


def test_no_weights_are_kept_alive(graphs: list[InferenceGraph], options: dict[str, Any]):
    block = Block().eval()
    compiled = torch.compile(block, backend="convoy", options=options)
    compiled(X)
    assert len(graphs[0].sets) == 1
    new_parameter(block)
    assert len(graphs[0].sets) == 0


def test_weights_that_change_in_every_call_are_left_to_pytorch_with_one_warning(
    graphs: list[InferenceGraph], options: dict[str, Any]
):
    block = Block().eval()
    compiled = torch.compile(block, backend="convoy", options=options)

    def calls() -> None:
        for _ in range(30):
            block.conv.weight.mul_(1.01)
            close(compiled(X), block(X))

    with pytest.warns(UserWarning, match="change every few calls") as told:
        calls()
    assert [one.filename for one in told] == [__file__]


class Mutating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.conv(x) + self.calls


def test_what_a_graph_writes_to_is_written_once_a_call(graphs: list[InferenceGraph], options: dict[str, Any]):
    module = Mutating().eval()
    stock = copy.deepcopy(module)
    compiled = torch.compile(module, backend="convoy", options=options)
    for count in (1, 2, 3):
        close(compiled(X), stock(X))
        assert module.calls == count

    def step(buffer: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return nn.functional.conv2d(x, weight) + buffer

    buffer, weight = torch.zeros(1), torch.randn(2, 4, 1, 1)
    made = torch.compile(step, backend="convoy", options=options)(buffer, X, weight)
    assert buffer == 1
    close(made, nn.functional.conv2d(X, weight) + 1)


def test_batch_norm_in_training_mode_keeps_its_statistics(graphs: list[InferenceGraph], options: dict[str, Any]):
    block = Block()
    stock = copy.deepcopy(block)
    compiled = torch.compile(block, backend="convoy", options=options)
    for _ in range(2):
        close(compiled(X), stock(X))
    for name, value in stock.state_dict().items():
        close(block.state_dict()[name], value)


def test_results_that_are_inputs_or_views_of_them(graphs: list[InferenceGraph], options: dict[str, Any]):
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.view(2, -1), x.relu().flatten(1)

    compiled = torch.compile(function, backend="convoy", options=options)
    x = X.clone()
    same, view, other = compiled(x)
    assert same is x
    view.zero_()
    assert not x.any()
    close(other, X.relu().flatten(1))


@pytest.mark.parametrize("with_gradients", [False, True])
def test_results_that_are_views_of_one_another(
    graphs: list[InferenceGraph], options: dict[str, Any], with_gradients: bool
):
    conv = nn.Conv2d(4, 8, 3)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = conv(x).relu()
        return y[:, 2:], y, y.flatten(1)

    with torch.set_grad_enabled(with_gradients):
        part, whole, flat = torch.compile(function, backend="convoy", options=options)(X)
    for found, wanted in zip((part, whole, flat), function(X), strict=True):
        close(found, wanted)
        assert found.stride() == wanted.stride()
    if not with_gradients:  # else AOTAutograd cut it in two
        assert graphs[0].plan is not None
    whole.detach().fill_(3)
    assert bool((part == 3).all())
    assert bool((flat == 3).all())


def test_a_result_that_is_expanded(graphs: list[InferenceGraph], options: dict[str, Any]):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.relu().mean((2, 3), keepdim=True).expand(-1, -1, 5, 5)

    close(torch.compile(function, backend="convoy", options=options)(X), function(X))
    assert graphs[0].plan is not None


@pytest.mark.parametrize("inference", [False, True])
def test_results_have_the_strides_of_pytorch(graphs: list[InferenceGraph], options: dict[str, Any], inference: bool):
    conv = nn.Conv2d(4, 8, 3)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = conv(x).relu()
        return y, y.permute(0, 2, 3, 1) + 1, y.mean((2, 3)).t() * 2

    compiled = torch.compile(function, backend="convoy", options=options, dynamic=False)
    with torch.inference_mode() if inference else torch.no_grad():
        for x in (X, X.to(memory_format=torch.channels_last)):
            for found, wanted in zip(compiled(x), function(x), strict=True):
                close(found, wanted)
                assert found.stride() == wanted.stride()
    assert all(graph.plan is not None for graph in graphs)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft2(self.conv(x)).abs()


def test_what_cannot_be_captured_is_pytorchs_with_a_warning_at_the_users_line(
    graphs: list[InferenceGraph], options: dict[str, Any]
):
    module = Spectrum().eval()
    compiled = torch.compile(module, backend="convoy", options=options)
    with pytest.warns(UserWarning, match="complex64") as told:
        close(compiled(X), module(X))
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(X)


def test_a_search_that_fails_leaves_pytorch(
    graphs: list[InferenceGraph], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted\nfault")

    monkeypatch.setattr("convoy.torch_compile.inference_graph.optimize_model", fail)
    block = Block().eval()
    with pytest.warns(UserWarning, match="planted$"):
        close(torch.compile(block, backend="convoy", options=options)(X), block(X))


def test_an_optimizers_step(graphs: list[InferenceGraph], options: dict[str, Any]):
    block, stock = Block(), Block()
    stock.load_state_dict(block.state_dict())
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module, compile_it in ((block, True), (stock, False)):
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
            step = torch.compile(optimizer.step, backend="convoy", options=options) if compile_it else optimizer.step
            for _ in range(3):
                optimizer.zero_grad()
                module(X).square().sum().backward()
                step()
    for found, wanted in zip(block.parameters(), stock.parameters(), strict=True):
        close(found, wanted)


def test_each_shape_that_comes_again_is_compiled_by_itself(graphs: list[InferenceGraph], options: dict[str, Any]):
    block = Block().eval()
    compiled = torch.compile(block, backend="convoy", options=options)
    images = torch.cat((X, X))
    for size in (4, 3, 4, 3, 4, 3):  # Dynamo's graph is symbolic from the second on
        close(compiled(images[:size]), block(images[:size]))
    assert len(graphs) == 3
    assert all(graph.plan is not None for graph in graphs)
    block.conv.weight.mul_(2)
    close(compiled(images), block(images))


def test_more_shapes_than_are_compiled_are_left_to_pytorch_with_a_warning(
    graphs: list[InferenceGraph], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(symbolic_graph, "MOST_SHAPES", 1)
    compiled = torch.compile(lambda x: x.sin() + x.shape[0], backend="convoy", options=options, dynamic=True)
    three = torch.cat((X, X))[:3]
    for x in (X, X, three):
        close(compiled(x), x.sin() + len(x))
    with pytest.warns(UserWarning, match="more than 1 shapes"):
        close(compiled(three), three.sin() + 3)
    assert len(graphs) == 1


class Scaled(nn.Module):
    """Has floats of PyTorch's and of its own, which Dynamo makes inputs under `dynamic=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.factor = nn.BatchNorm2d(4), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.factor


@pytest.mark.parametrize("training", [False, True])
def test_floats_of_modules_are_constants_under_dynamic(
    graphs: list[InferenceGraph], options: dict[str, Any], training: bool
):
    module = Scaled().train(training)
    stock = copy.deepcopy(module)
    compiled = torch.compile(module, backend="convoy", options=options, dynamic=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for x in (X, X, torch.cat((X, X))):
            close(compiled(x), stock(x))
        module.factor = stock.factor = 2.0
        for x in (X, X):
            close(compiled(x), stock(x))
    close(module.norm.running_mean, stock.norm.running_mean)
    if not training:
        assert len([graph for graph in graphs if graph.plan is not None]) == 2


def test_a_default_device_and_a_dispatch_mode_around_the_first_call(
    graphs: list[InferenceGraph], options: dict[str, Any]
):
    block = Block().eval()
    compiled = torch.compile(block, backend="convoy", options=options)
    with torch.device("meta"):
        close(compiled(X), block(X))
    assert graphs[0].plan is not None


@pytest.mark.parametrize(
    ("given", "named", "hint"),
    [
        ({"efort": "none"}, "options: got 'efort'", "Did you mean effort"),
        ({"time_s": "3"}, "time_s", "number of seconds"),
        ({"only_engines": ("atten",)}, "only_engines", "aten"),
    ],
)
def test_wrong_options_are_named(graphs: list[InferenceGraph], given: dict[str, Any], named: str, hint: str):
    compiled = torch.compile(Block().eval(), backend="convoy", options=given)
    with pytest.raises(Exception, match=named) as caught:
        compiled(X)
    assert hint in str(caught.value)


def test_a_mode_of_inductors_is_refused(graphs: list[InferenceGraph]):
    with pytest.raises(Exception, match=r"mode: got 'max-autotune'.*effort"):
        torch.compile(Block().eval(), backend="convoy", mode="max-autotune")(X)


def test_a_graph_without_tensors_runs_and_says_nothing(graphs: list[InferenceGraph], options: dict[str, Any]) -> None:
    """A graph break leaves graphs that only make tensors; no argument is wrong in them."""
    block = Block().eval()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = block(x)
        torch._dynamo.graph_break()
        grid = torch.linspace(0, 1, 8)
        torch._dynamo.graph_break()
        return y * grid

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(torch.compile(run, backend="convoy", options=options)(X), run(X))
    assert len(graphs) == 2
