"""pruned.channels: right wherever it says yes, in every layout and dtype; what it keeps; refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from convoy.engines.manifest import load_engine
from convoy.engines.sparse_weights import pruned_channels_gpu
from convoy.engines.sparse_weights.pruned_channels import ENGINE, inner_knobs, kept, smaller
from convoy.errors import InputError
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Knobs, parse_problem
from convoy.target import Target
from tests.unit.engines.conv_cases import EPILOGUES, SHAPES, of_dtype
from tests.unit.engines.pruned_cases import mask_of

CPU = detect_target("cpu")
LAYER = ConvProblem(2, 24, 7, 6, 20, 3, 3, 1, 1)


def dead(problem, filters=(), channels=()):
    nonzero = np.random.default_rng(1).random(problem.weight_spec.shape) < 0.7
    nonzero[list(filters)] = False
    nonzero[:, list(channels)] = False
    return problem.with_mask(mask_of(nonzero))


CASES = {
    "filters": dead(LAYER, filters=range(0, 20, 2)),
    "channels": dead(LAYER, channels=range(3, 20)),
    "both": dead(LAYER, range(9), range(0, 24, 2)),
    "stride, all filters dead": dead(replace(LAYER, stride_h=2, stride_w=3), range(20)),
    "empty batch": dead(replace(LAYER, n=0), range(8)),
    "1x1": dead(ConvProblem(1, 32, 5, 4, 32, 1, 1), range(8, 32), range(8, 32)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_yes_is_kept(name, layout, dtype):
    faults = []
    for epilogue in EPILOGUES[:6]:
        problem = replace(of_dtype(CASES[name], dtype).with_layout(layout), epilogue=epilogue)
        assert ENGINE.supports(problem, CPU)
        for knobs in ENGINE.space(problem, CPU):
            executable = ENGINE.build(problem, knobs, CPU)
            assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
            for kind in ("integer", "normal"):
                verdict = judge(executable, ENGINE.family, problem, make_data(problem, 1, kind), kind)
                faults += [] if verdict.ok else [f"{problem} [{knobs}]: {verdict.reason}"]
    assert not faults, "\n".join(faults)


def test_what_is_kept_is_rounded_up_by_dead_ones():
    filters, channels = kept(dead(LAYER, filters=range(9), channels=range(0, 24, 2)))
    assert (len(filters), len(channels)) == (16, 16)
    assert set(range(9, 20)) <= set(filters)
    assert set(range(1, 24, 2)) <= set(channels)
    assert (smaller(CASES["filters"]).k, smaller(CASES["filters"]).c) == (16, 24)


def test_it_is_for_cpus():
    gpu = replace(CPU, device="cuda", arch="sm_90")
    assert "needs a CPU" in ENGINE.supports(CASES["both"], gpu).reason


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (LAYER, "without a mask"),
        (parse_problem(CASES["both"].key), "digest alone"),
        (dead(LAYER), "20 of 20 filters and 24 of 24 channels"),
        (dead(replace(LAYER, groups=4), filters=range(10)), "groups = 1"),
        (dead(SHAPES["empty batch"], filters=[0]), "filters"),
    ],
)
def test_refusals_say_why(problem, words):
    support = ENGINE.accepts(problem, CPU)
    assert not support
    assert words in support.reason


def test_a_value_where_the_mask_has_none_is_refused():
    problem = CASES["filters"]
    executable = ENGINE.build(problem, ENGINE.space(problem, CPU)[0], CPU)
    with pytest.raises(InputError, match="mask"):
        executable.pack((torch.ones(problem.weight_spec.shape),))


def test_on_a_gpu_an_engine_of_its_own_takes_dense_kernels_without_workspace():
    gpu = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
    half = dead(
        ConvProblem(8, 256, 14, 14, 256, 3, 3, 1, 1, layout="nhwc", numerics="half"), range(0, 256, 2), range(99)
    )
    half = replace(half, x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16")
    assert pruned_channels_gpu.ENGINE.supports(half, gpu)
    names = [knobs["inner"] for knobs in pruned_channels_gpu.ENGINE.space(half, gpu)]
    assert names[0] == "aten"
    for name in names:
        settings = inner_knobs(str(name), smaller(half), gpu)
        assert all(load_engine(str(name)).workspace_bytes(smaller(half), knobs) == 0 for knobs in settings)
    assert "needs a GPU" in pruned_channels_gpu.ENGINE.supports(half, CPU).reason
    assert "whole filters or channels" in pruned_channels_gpu.ENGINE.supports(dead(half), gpu).reason


def test_a_plan_that_the_library_names_and_then_refuses_is_no_setting(monkeypatch):
    inner = load_engine("onednn")
    refused, hungry, good = (Knobs.of(plan=name) for name in ("refused", "hungry", "good"))

    def workspace_bytes(problem, knobs):
        if knobs == refused:
            raise InputError("plan", "refused", "a plan that the library has")
        return 256 if knobs == hungry else 0

    monkeypatch.setattr(inner, "space", lambda problem, target: [refused, hungry, good])
    monkeypatch.setattr(inner, "workspace_bytes", workspace_bytes)
    assert inner_knobs("onednn", smaller(CASES["both"]), CPU) == [good]
    monkeypatch.setattr(inner, "space", lambda problem, target: [refused])
    assert ENGINE.space(CASES["both"], CPU) == [Knobs.of(inner="aten")]
