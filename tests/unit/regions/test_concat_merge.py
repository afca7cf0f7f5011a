"""Parallel 1x1 convolutions as one region, and concatenations whose pieces may be written in place."""

import pytest

from convoy.engines.triton.merged import Merge, merge_of
from convoy.graph.text import parse_graph
from convoy.regions import propose
from convoy.regions.concat import concat_inputs, writable_in_place

CONV = "fp16[1,{k},4,4] = conv2d(%{x}, %w{i}, None, ({s}, {s}), (0, 0), (1, 1), 1)"


def graph(*lines, weights=((8, 8), (16, 8), (24, 8)), returned="%p, %q"):
    constants = [f"constant %w{i}: fp16[{k},{c},1,1]" for i, (k, c) in enumerate(weights)]
    return parse_graph(
        "\n".join(["graph 1", "input %x: fp16[1,8,4,4]", *constants, *lines, f"return {returned}"]) + "\n"
    )


def conv(name, k, i, x="x"):
    return f"%{name}: " + CONV.format(k=k, x=x, i=i, s=1)


def relu(name, of, k):
    return f"%{name}: fp16[1,{k},4,4] = aten.relu.default(%{of})"


TWO = (conv("a", 8, 0), conv("b", 16, 1), relu("p", "a", 8), relu("q", "b", 16))
WEIGHTS = ((8, 8), (16, 8))


def merges(net, layouts=("nchw", "nhwc")):
    return [r for r in propose(net, layouts=layouts, numerics="half", patterns=("merge",)) if r.pattern == "merge"]


def test_parallel_convolutions_with_their_activations_are_one_region():
    (region,) = merges(graph(*TWO, weights=WEIGHTS))
    assert region.nodes == ("a", "b", "p", "q")
    assert region.args == ("x",)
    assert region.constants == ("w0", "w1")
    assert set(region.results) == {"p", "q"}
    merge = merge_of(region.problems[0].text)
    assert isinstance(merge, Merge)
    assert [part.k for part in merge.parts] == [8, 16]
    assert merge.activation == "relu"
    assert [region.results[i] for i in merge.results] == ["p", "q"]


def fresh(net_text):
    """The same net with weights that are inputs, as in training."""
    return parse_graph(net_text.replace("constant %", "input %"))


def text_of(*lines, **of):
    from convoy.graph.text import print_graph

    return print_graph(graph(*lines, **of))


def test_weights_that_change_from_step_to_step_are_arguments():
    (region,) = merges(fresh(text_of(*TWO, weights=WEIGHTS)))
    assert region.args == ("x", "w0", "w1")
    assert region.constants == ()
    merge = merge_of(region.problems[0].text)
    assert isinstance(merge, Merge)
    assert merge.dynamic
    assert [part.k for part in merge.parts] == [8, 16]


def test_casts_of_weights_are_taken_and_weights_that_layers_make_are_not():
    """Were %b's weight made of %a, a way would lead out of the region and back: it would not be convex."""
    head = ("graph 1", "input %x: fp16[1,8,4,4]", "input %w: fp32[8,8,1,1]", "input %u: fp32[8,8,1,1]")
    casts = [f"%{name}h: fp16[8,8,1,1] = aten._to_copy.default(%{name}, dtype=dtype.fp16)" for name in ("w", "u")]
    one = "%a: fp16[1,8,4,4] = conv2d(%x, %wh, None, (1, 1), (0, 0), (1, 1), 1)"
    two = "%b: fp16[1,8,4,4] = conv2d(%x, %uh, None, (1, 1), (0, 0), (1, 1), 1)"
    (region,) = merges(parse_graph("\n".join([*head, *casts, one, two, "return %a, %b"]) + "\n"))
    assert region.args == ("x", "wh", "uh")
    made = "%m: fp16[8,8,1,1] = aten.as_strided.default(%a, (8, 8, 1, 1), (8, 1, 1, 1))"
    later = two.replace("%uh", "%m")
    assert not merges(parse_graph("\n".join([*head, casts[0], one, made, later, "return %a, %b"]) + "\n"))


