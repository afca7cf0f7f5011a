"""tracer_words: a message says what in the user's code stops a tracer, for each of its private errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from convoy.capture import capture_inference
from convoy.capture.tracer_words import tracer_words
from convoy.errors import CaptureError


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda x: x.sum().item(), "values of a tensor decide what runs.*\\(DataDependentOutputException: aten._local"),
        (torch.nonzero, "values of a tensor decide the shape.*\\(DynamicOutputShapeException: aten.nonzero.default\\)"),
    ],
    ids=["item", "nonzero"],
)
def test_what_fake_tensors_refuse_is_said_in_words_of_the_users_code(
    run: Callable[[torch.Tensor], object], words: str
) -> None:
    with FakeTensorMode() as mode, pytest.raises(RuntimeError) as caught:
        run(mode.from_tensor(torch.ones(3)))
    with pytest.raises(CaptureError, match=f"^{words}"):
        raise CaptureError(tracer_words(caught.value))


def test_other_errors_keep_their_own_words() -> None:
    assert tracer_words(ValueError("no such axis")) == "ValueError: no such axis"
    assert tracer_words(AssertionError()) == "AssertionError"


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor


class ReturnsObject(nn.Module):
    def forward(self, x: torch.Tensor) -> Scores:
        return Scores(x * 2)


def test_a_result_of_an_unknown_class_names_the_call_that_makes_it_known() -> None:
    x = torch.randn(3)
    with pytest.raises(CaptureError, match=r"call torch\.export\.register_dataclass\(CLASS\)"):
        capture_inference(ReturnsObject(), (x,))
