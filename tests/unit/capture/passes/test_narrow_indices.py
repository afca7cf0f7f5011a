"""Indices of poolings between forward and backward pass: narrow where the backward pass alone reads them, and right."""

import pytest
import torch
from torch import nn

from convoy.capture import capture_training
from convoy.capture.draft import Draft
from convoy.capture.passes.narrow_indices import index_casts, narrow_indices
from convoy.engines.interpret import compile_graph
from convoy.graph.text import parse_graph

POOL = "%v: fp32[2,4,{o},{o}], %i: i64[2,4,{o},{o}] = aten.max_pool2d_with_indices.default(%x, (2, 2), (2, 2))"
BACK = (
    "%dx: fp32[2,4,{s},{s}] = aten.max_pool2d_with_indices_backward.default"
    "(%dy, %x, (2, 2), (2, 2), (0, 0), (1, 1), False, %i)"
)


def narrowed(side, *more, returned="%v, %dx"):
    lines = ["graph 1", "input %x: fp32[2,4,{s},{s}]", "input %dy: fp32[2,4,{o},{o}]", POOL, BACK, *more]
    graph = parse_graph(
        "\n".join([*lines, f"return {returned}"]).replace("{s}", str(side)).replace("{o}", str(side // 2)) + "\n"
    )
    draft = Draft.of(graph, {})
    narrow_indices(draft)
    return graph, draft.finish()[0]


@pytest.mark.parametrize(("side", "dtype"), [(8, "i16"), (180, "i16"), (182, "i32")])
def test_what_lies_between_the_passes_is_narrow(side, dtype):
    before, after = narrowed(side)
    (pool,) = (node for node in after.nodes if "with_indices.default" in node.op)
    (cast,) = after.users(pool.outputs[1])
    assert after.values[cast.outputs[0]].spec.dtype == dtype
    generator = torch.Generator().manual_seed(0)
    args = [torch.randint(-3, 4, before.values[name].spec.shape, generator=generator).float() for name in before.inputs]
    for found, wanted in zip(compile_graph(after)(args), compile_graph(before)(args), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("more", "returned"),
    [((), "%v, %dx, %i"), (("%j: i64[2,4,4,4] = aten.add.Tensor(%i, %i)",), "%v, %dx, %j")],
    ids=["returned", "read by somebody else"],
)
def test_indices_that_others_want_stay_as_they_are(more, returned):
    before, after = narrowed(8, *more, returned=returned)
    assert [node.op for node in after.nodes] == [node.op for node in before.nodes]


def test_a_training_step_keeps_narrow_indices():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))
    batch = (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    graph = capture_training(model, nn.functional.cross_entropy, batch).captured.graph
    (back,) = (node for node in graph.nodes if node.op.endswith("with_indices_backward.default"))
    cast = graph.producer(back.args[-1].name)
    (source,) = cast.refs()
    assert graph.values[source].spec.dtype == "i16"


def test_what_was_put_into_a_graph_is_found_again():
    before, after = narrowed(8)
    assert index_casts(before) == frozenset()
    assert index_casts(after) == {node.name for node in after.nodes} - {node.name for node in before.nodes}
    assert len(index_casts(after)) == 2


def test_a_models_own_casts_of_indices_are_not_taken_for_ours():
    own = (
        "%n: i16[2,4,4,4] = aten._to_copy.default(%i, dtype=dtype.i16)",
        "%w: i64[2,4,4,4] = aten._to_copy.default(%n, dtype=dtype.i64)",
    )
    for more, returned in ((own, "%v, %dx, %w"), (own[:1], "%v, %dx, %n")):
        assert index_casts(narrowed(8, *more, returned=returned)[1]) == frozenset()
