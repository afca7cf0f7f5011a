"""Where Inductor computes wrongly, `inductor` refuses; PyTorch's own operator is right there; and the fault is still there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.library.inductor import ENGINE
from convoy.engines.manifest import load_engine
from convoy.measurement.data import make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.problem import Knobs, SubgraphProblem

CPU = detect_target("cpu")
WITH_COMPILER = replace(CPU, versions=(("cxx", "g++"),))
NAMES = {2: "avg_pool2d_backward", 3: "avg_pool3d_backward"}


def gradient(made: tuple[int, ...], image: tuple[int, ...], arguments: str) -> SubgraphProblem:
    """The gradient of an average pooling of images of four channels."""
    wide, narrow = (f"fp32[1,4,{','.join(map(str, sides))}]" for sides in (image, made))
    node = f"aten.{NAMES[len(image)]}.default(%dy, %x, {arguments})"
    return SubgraphProblem(f"graph 1\ninput %dy: {narrow}\ninput %x: {wide}\n%dx: {wide} = {node}\nreturn %dx\n")


ROWS = gradient((3, 5), (5, 10), "(2, 2), (2, 2), (0, 0), True, True, None")
"""The last windows have one row beyond the image."""

WRONG = [
    ROWS,
    gradient((3, 5), (5, 9), "(2, 2), (2, 2), (0, 0), True, True, None"),
    gradient((5, 6), (8, 11), "(3, 3), (2, 2), (1, 1), True, True, None"),
    gradient((3, 5), (5, 10), "(2, 2), (), (0, 0), True, True, None"),  # no stride: the window's
    gradient((3, 5), (5, 10), "2, 2, 0, True, True, None"),
    gradient((3, 5), (5, 10), "(2,), (2,), (0,), True, True, None"),
    gradient((3, 5), (5, 10), "(2, 2), (2, 2), (0, 0), True, count_include_pad=True, divisor_override=None"),
    gradient((2, 2, 3), (4, 4, 5), "(2, 2, 2), (2, 2, 2), (0, 0, 0), True, True, None"),
]
RIGHT = [
    gradient((2, 5), (5, 10), "(2, 2), (2, 2), (0, 0), False, True, None"),
    gradient((3, 5), (5, 10), "(2, 2), (2, 2), (0, 0), True, False, None"),
    gradient((3, 5), (5, 10), "(2, 2), (2, 2), (0, 0), True, True, 3"),
    gradient((3, 5), (6, 10), "(2, 2), (2, 2), (0, 0), True, True, None"),  # no window goes beyond the image
    gradient((4, 4), (7, 7), "(3, 3), (2, 2), (1, 1), True, True, None"),  # nor beyond the padding
    gradient((2, 2, 2), (4, 4, 4), "(2, 2, 2), (2, 2, 2), (0, 0, 0), True, True, None"),
]


@pytest.mark.parametrize("problem", WRONG)
def test_windows_beyond_the_padded_image_are_refused(problem: SubgraphProblem) -> None:
    reason = ENGINE.supports(problem, WITH_COMPILER).reason
    assert reason.startswith("Inductor divides by places outside of the padded image: aten.avg_pool")


@pytest.mark.parametrize("problem", RIGHT)
def test_the_other_gradients_are_taken(problem: SubgraphProblem) -> None:
    assert ENGINE.supports(problem, WITH_COMPILER)


def test_such_a_gradient_among_others_is_refused() -> None:
    text = ROWS.text.replace("return %dx", "%z: fp32[1,4,5,10] = aten.relu.default(%dx)\nreturn %z")
    assert "outside of the padded image" in ENGINE.supports(SubgraphProblem(text), WITH_COMPILER).reason


def result(engine: str, problem: SubgraphProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """An engine's result, whether it supports the problem or not, and the exact one in float64."""
    data = make_data(problem, 1, "normal")
    (exact,) = oracle(problem, data)
    built = load_engine(engine).build(problem, Knobs(), CPU)
    buffers = Buffers(tuple(data.args), [torch.full(exact.shape, float("nan"))], built.pack(data.constants))
    built.launch(buffers, None)
    (made,) = buffers.results
    assert made is not None
    return made.double(), exact


@pytest.mark.parametrize("problem", WRONG[:3])
def test_pytorchs_own_operator_is_right(problem: SubgraphProblem) -> None:
    torch.testing.assert_close(*result("aten", problem), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not CPU.version("cxx"), reason="needs a C++ compiler")
def test_the_fault_is_still_there() -> None:
    made, exact = result("inductor", ROWS)
    if torch.allclose(made, exact, rtol=1e-4):
        pytest.skip(f"PyTorch {torch.__version__} has mended it: this version needs no refusal")
    torch.testing.assert_close(made[:, :, :4], exact[:, :, :4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made[:, :, 4] * 2, exact[:, :, 4], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not CPU.version("cxx"), reason="needs a C++ compiler")
def test_inductor_is_right_where_no_window_goes_beyond() -> None:
    torch.testing.assert_close(*result("inductor", RIGHT[4]), rtol=1e-4, atol=1e-5)
