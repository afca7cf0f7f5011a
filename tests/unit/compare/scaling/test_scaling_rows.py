"""Rows of scaling that come from a file: the number of GPUs or processes is read with care."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.compare.scaling.scaling_jobs import ScaleRequest, ScalingJob
from convoy.compare.scaling.scaling_rows import count_of, result_row
from convoy.errors import InputError

ROW = result_row(
    ScalingJob(ScaleRequest(model="alexnet", gpus=(4,), batch=8), "convoy", 4, "weak"),
    {"rounds": {"step": [0.01] * 3}, "values": {}, "setting": "words", "notes": [], "backend": "nccl"},
)


@pytest.mark.parametrize("axes", [{"gpus": 4}, {"processes": 4}, {"gpus": "4"}])
def test_the_number_has_one_of_two_names(axes: dict[str, int | str]) -> None:
    assert count_of(replace(ROW, axes=axes)) == 4


@pytest.mark.parametrize("axes", [{}, {"gpus": -1}, {"gpus": 0}, {"gpus": "١"}, {"gpus": 10**9}, {"gpus": 2.5}])
def test_a_row_without_a_number_is_refused(axes: dict[str, int | float | str]) -> None:
    with pytest.raises(InputError, match="a number of GPUs or processes"):
        count_of(replace(ROW, axes=axes))
