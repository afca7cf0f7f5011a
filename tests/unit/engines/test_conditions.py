"""What engines made of torch's operations share: refusals, and where oneDNN is not to be trusted."""

import pytest

from convoy.engines.conditions import effective_dilation, onednn_defect
from convoy.engines.manifest import load_engine
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.detect import detect_target
from convoy.problem import ConvProblem

BF16 = {"x_dtype": "bf16", "weight_dtype": "bf16", "y_dtype": "bf16", "numerics": "half"}

DEFECTS = [
    (
        ConvProblem(1, 1, 9, 2, 4, 3, 2, 4, 4, 3, 3, 1, 3),
        "crashes where a dilated filter (4 wide) fits into the padding (4)",
    ),
    (ConvProblem(1, 1, 5, 3, 4, 3, 3, 2, 1, 1, 5), "is wrong for one channel a group, not depthwise"),
    (ConvProblem(1, 2, 9, 1, 6, 3, 3, 1, 1, 5, 5, direction="wgrad", **BF16), "leaves bf16 weight gradients"),
    (ConvProblem(1, 39, 11, 2, 21, 7, 3, 2, 1, 2, 5, direction="wgrad", **BF16), "leaves bf16 weight gradients"),
]


@pytest.mark.parametrize(("problem", "phrase"), DEFECTS, ids=[str(p) for p, _ in DEFECTS])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_where_onednn_is_wrong_it_is_refused_and_the_baseline_does_without(problem, phrase, layout):
    problem, target = problem.with_layout(layout), detect_target("cpu")
    assert onednn_defect(problem).startswith(phrase)
    assert not load_engine("onednn").supports(problem, target)
    baseline = load_engine("aten")
    executable = baseline.build(problem, baseline.space(problem, target)[0], target)
    for seed in range(3):
        verdict = judge(executable, "library", problem, make_data(problem, seed, "integer"), "integer")
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(1, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2),
        ConvProblem(8, 64, 56, 56, 64, 3, 3, 1, 1, direction="wgrad", **BF16),
        ConvProblem(8, 64, 56, 56, 64, 3, 3, 2, 2, 1, 1, 2, 2),
        ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1, groups=512),
        ConvProblem(1, 1, 28, 28, 8, 5, 5),
    ],
    ids=str,
)
def test_layers_of_real_nets_are_not_refused(problem):
    assert onednn_defect(problem) == ""


def test_a_dilation_of_a_single_row_means_nothing():
    assert effective_dilation(ConvProblem(1, 1, 9, 9, 1, 1, 3, dilation_h=5, dilation_w=2)) == (1, 2)
