"""pruned.csr without a GPU: its kernels run by threads of the CPU, compiled for sm_90a, refused."""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.hopper.nvrtc_kernel import structure
from convoy.engines.sparse_weights import pruned_csr
from convoy.engines.sparse_weights.pruned_csr import ENGINE, THREADS, Rows, padded, parameters, sizes
from convoy.errors import InputError, LaunchError
from convoy.measurement.accuracy import make_data, oracle
from convoy.problem import ConvProblem, Epilogue, Knobs, parse_problem
from convoy.target import Target
from tests.unit.engines.conv_cases import EPILOGUES, SHAPES
from tests.unit.engines.emulated_cuda import address, kernel_libraries
from tests.unit.engines.pruned_cases import PATTERNS, SMALL, mask_of, pattern, pruned
from tests.unit.engines.spills import assert_no_spills

HERE = Path(__file__).parent
H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
HALF = {"x_dtype": "fp16", "weight_dtype": "fp16", "y_dtype": "fp16"}
LAUNCH = """
extern "C" void run(const Value* x, Value* planes, const int* starts, const Entry* entries, const Value* bias,
                    const Value* residual, Value* y, const Sizes* z, int pad_blocks, int blocks) {
  if (pad_blocks) launch(pad_blocks, THREADS, [=] { pad(x, planes, *z); });
  launch(blocks, THREADS, [=] { csr(pad_blocks ? planes : x, starts, entries, bias, residual, y, *z); });
}
"""


@pytest.fixture(autouse=True)
def _bindings_are_there(monkeypatch):
    monkeypatch.setattr(pruned_csr, "absence", lambda: "")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    build = kernel_libraries(tmp_path_factory.mktemp("csr"), HERE / "plain_device")

    def kernel(settings):
        return build("csr", settings, LAUNCH)

    return kernel


