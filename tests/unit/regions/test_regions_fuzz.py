"""Regions of random graphs: each is convex, complete, and computes by itself what the whole graph computes there."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.interpret import compile_graph
from convoy.graph.ir import Arg, Graph, Node, Ref, Value, ValueKind
from convoy.graph.rebuild import rebuild
from convoy.graph.text import parse_graph
from convoy.graph.verify import verify
from convoy.problem import ConvProblem, Epilogue, LinearProblem, SubgraphProblem, TensorSpec
from convoy.regions import Region, propose

LAYOUTS = ("nchw", "nhwc")
SEEDS = range(50)

DRAWN_ACTIVATIONS: list[tuple[str, tuple[Arg, ...]]] = [
    ("aten.relu.default", ()),
    ("aten.hardtanh.default", (0.0, 6.0)),
    ("aten.hardtanh.default", (-1.0, 1.0)),
    ("aten.silu.default", ()),
    ("aten.gelu.default", ()),
    ("aten.sigmoid.default", ()),
    ("aten.clamp.default", (0, None)),
    ("aten.neg.default", ()),
]


class Drawer:
    """Draws one graph; every value is [2, c, 4, 4] or, behind a pooling, [2, c]."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.images: list[str] = []
        self.matrices: list[str] = []

    def value(self, name: str, shape: tuple[int, ...], kind: ValueKind) -> str:
        self.values[name] = Value(name, TensorSpec(shape, "fp32"), kind)
        return name

    def node(self, op: str, args: tuple[Arg, ...], shape: tuple[int, ...], parts: int = 1) -> list[str]:
        name = f"n{len(self.nodes)}"
        outputs = [self.value(name if i == 0 else f"{name}.{i}", shape, "node") for i in range(parts)]
        self.nodes.append(Node(name, op, args, (), tuple(outputs)))
        (self.images if len(shape) == 4 else self.matrices).extend(outputs)
        return outputs

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].spec.shape

    def recent(self, names: list[str]) -> str:
        """A value, the later ones more often: long chains and short cuts."""
        if self.random.random() < 0.5:
            return names[-1]
        return names[-1 - min(int(self.random.expovariate(0.7)), len(names) - 1)]

    def draw(self, count: int) -> Graph:
        for index in range(self.random.randint(1, 2)):
            self.images.append(self.value(f"x{index}", (2, self.random.choice([2, 4]), 4, 4), "input"))
        inputs = tuple(self.images)
        steps: list[Callable[[], object]] = [self.conv] * 4 + [self.activation] * 4 + [self.add] * 4
        steps += [
            self.linear,
            self.matrix_activation,
            self.pool,
            self.cat,
            self.split,
            self.multiply,
            self.mean,
            self.view,
        ]
        for _ in range(count):
            self.random.choice(steps)()
        made = [name for name, value in self.values.items() if value.kind == "node"]
        read = {name for node in self.nodes for name in node.refs()}
        ends = [name for name in made if name not in read] or [inputs[0]]
        outputs = tuple(ends + self.random.sample(made, min(len(made), self.random.randint(0, 2))))
        graph = rebuild(inputs, outputs, self.values, self.nodes)
        verify(graph)
        return graph

    def conv(self) -> None:
        x = self.recent(self.images)
        channels = self.shape(x)[1]
        groups = self.random.choice([1, 1, channels])
        weight = self.constant((4, channels // groups, 3, 3) if 4 % groups == 0 else (channels, 1, 3, 3))
        bias = Ref(self.constant((self.shape(weight)[0],))) if self.random.random() < 0.5 else None
        args = (Ref(x), Ref(weight), bias, (1, 1), (1, 1), (1, 1), groups)
        self.node("conv2d", args, (2, self.shape(weight)[0], 4, 4))

    def constant(self, shape: tuple[int, ...]) -> str:
        return self.value(f"w{len(self.values)}", shape, "constant")

    def activation(self) -> None:
        x = self.recent(self.images)
        op, rest = self.random.choice(DRAWN_ACTIVATIONS)
        self.node(op, (Ref(x), *rest), self.shape(x))

    def add(self) -> None:
        x = self.recent(self.images)
        same = [name for name in self.images if self.shape(name) == self.shape(x)]
        pair = [Ref(x), Ref(self.random.choice(same))]
        self.random.shuffle(pair)
        self.node("aten.add.Tensor", tuple(pair), self.shape(x))

    def multiply(self) -> None:
        x = self.recent(self.images)
        self.node("aten.mul.Tensor", (Ref(x), Ref(self.constant((1, self.shape(x)[1], 1, 1)))), self.shape(x))

    def pool(self) -> None:
        x = self.recent(self.images)
        self.node("aten.max_pool2d.default", (Ref(x), (3, 3), (1, 1), (1, 1)), self.shape(x))

    def cat(self) -> None:
        parts = [self.recent(self.images) for _ in range(self.random.randint(1, 3))]
        parts = [name for name in parts if self.shape(name)[1] <= 8]
        if parts:
            channels = sum(self.shape(name)[1] for name in parts)
            self.node("aten.cat.default", (tuple(map(Ref, parts)), 1), (2, channels, 4, 4))

    def split(self) -> None:
        x = self.recent(self.images)
        n, channels, h, w = self.shape(x)
        if channels % 2 == 0:
            self.node("aten.split.Tensor", (Ref(x), channels // 2, 1), (n, channels // 2, h, w), parts=2)

    def mean(self) -> None:
        x = self.recent(self.images)
        self.node("aten.mean.dim", (Ref(x), (2, 3)), self.shape(x)[:2])

    def view(self) -> None:
        x = self.recent(self.images)
        n, channels, h, w = self.shape(x)
        self.node("aten.view.default", (Ref(x), (n, channels * h, w, 1)), (n, channels * h, w, 1))
        self.images.pop()  # nobody reads it as an image; it may be returned

    def linear(self) -> None:
        if self.matrices:
            x = self.recent(self.matrices)
            weight = self.constant((3, self.shape(x)[1]))
            bias = Ref(self.constant((3,))) if self.random.random() < 0.5 else None
            self.node("linear", (Ref(x), Ref(weight), bias), (2, 3))

    def matrix_activation(self) -> None:
        if self.matrices:
            x = self.recent(self.matrices)
            self.node("aten.relu.default", (Ref(x),), self.shape(x))


def draw(seed: int, count: int = 25) -> Graph:
    """A random graph of about `count` nodes."""
    return Drawer(seed).draw(count)


def tensors(graph: Graph, kind: ValueKind, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded values of a graph's inputs or constants, of a size at which float64 keeps its digits."""
    generator = torch.Generator().manual_seed(seed)
    return {
        value.name: torch.randn(value.spec.shape, generator=generator).double() * 0.4
        for value in graph.values.values()
        if value.kind == kind
    }


def every_value(graph: Graph) -> dict[str, torch.Tensor]:
    """Every value of a graph, in float64."""
    inputs, constants = tensors(graph, "input"), tensors(graph, "constant", seed=1)
    made = [value.name for value in graph.values.values() if value.kind == "node"]
    whole = Graph(graph.inputs, tuple(made), graph.values, graph.nodes)
    found = compile_graph(whole)([inputs[name] for name in graph.inputs], list(constants.values()))
    return inputs | constants | dict(zip(made, found, strict=True))


def is_convex(graph: Graph, nodes: Collection[str]) -> bool:
    """By definition: no way out of the set and back into it."""
    outside: set[str] = set()
    for node in graph.nodes:
        makers = {maker.name for name in node.refs() if (maker := graph.producer(name)) is not None}
        if node.name in nodes:
            if makers & outside:
                return False
        elif makers & (outside | set(nodes)):
            outside.add(node.name)
    return True


def test_the_check_of_convexity_finds_a_way_round():
    graph = parse_graph(
        "graph 1\ninput %x: fp32[1]\n%a: fp32[1] = aten.neg.default(%x)\n%b: fp32[1] = aten.exp.default(%a)\n"
        "%c: fp32[1] = aten.add.Tensor(%a, %b)\nreturn %c\n"
    )
    assert is_convex(graph, {"a", "b", "c"})
    assert is_convex(graph, {"a", "b"})
    assert not is_convex(graph, {"a", "c"})


@pytest.mark.parametrize("seed", SEEDS)
def test_regions_of_a_random_graph(seed: int):
    graph = draw(seed)
    values = every_value(graph)
    found = propose(graph, layouts=LAYOUTS, numerics="as_torch")
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    assert len({region.id for region in found}) == len(found)
    alone = {region.nodes[0] for region in found if len(region.nodes) == 1}
    assert alone == set(order)
    for region in found:
        assert list(region.nodes) == sorted(region.nodes, key=order.__getitem__)
        assert is_convex(graph, set(region.nodes))
        assert set(region.results) == exported(graph, region.nodes)
        assert region.problems
        check_numbers(region, values)


def exported(graph: Graph, nodes: Collection[str]) -> set[str]:
    """The results of a set of nodes that are read outside it or returned."""
    made = {output for name in nodes for output in graph.node(name).outputs if output}
    readers: list[Node] = [node for node in graph.nodes if node.name not in nodes]
    return made & ({name for node in readers for name in node.refs()} | set(graph.outputs))


def check_numbers(region: Region, values: dict[str, torch.Tensor]) -> None:
    """The region's problem, computed by itself from what the whole graph has there, gives what the whole graph gives."""
    args, constants = [values[name] for name in region.args], [values[name] for name in region.constants]
    problem = region.problems[0]
    if isinstance(problem, SubgraphProblem):
        piece = parse_graph(problem.text)
        verify(piece)
        found = compile_graph(piece)(args, constants)
    else:
        assert isinstance(problem, (ConvProblem, LinearProblem))
        found = (by_problem(problem, args, constants),)
    for name, tensor in zip(region.results, found, strict=True):
        torch.testing.assert_close(tensor, values[name], rtol=1e-10, atol=1e-10)


def by_problem(
    problem: ConvProblem | LinearProblem, args: list[torch.Tensor], constants: list[torch.Tensor]
) -> torch.Tensor:
    """Compute exactly what the problem's words say: y = pool(activation(main(x, weight) + bias + residual))."""
    epilogue = problem.epilogue
    x, weight = args[0], constants[0]
    assert tuple(x.shape) == problem.x_spec.shape
    assert tuple(weight.shape) == problem.weight_spec.shape
    assert len(args) == 1 + epilogue.residual
    assert len(constants) == 1 + epilogue.bias
    if isinstance(problem, ConvProblem):
        sizes = ((problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w))
        y = F.conv2d(x, weight, None, *sizes, (problem.dilation_h, problem.dilation_w), problem.groups)
    else:
        y = x @ weight.T
    if epilogue.bias:
        y = y + constants[1].reshape(-1, *[1] * (y.dim() - 2))
    if epilogue.residual:
        assert args[1].shape == y.shape
        y = y + args[1]
    y = y if epilogue.activation == "none" else getattr(F, epilogue.activation)(y)
    if epilogue.pool is None:
        return y
    assert str(epilogue.pool) == "max3x3s1x1p1x1", "the only pooling that is drawn"
    return F.max_pool2d(y, 3, 1, 1)


def test_random_graphs_hold_every_pattern_and_case():
    """The fuzz above is worth something: over its seeds every kind of region comes up, with every part of an epilogue."""
    graphs = [draw(seed) for seed in SEEDS]
    regions = [region for graph in graphs for region in propose(graph, layouts=LAYOUTS, numerics="as_torch")]
    assert {region.pattern for region in regions} == {"conv", "conv_pool", "linear", "op", "glue"}
    epilogues = {p.epilogue for region in regions for p in region.problems if isinstance(p, ConvProblem)}
    pooled = [e for e in epilogues if e.pool is not None]
    assert {e.residual for e in pooled} == {False, True}
    assert len({e.activation for e in pooled}) > 1
    assert {(e.bias, e.residual) for e in epilogues} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {e.activation for e in epilogues} == {"none", "relu", "relu6", "silu", "gelu", "sigmoid"}
    assert any(len(region.results) > 1 for region in regions if region.pattern == "glue")
    assert any(len(region.nodes) > 4 for region in regions if region.pattern == "glue")


def test_the_check_of_numbers_finds_a_wrong_region():
    graph, with_residual = next(
        (graph, region)
        for graph in map(draw, SEEDS)
        for region in propose(graph, layouts=LAYOUTS, numerics="as_torch")
        if region.pattern == "conv" and len(region.args) == 2
    )
    values = every_value(graph)
    check_numbers(with_residual, values)
    wrong = [
        replace(with_residual, results=(graph.node(with_residual.nodes[0]).outputs[0],)),
        replace(
            with_residual,
            problems=tuple(
                replace(p, epilogue=Epilogue(p.epilogue.bias, True, "gelu")) for p in with_residual.problems
            ),
        ),
        replace(with_residual, args=with_residual.args[:1]),
    ]
    for region in wrong:
        with pytest.raises(AssertionError):
            check_numbers(region, values)
