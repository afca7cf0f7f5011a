"""tile_ops.h: the emulation gives the bits that Intel's manual describes, and real instructions come out of the compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from convoy.engines.compilers import host_compiler
from convoy.engines.compilers.host_compiler import compile_shared, load_shared
from convoy.engines.compilers.instruction_sets import cpu_flags
from convoy.engines.cpu.bf16 import bf16_units
from convoy.engines.cpu.bf16.bf16_units import TILE_OPS_H
from convoy.engines.cpu.bf16.cpu_direct_bf16 import kernel
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.errors import CompileError

pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

CALLS = """
FOR_AMX void tile_product(float *sum, const bf16 *a, const bf16 *b) {
    TILES_FENCE();
    TILES_BEGIN();
    TILE_LOAD(2, sum, 64);
    TILE_LOAD(5, a, 64);
    TILE_LOAD(7, b, 64);
    TILE_DP(2, 5, 7);
    TILE_STORE(2, sum, 64);
    TILES_END();
    TILES_FENCE();
}
FOR_AVX512 void vector_product(float *sum, const bf16 *pair, const bf16 *row) {
    sums16 found = no_sums();
    found += *(const sums16 *)sum;
    sums_stored(sum, pairs_added(found, pair, row));
}
int64_t permitted(void) { return amx_permitted(); }
"""


def library(*flags):
    text = "".join(part.read_text(encoding="utf-8") for part in (PARALLEL_H, TILE_OPS_H)) + CALLS
    return load_shared(
        compile_shared(text, ("-std=gnu11", "-O1", "-march=native", "-Wno-psabi", *flags), "tile-ops-test")
    )


@pytest.fixture(scope="module")
def emulated():
    return library("-DEMULATED")


def pointer(values):
    return ctypes.c_void_p(values.ctypes.data)


def to_bf16(values):
    """The bits of the nearest bf16 of values that bf16 holds."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def flushed(value):
    return np.copysign(np.float32(0), value) if abs(value) < np.finfo(np.float32).tiny else value


def fma(a, b, c):
    """a * b + c in exact fractions, rounded once; denormal operands and results are zero."""
    a, b, c = (flushed(np.float32(value)) for value in (a, b, c))
    total = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if not total:
        return np.float32(0)
    exponent = max(0, total.numerator.bit_length() - total.denominator.bit_length())
    unit = Fraction(2) ** (exponent - 25) if exponent else Fraction(1, 2 ** (25 + total.denominator.bit_length()))
    while abs(total) >= unit * 2**24:
        unit *= 2
    while abs(total) < unit * 2**23:
        unit /= 2
    return flushed(np.float32(float(round(total / unit) * unit)))  # Python rounds halves to even


def tile_product(sums, a, b):
    """TDPBF16PS by the manual's pseudocode."""
    found = sums.copy()
    for m in range(16):
        for n in range(16):
            even = odd = np.float32(0)
            for k in range(16):
                even = fma(a[m, 2 * k], b[k, 2 * n], even)
                odd = fma(a[m, 2 * k + 1], b[k, 2 * n + 1], odd)
            found[m, n] = fma(1, found[m, n], fma(1, even, odd))
    return found


def operands(seed, kind):
    """A tile of sums, and two of bf16: of ordinary size, or so small that products and sums are denormal."""
    generator = np.random.default_rng(seed)
    scale = {"ordinary": 1.0, "small": 2.0**-64}[kind]
    a, b = (
        to_bf16(generator.standard_normal((16, 32)) * scale * 2.0 ** generator.integers(-3, 4, (16, 32))) for _ in "ab"
    )
    sums = (generator.standard_normal((16, 16)) * scale * scale).astype(np.float32)
    if kind == "small":
        a[:, 3] = 0x0040  # a denormal bf16
        sums[0] = np.float32(1e-39)
    return sums, a, b


