"""The text form: readable, the same for equal graphs, read back exactly, and refused with the line where it is wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import InputError
from convoy.graph.ir import Arg, Graph, Node, Ref, Symbol, Value
from convoy.graph.text import MAX_DEPTH, digest, parse_graph, print_arg, print_graph
from convoy.problem import TensorSpec

EXAMPLE = """\
graph 1
input %x: fp32[1,3,8,8]
constant %conv.weight: fp32[4,3,3,3]
%conv: fp32[1,4,8,8] = conv2d(%x, %conv.weight, None, (1, 1), (1, 1), (1, 1), 1)
%pool: fp32[1,4,4,4], _ = aten.max_pool2d_with_indices.default(%conv, (2, 2)) as %pooling
%same: fp32[1,4,4,4] = aten.add.Tensor(%pool, %pool, alpha=0.5)
return %same, %x
"""


def one_node(*args: Arg, kwargs: tuple[tuple[str, Arg], ...] = ()) -> Graph:
    x, y = Value("x", TensorSpec((2,), "fp32"), "input"), Value("y", TensorSpec((2,), "fp32"), "node")
    node = Node("y", "aten.f.default", args, kwargs, ("y",))
    return Graph(("x",), ("y",), {"x": x, "y": y}, (node,))


def test_example_reads_as_it_looks():
    graph = parse_graph(EXAMPLE)
    assert graph.inputs == ("x",)
    assert graph.outputs == ("same", "x")
    assert [(n.name, n.op, n.outputs) for n in graph.nodes] == [
        ("conv", "conv2d", ("conv",)),
        ("pooling", "aten.max_pool2d_with_indices.default", ("pool", "")),
        ("same", "aten.add.Tensor", ("same",)),
    ]
    assert graph.nodes[0].args == (Ref("x"), Ref("conv.weight"), None, (1, 1), (1, 1), (1, 1), 1)
    assert graph.nodes[2].kwargs == (("alpha", 0.5),)
    assert graph.values["conv.weight"] == Value("conv.weight", TensorSpec((4, 3, 3, 3), "fp32"), "constant")
    assert graph.values["pool"].kind == "node"


def test_example_prints_back():
    assert print_graph(parse_graph(EXAMPLE)) == EXAMPLE


def test_no_outputs_prints_back():
    text = "graph 1\ninput %x: bool[]\nreturn\n"
    assert print_graph(parse_graph(text)) == text


def test_digest_tells_graphs_apart():
    graph = parse_graph(EXAMPLE)
    assert digest(graph) == digest(parse_graph(EXAMPLE))
    assert len(digest(graph)) == 16
    for change in (("alpha=0.5", "alpha=0.25"), ("(2, 2)", "(2, 1)"), ("same, %x", "same"), (" as %pooling", "")):
        assert digest(parse_graph(EXAMPLE.replace(*change))) != digest(graph)


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        (1, "1"),
        (1.0, "1.0"),
        (True, "True"),
        (-0.0, "-0.0"),
        (1e-05, "1e-05"),
        (1e22, "1e+22"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        ((), "()"),
        ((1,), "(1,)"),
        (((1, 2), (None,)), "((1, 2), (None,))"),
        ('a"b\n%x\u00e9\\', '"a\\"b\\n%x\\u00e9\\\\"'),
        (Symbol("dtype.fp32"), "dtype.fp32"),
        (Ref("x"), "%x"),
    ],
)
def test_arguments(arg: Arg, text: str):
    assert print_arg(arg) == text
    read = parse_graph(print_graph(one_node(arg))).nodes[0].args[0]
    assert type(read) is type(arg)
    assert repr(read) == repr(arg)


ARGS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([Ref("x"), Symbol("dtype.fp16"), Symbol("memory_format.nhwc")]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)
WORDS = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(ARGS, max_size=4), st.dictionaries(WORDS, ARGS, max_size=3))
def test_any_arguments_read_back(args: list[Arg], kwargs: dict[str, Arg]):
    graph = one_node(*args, kwargs=tuple(kwargs.items()))
    read = parse_graph(print_graph(graph))
    assert repr(read.nodes) == repr(graph.nodes)
    assert read == graph


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("graph 1", "graph 2", 1),
        ("input %x", "inputs %x", 2),
        ("fp32[1,3,8,8]", "fp31[1,3,8,8]", 2),
        ("fp32[1,3,8,8]", "fp32[1,-3,8,8]", 2),
        ("fp32[1,3,8,8]", "fp32[1,,3]", 2),
        ("%conv.weight: fp32", "%x: fp32", 3),
        ("%conv: fp32", "%x: fp32", 4),
        ("conv2d(%x", "conv2d(%y", 4),
        ("conv2d(%x", "conv2d(%conv", 4),
        ("None, (1, 1), (1, 1)", "Nothing, (1, 1), (1, 1)", 4),
        ("(1, 1), 1)", "(1, 1), 1", 4),
        ("(1, 1), 1)", "(1 1), 1)", 4),
        ("(1, 1), 1)", "(1), 1)", 4),
        ("(1, 1), 1)", "(1, 1), 12345678901234567890)", 4),
        ("(1, 1), 1)", "(1, 1), 1x)", 4),
        ("(1, 1), 1)", '(1, 1), "open)', 4),
        ("(1, 1), 1)", '(1, 1), "\\x")', 4),
        ("(1, 1), 1)", "(1, 1), " + "(" * (MAX_DEPTH + 1) + "),", 4),
        (" as %pooling", " as", 5),
        (" as %pooling", " is %pooling", 5),
        ("alpha=0.5", "alpha=0.5, alpha=1", 6),
        ("alpha=0.5", "alpha=0.5, 1", 6),
        ("same, %x", "same, %y", 7),
        ("same, %x", "same %x", 7),
        ("same, %x\n", "same, %x\nmore\n", 8),
        ("return %same, %x\n", "", 7),
    ],
)
def test_wrong_text_is_refused_with_its_line(old: str, new: str, line: int):
    assert old in EXAMPLE
    with pytest.raises(InputError, match=rf"line {line}\b"):
        parse_graph(EXAMPLE.replace(old, new, 1))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, len(EXAMPLE) - 1), st.text(max_size=3), st.integers(0, 4))
def test_damaged_text_never_crashes(position: int, inserted: str, removed: int):
    text = EXAMPLE[:position] + inserted + EXAMPLE[position + removed :]
    try:
        graph = parse_graph(text)
    except InputError as caught:
        where = caught.argument
    else:
        where = "graph text, line 0" if parse_graph(print_graph(graph)) == graph else "read otherwise"
    assert where.startswith("graph text, line ")


def test_a_very_deep_text_is_refused():
    with pytest.raises(InputError, match="inside one another"):
        parse_graph(EXAMPLE.replace("None", "(" * 100_000))


@pytest.mark.parametrize(
    "line",
    [
        "%y: fp32[1] = aten.relu.default(%x, 1e999)",
        "%y: fp32[1] = aten.relu.default(%x, " + "9" * 400 + ".0)",
        "%y: fp32[1] = aten.relu.default(%x, " + "9" * 20 + ")",
        '%y: fp32[1] = aten.relu.default(%x, "\\ud800")',
        "%y: fp32[" + "9" * 13 + "] = aten.relu.default(%x)",
        "%y: fp32[1], %y: fp32[1] = aten.relu.default(%x)",
        "%y: fp32[1] = aten.relu.default(%x, a=1, a=2)",
    ],
)
def test_numbers_and_names_that_no_graph_has_are_refused(line: str) -> None:
    with pytest.raises(InputError, match="graph text, line 3"):
        parse_graph(f"graph 1\ninput %x: fp32[1]\n{line}\nreturn %x\n")


def test_long_lines_are_read_in_one_pass() -> None:
    returned = ", ".join(["%x"] * 50_000)
    assert len(parse_graph(f"graph 1\ninput %x: fp32[1]\nreturn {returned}\n").outputs) == 50_000
    named = ", ".join(f"a{i}=1" for i in range(20_000))
    outputs = ", ".join(f"%y{i}: fp32[1]" for i in range(10_000))
    (node,) = parse_graph(f"graph 1\ninput %x: fp32[1]\n{outputs} = aten.relu.default(%x, {named})\nreturn %x\n").nodes
    assert (len(node.outputs), len(node.kwargs)) == (10_000, 20_000)
