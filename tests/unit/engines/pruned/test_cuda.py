"""pruned.cuda without a GPU: its code run by threads of the CPU, compiled for sm_90a, refused, cached."""

import ctypes
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from conv_cases import SHAPES
from pruned_cases import SMALL, mask_of, pattern, pruned

from convoy.engines import binaries, host_compiler
from convoy.engines.pruned import cuda
from convoy.engines.pruned.cuda import ENGINE, cut_of, template
from convoy.engines.pruned.emit_cuda import MOST_VALUES, emit
from convoy.engines.pruned.ir import verify
from convoy.engines.pruned.walk import walk
from convoy.errors import CompileError, InputError, LaunchError
from convoy.measurement.accuracy import make_data, oracle
from convoy.problem import ConvProblem, Epilogue, Knobs, parse_problem
from convoy.target import Target

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
KNOBS = Knobs.of(filters=3, vectors=2, lanes=8, channels=2)
HALF = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16"}

HOST = """
#include <pthread.h>
#include <cstring>
#include <cmath>
using std::fmaf;
#define CONVOY_HOST
#define __global__
#define __device__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(n)
struct place { unsigned x, y; };
static thread_local place threadIdx, blockIdx;
static pthread_barrier_t barrier;
alignas(16) static char shared_memory[1 << 18];
static inline void __syncthreads() { pthread_barrier_wait(&barrier); }
#define COPY16(to, from) memcpy(to, from, 16)
#define COMMIT
#define WAIT(n)
#define SHARED element *const staged = (element *)shared_memory
"""
WIDE = """
#include <cstdint>
static inline float wide(float v) { return v; }
static inline float wide(unsigned short v) { _Float16 h; memcpy(&h, &v, 2); return (float)h; }
struct rounded { float v; operator float() { return v; } operator unsigned short() {
    const _Float16 h = (_Float16)v; unsigned short s; memcpy(&s, &h, 2); return s; } };
static inline rounded narrow(float v) { return {v}; }
"""
RUN = """
struct launch {{ void *a, *b, *c, *d; const char *values; unsigned x, y, thread; }};
static void *thread(void *pointer)
{{
    const launch &l = *(launch *)pointer;
    threadIdx = {{l.thread, 0}}; blockIdx = {{l.x, l.y}};
    {call}
    return nullptr;
}}
extern "C" void run(void *a, void *b, void *c, void *d, const char *values)
{{
    for (unsigned y = 0; y < {grid[1]}; y++) for (unsigned x = 0; x < {grid[0]}; x++) {{
        static launch launches[{threads}]; static pthread_t threads[{threads}];
        pthread_barrier_init(&barrier, nullptr, {threads});
        for (unsigned t = 0; t < {threads}; t++) {{
            launches[t] = {{a, b, c, d, values, x, y, t}};
            pthread_create(&threads[t], nullptr, thread, &launches[t]);
        }}
        for (unsigned t = 0; t < {threads}; t++) pthread_join(threads[t], nullptr);
        pthread_barrier_destroy(&barrier);
    }}
}}
"""


def written(problem, knobs=KNOBS, values=None):
    """Code of a problem, its kernel and the places of its values."""
    mask = cuda.positions(problem.mask)
    layout = template(problem, mask, knobs)
    kernel, places = walk(mask, layout, knobs.integer("lanes"), cut_of(layout, knobs, 4))
    verify(kernel, problem.k)
    epilogue = problem.epilogue
    source = emit(
        kernel,
        layout,
        bias=epilogue.bias,
        residual=epilogue.residual,
        activation=epilogue.activation,
        values=None if values is None else list(values.ravel()[places]),
    )
    return source, places


