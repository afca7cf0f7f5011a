"""The class attributes of engines agree with their executables and with `supports`."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from convoy.engines.cpu.native_launch import NativeExecutable
from convoy.engines.hopper.nvrtc_kernel import absence
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.engines.triton.triton_build import installed
from convoy.measurement.data import result_specs
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Knobs, LayoutProblem, SubgraphProblem
from convoy.regions import PATTERNS
from convoy.target import Target
from tests.unit.engines import norm_cases
from tests.unit.engines.conv_cases import LINEAR, OTHERS
from tests.unit.engines.pruned_cases import mask_of

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.13.0"),))
CPU = detect_target("cpu")
MERGE = """graph 1
input %x: fp16[1,64,8,8]
constant %w1: fp16[64,64,1,1]
constant %w2: fp16[32,64,1,1]
%a: fp16[1,64,8,8] = conv2d(%x, %w1, None, (1, 1), (0, 0), (1, 1), 1)
%b: fp16[1,32,8,8] = conv2d(%x, %w2, None, (1, 1), (0, 0), (1, 1), 1)
return %a, %b
"""
PLACES = ((160, 32), (96, 16), (256, 128))
"""(channels of the larger tensor, the slice's first)."""


def typed(dtype, **more):
    """A 3x3 convolution in nhwc with changes."""
    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    found = ConvProblem(2, 64, 14, 14, 64, 3, 3, 1, 1, layout="nhwc", numerics="as_torch", **types)
    return replace(found, **more)


def problems():
    """Of every kind that a region can have, in nhwc: for each engine for a GPU or a CPU at least one."""
    half, full = typed("fp16"), typed("fp32")
    wide = typed("fp16", c=128, k=128)
    few = {"c": 3, "h": 224, "w": 224, "r": 7, "s": 7, "stride_h": 2, "stride_w": 2, "pad_h": 3, "pad_w": 3}
    pairs = np.zeros(wide.weight_spec.shape, dtype=bool)
    pairs[:, ::2] = True
    blocks = np.zeros(wide.weight_spec.shape, dtype=bool)
    blocks[:, :64] = True
    yield from (half, full, replace(full, numerics="strict"))
    yield from (typed("fp16", r=1, s=1, pad_h=0, pad_w=0), typed("fp32", r=1, s=1, pad_h=0, pad_w=0, h=1, w=1))
    yield from (typed("fp16", **few), typed("fp32", **few))
    yield from (typed("fp16", c=64, groups=64), typed("fp32", c=64, groups=64))
    yield from (replace(half, dynamic_weight=True), typed("fp16", c=3, k=64), typed("fp16", c=60, k=61))
    for direction in ("dgrad", "wgrad"):
        yield from (
            replace(p, direction=direction) for p in (half, full, typed("fp16", c=64, groups=64), typed("fp16", **few))
        )
    yield from (
        wide.with_mask(mask_of(pairs)),
        wide.with_mask(mask_of(blocks)),
        wide.with_mask(mask_of(blocks & pairs)),
    )
    yield from (full.with_mask(mask_of(pairs[:64, :64])), full.with_layout("nchw").with_mask(mask_of(pairs[:64, :64])))
    yield from LINEAR
    yield from (problem for problem in OTHERS if not isinstance(problem, LayoutProblem))
    yield SubgraphProblem(MERGE, "nhwc")
    yield from (*load_engine("cuda.bottleneck").samples(), *load_engine("cuda.fusion").samples())
    yield from (norm_cases.forward(name) for name in norm_cases.CASES)
    yield from (norm_cases.backward(name) for name in norm_cases.CASES)


@pytest.fixture
def compilers_do_nothing(monkeypatch):
    """Executables are made without compiling."""
    monkeypatch.setattr("convoy.engines.hopper.nvrtc_kernel.cached", lambda *_: bytes(4))
    monkeypatch.setattr("convoy.engines.triton.triton_build.compile_kernel", lambda *_: SimpleNamespace())


def writes_slices(executable, problem):
    """Whether an executable takes any of some places for any of its results."""
    return any(executable.accept_slice(i, *place) for i in range(len(result_specs(problem))) for place in PLACES)


ABOUT = [name for name in MANIFEST if name not in ("inductor", "cudnn", "pruned.cuda")]
"""Engines whose executables can be made here without a library's own compiler."""


@pytest.mark.parametrize("name", ABOUT)
def test_slices_are_written_by_those_that_say_so(name, compilers_do_nothing):
    engine = load_engine(name)
    if engine.devices == ("cuda",) and (absence() or not installed()):
        pytest.skip("the libraries that its kernels are compiled with are not here")
    targets = [target for target in (CPU, H100) if target.device in engine.devices]
    asked = [(p, t) for p in problems() for t in targets if engine.accepts(p, t)]
    if engine.writes_slices:
        assert asked
    made = [engine.build(p, engine.space(p, t)[0], t) for p, t in asked[:12]]
    found = [writes_slices(executable, p) for executable, (p, _) in zip(made, asked, strict=False)]
    assert any(found) == engine.writes_slices
    if engine.native:
        assert all(isinstance(executable, NativeExecutable) for executable in made)
    else:
        assert not any(isinstance(executable, NativeExecutable) for executable in made)


@pytest.mark.parametrize("name", MANIFEST)
def test_on_other_devices_supports_says_no(name):
    engine = load_engine(name)
    others = [target for target in (CPU, H100) if target.device not in engine.devices]
    assert [p for p in problems() for target in others if engine.accepts(p, target)] == []


def test_patterns_are_known_and_each_has_an_engine():
    named = [pattern for name in MANIFEST for pattern in load_engine(name).patterns]
    assert sorted(named) == sorted(PATTERNS)


def test_a_method_under_its_former_name_is_taken_with_a_warning():
    with pytest.warns(UserWarning, match="unsteady is now named nondeterminism_reason") as caught:

        class Former(type(load_engine("aten"))):
            id = "former"

            def unsteady(self, problem, knobs, target):
                return "sums in any order"

    assert caught[0].filename == __file__
    assert Former().nondeterminism_reason(OTHERS[0], Knobs(), CPU) == "sums in any order"
