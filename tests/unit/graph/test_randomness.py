"""Which operators draw random numbers: PyTorch's own tags are the judge."""

from __future__ import annotations

import pytest
import torch

from convoy.graph.ir import Node, Ref
from convoy.graph.randomness import DROPOUT_P_POSITION, RANDOM, draws_random


def every() -> list[str]:
    """Names of all operators, with their overloads."""
    return torch._C._dispatch_get_all_op_names()


def tagged() -> dict[str, list[str]]:
    """Names of the functional ATen operators that PyTorch tags as random, with the names of their arguments."""
    found: dict[str, list[str]] = {}
    # Not dir(torch.ops.aten): that lists what this process has used so far.
    for name in sorted({full.split("::")[1].split(".")[0] for full in every() if full.startswith("aten::")}):
        packet = getattr(torch.ops.aten, name)
        for overload in sorted(getattr(packet, "overloads", list)(), key=lambda overload: overload == "default"):
            operator = getattr(packet, overload)
            if torch.Tag.nondeterministic_seeded in operator.tags and not operator._schema.is_mutable:
                found[name] = [argument.name for argument in operator._schema.arguments]
    return found


def test_every_operator_that_pytorch_calls_random_is_known():
    unknown = [name for name in tagged() if name not in {*RANDOM, *DROPOUT_P_POSITION, "rrelu"}]
    assert unknown == []


def test_the_dropout_of_attention_stands_where_the_table_says():
    for name, arguments in tagged().items():
        if name in DROPOUT_P_POSITION:
            assert arguments.index("dropout_p") == DROPOUT_P_POSITION[name]


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "random"),
    [
        ("aten.native_dropout.default", (0.5, True), (), True),
        ("aten.relu.default", (), (), False),
        ("conv2d", (), (), False),
        ("aten.rrelu.default", (0.1, 0.3), (), False),
        ("aten.rrelu.default", (0.1, 0.3, True), (), True),
        ("aten.scaled_dot_product_attention.default", (Ref("k"), Ref("v")), (), False),
        ("aten.scaled_dot_product_attention.default", (Ref("k"), Ref("v"), None, 0.1), (), True),
        ("aten.scaled_dot_product_attention.default", (Ref("k"), Ref("v")), (("dropout_p", 0.1),), True),
    ],
)
def test_a_node_draws(op, args, kwargs, random):
    assert draws_random(Node("y", op, (Ref("x"), *args), kwargs, ("y",))) is random
