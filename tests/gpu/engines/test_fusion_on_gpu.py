"""cuda.fusion on the GPU: subgraphs within bounds, the same bits in every replay, part of a net's first answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.base import Buffers
from convoy.engines.fusion.fusion import ENGINE
from convoy.engines.fusion.layout_copy import ENGINE as LAYOUT
from convoy.engines.torch_operators import DTYPES
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.data import in_layout, result_specs
from convoy.measurement.device.detect import detect_target
from convoy.pipeline import optimize_model
from convoy.problem import Knobs, LayoutProblem, SubgraphProblem, TensorSpec
from convoy.target import Target
from tests.unit.engines.fusion.cases import CASES, chain, gate, layer_norm, mean, norm_after_cat, pool, shuffle, softmax
from tests.unit.engines.fusion.emulated import scaled

pytestmark = pytest.mark.gpu

LARGE = {
    "mean of a first stage": mean((8, 32, 112, 112), before="silu.default"),
    "gate of a first stage": gate((32, 96, 56, 56)),
    "layer norm of a first stage": layer_norm((8, 96, 56, 56)),
    "layer norm, nchw": layer_norm((2, 192, 28, 28), "bf16", "nchw"),
    "dense block": norm_after_cat((64, *(32,) * 8), 28),
    "pooling": pool("max_pool2d", (8, 64, 112, 112), (3, 3), (2, 2), (1, 1)),
    "shuffle": shuffle(232, 28),
    "attention": softmax((8, 12, 197, 197), 3, layout="nchw"),
    "classes": softmax((64, 1000), 1, "fp32"),
}
SEEDS = range(200)


@pytest.fixture(scope="module")
def target() -> Target:
    return detect_target("cuda")


def verdict(problem: SubgraphProblem, target: Target, seed: int):
    assert ENGINE.supports(problem, target), ENGINE.supports(problem, target).reason
    executable = ENGINE.build(problem, Knobs(), target)
    return judge(executable, ENGINE.family, problem, make_data(problem, seed, "normal", "cuda"), "normal")


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_a_named_subgraph_is_right(name: str, target: Target):
    found = verdict((CASES | LARGE)[name], target, 3)
    assert found.ok, found.reason


@pytest.mark.parametrize("factor", [0.001, 300])
@pytest.mark.parametrize("name", ["activations", "activations, fp32"])
def test_small_and_large_numbers_are_right(name: str, factor: float, target: Target):
    executable = ENGINE.build(CASES[name], Knobs(), target)
    data = scaled(make_data(CASES[name], 3, "normal", "cuda"), factor)
    found = judge(executable, ENGINE.family, CASES[name], data, "normal")
    assert found.ok, found.reason


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_subgraph_is_right(seed: int, target: Target):
    problem = chain(seed)
    if not ENGINE.supports(problem, target):
        pytest.skip(ENGINE.supports(problem, target).reason)
    found = verdict(problem, target, seed)
    assert found.ok, f"{found.reason}\n{problem.text}"


@pytest.mark.parametrize("name", ["mean, large", "layer norm, long", "softmax, rows", "dense block"])
def test_replays_of_a_graph_give_the_same_bits_beside_other_work(name: str, target: Target):
    problem = (CASES | LARGE)[name]
    executable = ENGINE.build(problem, Knobs(), target)
    data = make_data(problem, 6, "normal", "cuda")
    results: list[torch.Tensor | None] = [
        in_layout(torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cuda"), problem.layout)
        for spec in result_specs(problem)
    ]
    buffers = Buffers(data.args, results, executable.pack(data.constants))
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(buffers, workspace)
    torch.cuda.synchronize()
    before = [t.clone() for t in results if t is not None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(buffers, workspace)
    side, work = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for _ in range(50):
        for tensor in results:
            assert tensor is not None
            tensor.fill_(torch.nan)
        graph.replay()
        with torch.cuda.stream(side):
            torch.mm(work, work)
        torch.cuda.synchronize()
        assert all(torch.equal(old, new) for old, new in zip(before, results, strict=True))


@pytest.mark.parametrize("name", ["bilinear", "max pooling", "padding"])
def test_a_result_may_be_channels_of_a_larger_tensor(name: str, target: Target):
    problem = CASES[name]
    executable, data = ENGINE.build(problem, Knobs(), target), make_data(problem, 4, "normal", "cuda")
    (spec,) = result_specs(problem)
    n, c, h, w = spec.shape
    assert executable.accept_slice(0, c + 24, 8)
    whole = torch.full((n, h, w, c + 24), 7, dtype=DTYPES[spec.dtype], device="cuda").permute(0, 3, 1, 2)
    dense = in_layout(torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cuda"), "nhwc")
    for result in (dense, whole[:, 8 : 8 + c]):
        executable.launch(Buffers(data.args, [result], executable.pack(data.constants)), None)
    assert torch.equal(whole[:, 8 : 8 + c], dense)
    assert bool((whole[:, :8] == 7).all())
    assert bool((whole[:, 8 + c :] == 7).all())


COPIES = [
    LayoutProblem(TensorSpec(shape, dtype), *layouts)
    for shape in ((32, 3, 224, 224), (1, 3, 223, 17), (2, 64, 56, 56), (3, 130, 7, 9))
    for dtype in ("fp16", "fp32")
    for layouts in (("nchw", "nhwc"), ("nhwc", "nchw"))
]


@pytest.mark.parametrize("problem", COPIES, ids=str)
def test_a_copy_between_memory_formats_is_exact(problem: LayoutProblem, target: Target):
    executable = LAYOUT.build(problem, Knobs(), target)
    found = judge(executable, LAYOUT.family, problem, make_data(problem, 3, "normal", "cuda"), "normal")
    assert found.ok, found.reason


class Net(nn.Module):
    """A gate, a residual and a global mean between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.down, self.up, self.end = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in EfficientNet and ResNet."""
        y = torch.nn.functional.silu(self.first(x))
        gated = y * torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return self.end(torch.relu(self.second(gated) + y).mean((2, 3)))


def test_a_first_answer_uses_it_and_not_inductor(tmp_path: Path, target: Target):
    if target.capability < 90:
        pytest.skip("predictions need rows, which ship for Hopper")
    model = Net().eval().half().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 28, 28, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    before = "torch._inductor.compile_fx" in sys.modules
    result = optimize_model(model, (x,), name="gated", settings=convoy.Settings(db=tmp_path / "perf.db", effort="none"))
    engines = {layer.engine for layer in result.summary.layers}
    assert ENGINE.id in engines
    assert "inductor" not in engines
    assert ("torch._inductor.compile_fx" in sys.modules) == before
