"""cuda.layout: exact on the CPU, compiled for an absent GPU, copies that it is not for."""

import ctypes
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from convoy.engines.fusion.layout_copy import ENGINE, copy_code
from convoy.engines.hopper.nvrtc_kernel import absence
from convoy.engines.torch_operators import DTYPES
from convoy.measurement.data import in_layout
from convoy.problem import Knobs, LayoutProblem, LinearProblem, TensorSpec
from convoy.target import Target
from tests.unit.engines.fusion.emulated import DEVICE, GXX
from tests.unit.engines.spills import assert_no_spills

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.13.0"),))
SHAPES = {
    "an image": ((2, 3, 8, 12), "fp16"),
    "odd pixels": ((1, 3, 5, 7), "bf16"),
    "one channel": ((3, 1, 4, 4), "fp32"),
    "eight channels": ((1, 8, 4, 6), "i64"),
    "a tile": ((1, 64, 8, 8), "fp16"),
    "parts of tiles": ((2, 70, 9, 11), "fp32"),
    "flags": ((1, 9, 13, 5), "bool"),
}
COPIES = {
    f"{name} to {end}": LayoutProblem(TensorSpec(*spec), start, end)
    for name, spec in SHAPES.items()
    for start, end in (("nchw", "nhwc"), ("nhwc", "nchw"))
}


@pytest.fixture(autouse=True)
def _bindings_are_there(monkeypatch):
    monkeypatch.setattr("convoy.engines.fusion.layout_copy.absence", lambda: "")


def library(folder, problems, change=("", "")):
    """A library with a function `run_N` for each copy."""
    headers = dict(copy_code(problems[0]).source.headers)
    text = '#include "fusion_device.cuh"\n' + headers["fusion_operators.cuh"].replace("#pragma once", "")
    kernel = headers["layout_copy.cuh"].replace("#pragma once", "")
    for number, problem in enumerate(problems):
        code = copy_code(problem)
        lines = [line for line in code.source.text.splitlines() if "#include" not in line]
        undone = "\n".join(f"#undef {line.split()[1]}" for line in lines if line.startswith("#define"))
        text += f"namespace n{number} {{\n" + "\n".join(lines) + f"\n{kernel.replace(*change)}\n"
        text += "static void call(void **a) { layout_copy((const Value*)a[0], (Value*)a[1]); }\n}\n"
        text += (
            f'extern "C" void run_{number}(void **a) {{ launch({code.blocks}, {code.threads}, n{number}::call, a); }}\n'
        )
        text += undone + "\n"
    (folder / "copies.cpp").write_text(text)
    subprocess.run([*GXX, f"-I{DEVICE}", "-o", folder / "copies.so", folder / "copies.cpp"], check=True, timeout=120)
    return ctypes.CDLL(str(folder / "copies.so"))


def copied(function, problem):
    """A result that was something else before, and the argument."""
    numbers = torch.arange(problem.spec.elements).reshape(problem.spec.shape) % 251
    x = in_layout(numbers.to(DTYPES[problem.spec.dtype]), problem.source)
    y = in_layout(torch.full_like(x, 77), problem.layout)
    function((ctypes.c_void_p * 2)(x.data_ptr(), y.data_ptr()))
    return y, x


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs a host compiler")
    return library(tmp_path_factory.mktemp("copies"), list(COPIES.values()))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_exact(copies, name):
    y, x = copied(getattr(copies, f"run_{list(COPIES).index(name)}"), COPIES[name])
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("an image to nhwc", ("plane[k % COUNT]", "plane[k / COUNT]")),
        ("parts of tiles to nchw", ("= tile[at][c]", "= tile[c][at]")),
    ],
)
def test_planted_faults_are_seen(tmp_path, name, change):
    if shutil.which("g++") is None:
        pytest.skip("needs a host compiler")
    y, x = copied(library(tmp_path, [COPIES[name]], change).run_0, COPIES[name])
    assert not torch.equal(y, x)


@pytest.mark.skipif(bool(absence()), reason="needs NVRTC")
@pytest.mark.parametrize("name", ["an image to nhwc", "parts of tiles to nchw"])
def test_it_compiles_for_a_gpu_that_is_not_there(name):
    assert_no_spills(ENGINE.build(COPIES[name], Knobs(), H100).log)


def test_refusals_say_why():
    image = COPIES["an image to nhwc"]
    assert ENGINE.supports(image, H100)
    assert "got a linear layer" in ENGINE.supports(LinearProblem(1, 2, 3), H100).reason
    assert "capability 8.0" in ENGINE.supports(image, replace(H100, arch="sm_75")).reason
    assert "got nchw to nchw" in ENGINE.supports(LayoutProblem(image.spec, "nchw", "nchw"), H100).reason
    empty = LayoutProblem(TensorSpec((0, 3, 4, 4), "fp16"), "nchw", "nhwc")
    assert "got 0" in ENGINE.supports(empty, H100).reason
    assert 1.5 < ENGINE.estimate_us(image, Knobs(), H100) < 3
