"""A plan in words: layers by every name that people see, with their candidates and PyTorch's time; predictions are marked."""

from __future__ import annotations

import dataclasses
import json

import pytest

from convoy import plan as plans
from convoy.errors import InputError, PlanError
from convoy.plan import Plan, Step, StepCandidate
from convoy.plan.describe import CUT, step_name
from convoy.problem import ConvProblem, EngineConfig, Knobs
from tests.unit.plan.test_file import PLAN, STEPS

CANDIDATES = (
    StepCandidate("triton.implicit_gemm", "block_m=64,flat=true", "nhwc", "ok", 7.25),
    StepCandidate("aten", "", "nchw", "ok", 9.5, predicted=True),
    StepCandidate("cudnn", "", "nchw", "out_of_memory", reason="needs 3 GiB"),
)
MERGED = dataclasses.replace(STEPS[1], candidates=CANDIDATES, baseline_us=14.5)
MEASURED = dataclasses.replace(PLAN, steps=(STEPS[0], MERGED))
LONG = "layer1.0.conv1+layer1.0.bn1+layer1.0.relu+layer1.0.conv2"


def predicted(plan: Plan) -> Plan:
    steps = tuple(dataclasses.replace(step, predicted=True, baseline_predicted=True) for step in plan.steps)
    return dataclasses.replace(plan, steps=steps, predicted=True)


@pytest.mark.parametrize("name", ["conv+relu", "conv", "relu", "relu+conv", "conv(conv+relu)"])
def test_a_merged_layer_has_its_joint_name_and_those_of_its_parts(name: str) -> None:
    text = plans.explain(MEASURED, name)
    assert text.startswith(f"{name}: step 2 of 2, conv(conv+relu)\n")


def test_a_copy_has_a_name_too() -> None:
    assert "layout:nchw:nhwc" in plans.explain(MEASURED, step_name(STEPS[0]))
    assert step_name(STEPS[0]) == "x to nhwc"


def test_a_name_that_the_table_has_cut_is_understood() -> None:
    long = dataclasses.replace(MERGED, nodes=tuple(LONG.split("+")))
    plan = dataclasses.replace(MEASURED, steps=(STEPS[0], long))
    assert LONG in plans.explain(plan, LONG[:41] + CUT)
    printed = plans.explain(plan).splitlines()[-2].split()[0]  # before the note
    assert printed.endswith(CUT)
    assert LONG in plans.explain(plan, printed)
    for wrong in (CUT, "conv9" + CUT, LONG[:40]):
        with pytest.raises(InputError, match=r"layer1\.0\.conv1\+"):
            plans.explain(plan, wrong)


def test_a_layer_lists_its_candidates_and_pytorchs_time() -> None:
    lines = plans.explain(MEASURED, "conv+relu").splitlines()
    assert "time       7.25 us (82.9% of the net)" in lines
    assert "PyTorch    14.50 us, 2.00x as long" in lines
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table == [
        ["candidate", "knobs", "layout", "us"],
        ["triton.implicit_gemm", "block_m=64,flat=true", "nhwc", "7.25", "chosen"],
        ["aten", "-", "nchw", "~9.50"],
        ["cudnn", "-", "nchw", "out_of_memory:", "needs", "3", "GiB"],
    ]


def test_what_was_selected_is_explained_although_the_plan_is_the_baseline() -> None:
    plan = MEASURED.as_baseline()
    assert (plan.steps, plan.rejected_steps) == ((), MEASURED.steps)
    assert "conv(conv+relu)" in plans.explain(plan)
    text = plans.explain(plan, "conv")
    assert "does not run: the plan is the baseline" in text
    assert "~9.50" in text
    assert plans.from_dict(plans.to_dict(plan)) == plan
    assert "does not run" not in plans.explain(MEASURED, "conv")


def test_predicted_times_are_marked_and_nothing_is_computed_from_them() -> None:
    plan = predicted(MEASURED)
    text = plans.explain(plan)
    assert "add up to ~0.009 ms, in part predicted" in text
    assert "can be under" not in text
    assert "~7.2" in text
    assert "~14.5" in text
    details = plans.explain(plan, "conv")
    assert "time       ~7.25 us\n" in details
    assert "PyTorch    ~14.50 us\n" in details
    assert "can be under 0.009 ms" in plans.explain(MEASURED)
    assert "~" not in plans.explain(MEASURED)


def test_the_difference_of_two_plans_marks_predictions() -> None:
    other = dataclasses.replace(MERGED, config=EngineConfig("aten"), predicted=True)
    lines = plans.compare(MEASURED, dataclasses.replace(MEASURED, steps=(STEPS[0], other)))
    assert len(lines) == 2
    assert all(" nhwc 7.2 us -> aten@1[] nhwc ~7.2 us" in line for line in lines)


def test_candidates_go_through_a_file_and_files_without_them_are_read() -> None:
    plan = predicted(MEASURED)
    data = json.loads(json.dumps(plans.to_dict(plan)))
    assert plans.from_dict(data) == plan
    for name in ("predicted", "rejected_steps"):
        del data[name]
    for step in data["steps"]:
        for name in ("predicted", "baseline_us", "baseline_predicted", "candidates"):
            del step[name]
    assert plans.from_dict(data) == PLAN


@pytest.mark.parametrize(
    "change",
    [{"engine": "no engine"}, {"layout": "x"}, {"status": "OK"}, {"median_us": -1}, {"reason": "x" * 201}, {"more": 1}],
)
def test_a_wrong_candidate_is_refused_and_named(change: dict[str, object]) -> None:
    data = plans.to_dict(MEASURED)
    data["steps"][1]["candidates"][0] |= change
    with pytest.raises(PlanError, match=rf"^plan\.steps\[1\]\.candidates\[0\]\.{next(iter(change))}"):
        plans.from_dict(data)


def test_control_characters_of_a_file_are_not_printed() -> None:
    hostile = dataclasses.replace(
        MERGED, candidates=(StepCandidate("aten", "\x1b[2J", "nchw", "ok", 1.0, reason="\x1b"),)
    )
    text = plans.explain(dataclasses.replace(MEASURED, steps=(STEPS[0], hostile)), "conv")
    assert "\x1b" not in text


def test_two_steps_of_one_node_are_both_explained() -> None:
    problem = ConvProblem(1, 3, 8, 8, 4, 3, 3).key
    first, second = (
        Step("region", "banded", (f"a{i}", "b"), ("x",), (f"a{i}",), problem, EngineConfig("aten", 1, Knobs()), "nchw")
        for i in (1, 2)
    )
    text = plans.explain(dataclasses.replace(PLAN, steps=(first, second)), "b")
    assert text.count("b: step") == 2
