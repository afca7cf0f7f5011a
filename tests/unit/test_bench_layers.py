"""The layer benchmarks' own parts that need no device: runs, data with known results, checking, and the sheet that resumes."""

import pytest
import torch
from bench.layers import kernels, layer_data, layer_timing

from convoy.engines.library.aten import ENGINE
from convoy.problem import Conv3dProblem, ConvProblem, Knobs, LinearProblem
from convoy.target import Target

CPU = Target("cpu", "a CPU", "avx2", 1, 8 << 30, 1 << 20)
SMALL = ConvProblem(2, 8, 6, 5, 4, 3, 3, 1, 1, 2, 2, layout="nhwc", numerics="strict")


def test_a_run_names_layers_in_directions():
    found = layer_data.problems("fp16:half:32:targets,4096x1000:fprop,wgrad")
    assert [p.direction for p in found if isinstance(p, ConvProblem)] == ["fprop"] * 5 + ["wgrad"] * 5
    assert sum(isinstance(p, LinearProblem) for p in found) == 1
    assert {p.n for p in found} == {32}


@pytest.mark.parametrize("run", ["fp16:half:1", "fp16:half:1:targets:sideways"])
def test_a_run_that_is_none_is_refused(run):
    with pytest.raises(ValueError, match="run"):
        layer_data.problems(run)


@pytest.mark.parametrize("direction", layer_data.DIRECTIONS)
def test_checking_passes_what_is_right_and_sees_a_planted_fault(direction):
    from dataclasses import replace

    problem = replace(SMALL, direction=direction)
    data = layer_data.Data.of(problem, 2, "cpu")
    executable = ENGINE.build(problem, Knobs(), CPU)
    error, wrong = layer_data.check(executable, data, None)
    assert not wrong
    assert 0 <= error < 1e-6
    data.integer[1].view(-1)[3] += 1
    assert layer_data.check(executable, data, None)[1] == "wrong on integers"


def test_noise_beyond_the_bound_is_seen():
    data = layer_data.Data.of(SMALL, 2, "cpu")
    data.normal[1].add_(torch.randn_like(data.normal[1]) * 1e-4)
    assert "relative error" in layer_data.check(ENGINE.build(SMALL, Knobs(), CPU), data, None)[1]


def test_the_sheet_carries_rows_of_the_same_device_on(tmp_path):
    variant = layer_timing.Variant(SMALL, "aten", Knobs.of(a=1, b="two"))
    first = kernels.Sheet(tmp_path / "first.csv", "a GPU")
    first.begin([])
    first.add(layer_timing.Outcome(variant, "ok", 12.5, 1e-4, 10.0), "quick", 3.0)
    again = kernels.Sheet(tmp_path / "again.csv", "a GPU")
    again.begin([first.path])
    assert again.quick[variant].us == 12.5
    assert again.done == set()
    again.add(layer_timing.Outcome(variant, "ok", 12.0), "final", 3.0)
    last = kernels.Sheet(tmp_path / "last.csv", "a GPU")
    last.begin([first.path, again.path])
    assert last.done == {SMALL.key}
    assert len(last.path.read_text().splitlines()) == 3
    other = kernels.Sheet(tmp_path / "other.csv", "another GPU")
    other.begin([again.path])
    assert not other.quick
    assert not other.done


def test_a_list_of_volumes_is_read_and_its_layers_are_checked():
    found = layer_data.problems("fp16:half:1:unet3d,r3d_18")
    assert len(found) == 18 + 11
    assert {problem.layout for problem in found} == {"ndhwc"}
    assert layer_data.short(found[1]) == "32>32 3x3x3/1x1x1 @128x128x128"
    problem = Conv3dProblem(1, 4, (3, 4, 5), 6, (3, 3, 3), (1, 1, 1), (1, 2, 1), layout="ndhwc", numerics="strict")
    data = layer_data.Data.of(problem, 1, "cpu")
    assert not layer_data.check(ENGINE.build(problem, Knobs(), CPU), data, None)[1]
