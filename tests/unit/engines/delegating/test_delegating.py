"""batches: a convolution a few images at a time by another engine. On the CPU, with `gemm` in that one's place."""

from dataclasses import replace

import pytest

from convoy.engines.delegating import delegating, micro_batched
from convoy.engines.delegating.micro_batched import MicroBatchedExecutable
from convoy.engines.manifest import load_engine
from convoy.errors import InputError
from convoy.measurement.accuracy import judge, make_data
from convoy.problem import Epilogue, Knobs
from convoy.target import Target
from tests.unit.engines.emulated_cuda import conv

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
FULL = Epilogue(bias=True, residual=True, activation="relu")
BATCH = conv(6, 8, 7, 6, 12, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=FULL)
GEMM = load_engine("gemm")


@pytest.fixture(autouse=True)
def _gemm_inside(monkeypatch):
    monkeypatch.setattr(micro_batched, "DELEGATES", ("gemm",))
    delegating.delegate_knobs.cache_clear()
    yield
    delegating.delegate_knobs.cache_clear()


def right(executable, problem, kind):
    return judge(executable, "gemm", problem, make_data(problem, 1, kind, "cpu"), kind)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("kind", ["integer", "normal"])
def test_parts_of_a_batch_are_the_whole(direction, kind):
    problem = replace(BATCH, direction=direction, epilogue=FULL if direction == "fprop" else Epilogue())
    whole = max(GEMM.workspace_bytes(problem, knobs) for knobs in GEMM.space(problem, GPU))
    assert micro_batched.ENGINE.supports(problem, GPU)
    for knobs in micro_batched.ENGINE.space(problem, GPU):
        executable = micro_batched.ENGINE.build(problem, knobs, GPU)
        assert 0 < executable.workspace_bytes == micro_batched.ENGINE.workspace_bytes(problem, knobs) <= whole
        assert (
            executable.workspace_bytes < whole or knobs["images"] == 1
        )  # gemm splits by itself: it is no batch's then
        verdict = right(executable, problem, kind)
        assert verdict.ok, (knobs, verdict.reason)


def test_a_part_that_is_left_out_is_seen():
    small = micro_batched.micro_batch(BATCH, 2)
    two_of_three = replace(BATCH, n=4)
    executable = MicroBatchedExecutable(two_of_three, 2, GEMM.build(small, GEMM.space(small, GPU)[0], GPU))
    assert not right(executable, BATCH, "normal").ok


def test_parts_are_whole_and_begin_at_multiples_of_sixteen_bytes():
    assert list(micro_batched.sizes(replace(BATCH, n=12))) == [6, 4, 3, 2, 1]
    assert list(micro_batched.sizes(replace(BATCH, n=12, c=1, h=3, w=3, k=4))) == [4]
    assert list(micro_batched.sizes(replace(BATCH, n=1))) == []
    assert "grows with the batch" in micro_batched.ENGINE.supports(replace(BATCH, n=1), GPU).reason


def test_a_plan_that_the_inner_engine_names_and_then_refuses_is_no_setting(monkeypatch):
    wanted = GEMM.workspace_bytes

    def workspace_bytes(problem, knobs):
        if "refused" in knobs:
            raise InputError("plan", "refused", "a plan that the library has")
        return wanted(problem, knobs)

    good = delegating.delegate_knobs("gemm", micro_batched.micro_batch(BATCH, 2), GPU)
    delegating.delegate_knobs.cache_clear()
    monkeypatch.setattr(GEMM, "workspace_bytes", workspace_bytes)
    monkeypatch.setattr(GEMM, "space", lambda problem, target: [Knobs.of(refused=1), *good])
    offered = micro_batched.ENGINE.space(BATCH, GPU)
    assert offered
    assert not any("refused" in knobs for knobs in offered)


def test_knobs_of_both_engines_stand_side_by_side():
    knobs = delegating.wrap_knobs("gemm", Knobs.of(images=1, k=2), parts=3)
    assert delegating.unwrap_knobs(knobs, ("gemm",), "parts") == ("gemm", Knobs.of(images=1, k=2))
    with pytest.raises(InputError, match="inner as one of"):
        delegating.unwrap_knobs(knobs, ("cudnn",), "parts")
