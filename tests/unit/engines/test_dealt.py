"""Settings dealt out over cases: none is lost, each case has the first, and has its share of what is compiled."""

import pytest

from convoy.engines.triton.depthwise_gradients import ENGINE
from convoy.problem import ConvProblem
from convoy.target import Target
from tests.unit.engines.dealt import dealt, kernel_of

GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
@pytest.mark.parametrize("begin", [0, 2])
def test_cases_have_all_settings_between_them(direction, begin):
    given = ConvProblem(4, 96, 56, 56, 96, 3, 3, 1, 1, groups=96, layout="nhwc", direction=direction)
    space = ENGINE.space(given, GPU)
    cases = [dealt(space, begin + place, 3, ("parts",)) for place in range(3)]
    assert {knobs for case in cases for knobs in case} == set(space)
    assert all(case[0] == space[0] for case in cases)
    kernels = len({kernel_of(knobs, ("parts",)) for knobs in space})
    assert kernels >= 9
    for case in cases:
        assert len({kernel_of(knobs, ("parts",)) for knobs in case}) <= -(-kernels // 3) + 1


def test_what_is_only_launched_stays_together():
    given = ConvProblem(4, 96, 56, 56, 96, 3, 3, 1, 1, groups=96, layout="nhwc", direction="wgrad")
    space = ENGINE.space(given, GPU)
    found = dealt(space, 1, 3, ("parts",))[1:]
    for knobs in found:
        assert {k for k in space if kernel_of(k, ("parts",)) == kernel_of(knobs, ("parts",))} <= {space[0], *found}
