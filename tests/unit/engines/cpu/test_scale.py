"""cpu.scale: equal to PyTorch's in every order and width, within its buffers, and the same bits for any number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu.cpu_scale import ENGINE, SOURCE
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.engines.cpu.weight_tiles import VECTORS_H
from convoy.measurement.candidate import prepare
from convoy.measurement.device.detect import detect_target
from convoy.measurement.reference_data import ReferenceData
from convoy.problem import Knobs, SubgraphProblem
from convoy.target import Target
from tests.unit.engines import sanitized

CPU = detect_target("cpu")
pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

BF16_ERROR = 2.0**-8
"""More than the error of one rounding to bf16, less than that of two."""

RELU = "aten.relu.default(%n)"
RELU6 = "aten.hardtanh.default(%n, 0, 6)"
HARDSWISH = "aten.hardswish.default(%n)"

CASES = {
    "a dense layer's": ((1, 14, 14), (256, 32, 32, 32), RELU),
    "a value by itself": ((2, 9, 5), (40,), RELU),
    "no activation": ((1, 7, 7), (64, 64), ""),
    "relu6": ((3, 5, 6), (33, 100), RELU6),
    "channels that fill no register": ((2, 3, 3), (1, 2, 15, 17, 63, 65), RELU),
    "hardswish": ((2, 5, 5), (20, 37), HARDSWISH),
    "one pixel": ((1, 1, 1), (5, 16), RELU),
    "no image": ((0, 4, 4), (8, 8), RELU),
    "large enough for threads": ((2, 28, 28), (96, 64), RELU),
}


def piece(name: str, layout: str = "nhwc", dtype: str = "fp32", order: str = "%s, %x, %m") -> SubgraphProblem:
    (n, h, w), channels, activation = CASES[name]
    whole = sum(channels)
    made = f"{dtype}[{n},{whole},{h},{w}]"
    lines = ["graph 1", *(f"input %a{i}: {dtype}[{n},{c},{h},{w}]" for i, c in enumerate(channels))]
    lines += [f"constant %{constant}: {dtype}[1,{whole},1,1]" for constant in ("s", "m")]
    x = "%a0"
    if len(channels) > 1:
        lines.append(f"%x: {made} = aten.cat.default(({', '.join(f'%a{i}' for i in range(len(channels)))}), 1)")
        x = "%x"
    lines.append(f"%n: {made} = aten.addcmul.default({order.replace('%x', x)})")
    lines += [f"%y: {made} = {activation}", "return %y"] if activation else ["return %n"]
    return SubgraphProblem("\n".join(lines) + "\n", layout)


def launched(name: str, xs: list[torch.Tensor], shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    executable = ENGINE.build(piece(name), Knobs(), CPU)
    whole = sum(x.shape[1] for x in xs)
    y = torch.full((xs[0].shape[0], whole, *xs[0].shape[2:]), float("nan")).contiguous(
        memory_format=torch.channels_last
    )
    executable.launch(Buffers(tuple(xs), [y], executable.pack((shift, scale))), None)
    return y


def data(name: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    (n, h, w), channels, _ = CASES[name]
    generator = torch.Generator().manual_seed(len(name))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator).float()

    xs = [draw(n, c, h, w).contiguous(memory_format=torch.channels_last) for c in channels]
    return xs, draw(1, sum(channels), 1, 1), draw(1, sum(channels), 1, 1)


def exact(name: str, xs: list[torch.Tensor], shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    y = torch.cat(xs, 1) * scale + shift
    return {RELU: torch.relu, RELU6: functional.relu6, HARDSWISH: functional.hardswish, "": torch.clone}[
        CASES[name][2]
    ](y)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_integers_come_out_exact_and_nan_stays(name: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        xs, shift, scale = data(name)
        for x in xs:
            x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.02] = float("nan")
        found = launched(name, xs, shift, scale)
        expected = exact(name, xs, shift, scale)
        if CASES[name][2] == HARDSWISH:
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found.nan_to_num(-7.0), expected.nan_to_num(-7.0))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_to_its_buffers_and_to_the_oracle(name: str) -> None:
    assert prepare(ReferenceData(piece(name), CPU), ENGINE.config()).error < 1e-6
    assert prepare(ReferenceData(piece(name, dtype="bf16"), CPU), ENGINE.config()).error < BF16_ERROR


def test_a_launch_needs_no_python() -> None:
    xs, shift, scale = data("a dense layer's")
    executable = ENGINE.build(piece("a dense layer's"), Knobs(), CPU)
    native = executable.native(executable.pack((shift, scale)))
    assert native is not None
    assert len(native.tensors) == len(xs) + 3


def gated(
    n: int, c: int, h: int, w: int, order: str = "%x, %g", gate: str = "", dtype: str = "fp32"
) -> SubgraphProblem:
    made, gate = f"{dtype}[{n},{c},{h},{w}]", gate or f"{dtype}[{n},{c},1,1]"
    return SubgraphProblem(
        f"graph 1\ninput %x: {made}\ninput %g: {gate}\n%y: {made} = aten.mul.Tensor({order})\nreturn %y\n", "nhwc"
    )


@pytest.mark.parametrize("order", ["%x, %g", "%g, %x"])
@pytest.mark.parametrize("shape", [(2, 40, 9, 7), (3, 5, 1, 1), (1, 130, 28, 28), (0, 4, 3, 3)])
def test_a_gate_scales_the_channels_of_its_image(shape: tuple[int, int, int, int], order: str) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-9, 9, shape, generator=generator).float().contiguous(memory_format=torch.channels_last)
    gate = torch.randint(-9, 9, (*shape[:2], 1, 1), generator=generator).float()
    y = torch.full_like(x, float("nan"))
    problem = gated(*shape, order)
    assert ENGINE.supports(problem, CPU), ENGINE.supports(problem, CPU).reason
    ENGINE.build(problem, Knobs(), CPU).launch(Buffers((x, gate), [y], ()), None)
    assert torch.equal(y, x * gate)
    assert prepare(ReferenceData(problem, CPU), ENGINE.config()).error < 1e-6
    assert prepare(ReferenceData(gated(*shape, order, dtype="bf16"), CPU), ENGINE.config()).error < BF16_ERROR


SMOOTH = ("silu", "hardswish", "hardsigmoid", "sigmoid")


def test_gelu_is_as_close_as_pytorchs() -> None:
    """Its error grows with x, of which the tail of negative x is a difference of halves. Both give NaN for -infinity."""
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, 1e-4, -1e-4, 5.2, -5.2, 5.1999, -5.1999]
    x = torch.cat((torch.tensor(special), torch.linspace(-9, 9, 5000), torch.linspace(-0.1, 0.1, 801)))
    y = activated(x, "gelu")
    exact = functional.gelu(x.double())
    torch.testing.assert_close(y.isnan(), exact.isnan())
    kept = ~exact.isnan() & x.isfinite()
    error = ((y.double() - exact).abs() / x.abs().clamp(min=1e-30))[kept]
    assert error.max() < 2e-7
    assert y[2] == torch.inf


@pytest.mark.parametrize("activation", SMOOTH)
def test_activations_are_pytorchs_over_the_whole_range(activation: str) -> None:
    """Of values that nothing was done to before: scale 1, shift -0. What e^88.4 and more divide may come out as nothing."""
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, 88.5, 88.9, -88.5, -87.31, -104.0]
    x = torch.cat((torch.tensor(special), torch.linspace(-110, 110, 4000), torch.randn(83)))
    expected = getattr(functional, activation)(x.double()).float()
    torch.testing.assert_close(activated(x, activation), expected, equal_nan=True, rtol=3e-7, atol=1e-36)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """An activation by the kernel."""
    text = (
        f"graph 1\ninput %a0: fp32[{len(x)},1,1,1]\nconstant %s: fp32[1,1,1,1]\nconstant %m: fp32[1,1,1,1]\n"
        f"%n: fp32[{len(x)},1,1,1] = aten.addcmul.default(%s, %a0, %m)\n"
        f"%y: fp32[{len(x)},1,1,1] = aten.{activation}.default(%n)\nreturn %y\n"
    )
    executable = ENGINE.build(SubgraphProblem(text, "nhwc"), Knobs(), CPU)
    shift, scale = -torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    y = torch.full((len(x), 1, 1, 1), torch.nan)
    executable.launch(Buffers((x.view(-1, 1, 1, 1),), [y], executable.pack((shift, scale))), None)
    return y.flatten()


OTHERS = {
    "another order": piece("a value by itself", order="%x, %s, %m"),
    "blocked": piece("a value by itself", "blocked"),
    "planes": piece("a value by itself", "nchw"),
    "half": piece("a value by itself", dtype="fp16"),
    "another activation": SubgraphProblem(piece("a value by itself").text.replace("relu", "tanh"), "nhwc"),
    "two dtypes": gated(2, 4, 3, 3, gate="bf16[2,4,1,1]"),
    "a gate for all images": gated(2, 4, 3, 3, gate="fp32[1,4,1,1]"),
    "a gate for each pixel": gated(2, 4, 3, 3, gate="fp32[2,1,3,3]"),
    "two results": SubgraphProblem(piece("a value by itself").text.replace("return %y", "return %n, %y"), "nhwc"),
    "a constant for all channels": SubgraphProblem(
        piece("a value by itself").text.replace("%s: fp32[1,40,1,1]", "%s: fp32[1,1,1,1]"), "nhwc"
    ),
    "a concatenation alone": SubgraphProblem(
        "graph 1\ninput %a: fp32[1,4,2,2]\ninput %b: fp32[1,4,2,2]\n"
        "%x: fp32[1,8,2,2] = aten.cat.default((%a, %b), 1)\nreturn %x\n",
        "nhwc",
    ),
    "a scale that comes from outside": SubgraphProblem(
        piece("a value by itself").text.replace("constant %m", "input %m"), "nhwc"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_does_not_do_it_refuses(name: str) -> None:
    words = {
        "blocked": "needs layout nhwc",
        "planes": "needs layout nhwc",
        "half": "needs fp32 or bf16, got fp16",
        "two dtypes": "needs values of one dtype, got bf16, fp32",
    }.get(name, "another subgraph")
    found = ENGINE.supports(OTHERS[name], CPU)
    assert not found
    assert words in found.reason


def test_it_runs_on_cpus() -> None:
    gpu = Target("cuda", "test", "sm_90", 132, 1 << 34, 0)
    assert "runs on CPUs" in ENGINE.supports(piece("one pixel"), gpu).reason


MAIN = """
#include <stdlib.h>
int main(void) {
    for (int64_t first = 1; first < 80; first += 13)
        for (int64_t pixels = 1; pixels < 40; pixels += 7)
            for (int64_t activation = 0; activation <= SIGMOID; activation++) {
                int64_t own = activation % 2, settings[] = {2, pixels, own, 2, 1, activation, first, 21}, c = first + 21;
                stored *a = calloc(2 * pixels * first, sizeof *a), *b = calloc(2 * pixels * 21, sizeof *a);
                stored *scale = calloc((1 + own) * c, sizeof *a), *shift = calloc(c, sizeof *a);
                stored *y = calloc(2 * pixels * c, sizeof *a);
                NAMED(convoy_scale)(settings, (void *const[]){a, b, scale, own ? 0 : shift, y + MISSING});
                free(a), free(b), free(y), free(scale), free(shift);
            }
    return 0;
}
"""


@pytest.mark.parametrize(("missing", "dtype"), [(0, "fp32"), (1, "fp32"), (0, "bf16")])
def test_it_reads_and_writes_nothing_else(tmp_path: Path, missing: int, dtype: str) -> None:
    """By the compiler's own sanitizers; with a result that begins one value late they must say so."""
    source = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, VECTORS_H, SOURCE)) + MAIN
    done = sanitized.run(
        tmp_path, source, f"-DMISSING={missing}", "-DLANES=8", *(["-DBF16"] if dtype == "bf16" else [])
    )
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]
