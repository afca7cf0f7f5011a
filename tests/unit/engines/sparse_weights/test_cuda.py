"""pruned.cuda without a GPU: its code run by threads of the CPU, compiled and linked for sm_90a, refused, cached."""

import ctypes
import random
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import device_binaries, host_compiler
from convoy.engines.sparse_weights import generated_tile, generated_tile_space, pruned_cuda
from convoy.engines.sparse_weights.codegen import cuda_writer, emit_cuda, link_cubins
from convoy.engines.sparse_weights.codegen.cuda_copies import along
from convoy.engines.sparse_weights.generated_tile import GeneratedTile, block_bytes
from convoy.engines.sparse_weights.generated_tile_cost import estimate_us
from convoy.engines.sparse_weights.generated_tile_space import tile_config_of, tile_configs
from convoy.engines.sparse_weights.pruned_cuda import ENGINE, write
from convoy.errors import CompileError, InputError, LaunchError
from convoy.measurement.accuracy import make_data, oracle
from convoy.problem import ConvProblem, Epilogue, Knobs, parse_problem
from convoy.target import Target
from tests.unit.engines.conv_cases import SHAPES
from tests.unit.engines.pruned_cases import PATTERNS, SMALL, mask_of, pattern, pruned

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
FORM = GeneratedTile(lanes=8, vectors=2, filters=3, splits=2, channels=2, shared_kib=4, resident=1)
HALF = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16"}

HOST = """
#include <pthread.h>
#include <cstring>
#include <cmath>
#include <cstdlib>
using std::fmaf;
#define CONVOY_HOST
#define __global__
#define __device__
#define __constant__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(n)
struct dim { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static thread_local dim threadIdx, blockIdx;
static pthread_barrier_t barrier;
alignas(16) static char shared_memory[1 << 18];
static inline void __syncthreads() { pthread_barrier_wait(&barrier); }
static inline float __int_as_float(unsigned i) { float f; memcpy(&f, &i, 4); return f; }
#define COPY4(to, from, inside) (*(to) = (inside) ? (float)*(from) : 0.0f)
#define COPY16(to, from) memcpy(to, from, 16)
static inline void copy16(float *to, const void *from, bool inside) { static const float none[4] = {};
    if ((size_t)to % 16 || (inside && (size_t)from % 16)) abort(); memcpy(to, inside ? from : none, 16); }
#define COPY16_INSIDE(to, from, inside) copy16(to, from, inside)
typedef const char *address;
#define ADDRESS(p) ((address)(p))
#define BEGIN_CODE(inputs, values) {
#define LOAD1(word, at) const float x##word = *(const float *)(inputs + at);
#define LOAD2(word, at) const float2 x##word = *(const float2 *)(inputs + at); \\
    const float x##word##x = x##word.x, x##word##y = x##word.y;
#define FOUR(name, from) const float name##x = from.x, name##y = from.y, name##z = from.z, name##w = from.w;
#define LOAD4(word, at) const float4 x##word = *(const float4 *)(inputs + at); FOUR(x##word, x##word)
#define VALUES(word, at) const float4 w##word = *(const float4 *)(weights + at); FOUR(w##word, w##word)
#define FMA(sum, input, value) a##sum = fmaf(input, value, a##sum);
#define FMA_BITS(sum, input, bits) a##sum = fmaf(input, __int_as_float(0x##bits), a##sum);
#define END_CODE(...) }
#define COMMIT
#define WAIT(n)
#define SHARED float *const staged = (float *)shared_memory
#define GROUP
#define GLOBAL(p)
#define END
#define BEGIN
#define AWAIT
static inline float wide(float v) { return v; }
static inline float wide(unsigned short v) { _Float16 h; memcpy(&h, &v, 2); return (float)h; }
struct rounded { float v; operator float() { return v; } operator unsigned short() {
    const _Float16 h = (_Float16)v; unsigned short s; memcpy(&s, &h, 2); return s; } };
static inline rounded narrow(float v) { return {v}; }
"""
RUN = """
struct launch {{ void *a, *b, *c, *d, *e; unsigned x, thread; }};
static void *thread(void *pointer)
{{
    const launch &l = *(launch *)pointer;
    threadIdx = {{l.thread, 0}}; blockIdx = {{l.x, 0}};
    convolve((element *)l.a, (float *)l.b, (float *)l.c, (element *)l.d, (element *)l.e);
    return nullptr;
}}
extern "C" void run(void *a, void *b, void *c, void *d, void *e)
{{
    for (unsigned x = 0; x < {blocks}; x++) {{
        static launch launches[{threads}]; static pthread_t threads[{threads}];
        memset(shared_memory, 255, sizeof shared_memory);
        pthread_barrier_init(&barrier, nullptr, {threads});
        for (unsigned t = 0; t < {threads}; t++) {{
            launches[t] = {{a, b, c, d, e, x, t}};
            pthread_create(&threads[t], nullptr, thread, &launches[t]);
        }}
        for (unsigned t = 0; t < {threads}; t++) pthread_join(threads[t], nullptr);
        pthread_barrier_destroy(&barrier);
    }}
}}
"""


