"""Which engines a package's plan may have, and which plans of cuDNN's can stand in it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.engines.library.cudnn import calls_torch
from convoy.errors import InputError
from convoy.package.plan_choice import launches_no_kernel, own_engines
from convoy.problem import ConvProblem, Epilogue, Knobs, Problem, SubgraphProblem
from convoy.settings import Settings

PLAIN = ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1)


def test_a_portable_package_has_no_library() -> None:
    assert "cudnn" not in own_engines(Settings(), "cuda", portable=True)
    assert own_engines(Settings(), "cuda", portable=False) == [*own_engines(Settings(), "cuda"), "cudnn"]
    assert own_engines(Settings(), "cpu", portable=False) == own_engines(Settings(), "cpu")


def test_the_users_engines_hold() -> None:
    assert own_engines(Settings(only_engines=("cudnn", "aten")), "cuda", portable=False) == ["cudnn"]
    assert "cudnn" not in own_engines(Settings(deny_engines=("cudnn",)), "cuda", portable=False)
    with pytest.raises(InputError, match="only_engines"):
        own_engines(Settings(only_engines=("cudnn",)), "cuda", portable=True)


@pytest.mark.parametrize(
    ("epilogue", "fused", "calls"),
    [
        (Epilogue(), False, False),
        (Epilogue(bias=True), False, True),
        (Epilogue(bias=True), True, False),
        (Epilogue(bias=True, residual=True, activation="relu"), True, False),
        (Epilogue(bias=True, activation="hardswish"), True, True),
    ],
)
def test_what_is_left_to_pytorch_keeps_a_plan_out(epilogue: Epilogue, fused: bool, calls: bool) -> None:
    assert calls_torch(replace(PLAIN, epilogue=epilogue), Knobs.of(plan="eng1", fused=fused)) == calls


_VIEW = "%v1: fp32[2,2048] = aten.view.default(%v0, (2, 2048))\n"
_RELU = "%v1: fp32[2,32,8,8] = aten.relu.default(%v0)\n"


@pytest.mark.parametrize(
    ("problem", "none"),
    [
        (SubgraphProblem(f"graph 1\ninput %v0: fp32[2,32,8,8]\n{_VIEW}return %v1\n", "nchw", 1, "view"), True),
        (SubgraphProblem(f"graph 1\ninput %v0: fp32[2,32,8,8]\n{_VIEW}return %v1\n", "nhwc", 1, "view"), False),
        (SubgraphProblem(f"graph 1\ninput %v0: fp32[2,32,8,8]\n{_RELU}return %v1\n", "nchw", 1, "relu"), False),
        (PLAIN, False),
    ],
)
def test_a_view_of_dense_values_needs_no_kernel(problem: Problem, none: bool) -> None:
    """In channels_last it moves every element, so it does."""
    assert launches_no_kernel(problem) == none
