"""A net whose block is done in bands: the same numbers, in a chain with what follows, with a floor that counts its operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.compilers import host_compiler
from convoy.pipeline import net, optimize_model
from convoy.pipeline.check import end_to_end
from convoy.program.native_chains import ChainedProgram, NativeChain

pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")


class Block(nn.Module):
    """Twice an inverted residual."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Sequential(nn.Conv2d(8, 24, 1), nn.BatchNorm2d(24), nn.ReLU6())
        self.filter = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.ReLU6())
        self.narrow = nn.Conv2d(24, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each adds what it was given."""
        for _ in range(2):
            x = x + self.narrow(self.filter(self.widen(x)))
        return x


@pytest.mark.parametrize("threads", [1, 2])
def test_a_plan_in_bands_runs_is_saved_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(net, "LEAST_INSIDE", 1)
    monkeypatch.setattr(end_to_end, "why_slow", lambda *_: "")  # whatever else this machine does meanwhile
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(1)
        model, x = Block().eval(), torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last)
        settings = convoy.Settings(
            db=tmp_path / "perf.db", isolate=False, only_engines=("cpu.banded",), layout="nhwc", solver="single"
        )
        result = optimize_model(model, (x,), name="blocks", settings=settings)
        banded = [layer for layer in result.summary.layers if layer.engine == "cpu.banded"]
        assert len(banded) == 2
        for layer in banded:
            assert layer.flops == 2 * 2 * 9 * 10 * 24 * (8 + 9 + 8)
            assert layer.floor_us > 0
        with torch.no_grad():
            wanted, made = model(x), result.program(x)
        assert (made - wanted).norm() < 1e-6 * wanted.norm()
        program = result.program.programs[0].runnable
        assert isinstance(program, ChainedProgram)
        assert [chain.count for chain in program.chains] == [2]
        assert isinstance(program.chains[0], NativeChain)
        paths = result.program.save(tmp_path / "plan.json")
        again = convoy.load(model, paths, (x,), settings=settings)
        with torch.no_grad():
            assert torch.equal(again(x), made)
    finally:
        torch.set_num_threads(before)
