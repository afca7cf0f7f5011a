"""Which instruction sets oneDNN and our own kernels use, from a CPU's flags and the user's limits."""

import pytest

from convoy.engines.compilers import instruction_sets
from convoy.engines.compilers.instruction_sets import kernel_levels, onednn_levels
from convoy.errors import InputError
from convoy.settings import max_cpu_isa_from_environment, onednn_max_cpu_isa_from_environment

AVX2 = frozenset(["sse4_1", "sse4_2", "avx", "avx2", "fma", "bmi2", "f16c"])
AVX512 = AVX2 | frozenset(["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni", "avx512_bf16"])
AMX = AVX512 | frozenset(["amx_tile", "amx_int8", "amx_bf16", "avx512_fp16"])


@pytest.mark.parametrize(
    ("flags", "limit", "newest"),
    [
        (AVX2, "", "avx2"),
        (AVX512, "", "avx512_core_bf16"),
        (AMX, "", "avx512_core_amx"),
        (AMX, "avx512_core_bf16", "avx512_core_bf16"),
        (AMX, "avx10_1_512", "avx512_core_fp16"),
        (AMX, "avx10_1_512_amx", "avx512_core_amx"),
        (AMX, "avx2", "avx2"),
        (AVX2, "avx512_core_amx", "avx2"),
        (AMX, "no such word", "avx512_core_amx"),
        (AMX, "default", "avx512_core_amx"),
    ],
)
def test_onednn_uses_the_newest_that_the_cpu_has_within_the_limit(flags, limit, newest):
    assert onednn_levels(flags, limit)[-1] == newest


def test_a_cpu_without_any_of_them_has_none():
    assert onednn_levels(frozenset({"asimd"}), "") == ()
    assert kernel_levels(frozenset({"asimd"}), "") == ()


def test_kernels_are_limited_to_levels_that_the_cpu_has():
    assert kernel_levels(AMX, "") == ("sse4", "avx2", "avx512", "avx512_bf16", "amx")
    assert kernel_levels(AVX512, "amx")[-1] == "avx512_bf16"
    assert kernel_levels(AMX, "avx512")[-1] == "avx512"
    assert kernel_levels(AMX, "avx2") == ("sse4", "avx2")
    assert kernel_levels(AVX2, "avx512") == ("sse4", "avx2")


def test_limits_are_read_from_the_environment_by_name():
    assert max_cpu_isa_from_environment({}) == ""
    assert max_cpu_isa_from_environment({"CONVOY_MAX_CPU_ISA": "AVX2"}) == "avx2"
    with pytest.raises(InputError, match="CONVOY_MAX_CPU_ISA"):
        max_cpu_isa_from_environment({"CONVOY_MAX_CPU_ISA": "avx9"})
    assert onednn_max_cpu_isa_from_environment({"DNNL_MAX_CPU_ISA": "AVX2"}) == "avx2"
    assert onednn_max_cpu_isa_from_environment({"ONEDNN_MAX_CPU_ISA": "SSE41", "DNNL_MAX_CPU_ISA": "AVX2"}) == "sse41"


@pytest.fixture
def on_amx(monkeypatch):
    """As if this were an x86 CPU with AMX: the caches are emptied before and after."""
    cached = (instruction_sets.onednn_in_force, instruction_sets.vector_limit)
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: AMX)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("CONVOY_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    for function in cached:
        function.cache_clear()


def test_without_limits_a_target_says_nothing_of_them(on_amx):
    assert instruction_sets.limits() == {}
    assert instruction_sets.march() == "-march=native"


def test_limits_are_part_of_the_target_and_of_the_compilers_flags(on_amx):
    on_amx.setenv("CONVOY_MAX_CPU_ISA", "avx2")
    on_amx.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert instruction_sets.march() == "-march=haswell"
    assert instruction_sets.vector_floats() <= 8
    assert instruction_sets.limits() == {"max_cpu_isa": "haswell", "onednn_max_cpu_isa": "avx512_core_bf16"}


def test_a_limit_that_takes_nothing_away_changes_nothing(on_amx):
    on_amx.setenv("CONVOY_MAX_CPU_ISA", "amx")
    on_amx.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    assert instruction_sets.march() == "-march=native"
    assert instruction_sets.limits() == {}
