"""Samples are copied into the inputs of the program, in turn."""

from __future__ import annotations

import torch

from convoy.measurement.scenarios.batched_net import BatchedNet


def test_each_batch_begins_at_the_next_sample() -> None:
    seen: list[list[float]] = []
    given = {1: (torch.full((1, 2), 9.0),), 3: (torch.arange(3.0)[:, None].repeat(1, 2),)}
    net = BatchedNet(lambda x: seen.append(x[:, 0].tolist()), given)
    assert net.sizes == (1, 3)
    net(2, 3)
    net(3, 3)
    net(1, 1)
    assert seen == [[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [2.0]]
    assert given[1][0].tolist() == [[9.0, 9.0]]  # the caller's tensors stay as they were


def test_inputs_that_are_no_batches_are_one_sample() -> None:
    seen: list[tuple[int, ...]] = []
    net = BatchedNet(lambda x, y: seen.append((*x.shape, *y.shape)), {1: (torch.ones(5, 2), torch.tensor(3.0))})
    net(1, 1)
    net(1, 1)
    assert seen == [(5, 2), (5, 2)]
