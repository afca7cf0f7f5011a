"""Regions: what is proposed on small graphs, pattern by pattern."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph
from convoy.graph.verify import verify
from convoy.problem import ACTIVATIONS, ConvProblem, Epilogue, LinearProblem
from convoy.regions import Region, extract_subgraph, propose
from convoy.regions.activation import activation_of

LAYOUTS = ("nchw", "nhwc")


def proposed(text: str, layouts: tuple[str, ...] = LAYOUTS, *, patterns: tuple[str, ...] = ()) -> dict[str, Region]:
    graph = parse_graph("graph 1\n" + text)
    verify(graph)
    found = propose(graph, layouts=layouts, numerics="strict", patterns=patterns)
    assert len({region.id for region in found}) == len(found)
    return {region.id: region for region in found}


HEAD = """\
input %x: fp32[2,3,8,8]
input %r: fp32[2,4,8,8]
constant %w: fp32[4,3,3,3]
constant %b: fp32[4]
%c: fp32[2,4,8,8] = conv2d(%x, %w, %b, (1, 1), (1, 1), (1, 1), 1)
"""
ADD = "%s: fp32[2,4,8,8] = aten.add.Tensor(%c, %r)\n"
RELU = "%a: fp32[2,4,8,8] = aten.relu.default(%s)\n"


# ---- convolutions


def test_every_prefix_of_an_epilogue_is_proposed():
    found = proposed(f"{HEAD}{ADD}{RELU}return %a\n")
    assert list(found) == ["conv(c)", "conv(c+s)", "conv(c+s+a)", "op(s)", "op(a)", "glue(s+a)"]
    whole = found["conv(c+s+a)"]
    assert (whole.args, whole.constants, whole.results) == (("x", "r"), ("w", "b"), ("a",))
    assert [problem.layout for problem in whole.problems] == ["nchw", "nhwc"]
    problem = ConvProblem(
        2, 3, 8, 8, 4, 3, 3, 1, 1, layout="nhwc", numerics="strict", epilogue=Epilogue(True, True, "relu")
    )
    assert whole.problems[1] == problem
    assert (found["conv(c)"].args, found["conv(c)"].results) == (("x",), ("c",))
    assert found["conv(c)"].problems[0].epilogue == Epilogue(bias=True)


def test_an_activation_at_once():
    relu = RELU.replace("%s", "%c")
    found = proposed(f"{HEAD.replace('%b, ', 'None, ').replace('constant %b: fp32[4]', '')}{relu}return %a, %r\n")
    assert list(found) == ["conv(c)", "conv(c+a)", "op(a)"]
    assert found["conv(c+a)"].problems[0].epilogue == Epilogue(activation="relu")
    assert found["conv(c+a)"].constants == ("w",)


@pytest.mark.parametrize(
    "add",
    [
        "aten.add.Tensor(%r, %c)",
        "aten.add.Tensor(%c, %r, alpha=1)",
    ],
)
def test_either_order_of_an_addition(add: str):
    found = proposed(f"{HEAD}%s: fp32[2,4,8,8] = {add}\nreturn %s\n")
    assert found["conv(c+s)"].args == ("x", "r")


@pytest.mark.parametrize(
    "tail",
    [
        "%s: fp32[2,4,8,8] = aten.add.Tensor(%c, %r, alpha=2)\nreturn %s\n",
        "%s: fp32[2,4,8,8] = aten.add.Tensor(%c, %c)\nreturn %s, %r\n",
        "%s: fp32[2,4,8,8] = aten.add.Tensor(%c, 1.0)\nreturn %s, %r\n",
        "%s: fp32[2,4,8,8] = aten.sub.Tensor(%c, %r)\nreturn %s\n",
        f"{ADD}return %s, %c\n",
        f"{ADD}%z: fp32[2,4,8,8] = aten.mul.Tensor(%s, %c)\nreturn %z\n",
        "%m: fp32[2,4,1,1] = aten.mean.dim(%r, (2, 3), True)\n%s: fp32[2,4,8,8] = aten.add.Tensor(%c, %m)\nreturn %s\n",
        """%h: fp64[2,4,8,8] = aten._to_copy.default(%r, dtype=dtype.fp64)
