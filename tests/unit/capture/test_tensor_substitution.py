"""Substitution: torch functions get other tensors in the places of some, wherever they stand among the arguments."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from convoy.capture.tensor_substitution import TensorSubstitution, is_ordinary


def test_tensors_are_replaced_in_arguments_lists_and_keywords() -> None:
    a, b, x = torch.ones(2), torch.full((2,), 3.0), torch.zeros(2)
    with TensorSubstitution({id(a): b}) as substitution:
        assert torch.equal(a + x, b)
        assert torch.equal(torch.cat([x, a]), torch.tensor([0.0, 0, 3, 3]))
        assert torch.equal(torch.add(input=x, other=a), b)
        assert float(nn.functional.mse_loss(a, x)) == 9
        a.mul_(2)
    assert substitution.used == {id(a)}
    assert torch.equal(b, torch.full((2,), 6.0))
    assert torch.equal(a, torch.ones(2))


def test_others_are_asked_for() -> None:
    known, unknown = torch.ones(2), torch.ones(2)
    asked: list[int] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(id(tensor))
        return torch.zeros(2)

    with TensorSubstitution({id(known): torch.full((2,), 5.0)}, stand_in):
        given, made = known * 1, unknown * 1
    assert torch.equal(given, torch.full((2,), 5.0))
    assert torch.equal(made, torch.zeros(2))
    assert asked == [id(unknown)]


def test_a_tracers_tensors_are_told_apart() -> None:
    assert is_ordinary(torch.ones(1))
    assert is_ordinary(nn.Parameter(torch.ones(1)))
    with FakeTensorMode() as mode:
        assert not is_ordinary(mode.from_tensor(torch.ones(1)))
    assert not is_ordinary(torch._to_functional_tensor(torch.ones(1)))