def run_on_host(written, folder, arguments):
    """Run a kernel with a thread of the CPU for each of the GPU's, block after block."""
    source = written.source
    assert source.shared_bytes <= 1 << 18
    text = (
        HOST
        + "".join([source.head, *source.bodies]).replace("__restrict__", "")
        + RUN.format(blocks=source.blocks, threads=source.threads)
    )
    file = folder / "convolve.cpp"
    file.write_text(text)
    library = file.with_suffix(".so")
    flags = ["-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, str(file), "-o", str(library)], check=True, timeout=60)
    ctypes.CDLL(str(library)).run(*[ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in arguments])


def left_taps_alone(problem):
    """Filters that read nothing right of their first column: rows may lie closer together than their images are wide."""
    nonzero = np.zeros(problem.weight_spec.shape, bool)
    nonzero[..., 0] = True
    return problem.with_mask(mask_of(nonzero))


CASES = {
    "fours at a time": (pruned(ConvProblem(2, 5, 6, 8, 6, 3, 3, 1, 1), "half"), replace(FORM, lanes=96), False),
    "fours, no padding": (pruned(ConvProblem(1, 4, 7, 12, 5, 3, 3), "half"), GeneratedTile(8, 4, 3, 2, 2, 4, 1), False),
    "fours, padding of five": (
        pruned(ConvProblem(2, 3, 5, 4, 5, 3, 3, 1, 5), "half"),
        replace(FORM, lanes=96, vectors=1),
        False,
    ),
    "no fours where rows are close": (left_taps_alone(ConvProblem(2, 4, 6, 8, 6, 3, 3, 1, 1)), FORM, False),
    "no fours where they take more tiles": (pruned(ConvProblem(2, 5, 6, 8, 6, 3, 3, 1, 1), "half"), FORM, False),
    "two splits": (pruned(SMALL, "half"), FORM, False),
    "half, immediates": (pruned(replace(SMALL, **HALF), "half"), FORM, True),
    "strided, four pixels": (
        pruned(SHAPES["dilated, strided, grouped"], "full"),
        replace(FORM, vectors=4, splits=1),
        False,
    ),
    "four phases": (
        pruned(ConvProblem(2, 4, 9, 9, 6, 3, 3, 1, 1, 2, 2), "half"),
        GeneratedTile(8, 4, 6, 2, 2, 4, 1),
        False,
    ),
    "wide stores": (pruned(ConvProblem(3, 4, 6, 8, 7, 5, 5, 2, 2), "half"), GeneratedTile(4, 4, 4, 3, 2, 4, 1), False),
    "wide stores, one split": (pruned(replace(SMALL, w=8), "tenth"), GeneratedTile(8, 2, 8, 1, 6, 64, 1), False),
    "one pixel, dead channels": (pruned(SMALL, "dead channels"), GeneratedTile(32, 1, 4, 4, 1, 1, 1), False),
    "empty and full filters": (pruned(SMALL, "empty and full filters"), GeneratedTile(16, 1, 2, 2, 6, 64, 1), False),
    "nothing": (pruned(SMALL, "none"), FORM, False),
    "a single one": (pruned(SMALL, "single"), replace(FORM, splits=4), False),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", CASES)
def test_the_code_is_exact_on_threads_of_the_cpu(name, tmp_path):
    problem, form, immediates = CASES[name]
    data = make_data(problem, 3, "integer")
    weight = data.constants[0].float().numpy().ravel()
    written = write(problem, form, list(weight) if immediates else None)
    packed = np.append(np.append(weight, 0)[np.append(written.places, weight.size)], 0)[
        np.array(written.source.packed, int)
    ]
    values = torch.from_numpy(np.append(packed, np.zeros(4)).astype(np.float32))
    assert bool(len(packed)) is (not immediates and bool(len(written.places)))
    bias = data.constants[1].float() if problem.epilogue.bias else None
    residual = data.args[1] if problem.epilogue.residual else None
    y = torch.full_like(oracle(problem, data)[0], float("nan")).to(data.args[0].dtype)
    run_on_host(written, tmp_path, (data.args[0].contiguous(), values, bias, residual, y))
    assert torch.equal(y.double(), oracle(problem, data)[0])


def test_the_cases_have_what_they_are_there_for():
    written = {name: write(problem, form) for name, (problem, form, _) in CASES.items()}
    for name, w in written.items():
        assert len(w.source.bodies) == 1, name
    assert "#define WIDE_STORES 1" in written["wide stores"].source.head
    assert "#define WIDE_STORES 0" in written["two splits"].source.head
    ring = written["one pixel, dead channels"].source.bodies[0]
    assert ring.count("    COMMIT;") > ring.count("    COMMIT;\n    WAIT") > 1, "more steps than buffers"
    assert "stage_list(staged" in written["four phases"].source.bodies[0]
    assert "stage_run(staged" in written["wide stores"].source.bodies[0]
    assert "filters_" in written["empty and full filters"].source.bodies[0]
    moved = {"fours at a time": 3, "fours, no padding": 0, "fours, padding of five": 3, "wide stores": 2}
    for name, shift in moved.items():
        assert f"#define SHIFT {shift}\n" in written[name].source.head
        assert "#define FOURS 1" in written[name].source.head, name
    for name in (
        "no fours where rows are close",
        "no fours where they take more tiles",
        "half, immediates",
        "strided, four pixels",
        "two splits",
    ):
        assert "#define FOURS 0" in written[name].source.head, name


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_fours_that_cross_into_an_image_would_be_noticed(tmp_path, monkeypatch):
    """The rule that refuses them is needed."""
    problem, form, _ = CASES["no fours where rows are close"]
    monkeypatch.setattr(cuda_writer, "fours", lambda layout, tile: 3)
    data = make_data(problem, 3, "integer")
    written = write(problem, form)
    weight = torch.cat([data.constants[0].ravel(), torch.zeros(1)])
    values = weight[np.append(written.places, len(weight) - 1)[np.array(written.source.packed, int)]]
    y = torch.zeros_like(oracle(problem, data)[0]).float()
    run_on_host(written, tmp_path, (data.args[0].contiguous(), values, None, None, y))
    assert not torch.equal(y.double(), oracle(problem, data)[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_wrong_offset_is_noticed(tmp_path):
    """The comparison above can fail: one load moved by a float is another convolution."""
    problem, form, _ = CASES["wide stores, one split"]
    data = make_data(problem, 3, "integer")
    written = write(problem, form)
    text = written.source.bodies[0]
    load = re.search(r"LOAD2\((\d+), (\d+)\)", text)
    harmed = text.replace(load.group(0), f"LOAD2({load.group(1)}, {int(load.group(2)) + 8})", 1)
    weight = data.constants[0].ravel()
    values = torch.cat([weight, torch.zeros(1)])[np.append(written.places, weight.numel())[list(written.source.packed)]]
    y = torch.zeros_like(oracle(problem, data)[0]).float()
    harmed = replace(written, source=replace(written.source, bodies=(harmed,)))
    run_on_host(harmed, tmp_path, (data.args[0], values, data.constants[1], data.args[1], y))
    assert not torch.equal(y.double(), oracle(problem, data)[0])


def compiled(source, options=("--maxrregcount=128",)):
    """A cubin, or a skip where NVRTC or nvJitLink is not there."""
    try:
        return link_cubins.compile_units(ENGINE.id, source.head, source.bodies, H100, options)
    except CompileError as error:
        if error.summary == "NVRTC is not there":
            pytest.skip(error.summary)
        raise


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(host_compiler, "compiled_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_for_an_h100(name):
    problem, form, immediates = CASES[name]
    source = write(problem, form, [0.5] * problem.weight_spec.elements if immediates else None).source
    assert compiled(source)[:4] == b"\x7fELF"


def test_units_are_compiled_apart_and_linked(monkeypatch, folder):
    if link_cubins.unlinked():
        pytest.skip(link_cubins.unlinked())
    monkeypatch.setattr(emit_cuda, "UNIT_FMAS", 100)
    source = write(*CASES["wide stores"][:2]).source
    assert len(source.bodies) >= 3
    assert ['extern "C" __global__' in body for body in source.bodies] == [False] * (len(source.bodies) - 1) + [True]
    assert compiled(source)[:4] == b"\x7fELF"
    assert len(list(folder.iterdir())) == len(source.bodies) + 1
    with pytest.raises(CompileError, match="nvJitLink refused"):
        link_cubins.compile_units(ENGINE.id, source.head, source.bodies[1:], H100, ())


@pytest.mark.parametrize(("dead", "where"), [(False, "__constant__"), (True, "__device__ const")])
def test_tables_of_many_units_are_not_too_many_for_constant_memory(dead, where, monkeypatch):
    """A table of all channels in each of a dozen units was: nvJitLink said so after all of them were compiled."""
    nonzero = np.zeros((12, 2048, 1, 1), bool)
    for channel in range(2048):
        nonzero[channel * 12 // 2048, channel] = not (dead and channel % 3 == 1)
    problem = ConvProblem(1, 2048, 7, 7, 12, 1, 1).with_mask(mask_of(nonzero))
    monkeypatch.setattr(emit_cuda, "UNIT_FMAS", 100)
    source = write(
        problem, GeneratedTile(lanes=64, vectors=1, filters=1, splits=1, channels=64, shared_kib=100, resident=1)
    ).source
    assert len(source.bodies) == 13
    assert set(re.findall(r"static (__constant__|__device__ const) int \w+\[\]", source.head + source.bodies[0])) == {
        where
    }
    assert compiled(source)[:4] == b"\x7fELF"


def test_where_nothing_links_all_units_are_one(monkeypatch, folder):
    monkeypatch.setattr(link_cubins, "unlinked", lambda: "needs nvJitLink: it is not there")
    monkeypatch.setattr(emit_cuda, "UNIT_FMAS", 100)
    assert compiled(write(*CASES["wide stores"][:2]).source)[:4] == b"\x7fELF"
    assert len(list(folder.iterdir())) == 1


def test_immediates_of_any_value_compile():
    weight = np.where(pattern("half", (8, 6, 3, 3)), 1.5, 0.0)
    places = np.argwhere(weight)
    for place, value in zip(places, (np.nan, np.inf, -np.inf, 1e-45, -0.1, 3e38), strict=False):
        weight[tuple(place)] = np.float32(value)
    source = write(pruned(SMALL, "half"), FORM, list(weight.ravel())).source
    assert not source.packed
    for word in ("7FC00000", "7F800000", "FF800000", "3FC00000"):
        assert word in source.bodies[0]
    compiled(source)


def test_nearly_every_instruction_is_a_multiply_add():
    """The code loads words of four values and of neighbouring inputs, and nothing else."""
    problem = ConvProblem(1, 32, 28, 28, 16, 3, 3, 1, 1)
    problem = problem.with_mask(mask_of(pattern("tenth", problem.weight_spec.shape)))
    unit = write(problem, GeneratedTile(64, 4, 16, 1, 8, 200, 1)).source.bodies[0]
    fmas, loads = unit.count("FMA("), unit.count("LOAD4(") + unit.count("VALUES(")
    assert fmas == 4 * problem.mask.nonzeros
    assert loads < fmas / 4


@pytest.mark.parametrize("harm", ["cut", "changed", "emptied", "appended", "gone"])
def test_a_damaged_binary_is_a_miss(harm, folder):
    made = []

    def make():
        made.append(None)
        return b"a binary"

    assert device_binaries.cached(ENGINE.id, ("source", "sm_90a"), make) == b"a binary"
    assert device_binaries.cached(ENGINE.id, ("source", "sm_90a"), make) == b"a binary"
    assert len(made) == 1
    (path,) = folder.iterdir()
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        bad = {"cut": content[:-1], "changed": b"b" + content[1:], "emptied": b"", "appended": content + b"x"}
        path.write_bytes(bad[harm])
    assert device_binaries.cached(ENGINE.id, ("source", "sm_90a"), make) == b"a binary"
    assert len(made) == 2
    assert path.read_bytes() == content
    assert device_binaries.cached(ENGINE.id, ("source", "sm_80"), make) == b"a binary"
    assert len(made) == 3, "another architecture is another binary"


def test_a_cache_that_cannot_be_written_is_no_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(host_compiler, "compiled_folder", lambda: tmp_path / "not there")
    assert device_binaries.cached(ENGINE.id, ("source",), lambda: b"a binary") == b"a binary"


@pytest.mark.parametrize(
    ("problem", "target", "words"),
    [
        (pruned(SMALL, "tenth"), CPU, "capability 8.0"),
        (SMALL, H100, "without a mask"),
        (parse_problem(pruned(SMALL, "tenth").key), H100, "digest alone"),
        (pruned(SMALL, "tenth").with_layout("nhwc"), H100, "layout nchw"),
        (pruned(replace(SMALL, x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16"), "tenth"), H100, "fp32 or fp16"),
        (pruned(replace(SMALL, n=0), "tenth"), H100, "batch"),
        (pruned(replace(SMALL, n=10**7), "tenth"), H100, "2^30"),
        (pruned(replace(SMALL, direction="dgrad", epilogue=Epilogue()), "tenth"), H100, "fprop"),
        (pruned(ConvProblem(1, 512, 7, 7, 1024, 3, 3, 1, 1), "tenth"), H100, "non-zero"),
        (pruned(ConvProblem(1, 2, 2, 300_000, 1, 2, 1), "full"), H100, "shared memory"),
    ],
)
def test_refusals_say_why(problem, target, words, monkeypatch):
    monkeypatch.setattr(pruned_cuda, "absence", lambda: "")
    support = ENGINE.accepts(problem, target)
    assert not support
    assert words in support.reason


def test_without_the_packages_it_says_so(monkeypatch):
    monkeypatch.setattr(pruned_cuda, "absence", lambda: "needs cuda-core and cuda-bindings")
    assert "cuda-core" in ENGINE.supports(pruned(SMALL, "tenth"), H100).reason
    monkeypatch.setattr(pruned_cuda, "absence", lambda: "")
    monkeypatch.setattr(pruned_cuda, "unlinked", lambda: "needs nvJitLink")
    assert ENGINE.supports(pruned(SMALL, "tenth"), H100)
    large = pruned(ConvProblem(1, 256, 7, 7, 64, 3, 3, 1, 1), "tenth")
    assert "nvJitLink" in ENGINE.supports(large, H100).reason


@pytest.mark.parametrize(("share", "most"), [(0.003, 16), (0.02, 16), (0.04, 9)])
def test_the_more_code_the_fewer_settings(share, most):
    problem = ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1)
    nonzero = np.random.default_rng(3).random(problem.weight_spec.shape) < share
    space = ENGINE.space(problem.with_mask(mask_of(nonzero)), H100)
    assert 2 <= len(space) <= most
    assert sum(knobs.integer("vectors") for knobs in space) * nonzero.sum() <= generated_tile_space.SPACE_FMAS


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("target", [H100, replace(H100, arch="sm_86", units=28)], ids=["sm_90", "sm_86"])
def test_the_space_fits_the_device(n, target):
    problem = ConvProblem(n, 64, 56, 56, 64, 3, 3, 1, 1)
    problem = problem.with_mask(mask_of(pattern("tenth", problem.weight_spec.shape)))
    space = ENGINE.space(problem, target)
    assert len(set(space)) == len(space) > 4
    for form in tile_configs(problem, target)[:3]:
        source = write(problem, form).source
        assert source.threads == form.threads <= 1024
        assert source.shared_bytes <= block_bytes(target) - generated_tile.RESERVED_BYTES
        assert form.threads * form.registers <= 65536
    estimates = [ENGINE.estimate_us(problem, knobs, target) for knobs in space]
    assert estimates == sorted(estimates)


def test_the_model_knows_what_is_slow():
    problem = ConvProblem(1, 128, 28, 28, 128, 3, 3, 1, 1)
    problem = problem.with_mask(mask_of(pattern("tenth", problem.weight_spec.shape)))
    best = tile_configs(problem, H100)[0]
    few = tile_config_of(problem, Knobs.of(lanes=384, vectors=2, filters=32, splits=1), H100)
    assert estimate_us(problem, few, H100) > 2 * estimate_us(problem, best, H100), "few blocks, one split"
    more = replace(problem, n=64)
    assert estimate_us(more, best, H100) > 8 * estimate_us(problem, best, H100)


@pytest.mark.parametrize("change", [{"lanes": 0}, {"vectors": 3}, {"filters": 4096}, {"splits": 1024}])
def test_knobs_that_do_not_fit_are_refused(change):
    knobs = {"lanes": 64, "vectors": 2, "filters": 8, "splits": 1} | change
    with pytest.raises(InputError, match="knobs"):
        ENGINE.build(pruned(SMALL, "half"), Knobs.of(**knobs), H100)


def test_copies_are_shared_out_by_all_threads():
    for span, planes, threads in ((88, 20, 256), (1224, 8, 384), (40, 1, 64), (384, 64, 128)):
        count = along(span, planes, threads)
        assert threads % count == 0
        rounds = -(-span // count) * -(-planes // (threads // count))
        assert rounds <= 2 * -(-span * planes // threads)


def test_values_are_packed_and_a_launch_hands_over_pointers(monkeypatch):
    calls = []
    monkeypatch.setattr(pruned_cuda, "compile_units", lambda *arguments: calls.append(arguments) or b"a cubin")
    monkeypatch.setattr(
        pruned_cuda.Function, "launch", lambda self, *arguments, **named: calls.append((self, *arguments, named))
    )
    problem = pruned(SMALL, "half")
    knobs = ENGINE.space(problem, H100)[0]
    executable = ENGINE.build(problem, knobs, H100)
    form = tile_config_of(problem, knobs, H100)
    (engine, head, bodies, target, options), *_ = calls
    assert (engine, target, options) == (ENGINE.id, H100, (f"--maxrregcount={form.registers}",))
    assert (head, bodies) == (write(problem, form).source.head, write(problem, form).source.bodies)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs) == 0
    data = make_data(problem, 1)
    values, bias = executable.pack(data.constants)
    nonzero = pattern("half", problem.weight_spec.shape)
    assert sorted(values[values != 0].tolist()) == sorted(data.constants[0].numpy()[nonzero].tolist())
    assert values.dtype == bias.dtype == torch.float32
    assert executable.resident_bytes((values, bias)) == 4 * (len(values) + len(bias)) + len(b"a cubin"), (
        "code costs memory"
    )
    y = torch.empty(problem.y_spec.shape)
    executable.launch(Buffers(data.args, [y], (values, bias)), None)
    function, device, blocks, threads, arguments, named = calls[-1]
    assert named == {"dependent": True}
    source = write(problem, form).source
    assert (function.name, function.shared_bytes) == ("convolve", source.shared_bytes)
    assert (device, blocks, threads) == (0, source.blocks, source.threads)
    tensors = (data.args[0], values, bias, data.args[1], y)
    assert [argument.value for argument in arguments] == [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(InputError, match="mask"):
        executable.pack((data.constants[0] + 1, data.constants[1]))


def test_results_that_lie_askew_are_refused(monkeypatch):
    monkeypatch.setattr(pruned_cuda, "compile_units", lambda *_: b"a cubin")
    problem = pruned(replace(SMALL, w=8), "half")
    executable = ENGINE.build(problem, Knobs.of(lanes=32, vectors=4, filters=8, splits=2), H100)
    data = make_data(problem, 1)
    y = torch.empty(problem.y_spec.elements + 1)[1:].view(problem.y_spec.shape)
    with pytest.raises(LaunchError, match=r"y lies at .* written 16 bytes at once"):
        executable.launch(Buffers(data.args, [y], executable.pack(data.constants)), None)
    x = torch.empty(problem.x_spec.elements + 1)[1:].view(problem.x_spec.shape)
    y = torch.empty(problem.y_spec.shape)
    with pytest.raises(LaunchError, match=r"x lies at .* read 16 bytes at once"):
        executable.launch(Buffers((x, *data.args[1:]), [y], executable.pack(data.constants)), None)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("seed", range(6))
def test_any_form_of_any_shape_is_exact(seed, tmp_path):
    rng = random.Random(seed)
    groups = rng.choice([1, 1, 2])
    problem = ConvProblem(
        rng.randint(1, 3), groups * rng.randint(1, 6), rng.randint(5, 12), rng.randint(5, 12), groups * rng.randint(1, 8),
        rng.choice([1, 3, 5]), rng.choice([1, 2, 3]), rng.randint(0, 2), rng.randint(0, 2), rng.choice([1, 2]),
        rng.choice([1, 2, 3]), groups=groups, epilogue=Epilogue(bias=seed % 2 == 0, activation="relu6"),
    )  # fmt: skip
    problem = pruned(problem, rng.choice(PATTERNS), seed)
    form = GeneratedTile(
        rng.choice([8, 16, 32]), rng.choice([1, 2, 4]), rng.randint(1, 8), rng.randint(1, 4), rng.randint(1, 6), 4, 1
    )
    data = make_data(problem, seed, "integer")
    written = write(problem, form)
    weight = torch.cat([data.constants[0].ravel(), torch.zeros(1)])
    places = np.append(written.places, len(weight) - 1)[np.array(written.source.packed, int)]
    bias = data.constants[1] if problem.epilogue.bias else None
    y = torch.full_like(oracle(problem, data)[0], float("nan")).float()
    run_on_host(written, tmp_path, (data.args[0].contiguous(), weight[places], bias, None, y))
    assert torch.equal(y.double(), oracle(problem, data)[0])