%s: fp64[2,4,8,8] = aten.add.Tensor(%c, %h)
return %s
""",
    ],
)
def test_additions_that_are_no_epilogue(tail: str):
    found = proposed(HEAD + tail)
    assert [region for region in found if region.startswith("conv")] == ["conv(c)"]


def test_a_constant_is_no_residual():
    text = HEAD.replace("constant %b: fp32[4]", "constant %b: fp32[4]\nconstant %k: fp32[2,4,8,8]")
    found = proposed(f"{text}{ADD.replace('%r', '%k')}return %s, %r\n")
    assert [region for region in found if region.startswith("conv")] == ["conv(c)"]


def test_a_value_with_two_readers_is_not_swallowed():
    found = proposed(f"{HEAD}{ADD}{RELU}return %a, %s\n")
    assert [region for region in found if region.startswith("conv")] == ["conv(c)", "conv(c+s)"]


def test_two_convolutions_that_meet_may_each_take_the_addition():
    second = "%d: fp32[2,4,8,8] = conv2d(%x, %w, %b, (1, 1), (1, 1), (1, 1), 1)\n"
    found = proposed(f"{HEAD}{second}{ADD.replace('%r', '%d')}return %s, %r\n")
    assert found["conv(c+s)"].args == ("x", "d")
    assert found["conv(d+s)"].args == ("x", "c")


@pytest.mark.parametrize(("dtype", "accumulator"), [("fp16", "fp32"), ("bf16", "fp32"), ("fp64", "fp64")])
def test_dtypes_reach_the_problem(dtype: str, accumulator: str):
    problem = proposed(f"{HEAD}return %c, %r\n".replace("fp32", dtype))["conv(c)"].problems[0]
    assert isinstance(problem, ConvProblem)
    assert (problem.x_dtype, problem.weight_dtype, problem.y_dtype, problem.acc_dtype) == (
        dtype,
        dtype,
        dtype,
        accumulator,
    )


# ---- linear layers


def test_a_linear_layer_with_its_epilogue():
    text = (
        "input %x: fp32[2,6]\ninput %r: fp32[2,5]\nconstant %w: fp32[5,6]\nconstant %b: fp32[5]\n"
        "%y: fp32[2,5] = linear(%x, %w, %b)\n%s: fp32[2,5] = aten.add.Tensor(%r, %y)\n"
        "%a: fp32[2,5] = aten.silu.default(%s)\nreturn %a\n"
    )
    found = proposed(text)
    assert list(found) == ["linear(y)", "linear(y+s)", "linear(y+s+a)", "op(s)", "op(a)", "glue(s+a)"]
    assert found["linear(y+s+a)"].problems == (
        LinearProblem(2, 6, 5, numerics="strict", epilogue=Epilogue(True, True, "silu")),
    )
    assert [problem.layout for problem in found["op(s)"].problems] == ["any"]


# ---- activations


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ("relu.default(%x)", "relu"),
        ("clamp_min.default(%x, 0)", "relu"),
        ("clamp.default(%x, 0.0)", "relu"),
        ("clamp.default(%x, min=0)", "relu"),
        ("clamp.default(%x, 0, 6)", "relu6"),
        ("clamp.default(%x, 0, 5)", ""),
        ("clamp.default(%x, None, 6)", ""),
        ("relu6.default(%x)", "relu6"),
        ("hardtanh.default(%x, 0.0, 6.0)", "relu6"),
        ("hardtanh.default(%x, min_val=0, max_val=6)", "relu6"),
        ("hardtanh.default(%x)", ""),
        ("hardtanh.default(%x, 0.0)", ""),
        ("silu.default(%x)", "silu"),
        ("hardswish.default(%x)", "hardswish"),
        ("hardsigmoid.default(%x)", "hardsigmoid"),
        ("sigmoid.default(%x)", "sigmoid"),
        ("gelu.default(%x)", "gelu"),
        ('gelu.default(%x, approximate="none")', "gelu"),
        ('gelu.default(%x, approximate="tanh")', ""),
        ("tanh.default(%x)", ""),
        ("clamp.Tensor(%x, %x)", ""),
        ("add.Tensor(%x, %x)", ""),
    ],
)
def test_activations_by_every_name(call: str, word: str):
    graph = parse_graph(f"graph 1\ninput %x: fp32[9]\n%y: fp32[9] = aten.{call}\nreturn %y\n")
    assert activation_of(graph.nodes[0]) == word
    assert not word or word in ACTIVATIONS
    if word:
        x = torch.linspace(-8, 8, 9)
        torch.testing.assert_close(compile_graph(graph)([x])[0], getattr(F, word)(x))


# ---- glue


def test_glue_and_what_epilogues_leave_of_it():
    text = (
        f"{HEAD}%a: fp32[2,4,8,8] = aten.relu.default(%c)\n"
        "%p: fp32[2,4,4,4] = aten.max_pool2d.default(%a, (2, 2))\n"
        "%f: fp32[2,64] = aten.view.default(%p, (2, 64))\nreturn %f, %r\n"
    )
    assert [region for region in proposed(text) if region.startswith("glue")] == ["glue(a+p+f)", "glue(p+f)"]


POOLED = f"{HEAD}%a: fp32[2,4,8,8] = aten.relu.default(%c)\n%p: fp32[2,4,4,4] = aten.max_pool2d.default(%a, (2, 2))\n"


def test_a_pooling_may_stay_apart_with_what_flattens_it():
    text = (
        f"{POOLED}%n: fp32[2,4,4,4] = aten.neg.default(%p)\n%t: fp32[2,4,4,4] = aten.tanh.default(%n)\n"
        "%q: fp32[2,4,1,1] = aten.adaptive_avg_pool2d.default(%t, (1, 1))\n"
        "%f: fp32[2,4] = aten.view.default(%q, (2, 4))\nreturn %f, %r\n"
    )
    stays = ["glue(a+p+n+t+q+f)", "glue(p+n+t+q+f)"]
    assert [region for region in proposed(text) if region.startswith("glue")] == stays
    apart = [region for region in proposed(text, patterns=("pool",)) if region.startswith("glue")]
    assert apart == [*stays, "glue(n+t)", "glue(q+f)"]


@pytest.mark.parametrize("view", ["(2, 4, 16)", "(8, 16)"])
def test_another_view_is_not_taken_with_a_pooling(view: str):
    shape = view.strip("()").replace(" ", "")
    text = f"{POOLED}%f: fp32[{shape}] = aten.view.default(%p, {view})\nreturn %f, %r\n"
    found = [region for region in proposed(text, patterns=("pool",)) if region.startswith("glue")]
    assert found == ["glue(a+p+f)", "glue(p+f)"]


def test_glue_does_not_reach_across_a_layer():
    text = (
        "input %x: fp32[2,4,8,8]\nconstant %w: fp32[4,4,1,1]\n"
        "%a: fp32[2,4,8,8] = aten.relu.default(%x)\n%n: fp32[2,4,8,8] = aten.neg.default(%a)\n"
        "%c: fp32[2,4,8,8] = conv2d(%n, %w, None, (1, 1), (0, 0), (1, 1), 1)\n"
        "%m: fp32[2,4,8,8] = aten.mul.Tensor(%c, %a)\n%o: fp32[2,4,8,8] = aten.neg.default(%m)\nreturn %o\n"
    )
    assert [region for region in proposed(text) if region.startswith("glue")] == ["glue(a+n)", "glue(m+o)"]


def test_an_epilogue_in_the_middle_of_glue_splits_it():
    text = (
        f"{HEAD}%n: fp32[2,4,8,8] = aten.neg.default(%c2)\n".replace("%c2", "%r")
        + "%t: fp32[2,4,8,8] = aten.tanh.default(%n)\n%s: fp32[2,4,8,8] = aten.add.Tensor(%c, %t)\n"
        "%z: fp32[2,4,8,8] = aten.mul.Tensor(%s, %n)\n%e: fp32[2,4,8,8] = aten.exp.default(%z)\nreturn %e\n"
    )
    found = [region for region in proposed(text) if region.startswith("glue")]
    assert found == ["glue(n+t+s+z+e)", "glue(n+t)", "glue(z+e)"]  # n, t, z together would go round s


def test_layouts_are_those_asked_for():
    found = proposed(f"{HEAD}{ADD}{RELU}return %a\n", layouts=("nhwc", "nchw", "blocked"))
    for region in found.values():
        assert [problem.layout for problem in region.problems] == ["nhwc", "nchw", "blocked"]


def test_a_piece_without_images_at_its_border_has_no_layout():
    text = "input %x: fp32[2,8]\n%v: fp32[2,2,2,2] = aten.view.default(%x, (2, 2, 2, 2))\n"
    text += "%n: fp32[2,2,2,2] = aten.neg.default(%v)\n%f: fp32[2,8] = aten.view.default(%n, (2, 8))\nreturn %f\n"
    found = proposed(text)
    assert [problem.layout for problem in found["glue(v+n+f)"].problems] == ["any"]
    assert [problem.layout for problem in found["op(v)"].problems] == ["nchw", "nhwc"]


# ---- cut


def test_equal_pieces_are_one_problem():
    text = (
        "graph 1\ninput %x: fp32[2,4,8,8]\nconstant %k: fp32[4,1,1]\nconstant %q: fp32[4,1,1]\n"
        "%a: fp32[2,4,8,8] = aten.mul.Tensor(%x, %k)\n%b: fp32[2,4,8,8] = aten.relu.default(%a)\n"
        "%c: fp32[2,4,8,8] = aten.mul.Tensor(%b, %q)\n%d: fp32[2,4,8,8] = aten.relu.default(%c)\nreturn %d\n"
    )
    graph = parse_graph(text)
    first, second = extract_subgraph(graph, ("a", "b"), "nchw"), extract_subgraph(graph, ("d", "c"), "nchw")
    assert first[0] == second[0]
    assert first[0].key == second[0].key
    assert first[0].text == (
        "graph 1\ninput %v0: fp32[2,4,8,8]\nconstant %c0: fp32[4,1,1]\n"
        "%v1: fp32[2,4,8,8] = aten.mul.Tensor(%v0, %c0)\n%v2: fp32[2,4,8,8] = aten.relu.default(%v1)\nreturn %v2\n"
    )
    assert (first[1:], second[1:]) == ((("x",), ("k",), ("b",)), (("b",), ("q",), ("d",)))
    assert first[0].bytes_min == 2 * 4 * 8 * 8 * 4 * 2 + 16
    assert first[0].label == "mul + relu"
    assert extract_subgraph(graph, ("a",), "nchw")[0] != extract_subgraph(graph, ("b",), "nchw")[0]


def test_an_output_that_only_the_piece_reads_is_not_exported():
    text = (
        "graph 1\ninput %x: fp32[4]\n%a: fp32[2], %b: fp32[2] = aten.split.Tensor(%x, 2)\n"
        "%c: fp32[2] = aten.neg.default(%b)\nreturn %a, %c\n"
    )
    graph = parse_graph(text)
    assert extract_subgraph(graph, ("a", "c"), "any")[3] == ("a", "c")
    assert extract_subgraph(graph, ("a",), "any")[3] == ("a", "b")
    assert "aten.split" in extract_subgraph(graph, ("a",), "any")[0].text


def test_a_long_label_is_cut():
    ops = ["relu", "neg", "tanh", "exp", "sigmoid", "log1p", "hardswish", "hardsigmoid", "softplus", "relu6"]
    lines = [f"%v{i + 1}: fp32[1] = aten.{op}.default(%v{i})" for i, op in enumerate(ops)]
    graph = parse_graph("\n".join(["graph 1", "input %v0: fp32[1]", *lines, "return %v10", ""]))
    label = extract_subgraph(graph, [node.name for node in graph.nodes], "any")[0].label
    assert len(label) <= 60
    assert label.endswith("...")


def test_a_backward_pooling_is_offered_alone_with_its_cast_and_left_out_of_its_group():
    text = """\