def run(library, problem, pixels):
    """The kernels' y and the oracle's, on integers."""
    knobs = Knobs.of(pixels=pixels)
    data = make_data(problem, 1, "integer")
    starts, entries = Rows(problem).pack(data.constants[0])
    planes = torch.full((sizes(problem)["planes"],), float("nan"), dtype=data.args[0].dtype)
    y = torch.full(problem.y_spec.shape, float("nan"), dtype=data.args[0].dtype)
    threads = 8  # instead of 128: a thread of the host is dear
    kernel = library(parameters(problem, knobs) | {"THREADS": threads})
    kernel.run(
        address(data.args[0]), address(planes), address(starts), address(entries),
        address(data.constants[1] if problem.epilogue.bias else None),
        address(data.args[1] if problem.epilogue.residual else None), address(y),
        ctypes.byref(structure("Sizes", sizes(problem))),
        -(-len(planes) // threads) if ENGINE.workspace_bytes(problem, knobs) else 0,
        -(-problem.n * problem.p * problem.q // (threads * pixels)) * problem.k,
    )  # fmt: skip
    return y.double(), oracle(problem, data)[0]


NAMES = (
    "3x3 padded",
    "1x1 strides 2 and 3",
    "dilated, strided, grouped",
    "3x3 over-padded",
    "depthwise, two filters a channel",
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize("name", NAMES)
def test_exact_on_integers(library, name):
    turn = NAMES.index(name)
    problem = pruned(SHAPES[name], PATTERNS[turn])
    y, expected = run(library, replace(problem, epilogue=EPILOGUES[3]), 1 + turn % 2)
    assert torch.equal(y, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
def test_exact_in_half(library):
    y, expected = run(library, replace(pruned(SMALL, "tenth"), **HALF, numerics="half"), 2)
    assert torch.equal(y, expected)


def test_rows_read_inside_the_padded_image():
    for name in ("dilated, strided, grouped", "3x3 over-padded", "4x2", "grouped 5x5"):
        problem = pruned(SHAPES[name], "full")
        height, width = padded(problem)
        rows = Rows(problem)
        last = (problem.p - 1) * problem.stride_h * width + (problem.q - 1) * problem.stride_w
        assert int(rows.offsets.max()) + last < problem.c * height * width
        assert int(rows.starts[-1]) == len(rows.offsets) == problem.mask.nonzeros


@pytest.mark.parametrize(
    ("problem", "target", "words"),
    [
        (pruned(SMALL, "tenth"), CPU, "capability 8.0"),
        (SMALL, H100, "without a mask"),
        (parse_problem(pruned(SMALL, "tenth").key), H100, "digest alone"),
        (pruned(SMALL, "tenth").with_layout("nhwc"), H100, "layout nchw"),
        (pruned(replace(SMALL, x_dtype="bf16", weight_dtype="bf16", y_dtype="bf16"), "tenth"), H100, "fp32 or fp16"),
        (pruned(replace(SMALL, n=0), "tenth"), H100, "batch"),
        (pruned(replace(SMALL, n=10**7), "tenth"), H100, "2^31"),
        (pruned(replace(SMALL, direction="dgrad", epilogue=Epilogue()), "tenth"), H100, "fprop"),
    ],
)
def test_refusals_say_why(problem, target, words):
    support = ENGINE.accepts(problem, target)
    assert not support
    assert words in support.reason


def test_the_space_keeps_multiprocessors_busy():
    large = pruned(ConvProblem(64, 64, 56, 56, 64, 3, 3, 1, 1), "tenth")
    small = pruned(ConvProblem(1, 64, 7, 7, 64, 3, 3, 1, 1), "tenth")
    assert ENGINE.accepts(large, H100)
    assert [knobs["pixels"] for knobs in ENGINE.space(large, H100)] == [4, 2, 1]
    assert [knobs["pixels"] for knobs in ENGINE.space(small, H100)] == [1]


class Launches:
    """In a kernel's place: what it was launched with."""

    made: ClassVar[list[tuple[str, list[int | None]]]] = []

    def __init__(self, engine, cubin, name, shared_bytes):
        self.name = name

    def launch(self, device, grid, threads, arguments, **_):
        self.made.append((self.name, [argument.value for argument in arguments[:2] if hasattr(argument, "value")]))


def test_the_workspace_is_used_where_there_is_padding_and_only_there(monkeypatch):
    monkeypatch.setattr(pruned_csr, "compile_cubin", lambda *_: (b"", ""))
    monkeypatch.setattr(pruned_csr, "Function", Launches)
    for problem, padding in (
        (pruned(SMALL, "tenth"), True),
        (pruned(replace(SMALL, pad_h=0, pad_w=0), "tenth"), False),
    ):
        executable, data = ENGINE.build(problem, ENGINE.space(problem, H100)[0], H100), make_data(problem, 1, "integer")
        buffers = Buffers(data.args, [torch.empty(problem.y_spec.shape)], executable.pack(data.constants))
        x = data.args[0].data_ptr()
        for workspace in (torch.empty(max(executable.workspace_bytes, 1024), dtype=torch.uint8), None, torch.empty(0)):
            Launches.made.clear()
            if padding and (workspace is None or not workspace.numel()):
                with pytest.raises(LaunchError, match="workspace"):
                    executable.launch(buffers, workspace)
                continue
            executable.launch(buffers, workspace)
            names, pointers = zip(*Launches.made, strict=True)
            assert names == (("pad", "csr") if padding else ("csr",))
            assert pointers[-1][0] == (workspace.data_ptr() if padding else x)


def test_values_are_data_and_strays_are_refused():
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    nonzero = pattern("tenth", SMALL.weight_spec.shape)
    problem = SMALL.with_mask(mask_of(nonzero))
    executable = ENGINE.build(problem, ENGINE.space(problem, H100)[0], H100)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, ENGINE.space(problem, H100)[0])
    weight = torch.from_numpy(np.where(nonzero, np.nan, 0.0)).float()
    starts, entries, _ = executable.pack((weight, torch.zeros(problem.k)))
    assert entries[:, 1].view(torch.float32).isnan().all()
    assert starts[-1] == len(entries) == nonzero.sum()
    with pytest.raises(InputError, match="weight"):
        executable.pack((torch.ones_like(weight), torch.zeros(problem.k)))
    assert_no_spills(executable.log)
    assert THREADS % 32 == 0