@pytest.mark.parametrize("kind", ["ordinary", "small"])
def test_a_tile_product_has_the_manuals_bits(emulated, kind):
    sums, a, b = operands(1, kind)
    wanted = tile_product(sums, from_bf16(a), from_bf16(b))
    emulated.tile_product(pointer(sums), pointer(a), pointer(b))
    assert np.array_equal(sums, wanted)
    assert len(np.unique(wanted)) > 100


@pytest.mark.parametrize("kind", ["ordinary", "small"])
def test_a_vector_product_adds_the_odd_product_first(emulated, kind):
    sums, a, b = operands(2, kind)
    row, pair = sums[1].copy(), from_bf16(a[1, :2])
    wanted = [
        fma(pair[0], even, fma(pair[1], odd, before))
        for before, even, odd in zip(row, from_bf16(b[1, ::2]), from_bf16(b[1, 1::2]), strict=True)
    ]
    found = row.copy()
    emulated.vector_product(pointer(found), pointer(a[1]), pointer(b[1]))
    assert np.array_equal(found, np.array(wanted, np.float32))


def test_what_is_not_finite_goes_through(emulated):
    sums, a, b = operands(3, "ordinary")
    a[0, 0], b[3, 4] = 0x7F80, 0x7FC0  # infinity, NaN
    emulated.tile_product(pointer(sums), pointer(a), pointer(b))
    assert not np.isfinite(sums[0]).any()
    assert np.isnan(sums[:, 2]).all()
    assert np.isfinite(np.delete(sums[1:], 2, axis=1)).all()


@pytest.mark.parametrize("unit", ["amx", "avx512"])
def test_the_cpus_own_instructions_agree_with_the_emulation(emulated, unit):
    """To some roundings of their terms: makers may differ in the order of two sums."""
    if unit not in bf16_units.bf16_units()[0]:
        pytest.skip(f"this process cannot use {unit}")
    real = library()
    assert real.permitted() == ("amx" in bf16_units.bf16_units()[0])
    function = {"amx": "tile_product", "avx512": "vector_product"}[unit]
    for kind in ("ordinary", "small"):
        for seed in range(8):
            sums, a, b = operands(seed, kind)
            same = sums.copy()
            terms = np.abs(sums) + np.abs(from_bf16(a)) @ np.abs(from_bf16(b).reshape(16, 16, 2)).max((0, 2))[
                None, :
            ].repeat(32, 0)
            getattr(emulated, function)(pointer(sums), pointer(a), pointer(b))
            getattr(real, function)(pointer(same), pointer(a), pointer(b))
            assert (np.abs(sums - same) <= 2.0**-20 * terms + 2.0**-120).all()


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_holds_the_instructions_whatever_cpu_compiles_it(dtype):
    if bf16_units._compiler_refusal():
        pytest.skip("this compiler has no AMX or AVX-512 BF16")
    source = kernel(dtype)
    path = compile_shared(source.text(), source.flags, "bf16-objdump-test")
    listing = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    for instruction in ("tdpbf16ps", "vdpbf16ps", "ldtilecfg", "tilerelease"):
        assert instruction in listing


def test_a_compiler_without_the_instructions_is_named_with_its_words(monkeypatch):
    def refuse(*_):
        raise CompileError("bf16-probe", "the C compiler refused the source", "error: unknown target option amx-tile")

    assert bf16_units._compiler_refusal() == "" or "needs a C compiler" in bf16_units._compiler_refusal()
    monkeypatch.setattr(bf16_units, "compile_shared", refuse)
    assert "needs a C compiler with AMX and AVX-512 BF16: error: unknown target" in bf16_units._compiler_refusal()


def test_a_system_that_refuses_tiles_is_quoted(monkeypatch):
    asked = bf16_units.amx_refusal.__wrapped__()
    assert bool(asked) == bool(bf16_units.amx_refusal.__wrapped__())
    assert asked == "" or "AMX" in asked
    if sys.platform == "linux" and "amx_tile" not in cpu_flags():
        assert "Linux refuses this process AMX's registers (arch_prctl: " in asked
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert bf16_units.amx_refusal.__wrapped__() == "AMX needs Linux, got Darwin"