input %x: fp32[1,4,8,8]
input %m: fp32[1,4,8,8]
input %dy: fp32[1,4,4,4]
input %i: i16[1,4,4,4]
%j: i64[1,4,4,4] = aten._to_copy.default(%i, dtype=dtype.i64)
%p: fp32[1,4,8,8] = aten.max_pool2d_with_indices_backward.default(%dy, %x, (2, 2), (2, 2), (0, 0), (1, 1), False, %j)
%t: fp32[1,4,8,8] = aten.threshold_backward.default(%p, %m, 0)
%s: fp32[4] = aten.sum.dim_IntList(%t, (0, 2, 3))
return %t, %s
"""
    found = [region for region in proposed(text) if region.startswith("glue")]
    assert found == ["glue(j+p+t+s)", "glue(t+s)", "glue(j+p)"]


def test_a_backward_average_is_left_out_of_its_group_and_casts_stay_in_it():
    text = """\
input %x: fp32[1,4,8,8]
input %m: fp32[1,4,8,8]
input %dy: bf16[1,4,4,4]
%j: fp32[1,4,4,4] = aten._to_copy.default(%dy, dtype=dtype.fp32)
%p: fp32[1,4,8,8] = aten.avg_pool2d_backward.default(%j, %x, (2, 2), (2, 2), (0, 0), False, True, None)
%a: fp32[1,4,8,8] = aten.add.Tensor(%p, %m)
%t: fp32[1,4,8,8] = aten.threshold_backward.default(%a, %m, 0)
return %t
"""
    found = proposed(text)
    assert [region for region in found if region.startswith("glue")] == ["glue(j+p+a+t)", "glue(a+t)"]
    assert "op(p)" in found or any(region.endswith("(p)") for region in found)


def test_indices_cross_from_pass_to_pass_as_they_are_kept():
    """The cast that widens them belongs to the pass that reads them, a layer later."""
    text = """\
