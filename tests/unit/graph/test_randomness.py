"""Which operators draw random numbers: PyTorch's own tags are the judge."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import convoy
from convoy.engines.interpret import compile_graph
from convoy.errors import InputError
from convoy.graph.ir import Node, Ref
from convoy.graph.randomness import DROPOUT_P_POSITION, RANDOM, RECURRENT_POSITIONS, draws_random, memory_order
from convoy.graph.text import parse_graph
from tests.unit.pipeline.untimed import plans_kept


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


def test_the_dropout_of_recurrent_layers_stands_where_the_table_says():
    for operator, positions in RECURRENT_POSITIONS.items():
        name, overload = operator.split(".")
        arguments = [argument.name for argument in getattr(getattr(torch.ops.aten, name), overload)._schema.arguments]
        assert tuple(map(arguments.index, ("num_layers", "dropout", "train"))) == positions


def test_a_recurrent_net_in_evaluation_mode_draws_nothing_and_is_compared_with_float64(tmp_path: Path):
    class Recogniser(torch.nn.Module):
        """Columns of an image as a sequence, as recognisers of text have it."""

        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
            self.rnn = torch.nn.LSTM(4 * 6, 8, 2, batch_first=True, bidirectional=True, dropout=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(self.conv(x).relu().permute(0, 3, 1, 2).flatten(2))[0]

    torch.manual_seed(0)
    model, x = Recogniser().eval(), torch.randn(2, 1, 6, 5)
    with torch.no_grad(), plans_kept():
        fast = convoy.optimize(model, (x,), settings=convoy.Settings(effort="none", db=tmp_path / "perf.db"))
        torch.testing.assert_close(fast(x).double(), copy.deepcopy(model).double()(x.double()), rtol=1e-5, atol=1e-6)
    assert not fast.plan.baseline
    assert [note for note in fast.plan.notes if "random" in note] == []


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "random"),
    [
        ("aten.native_dropout.default", (0.5, True), (), True),
        ("aten.relu.default", (), (), False),
        ("conv2d", (), (), False),
        ("aten.rrelu.default", (0.1, 0.3), (), False),
        ("aten.rrelu.default", (0.1, 0.3, True), (), True),
        ("aten.lstm.input", ((Ref("h"),), (Ref("w"),), True, 2, 0.5, True, False, True), (), True),
        ("aten.lstm.input", ((Ref("h"),), (Ref("w"),), True, 1, 0.5, True, False, True), (), False),
        ("aten.lstm.input", ((Ref("h"),), (Ref("w"),), True, 2, 0.5, False, False, True), (), False),
        ("aten.gru.data", (Ref("s"), Ref("h"), (Ref("w"),), True, 2, 0.0, True, False), (), False),
        ("aten.gru.data", (Ref("s"), Ref("h"), (Ref("w"),), True, 2, 0.1, True, False), (), True),
        ("aten.scaled_dot_product_attention.default", (Ref("k"), Ref("v")), (), False),
        ("aten.scaled_dot_product_attention.default", (Ref("k"), Ref("v"), None, 0.1), (), True),
        ("aten.scaled_dot_product_attention.default", (Ref("k"), Ref("v")), (("dropout_p", 0.1),), True),
    ],
)
def test_a_node_draws(op, args, kwargs, random):
    assert draws_random(Node("y", op, (Ref("x"), *args), kwargs, ("y",))) is random


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(4, 5), None),
        (torch.empty(4, 5).t(), (1, 0)),
        (torch.empty(4, 1).t(), None),
        (torch.empty(2, 3, 4).transpose(1, 2), (0, 2, 1)),
        (torch.empty(2, 3, 4, 5), (0, 1, 2, 3)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.empty(1, 3, 4, 1).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.empty(2, 3, 1, 1), None),
        (torch.empty(2, 1, 4, 5).to(memory_format=torch.channels_last), None),
        (torch.empty(2, 8, 4, 5)[:, ::2], (0, 1, 2, 3)),
        (torch.empty(2, 1, 1).expand(2, 3, 4), None),
        (torch.empty(()), None),
    ],
)
def test_the_order_of_a_tensor_in_memory(tensor: torch.Tensor, order: tuple[int, ...] | None):
    assert memory_order(tensor.shape, tensor.stride()) == order


def drawing(order: str) -> str:
    """Dropout of a matrix in an order."""
    return f"""graph 1
input %x: fp32[6,8]
%d: fp32[6,8], _ = aten.native_dropout.default(%x, 0.5, True, memory_order={order})
return %d
"""


def test_numbers_are_drawn_in_the_order_that_a_node_says():
    run, x = compile_graph(parse_graph(drawing("(1, 0)"))), torch.rand(6, 8) + 1
    torch.manual_seed(3)
    (found,) = run([x])
    torch.manual_seed(3)
    wanted, _ = torch.native_dropout(x.t().contiguous().t(), 0.5, True)
    torch.manual_seed(3)
    other, _ = torch.native_dropout(x, 0.5, True)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, other)


@pytest.mark.parametrize("order", ["(0, 0)", "(1,)", "(0, 1, 2)", "1", "(1, 0.0)"])
def test_an_order_that_is_none_is_refused(order: str):
    with pytest.raises(InputError, match="memory_order"):
        compile_graph(parse_graph(drawing(order)))