def run_on_host(module, folder, arguments, values=b""):
    """Run a module's kernel with a thread of the CPU for each of the GPU's, block after block."""
    call = "pad((const element *)l.a, (element *)l.b);"
    if module.name != "pad":
        passed = ", *(const struct values *)l.values" if values else ""
        call = f"{module.name}((element *)l.a, (float *)l.b, (element *)l.c, (element *)l.d{passed});"
    threads = RUN.format(call=call, grid=module.grid, threads=module.threads)
    source = folder / f"{module.name}.cpp"
    source.write_text(HOST + WIDE + module.source.replace("__restrict__", "") + threads)
    library = source.with_suffix(".so")
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    pointers = [ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in arguments]
    ctypes.CDLL(str(library)).run(*pointers, *[ctypes.c_void_p()] * (4 - len(pointers)), ctypes.c_char_p(values))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("problem", "immediates"),
    [
        (pruned(SMALL, "half"), False),
        (pruned(replace(SMALL, **HALF), "half"), True),
        (pruned(SHAPES["dilated, strided, grouped"], "full"), False),
    ],
    ids=["parameters", "half, immediates", "strided"],
)
def test_the_code_is_exact_on_threads_of_the_cpu(problem, immediates, tmp_path):
    data = make_data(problem, 3, "integer")
    weight = data.constants[0].float().numpy()
    source, places = written(problem, values=weight if immediates else None)
    planes = torch.full((max(source.workspace_bytes, 1),), 255, dtype=torch.uint8)
    pad = replace(
        source.pad, source=source.pad.source.replace("256", "32"), threads=32, grid=(source.pad.grid[0] * 8, 1)
    )
    run_on_host(pad, tmp_path, (data.args[0], planes))
    bias = data.constants[1].float() if problem.epilogue.bias else None
    residual = data.args[1] if problem.epilogue.residual else None
    y = torch.full_like(oracle(problem, data)[0], float("nan")).to(data.args[0].dtype)
    for module in source.parts:
        values = b"" if immediates else weight.ravel()[places[slice(*module.values)]].tobytes()
        assert bool(values) is not immediates
        run_on_host(module, tmp_path, (planes, bias, residual, y), values)
    assert torch.equal(y.double(), oracle(problem, data)[0])


def compiled(source):
    """A cubin, or a skip where NVRTC is not there."""
    try:
        return cuda.compile_module(source, "sm_90a")
    except CompileError as error:
        if error.summary == "NVRTC is not there":
            pytest.skip(error.summary)
        raise


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(host_compiler, "compiled_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["half", "none"])
def test_it_compiles_for_an_h100(dtype, name):
    problem = pruned(replace(SMALL, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype), name)
    source, _ = written(problem)
    for module in (source.pad, *source.parts):
        assert compiled(module.source)[:4] == b"\x7fELF"


def test_immediates_of_any_value_compile():
    weight = np.where(pattern("half", (8, 6, 3, 3)), 1.5, 0.0)
    places = np.argwhere(weight)
    for place, value in zip(places, (np.nan, np.inf, -np.inf, 1e-45, -0.1, 3e38), strict=False):
        weight[tuple(place)] = np.float32(value)
    source, _ = written(pruned(SMALL, "half"), values=weight)
    assert "w.v" not in source.parts[0].source
    for word in ("0x7fc00000", "0x7f800000", "0xff800000", "0x1.8000000000000p+0f"):
        assert word in source.parts[0].source
    compiled(source.parts[0].source)


def test_what_nvrtc_says_is_in_the_error(monkeypatch, folder):
    compiled('extern "C" __global__ void nothing() {}')
    with pytest.raises(CompileError, match="missing"):
        cuda.compile_module("__global__ void f() { missing(); }", "sm_90a")
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("harm", ["cut", "changed", "emptied", "appended", "gone"])
def test_a_damaged_binary_is_a_miss(harm, folder):
    made = []

    def make():
        made.append(None)
        return b"a binary"

    assert binaries.cached(ENGINE.id, ("source", "sm_90a"), make) == b"a binary"
    assert binaries.cached(ENGINE.id, ("source", "sm_90a"), make) == b"a binary"
    assert len(made) == 1
    (path,) = folder.iterdir()
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        bad = {"cut": content[:-1], "changed": b"b" + content[1:], "emptied": b"", "appended": content + b"x"}
        path.write_bytes(bad[harm])
    assert binaries.cached(ENGINE.id, ("source", "sm_90a"), make) == b"a binary"
    assert len(made) == 2
    assert path.read_bytes() == content
    assert binaries.cached(ENGINE.id, ("source", "sm_80"), make) == b"a binary"
    assert len(made) == 3, "another architecture is another binary"


def test_a_cache_that_cannot_be_written_is_no_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(host_compiler, "compiled_folder", lambda: tmp_path / "not there")
    assert binaries.cached(ENGINE.id, ("source",), lambda: b"a binary") == b"a binary"


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
        (pruned(ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1), "tenth"), H100, "non-zero"),
        (pruned(ConvProblem(1, 512, 7, 7, 8, 5, 5), "full"), H100, str(MOST_VALUES)),
    ],
)
def test_refusals_say_why(problem, target, words, monkeypatch):
    monkeypatch.setattr(cuda, "absence", lambda: "")
    support = ENGINE.accepts(problem, target)
    assert not support
    assert words in support.reason


