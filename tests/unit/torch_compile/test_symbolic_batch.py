"""Graphs with a symbolic batch size: other batches run by the graphs that are compiled, where images are independent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from convoy.torch_compile import symbolic_batch
from convoy.torch_compile.symbolic_batch import BatchInputs, SymbolicBatch
from tests.unit.dynamic.fake_programs import Net, images
from tests.unit.pipeline.untimed import plans_kept
from tests.unit.program.fast_net import always_kept


class Mixing(nn.Module):
    """A trace of the other images in each result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * x.mean(0)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The `SymbolicBatch` of each graph; PyTorch takes longer than any program."""
    made: list[Any] = []
    plain = SymbolicBatch.__init__

    def remember(self: Any, *given: Any) -> None:
        made.append(self)
        plain(self, *given)

    monkeypatch.setattr(SymbolicBatch, "__init__", remember)
    monkeypatch.setattr(symbolic_batch, "_estimate", lambda images, times: float("inf"))
    torch._dynamo.reset()
    with always_kept(), plans_kept(), torch.no_grad():
        yield made
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("only", "most"),
    [
        (("cpu.direct",), 0.0),  # integers, and no transformation of the filters: exact
        ((), 1e-6),  # Winograd's filters are no integers: some roundings of fp32 (6e-8) are left
    ],
)
def test_other_batches_are_computed_by_those_that_are_compiled(
    batches: list[Any], only: tuple[str, ...], most: float
) -> None:
    net = Net().eval()
    exact = copy.deepcopy(net).double()
    options = {"effort": "none", "isolate": False, "only_engines": only}
    compiled = torch.compile(net, backend="convoy", dynamic=True, options=options)
    for count in (5, 5, 9, 9):  # none of them another size of the images, which Dynamo would take for the same
        compiled(images(count))
    (batch,) = batches
    (times,) = batch._times.values()
    assert sorted(times) == [5, 9]
    times.update({5: 3.0, 9: 5.0})
    batch._chosen.clear()
    ran: list[tuple[int, ...]] = []
    for count in (2, 4, 7, 11, 14, 15):
        x = images(count)
        wanted, right, found = net(x), exact(x.double()), compiled(x)
        for name, tensor in wanted.items():
            assert (found[name].double() - right[name]).norm() <= most * right[name].norm()
            assert found[name].stride() == tensor.stride()
        ran += batch._chosen.values()
        batch._chosen.clear()
    assert ran == [(5,), (5,), (9,), (9, 5), (9, 5), (5, 5, 5)]


def test_a_net_that_mixes_images_is_not_split(batches: list[Any]) -> None:
    compiled = torch.compile(Mixing(), backend="convoy", dynamic=True, options={"effort": "none", "isolate": False})
    for count in (5, 5, 4):
        x = images(count)
        torch.testing.assert_close(compiled(x), Mixing()(x))
    assert [(batch._splits, batch._times) for batch in batches] == [(False, {})]


def test_the_estimate_of_pytorchs_time_is_on_the_line_between_known_ones() -> None:
    assert symbolic_batch._estimate(6, {4: 4.0, 8: 5.0}) == 4.5
    assert symbolic_batch._estimate(16, {4: 4.0, 8: 5.0}) == 10.0
    assert symbolic_batch._estimate(2, {4: 4.0}) == 2.0


def test_a_graph_without_a_symbolic_batch_has_no_parts() -> None:
    graph = torch.fx.symbolic_trace(Mixing())
    assert BatchInputs.of(graph, (0,)) is None