input %x: fp32[1,4,8,8]
constant %w: fp32[4,4,1,1]
%r: fp32[1,4,8,8] = aten.relu.default(%x)
%v: fp32[1,4,4,4], %i: i64[1,4,4,4] = aten.max_pool2d_with_indices.default(%r, (2, 2), (2, 2))
%n: i16[1,4,4,4] = aten._to_copy.default(%i, dtype=dtype.i16)
%j: i64[1,4,4,4] = aten._to_copy.default(%n, dtype=dtype.i64)
%y: fp32[1,4,4,4] = conv2d(%v, %w, None, (1, 1), (0, 0), (1, 1), 1)
%p: fp32[1,4,8,8] = aten.max_pool2d_with_indices_backward.default(%y, %r, (2, 2), (2, 2), (0, 0), (1, 1), False, %j)
%t: fp32[1,4,8,8] = aten.threshold_backward.default(%p, %r, 0)
return %t
"""
    found = proposed(text)
    assert [region for region in found if region.startswith("glue")] == ["glue(r+v+n)", "glue(j+p+t)", "glue(j+p)"]
    assert set(found["glue(r+v+n)"].results) == {"r", "v", "n"}


def test_random_numbers_are_drawn_in_the_callers_memory_format_alone():
    text = "input %x: fp32[1,4,8,8]\n%d: fp32[1,4,8,8], _ = aten.native_dropout.default(%x, 0.5, True)\nreturn %d\n"
    found = proposed(text, ("nhwc", "nchw"))
    assert [problem.layout for problem in found["draw(d)"].problems] == ["nhwc"]
    flat = proposed(text.replace("1,4,8,8", "4,8"), ("nhwc", "nchw"))
    assert [problem.layout for problem in flat["draw(d)"].problems] == ["any"]


NORM = """\
input %x: fp32[2,4,8,8]
input %r: fp32[2,4,8,8]
input %p0: fp32[4]
input %p1: fp32[4]
input %p2: fp32[4]
input %p3: fp32[4]
%y: fp32[2,4,8,8], %m: fp32[4], %s: fp32[4], _, _ = aten._native_batch_norm_legit_functional.default\
(%x, %p0, %p1, %p2, %p3, True, 0.1, 1e-05)
%a: fp32[2,4,8,8] = aten.add.Tensor(%y, %r)
%z: fp32[2,4,8,8] = aten.relu.default(%a)
%t: fp32[2,4,8,8] = aten.add.Tensor(%z, %r)
%k: fp32[2,4,8,8] = aten.threshold_backward.default(%t, %z, 0)
%dx: fp32[2,4,8,8], %dw: fp32[4], %db: fp32[4] = aten.native_batch_norm_backward.default\
(%k, %x, %p0, %p2, %p3, %m, %s, True, 1e-05, (True, True, True))
"""


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ("%k, %dx, %dw, %db", ["norm(y+a)", "norm(y+a+z)", "norm(k+dx)", "norm(t+k+dx)"]),
        ("%y, %dx, %dw, %db", ["norm(k+dx)", "norm(t+k+dx)"]),
        ("%a, %t, %dx, %dw, %db", ["norm(y+a)", "norm(k+dx)"]),
    ],
    ids=["the mask's result is read too", "the norm's is", "the sums are"],
)
def test_batch_norms_are_offered_with_what_stands_beside_them(returned, wanted):
    graph = parse_graph(f"graph 1\n{NORM}return {returned}\n")
    found = propose(graph, layouts=LAYOUTS, numerics="strict", patterns=("norm",))
    assert [region.id for region in found if region.pattern == "norm"] == wanted
    assert not any(region.pattern == "norm" for region in propose(graph, layouts=LAYOUTS, numerics="strict"))


def test_a_branchs_part_of_a_gradient_goes_to_its_norm_and_the_rest_of_the_group_stays_together():
    text = """\
