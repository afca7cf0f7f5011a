"""Programs whose bits differ from run to run: their packages are compared within a tolerance, and the user is told."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import convoy
from convoy.errors import CompileError
from convoy.package import write_checked
from convoy.package.same_results import compare_results
from convoy.program.native_chains import ChainedProgram
from tests.unit.package.conftest import Block, X, seeded

RIGHT = torch.linspace(-2, 2, 999)


class Varying:
    """Gives other bits in every run, and exact indices."""

    def __init__(self, factor: float = 1.0, index: int = 5) -> None:
        self.factor, self.index, self.runs = factor, index, itertools.count()

    def __call__(self, inputs: Sequence[torch.Tensor], *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The input times the factor, with an error of about 1e-6."""
        (x,) = inputs
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(next(self.runs)))
        return x * self.factor + 1e-6 * noise, torch.tensor([self.index])


def test_bits_are_compared_where_a_program_repeats_its_own() -> None:
    def own(inputs: Sequence[torch.Tensor], *_: Any) -> tuple[torch.Tensor, ...]:
        return (inputs[0] * 3,)

    found = compare_results(own, own, (RIGHT,), runs=2)
    assert (found.agree, found.error, found.tolerance) == (True, 0.0, 0.0)
    found = compare_results(own, lambda inputs, *_: (inputs[0] * 3 * (1 + 1e-6),), (RIGHT,), runs=1)
    assert not found.agree
    assert found.tolerance == 0


def test_results_are_compared_within_the_differences_between_runs() -> None:
    found = compare_results(Varying(), Varying(), (RIGHT,), runs=20)
    assert found.agree
    assert 1e-7 < found.error < found.tolerance < 1e-5
    assert not compare_results(Varying(), Varying(factor=1 + 1e-4), (RIGHT,), runs=1).agree
    assert not compare_results(Varying(), Varying(index=6), (RIGHT,), runs=1).agree
    assert not compare_results(
        Varying(), lambda inputs, *_: (inputs[0] * torch.inf, torch.tensor([5])), (RIGHT,), runs=1
    ).agree


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_export_says_that_bits_differ_and_refuses_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    class Noisy(ChainedProgram):
        runs = itertools.count()

        def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
            made = super().__call__(*args)
            return tuple(one * (1 + shift + 1e-6 * next(self.runs)) for one in made)

    monkeypatch.setattr(write_checked, "ChainedProgram", Noisy)
    path = tmp_path / "net.convoy"
    settings = convoy.Settings(effort="none", db=tmp_path / "perf.db")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if shift:
            with pytest.raises(CompileError, match="gives other results"):
                convoy.export(seeded(Block), path, (X,), portable=True, settings=settings)
            assert not path.exists()
        else:
            convoy.export(seeded(Block), path, (X,), portable=True, settings=settings)
    said = [one for one in found if "not bit by bit" in str(one.message)]
    assert [one.filename for one in said] == ([] if shift else [__file__])
