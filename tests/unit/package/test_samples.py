"""Any number of samples by programs of fixed batch sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.package.samples import batches_of
from tests.unit.package.conftest import X


@pytest.mark.parametrize(
    ("samples", "sizes", "batches"),
    [
        (1, (2,), [2]),
        (5, (2,), [2, 2, 2]),
        (5, (1, 4), [4, 1]),
        (3, (1, 4), [4]),
        (11, (1, 4, 8), [8, 4]),
        (0, (1,), []),
    ],
)
def test_batches_hold_all_samples(samples: int, sizes: tuple[int, ...], batches: list[int]) -> None:
    assert batches_of(samples, sizes) == batches


def test_samples_are_run_in_batches_and_the_last_one_is_padded(portable: Path) -> None:
    net = convoy.open(portable, trust=True)
    assert net.batch_sizes == (2,)
    x = torch.cat([X, X.flip(0), 2 * X[:1]])
    (found,) = net.run_samples(x)
    expected = torch.cat([net(x[:2]), net(x[2:4]), net(torch.cat([x[4:], torch.zeros_like(x[4:])]))[:1]])
    assert torch.equal(found, expected)
    assert torch.equal(net.run_samples(X)[0], net(X))
    for wrong in ((x, x), (x[:0],), (x.double(),), (x[:, :2],)):
        with pytest.raises(convoy.InputError):
            net.run_samples(*wrong)


class Sum(nn.Module):
    """Takes a batch, and gives something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, k] to [k]."""
        return x.sum(0)


def test_a_package_without_batches_says_so(tmp_path: Path) -> None:
    settings = convoy.Settings(effort="none", only_engines=("aten",))
    net = convoy.open(convoy.export(Sum(), tmp_path / "sum.convoy", (torch.ones(3, 2),), settings=settings))
    assert net.batch_sizes == ()
    with pytest.raises(convoy.InputError, match="inputs and outputs are batches"):
        net.run_samples(torch.ones(3, 2))