def test_a_merge_with_some_constant_weights_is_none():
    text = merges(fresh(text_of(*TWO, weights=WEIGHTS)))[0].problems[0].text
    mixed = merge_of(text.replace("input %v1", "constant %v1"))
    assert isinstance(mixed, str)


def test_nothing_is_merged_unasked_or_in_another_layout():
    net = graph(*TWO, weights=WEIGHTS)
    assert not [r for r in propose(net, layouts=("nchw", "nhwc"), numerics="half") if r.pattern == "merge"]
    assert not merges(net, ("nchw",))


def test_other_filters_inputs_and_activations_stay_apart():
    assert not merges(graph(conv("a", 8, 0), relu("p", "a", 8), conv("q", 16, 1, "a"), weights=WEIGHTS))
    assert not merges(graph(conv("a", 8, 0), relu("p", "a", 8), conv("q", 16, 1), weights=WEIGHTS))


def test_of_five_four_are_merged():
    lines = [conv(f"c{i}", 8, i) for i in range(5)]
    (region,) = merges(graph(*lines, weights=[(8, 8)] * 5, returned=", ".join(f"%c{i}" for i in range(5))))
    assert region.nodes == ("c0", "c1", "c2", "c3")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("(0, 0)", "(1, 1)"), "needs 1x1 filters"),
        (("fp16", "fp32"), "needs 1x1 filters of stride 1 in fp16"),
        (
            ("return %p, %q", "return %p, %q, %a"),
            "needs each convolution's result as an output, and no other output|the same activation",
        ),
        (("relu", "silu", 1), "the same activation"),
        (("%w1, None", "%w0, None"), "separate weights"),
    ],
)
def test_other_pieces_are_no_merge(change, reason):
    import re

    text = merges(graph(*TWO, weights=WEIGHTS))[0].problems[0].text
    names = {"%w1, None": "%c1, None", "%w0, None": "%c0, None", "return %p, %q": "return %v3, %v4"}
    old, new, *count = change
    old = names.get(old, old)
    new = names.get(new, "return %v3, %v4, %v1" if "%a" in new else new)
    changed = text.replace(old, new, *count)
    if "(1, 1), (1, 1), (1, 1)" in changed:
        changed = re.sub(r"(v[1-4]: fp16\[1,\d+,)4,4", r"\g<1>6,6", changed)
    assert changed != text
    found = merge_of(changed)
    assert isinstance(found, str)
    assert re.search(reason, found) or "graph" in found


def joined(cat, returned="%c", more=()):
    lines = (conv("a", 8, 0), conv("b", 16, 1), f"%c: {cat}", *more)
    return graph(*lines, weights=WEIGHTS, returned=returned)


def test_pieces_that_nobody_else_reads_may_be_placed():
    net = joined("fp16[1,24,4,4] = aten.cat.default((%a, %b), 1)")
    assert concat_inputs(net, net.node("c")) == writable_in_place(net, net.node("c")) == ("a", "b")
    shared = joined("fp16[1,24,4,4] = aten.cat.default((%a, %b), -3)", "%c, %a")
    assert writable_in_place(shared, shared.node("c")) == ("b",)


@pytest.mark.parametrize(
    ("cat", "found"),
    [
        ("fp16[1,16,4,4] = aten.cat.default((%a, %a), 1)", ()),
        ("fp16[1,8,8,4] = aten.cat.default((%a, %x), 2)", ()),
        ("fp16[1,16,4,4] = aten.cat.default((%a, %x), 1)", ("a", "x")),
    ],
)
def test_repeats_and_other_axes_are_no_pieces(cat, found):
    net = graph(conv("a", 8, 0), f"%c: {cat}", weights=((8, 8),), returned="%c")
    assert concat_inputs(net, net.node("c")) == found
