"""The specification of the IR: a good graph passes, and a planted breach of each rule is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.graph import verify as verify_module
from convoy.graph.ir import Graph, Node, Ref, Symbol, Value
from convoy.graph.text import parse_graph, print_graph
from convoy.graph.verify import RULES, verify
from convoy.problem import TensorSpec

GOOD = """\
graph 1
input %x: fp32[2,3,8,8]
input %unused: i64[]
constant %weight: fp32[4,3,3,3]
constant %bias: fp32[4]
constant %fc.weight: fp32[5,64]
%conv: fp32[2,4,4,4] = conv2d(%x, %weight, %bias, (2, 2), (1, 1), (1, 1), 1)
%relu: fp32[2,4,4,4] = aten.relu.default(%conv)
%flat: fp32[2,64] = aten.view.default(%relu, (2, 64))
%fc: fp32[2,5] = linear(%flat, %fc.weight, None)
%most: fp32[2], _ = aten.max.dim(%fc, 1)
%half: fp16[2] = aten._to_copy.default(%most, dtype=dtype.fp16)
return %fc, %half
"""

BACKWARD = """\
graph 1
input %x: fp32[2,3,8,8]
input %dy: fp32[2,4,4,4]
input %weight: fp32[4,3,3,3]
%dx: fp32[2,3,8,8] = conv2d_dgrad(%dy, %weight, (8, 8), (2, 2), (1, 1), (1, 1), 1)
%dw: fp32[4,3,3,3] = conv2d_wgrad(%x, %dy, (3, 3), (2, 2), (1, 1), (1, 1), 1)
return %dx, %dw
"""


def backward(old: str = "", new: str = "") -> Graph:
    assert not old or BACKWARD.count(old) == 1
    return parse_graph(BACKWARD.replace(old, new) if old else BACKWARD)


def changed(old: str, new: str) -> Graph:
    assert GOOD.count(old) == 1
    return parse_graph(GOOD.replace(old, new))


def good() -> Graph:
    return parse_graph(GOOD)


def with_value(graph: Graph, key: str, value: Value) -> Graph:
    return replace(graph, values={**graph.values, key: value})


def with_nodes(graph: Graph, *nodes: Node) -> Graph:
    return replace(graph, nodes=nodes)


def with_args(name: str, *args: object) -> Graph:
    graph = good()
    return with_nodes(graph, *(replace(n, args=args) if n.name == name else n for n in graph.nodes))


SPEC = TensorSpec((2,), "fp32")

BREACHES: list[tuple[str, str, Graph]] = [
    ("names", "stray", with_value(good(), "stray", Value("other", SPEC, "constant"))),
    ("names", "a b", with_value(good(), "a b", Value("a b", SPEC, "constant"))),
    ("names", "_", with_value(good(), "_", Value("_", SPEC, "constant"))),
    ("names", "", with_nodes(good(), *(replace(n, name="") if n.name == "fc" else n for n in good().nodes))),
    ("unique", "relu", changed("_ = aten.max.dim(%fc, 1)", "_ = aten.max.dim(%fc, 1) as %relu")),
    ("unique", "relu", with_nodes(good(), *good().nodes, replace(good().node("relu"), name="again"))),
    ("unique", "x", replace(good(), inputs=("x", "unused", "x"))),
    ("outputs", "gone", replace(good(), outputs=("fc", "gone"))),
    ("defined", "gone", replace(good(), inputs=("x", "unused", "gone"))),
    ("defined", "relu", with_args("relu", Ref("gone"))),
    ("defined", "fc", with_nodes(good(), *(replace(n, outputs=("y",)) if n.name == "fc" else n for n in good().nodes))),
    ("kinds", "relu", with_value(good(), "relu", replace(good().values["relu"], kind="constant"))),
    ("kinds", "weight", with_value(good(), "weight", replace(good().values["weight"], kind="input"))),
    ("kinds", "weight", with_value(good(), "weight", replace(good().values["weight"], kind="node"))),
    ("kinds", "unused", replace(good(), inputs=("x",))),
    ("kinds", "relu", replace(good(), inputs=("x", "unused", "relu"))),
    ("order", "relu", with_nodes(good(), good().nodes[1], good().nodes[0], *good().nodes[2:])),
    ("arguments", "relu", with_args("relu", [Ref("conv")])),
    ("arguments", "relu", with_args("relu", Ref("conv"), (1, (2, object())))),
    ("arguments", "half", changed("dtype.fp16", "dtype.fp8")),
    ("arguments", "half", changed("dtype.fp16", "device.cuda")),
    ("arguments", "half", with_nodes(good(), *good().nodes[:-1], replace(good().nodes[-1], kwargs=(("a", 1),) * 2))),
    ("operators", "relu", changed("aten.relu.default", "prims.relu.default")),
    ("operators", "relu", changed("aten.relu.default", "aten.relu")),
    ("operators", "relu", changed("aten.relu.default", "aten.relu_.default")),
    ("operators", "relu", changed("aten.relu.default", "aten.relu.out")),
    ("operators", "relu", changed("aten.relu.default", "conv4d")),
    ("alive", "spare", changed("constant %bias", "constant %spare: fp32[4]\nconstant %bias")),
    ("alive", "half", changed("return %fc, %half", "return %fc")),
    ("alive", "index", changed("%most: fp32[2], _", "%most: fp32[2], %index: i64[2]")),
    ("alive", "nothing", changed("return", "_ = aten.neg.default(%fc) as %nothing\nreturn")),
    (
        "constant_order",
        "bias",
        changed(
            "constant %weight: fp32[4,3,3,3]\nconstant %bias: fp32[4]",
            "constant %bias: fp32[4]\nconstant %weight: fp32[4,3,3,3]",
        ),
    ),
    ("convolutions", "conv", changed("(1, 1), 1)", "(1, 1))")),
    ("convolutions", "conv", changed("(1, 1), 1)", "(1, 1), True)")),
    ("convolutions", "conv", changed("(2, 2), (1, 1)", "(2, 2), 1")),
    ("convolutions", "conv", changed("(2, 2), (1, 1)", "(2, 2), (1, 1, 1)")),
    ("convolutions", "conv", changed("(2, 2), (1, 1)", "(2, 2), (1, 1.0)")),
    ("convolutions", "conv", changed("(1, 1), 1)", "(1, 1), groups=1)")),
    ("convolutions", "conv", changed("%bias, (2", "0.0, (2")),
    ("convolutions", "conv", changed("(1, 1), 1)", "(1, 1), 2)")),
    ("convolutions", "conv", changed("(2, 2), (1, 1), (1, 1)", "(2, 2), (1, 1), (9, 1)")),
    ("convolutions", "conv", changed("(2, 2), (1, 1), (1, 1)", "(2, 2), (0, 1), (1, 1)")),
    ("convolutions", "conv", changed("weight: fp32[4,3,3,3]", "weight: fp32[4,2,3,3]")),
    ("convolutions", "conv", changed("weight: fp32[4,3,3,3]", "weight: fp32[4,3,3]")),
    ("convolutions", "conv", changed("weight: fp32[4,3,3,3]", "weight: fp16[4,3,3,3]")),
    ("convolutions", "conv", changed("bias: fp32[4]", "bias: fp32[4,1]")),
    ("convolutions", "conv", changed("x: fp32[2,3,8,8]", "x: i32[2,3,8,8]")),
    ("convolutions", "conv", changed("%conv: fp32[2,4,4,4]", "%conv: fp32[2,4,4,5]")),
    ("linears", "fc", changed("%fc.weight, None", "%fc.weight")),
    ("linears", "fc", changed("%fc.weight, None", "%fc.weight, None, 1")),
    ("linears", "fc", changed("%fc.weight, None", "%fc.weight, 1")),
    ("linears", "fc", changed("[5,64]", "[5,65]")),
    (
        "linears",
        "fc",
        changed(
            "= aten.view.default(%relu, (2, 64))\n%fc: fp32[2,5] = linear(%flat",
            "= aten.view.default(%relu, (2, 64))\n%fc: fp32[2,5] = linear(%relu",
        ),
    ),
    ("linears", "fc", changed("[5,64]", "[6,64]")),
    ("linears", "fc", changed("%fc: fp32[2,5]", "%fc: fp16[2,5]")),
    ("gradients", "dx", backward("%weight, (8, 8)", "%weight, (9, 9)")),
    ("gradients", "dx", backward("%weight, (8, 8)", "%weight, (8, 8, 8)")),
    ("gradients", "dx", backward("(%dy, %weight", "(%dy, None")),
    ("gradients", "dx", backward("(%dy, %weight", "(%x, %weight")),
    ("gradients", "dw", backward("%dy, (3, 3)", "%dy, (3, 5)")),
    ("gradients", "dw", backward("%dw: fp32[4,3,3,3]", "%dw: fp16[4,3,3,3]")),
    ("gradients", "dw", backward("(3, 3), (2, 2), (1, 1), (1, 1), 1)", "(3, 3), (2, 2), (1, 1), (1, 1), 1, 1)")),
    ("gradients", "dw", backward("(3, 3), (2, 2), (1, 1), (1, 1), 1)", "(3, 3), (2, 2), (1, 1), (1, 1), 5)")),
]


def test_a_good_graph_passes():
    verify(good())
    verify(backward())
    assert parse_graph(print_graph(backward())) == backward()


def test_a_graph_of_nothing_passes():
    verify(parse_graph("graph 1\ninput %x: fp32[1]\nreturn\n"))


@pytest.mark.parametrize(("rule", "subject", "graph"), BREACHES, ids=[f"{b[0]}-{i}" for i, b in enumerate(BREACHES)])
def test_a_planted_breach_is_named(rule: str, subject: str, graph: Graph):
    with pytest.raises(InputError) as caught:
        verify(graph)
    assert caught.value.argument == f"graph, rule {rule!r}"
    assert caught.value.value == subject


def test_every_rule_has_a_planted_breach():
    assert {rule.__name__ for rule in RULES} == {rule for rule, _, _ in BREACHES}


@pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
def test_every_rule_is_stated(rule: str):
    assert getattr(verify_module, rule).__doc__.endswith(".")


@pytest.mark.parametrize("symbol", ["dtype.bool", "layout.strided", "device.inputs", "memory_format.nhwc"])
def test_known_symbols_pass(symbol: str):
    verify(with_args("relu", Ref("conv"), (Symbol(symbol),)))


def test_the_page_about_graphs_states_every_rule_and_shows_a_good_graph():
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "graph.md").read_text()
    for rule in RULES:
        assert f"`{rule.__name__}`" in page
    lines = [line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ")]
    text = "\n".join(lines) + "\n"
    graph = parse_graph(text)
    verify(graph)
    assert print_graph(graph) == text
