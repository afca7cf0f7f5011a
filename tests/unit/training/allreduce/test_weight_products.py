"""Weight gradients as products: which are found, whether gathering pays, and that a planted reader forbids it."""

from __future__ import annotations

import pytest

from convoy.graph.text import parse_graph
from convoy.training.allreduce.weight_products import kept_apart, straddles, weight_products, worth_gathering

HEAD = "graph 1\ninput %dy: bf16[{rows},{out}]\ninput %x: bf16[{rows},{inner}]\n"

FORMS = {
    "t(dy) x": """%t: bf16[{out},{rows}] = aten.t.default(%dy)
%m: bf16[{out},{inner}] = aten.mm.default(%t, %x)
%g: fp32[{out},{inner}] = aten._to_copy.default(%m, dtype=dtype.fp32)
""",
    "t(t(x) dy)": """%t: bf16[{inner},{rows}] = aten.t.default(%x)
%m: bf16[{inner},{out}] = aten.mm.default(%t, %dy)
%u: bf16[{out},{inner}] = aten.t.default(%m)
%g: fp32[{out},{inner}] = aten._to_copy.default(%u, dtype=dtype.fp32)
""",
    "t(t(t(dy) x))": """%t: bf16[{out},{rows}] = aten.t.default(%dy)
%m: bf16[{out},{inner}] = aten.mm.default(%t, %x)
%u: bf16[{inner},{out}] = aten.t.default(%m)
%v: bf16[{out},{inner}] = aten.t.default(%u)
%g: fp32[{out},{inner}] = aten._to_copy.default(%v, dtype=dtype.fp32)
""",
}


def graph(body: str, end: str = "return %g\n", rows: int = 4, out: int = 512, inner: int = 2048):
    return parse_graph((HEAD + body + end).format(rows=rows, out=out, inner=inner))


@pytest.mark.parametrize("form", FORMS)
def test_a_product_has_its_factors_and_the_nodes_that_nobody_else_reads(form: str) -> None:
    net = graph(FORMS[form])
    (found,) = weight_products(net, ["g"])
    assert (found.gradient, found.left, found.right) == ("g", "dy", "x")
    assert found.nodes == tuple(node.name for node in net.nodes)


def test_a_value_that_others_read_or_that_is_returned_is_no_part_of_a_product() -> None:
    body = FORMS["t(t(t(dy) x))"]
    assert not weight_products(graph(body, "return %g, %u\n"), ["g"])
    reader = "%r: bf16[{inner},{out}] = aten.relu.default(%u)\n"
    assert not weight_products(graph(body + reader, "return %g, %r\n"), ["g"])


def test_a_transposition_that_others_read_stays_outside() -> None:
    reader = "%r: bf16[{out},{rows}] = aten.relu.default(%t)\n"
    (found,) = weight_products(graph(FORMS["t(dy) x"] + reader, "return %g, %r\n"), ["g"])
    assert found.nodes == ("m", "g")
    assert found.left == "dy"


def test_a_product_over_other_things_than_rows_is_none() -> None:
    body = """%t: bf16[{inner},{rows}] = aten.t.default(%x)
%m: bf16[{rows},{rows}] = aten.mm.default(%x, %t)
%g: fp32[{rows},{rows}] = aten._to_copy.default(%m, dtype=dtype.fp32)
"""
    assert not weight_products(graph(body), ["g"])
    pointwise = "%g: bf16[{rows},{inner}] = aten.relu.default(%x)\n"
    assert not weight_products(graph(pointwise), ["g"])
    assert not weight_products(graph("", "return %x\n"), ["x"])


def test_gathering_pays_for_few_rows_of_a_large_layer() -> None:
    (large,) = weight_products(net := graph(FORMS["t(dy) x"], rows=128, out=4096, inner=9216), ["g"])
    assert all(large.pays(net, processes, "cuda") for processes in (2, 4, 8))
    assert not large.pays(net, 512, "cuda")
    (small,) = weight_products(net := graph(FORMS["t(dy) x"], rows=4096, out=64, inner=64), ["g"])
    assert not small.pays(net, 2, "cuda")
    assert not worth_gathering(net, ["g"], "cuda")


def test_steps_that_hold_a_product_and_others_do_not_keep_it_apart() -> None:
    (found,) = weight_products(graph(FORMS["t(dy) x"]), ["g"])
    assert kept_apart([found], [("t", "m"), ("g",), ("other",)]) == [found]
    assert not kept_apart([found], [("t",), ("m", "g", "other")])
    assert straddles(("g", "other"), found)
    assert not straddles((), found)