input %g: fp32[2,8,4,4]
input %h: fp32[2,8,4,4]
input %x: fp32[2,4,4,4]
input %z: fp32[2,4,4,4]
input %p0: fp32[4]
input %p1: fp32[4]
input %p2: fp32[4]
input %p3: fp32[4]
input %p4: fp32[4]
%a: fp32[2,8,4,4] = aten.add.Tensor(%g, %h)
%b: fp32[2,8,4,4] = aten.mul.Tensor(%a, 2)
%s: fp32[2,4,4,4] = aten.slice.Tensor(%b, 1, 0, 4)
%t: fp32[2,4,4,4] = aten.slice.Tensor(%b, 1, 4, 8)
%m: fp32[2,4,4,4] = aten.threshold_backward.default(%s, %z, 0)
%dx: fp32[2,4,4,4], %dw: fp32[4], %db: fp32[4] = aten.native_batch_norm_backward.default\
(%m, %x, %p0, %p1, %p2, %p3, %p4, True, 1e-05, (True, True, True))
return %dx, %dw, %db, %t
"""
    found = propose(parse_graph("graph 1\n" + text), layouts=LAYOUTS, numerics="strict", patterns=("norm",))
    assert [region.id for region in found if region.pattern == "norm"] == ["norm(m+dx)", "norm(s+m+dx)"]
    assert [region.id for region in found if region.pattern == "glue"] == ["glue(a+b+s+t+m+dx)", "glue(a+b+t)"]


@pytest.mark.parametrize(
    "op", ["aten.t.default(%x)", "aten.permute.default(%x, (1, 0))", "aten.transpose.int(%x, 0, 1)"]
)
def test_a_transposed_matrix_moves_nothing(op: str) -> None:
    graph = parse_graph(f"graph 1\ninput %x: bf16[64,32]\n%t: bf16[32,64] = {op}\nreturn %t\n")
    assert extract_subgraph(graph, ["t"], "nchw")[0].bytes_min == 0
    wide = parse_graph(
        "graph 1\ninput %x: bf16[2,64,32]\n%t: bf16[2,32,64] = aten.transpose.int(%x, 1, 2)\nreturn %t\n"
    )
    assert extract_subgraph(wide, ["t"], "nchw")[0].bytes_min == 2 * 2 * 2 * 64 * 32