def test_without_the_packages_it_says_so(monkeypatch):
    monkeypatch.setattr(cuda, "absence", lambda: "needs cuda-core and cuda-bindings")
    assert "cuda-core" in ENGINE.supports(pruned(SMALL, "tenth"), H100).reason


@pytest.mark.parametrize(("share", "most"), [(0.003, 15), (0.02, 6), (0.04, 2)])
def test_the_more_code_the_fewer_settings(share, most):
    problem = ConvProblem(64, 512, 7, 7, 512, 3, 3, 1, 1)
    nonzero = np.random.default_rng(3).random(problem.weight_spec.shape) < share
    space = ENGINE.space(problem.with_mask(mask_of(nonzero)), H100)
    assert 2 <= len(space) <= most
    assert len(space) * nonzero.sum() <= cuda.SPACE_NONZEROS


@pytest.mark.parametrize("n", [1, 64])
def test_the_space_fits_the_device(n):
    problem = ConvProblem(n, 64, 56, 56, 64, 3, 3, 1, 1)
    problem = problem.with_mask(mask_of(pattern("tenth", problem.weight_spec.shape)))
    space = ENGINE.space(problem, H100)
    assert len(set(space)) == len(space) > 4
    for knobs in space:
        layout = template(problem, cuda.positions(problem.mask), knobs)
        cut = cut_of(layout, knobs, 4)
        assert 2 * cut.channels * len(layout.phases) * layout.span * 4 <= cuda.SHARED_BYTES
        assert ENGINE.workspace_bytes(problem, knobs) >= layout.planes * layout.plane * 4
    first = space[0].integer("filters") * space[0].integer("vectors")
    assert first >= (8 if n == 1 else 32)


def test_a_launch_hands_the_driver_pointers_and_values(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    seen = []

    def launched(function, *rest):
        *sizes, stream, parameters, extra = rest
        addresses = (ctypes.c_void_p * 5).from_address(parameters)
        pointers = [ctypes.c_uint64.from_address(address).value for address in addresses[:4]]
        seen.append((function, sizes, stream, extra, pointers, ctypes.string_at(addresses[4], 8)))
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuLaunchKernel", launched)
    source, _ = written(pruned(SMALL, "half"))
    module = replace(source.parts[0], grid=(5, 2), threads=64, shared_bytes=1024)
    values = np.array([1.5, -2.0], np.float32).tobytes()
    cuda._launch("a function", module, 7, (1 << 40, 2, 0, 4), values)
    sizes = [5, 2, 1, 64, 1, 1, 1024]
    assert seen == [("a function", sizes, 7, 0, [1 << 40, 2, 0, 4], values)]
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_VALUE,))
    with pytest.raises(LaunchError, match="INVALID_VALUE"):
        cuda._launch("a function", module, 7, (0, 0, 0, 0), values)


def test_cubins_are_loaded_once_for_a_device_with_their_shared_memory(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    calls = []
    good = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(cuda, "compile_module", lambda source, arch: f"{arch} {len(source)}".encode())
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda cubin: (good, cubin))
    monkeypatch.setattr(driver, "cuModuleGetFunction", lambda loaded, name: (good, (loaded, name)))
    monkeypatch.setattr(driver, "cuFuncSetAttribute", lambda *rest: calls.append(rest) or (good,))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: zeros(()) if "device" in options else zeros(*size))
    problem = pruned(SMALL, "half")
    executable = ENGINE.build(problem, KNOBS, H100)
    data = make_data(problem, 1)
    for _ in range(2):
        values, bias = executable.pack(data.constants)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, KNOBS)
    assert [name for (_, name), *_ in calls] == [b"pad", b"part_0"]
    assert calls[0][0][0].startswith(b"sm_90a ")
    assert [rest[2] for rest in calls] == [module.shared_bytes for module in executable._modules]
    assert bias.dtype == torch.float32
    weight, nonzero = data.constants[0], pattern("half", problem.weight_spec.shape)
    assert sorted(np.frombuffer(b"".join(values), np.float32)) == sorted(weight.numpy()[nonzero])
    with pytest.raises(InputError, match="mask"):
        executable.pack((weight + 1, data.constants[1]))
