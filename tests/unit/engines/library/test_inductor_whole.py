"""inductor.whole: what it takes and why not, when it competes, right results on a CPU, and weights compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.competition import competing_engines
from convoy.engines.library import inductor_whole
from convoy.engines.library.inductor_whole import ENGINE, MODES
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement.data import make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.problem import ConvProblem, Knobs, SubgraphProblem
from convoy.settings import Settings
from convoy.target import Target

CPU = detect_target("cpu")
H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20, (("triton", "3.6.0"),))
needs_compiler = pytest.mark.skipif(not CPU.version("cxx"), reason="needs a C++ compiler")
DEFAULT = Knobs.of(mode="default")

(SAMPLE,) = ENGINE.samples()
assert isinstance(SAMPLE, SubgraphProblem)
NET: SubgraphProblem = SAMPLE
ONE = """\
graph 1
input %x: fp32[1,8,16,16]
constant %w: fp32[8,8,3,3]
%a: fp32[1,8,16,16] = conv2d(%x, %w, None, (1, 1), (1, 1), (1, 1), 1)
%r: fp32[1,8,16,16] = aten.relu.default(%a)
return %r
"""

GRADIENT = """\
graph 1
input %x: fp32[1,8,5,9]
constant %v: fp32[8,8,3,3]
constant %w: fp32[8,8,3,3]
%a: fp32[1,8,5,9] = conv2d(%x, %v, None, (1, 1), (1, 1), (1, 1), 1)
%p: fp32[1,8,3,5] = aten.avg_pool2d.default(%a, (2, 2), (2, 2), (0, 0), True)
%c: fp32[1,8,3,5] = conv2d(%p, %w, None, (1, 1), (1, 1), (1, 1), 1)
%d: fp32[1,8,5,9] = aten.avg_pool2d_backward.default(%c, %a, (2, 2), (2, 2), (0, 0), True, True, None)
return %d
"""


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (ConvProblem(1, 8, 8, 8, 8, 3, 3), "compiles nets"),
        (SubgraphProblem(GRADIENT, "nhwc"), "compiles inference, got aten.avg_pool2d_backward.default"),
        (replace(NET, layout="nchw"), "one memory format"),
        (SubgraphProblem(NET.text.replace("constant %w", "input %w"), "nhwc"), "constants"),
        (SubgraphProblem(ONE, "nhwc"), "several layers"),
    ],
)
def test_what_it_refuses_and_why(problem: Any, words: str) -> None:
    assert words in ENGINE.accepts(problem, replace(CPU, versions=(("cxx", "g++"),))).reason


def test_it_competes_at_efforts_that_measure_and_where_products_may_round() -> None:
    def competes(**settings: Any) -> bool:
        return "inductor.whole" in competing_engines(Settings(**settings))

    assert competes(effort="quick")
    assert competes(effort="full")
    assert not competes(effort="none")
    assert not competes(numerics="strict")


def test_every_mode_is_a_setting_and_builds_have_more_time() -> None:
    assert [str(knobs["mode"]) for knobs in ENGINE.space(NET, H100)] == list(MODES["cuda"])
    assert ENGINE.build_patience > 1
    assert ENGINE.accepts(NET, H100)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[torch.Tensor]]:
    """The weights of each compilation, which PyTorch's own operators stand in for."""
    seen: list[Sequence[torch.Tensor]] = []
    stock = load_engine("aten").build(NET, Knobs(), CPU)

    def compile_(problem: Any, target: Any, options: Any, constants: Sequence[torch.Tensor]) -> Any:
        seen.append(constants)
        held = [tensor.clone() for tensor in constants]

        def run(*args: torch.Tensor) -> Any:
            buffers = Buffers(args, [None], stock.pack(held))
            stock.launch(buffers, None)
            return buffers.results

        return run

    monkeypatch.setattr(inductor_whole, "_compile", compile_)
    return seen


def launched(executable: Any, args: Any, packed: Any) -> torch.Tensor:
    buffers = Buffers(args, [None], packed)
    executable.launch(buffers, None)
    result = buffers.results[0]
    assert result is not None
    return result


def test_a_cpus_program_is_compiled_once_for_the_same_weights_and_again_for_others(compiled: Any) -> None:
    data = make_data(NET, 0)
    executable = ENGINE.build(NET, DEFAULT, CPU)
    assert not compiled
    packed = executable.pack(data.constants)
    assert executable.pack([tensor.clone() for tensor in data.constants]) is packed
    assert len(compiled) == 1
    twice = executable.pack([2 * tensor for tensor in data.constants])
    assert len(compiled) == 2
    torch.testing.assert_close(launched(executable, data.args, twice), 4 * launched(executable, data.args, packed))
    assert executable.resident_bytes(packed) == sum(tensor.nbytes for tensor in data.constants)


def test_the_compilers_message_is_a_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such header\nand more")

    monkeypatch.setattr(inductor_whole, "_compile", fail)
    with pytest.raises(CompileError, match="no such header"):
        ENGINE.build(NET, DEFAULT, CPU).pack(make_data(NET, 0).constants)


@needs_compiler
def test_inductor_compiles_a_net_with_its_weights() -> None:
    data = make_data(NET, 0)
    executable = ENGINE.build(NET, DEFAULT, CPU)
    result = launched(executable, data.args, executable.pack(data.constants))
    assert result.is_contiguous(memory_format=torch.channels_last)
    (exact,) = oracle(NET, data)
    assert float((result.double() - exact).norm() / exact.norm()) < 1e-6
