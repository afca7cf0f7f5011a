"""Signatures and bound steps: what decides which program serves a call, and when memory goes back."""

from __future__ import annotations

import torch

from convoy.plan.plan import Step
from convoy.problem import EngineConfig, TensorSpec
from convoy.program.bound_plan import BoundStep
from convoy.program.calls import CallExample, signature_of
from convoy.program.lifetimes import with_frees


def test_signatures_tell_shapes_dtypes_structure_and_values_apart() -> None:
    x = torch.zeros(1, 2)
    calls = [
        ((x,), {}),
        ((x, x), {}),
        (((x, x),), {}),
        (([x, x],), {}),
        ((x.double(),), {}),
        ((torch.zeros(2, 1),), {}),
        ((x, 3), {}),
        ((x, 4), {}),
        ((x, None), {}),
        ((x,), {"tensor": x}),
        ((x,), {"value": x}),
        ((), {"x": {"a": x}}),
    ]
    signatures = [signature_of(args, kwargs) for args, kwargs in calls]
    assert len(set(signatures)) == len(calls)
    for call, signature in zip(calls, signatures, strict=True):
        assert signature_of(*CallExample.of(*call).zeros()) == signature


def bound(args: tuple[int, ...], results: tuple[int, ...]) -> BoundStep:
    step = Step("region", "op", ("n",), (), (), "p", EngineConfig("aten"), "any")
    return BoundStep(step, None, (), args, results, (TensorSpec((1,), "fp32"),))  # type: ignore[arg-type]


def test_each_slot_is_freed_after_its_last_use_and_outputs_never() -> None:
    steps = [bound((0,), (1,)), bound((1, 0), (2,)), bound((1,), (3,)), bound((3,), (4,)), bound((3,), (5,))]
    steps = with_frees(steps, outputs=[2, 5])
    assert [step.frees for step in steps] == [(), (0,), (1,), (4,), (3,)]
