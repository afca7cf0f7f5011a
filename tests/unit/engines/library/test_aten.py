"""The baseline where the same bits are asked for: gradients by cuDNN have a setting of their own for that."""

import pytest
import torch

from convoy.engines.base import DETERMINISTIC
from convoy.engines.library.aten import ENGINE
from convoy.engines.torch_flags import convolutions
from convoy.problem import ConvProblem
from convoy.target import Target

CPU = Target("cpu", "a CPU", "avx2", 1, 8 << 30, 1 << 20)
CUDA = Target("cuda", "a GPU", "sm_90", 132, 80 << 30, 50 << 20)


def problem(direction):
    return ConvProblem(2, 8, 9, 9, 16, 3, 3, pad_h=1, pad_w=1, direction=direction)


@pytest.mark.parametrize(
    ("direction", "target", "steady"),
    [
        ("fprop", CUDA, [True]),
        ("dgrad", CUDA, [False, True]),
        ("wgrad", CUDA, [False, True]),
        ("wgrad", CPU, [True]),
    ],
)
def test_what_may_differ_from_run_to_run_has_a_setting_that_does_not(direction, target, steady):
    given = problem(direction)
    space = ENGINE.space(given, target)
    assert [bool(knobs.get(DETERMINISTIC)) for knobs in space] == [False, True][: len(space)]
    assert [ENGINE.build(given, knobs, target).deterministic for knobs in space] == steady


def test_cudnn_is_told_while_a_launch_is_queued_and_no_longer():
    before = torch.backends.cudnn.deterministic
    with convolutions("as_torch", torch.device("cuda"), deterministic=True):
        assert torch.backends.cudnn.deterministic
    with convolutions("as_torch", torch.device("cuda")):
        assert torch.backends.cudnn.deterministic == before
    assert torch.backends.cudnn.deterministic == before
