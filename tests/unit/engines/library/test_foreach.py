"""foreach: casts alone, each argument once; what else it refuses and why. That it is right is held in test_matrix."""

from dataclasses import replace

import pytest

from convoy.engines.manifest import load_engine
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem
from tests.unit.engines.conv_cases import CASTS, POOL

CPU = detect_target("cpu")


def changed(*pairs):
    text = CASTS.text
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return replace(CASTS, text=text)


def test_casts_are_done():
    assert load_engine("foreach").supports(CASTS, CPU)
    assert "subgraph of casts" in load_engine("inductor").supports(CASTS, CPU).reason


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (POOL, "several dtype casts"),
        (ConvProblem(1, 3, 8, 8, 4, 3, 3), "subgraphs"),
        (changed(("aten._to_copy.default(%v1", "aten._to_copy.default(%v0"), ("bf16[4] ", "bf16[4,3,3,3] ")), "once"),
        (changed(("return %v3, %v4, %v5", "return %v4, %v3, %v5")), "once"),
        (changed(("bf16[4] ", "fp16[4] "), ("%v1, dtype=dtype.bf16", "%v1, dtype=dtype.fp16")), "one input dtype"),
        (changed(("%v1, dtype=dtype.bf16)", "%v1, dtype=dtype.bf16, memory_format=memory_format.nhwc)")), "several"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(problem, words):
    assert words in load_engine("foreach").supports(problem, CPU).reason
