"""Casts of inputs and of results, in groups that no way leads through."""

from __future__ import annotations

from convoy.graph.text import parse_graph
from convoy.graph.verify import verify
from convoy.regions import propose

TEXT = """\
graph 1
input %a: fp32[4,3,3,3]
input %b: fp32[4]
input %c: fp16[4]
%a16: bf16[4,3,3,3] = aten._to_copy.default(%a, dtype=dtype.bf16)
%b16: bf16[4] = aten._to_copy.default(%b, dtype=dtype.bf16)
%c32: fp32[4] = aten._to_copy.default(%c, dtype=dtype.fp32)
%u: bf16[4,3,3,3] = aten.neg.default(%a16)
%v: bf16[4] = aten.neg.default(%b16)
%u32: fp32[4,3,3,3] = aten._to_copy.default(%u, dtype=dtype.fp32)
%v32: fp32[4] = aten._to_copy.default(%v, dtype=dtype.fp32)
%w16: bf16[4] = aten._to_copy.default(%v32, dtype=dtype.bf16)
return %u32, %v32, %w16, %c32
"""


def groups(text: str) -> list[str]:
    graph = parse_graph(text)
    verify(graph)
    return [r.id for r in propose(graph, layouts=("nchw", "nhwc"), numerics="as_torch") if r.pattern == "casts"]


def test_casts_of_one_kind_are_together():
    assert groups(TEXT) == ["casts(a16+b16)"]  # v32 is read by another node: its group would not be convex
    plain = TEXT.replace("%w16: bf16[4] = aten._to_copy.default(%v32, dtype=dtype.bf16)\n", "").replace(", %w16", "")
    assert groups(plain) == ["casts(a16+b16)", "casts(u32+v32)"]


def test_one_alone_is_no_group():
    assert (
        groups("graph 1\ninput %a: fp32[4]\n%b: bf16[4] = aten._to_copy.default(%a, dtype=dtype.bf16)\nreturn %b\n")
        == []
    )


def test_gradients_that_travel_apart_are_cast_apart():
    def given(*buckets: tuple[str, ...]) -> list[str]:
        graph = parse_graph(GRADIENTS)
        regions = propose(graph, layouts=("nchw", "nhwc"), numerics="as_torch", buckets=buckets)
        return [r.id for r in regions if r.pattern == "casts"]

    assert given() == ["casts(a32+b32+c32+d32)"]
    assert given(("d32", "c32"), ("b32", "a32")) == ["casts(a32+b32)", "casts(c32+d32)"]
    assert given(("d32",), ("c32", "b32", "a32")) == ["casts(a32+b32+c32)"]


GRADIENTS = "graph 1\n" + "".join(f"input %{name}: bf16[4]\n" for name in "abcd")
GRADIENTS += "".join(f"%{name}n: bf16[4] = aten.neg.default(%{name})\n" for name in "abcd")
GRADIENTS += "".join(f"%{name}32: fp32[4] = aten._to_copy.default(%{name}n, dtype=dtype.fp32)\n" for name in "abcd")
GRADIENTS += "return %a32, %b32, %c32, %d32\n"
