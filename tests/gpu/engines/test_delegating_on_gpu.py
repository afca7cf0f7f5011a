"""batches on the GPU: with every engine inside, exact on integers, within the bounds on real numbers, in guards."""

from dataclasses import replace

import pytest

from convoy.engines.delegating import micro_batched
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue

pytestmark = pytest.mark.gpu

FULL = Epilogue(bias=True, residual=True, activation="relu")
KINDS = [("fp16", "half"), ("fp32", "as_torch"), ("fp32", "strict")]


def conv(*sizes, kind, **rest):
    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), kind[0])
    return ConvProblem(*sizes, layout="nhwc", numerics=kind[1], **types, **rest)


def wrong(engine, problem, target, most=8):
    """The faults of the first settings, in words; each inner engine's first is among them."""
    support = engine.supports(problem, target)
    if not support:
        pytest.skip(support.reason)
    space, found = list(engine.space(problem, target)), []
    firsts = {knobs["inner"]: knobs for knobs in reversed(space)}
    for knobs in dict.fromkeys([*firsts.values(), *space[:most]]):
        executable = engine.build(problem, knobs, target)
        assert executable.workspace_bytes == engine.workspace_bytes(problem, knobs)
        for data in ("integer", "normal"):
            tf32 = problem.numerics == "as_torch"
            verdict = judge(executable, "library", problem, make_data(problem, 1, data, "cuda"), data, tf32=tf32)
            found += [] if verdict.ok else [f"[{knobs}] on {data} data: {verdict.reason}"]
    return found


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("c", [3, 64])
def test_parts_of_a_batch_are_the_whole(c, direction, kind):
    problem = conv(8, c, 28, 28, 64, 7 if c == 3 else 3, 7 if c == 3 else 3, 1, 1, kind=kind)
    epilogue = FULL if direction == "fprop" else Epilogue()
    assert (
        wrong(micro_batched.ENGINE, replace(problem, direction=direction, epilogue=epilogue), detect_target("cuda"))
        == []
    )
