"""Convolutions with a fresh weight: every engine, its packing part of the launch, reads the weight of this very call."""

from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import InputError
from convoy.measurement.accuracy import judge, make_data, oracle
from convoy.measurement.device.detect import detect_target
from convoy.problem import Epilogue, Knobs
from tests.unit.engines.conv_cases import BIAS_RELU, SHAPES, of_dtype

CPU = detect_target("cpu")
SOME = (
    "3x3 padded",
    "3x3 stride 2",
    "1x1",
    "1x1 grouped",
    "depthwise",
    "11x11 stride 4",
    "empty batch",
    "large enough for tiles",
)


def fresh(shape, dtype, layout, epilogue):
    return replace(of_dtype(SHAPES[shape], dtype).with_layout(layout), epilogue=epilogue, dynamic_weight=True)


@pytest.mark.parametrize("engine", [load_engine(name) for name in MANIFEST], ids=lambda engine: engine.id)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_engine_takes_the_weight_as_an_argument(engine, layout):
    for shape in SOME:
        for dtype in ("fp32", "bf16"):
            for epilogue in (Epilogue(), Epilogue(bias=True, residual=True, activation="relu")):
                problem = fresh(shape, dtype, layout, epilogue)
                if not engine.supports(problem, CPU):
                    continue
                executable = build(engine, problem, engine.space(problem, CPU)[0], CPU)
                for kind in ("integer", "cancelling"):
                    verdict = judge(executable, engine.family, problem, make_data(problem, 1, kind), kind)
                    assert verdict.ok, f"{problem} on {kind} data: {verdict.reason}"


def test_the_weight_of_the_call_counts_and_not_the_first_one():
    problem = fresh("3x3 padded", "fp32", "nhwc", BIAS_RELU)
    for name in MANIFEST:
        engine = load_engine(name)
        if not engine.supports(problem, CPU):
            continue
        executable = build(engine, problem, engine.space(problem, CPU)[0], CPU)
        workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8)
        for seed in (1, 2):
            data = make_data(problem, seed)
            results = [None if executable.allocates_results else torch.empty(problem.y_spec.shape)]
            results = [r if r is None else r.contiguous(memory_format=torch.channels_last) for r in results]
            buffers = Buffers(data.args, results)
            executable.launch(buffers, workspace)
            (exact,) = oracle(problem, data)
            assert torch.allclose(buffers.results[0].double(), exact, atol=1e-4), name


class _Stale(Executable):
    """Planted: keeps the weight of its first launch."""

    allocates_results = True

    def __init__(self, inner):
        self._inner, self._kept = inner, None

    def launch(self, buffers, workspace):
        x, weight, *rest = buffers.args
        self._kept = weight if self._kept is None else self._kept
        self._inner.launch(replaced := Buffers((x, self._kept, *rest), buffers.results), workspace)
        buffers.results[:] = replaced.results


def test_an_executable_that_keeps_the_first_weight_is_caught():
    problem = fresh("3x3 padded", "fp32", "nchw", Epilogue())
    stale = _Stale(build(load_engine("aten"), problem, Knobs(), CPU))
    verdicts = [judge(stale, "library", problem, make_data(problem, seed, "normal"), "normal") for seed in (1, 2)]
    assert [verdict.ok for verdict in verdicts] == [True, False]


def test_gradients_read_no_fresh_weight():
    with pytest.raises(InputError, match="dynamic_weight"):
        replace(SHAPES["1x1"], direction="wgrad", dynamic_weight=True)
