"""Generated kernels as functions of the host: many of them compiled together. Not a test module."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch

from convoy.engines.fusion.kernel_code import KernelCode, header_text, kernel_of
from convoy.engines.torch_operators import DTYPES
from convoy.measurement.accuracy import check, make_data, oracle
from convoy.measurement.data import in_layout, result_specs

DEVICE = Path(__file__).with_name("device")
UNITS = 132
GXX = ["g++", "-std=c++17", "-O0", "-w", "-fPIC", "-shared"]


def code_of(problem, units=UNITS):
    """A problem's kernel; fails with the reason where there is none."""
    found = kernel_of(problem.text, problem.layout, units)
    assert isinstance(found, KernelCode), f"{found}\n{problem.text}"
    return found


def library(folder, codes, changes=()):
    """A library with a function `run_N` for each kernel; `changes` are faults, (before, after) in any text."""
    operators = header_text("fusion_operators.cuh")
    text = '#include "fusion_device.cuh"\n' + operators.replace("#pragma once", "")
    for number, code in enumerate(codes):
        parameters = re.search(r"fusion\((.*)\) \{", code.text)[1].split(", ")
        casts = ", ".join(f"({p.rsplit(' ', 1)[0].replace('RESTRICT', '')})a[{i}]" for i, p in enumerate(parameters))
        text += f"namespace n{number} {{\n{code.text}\nstatic void call(void **a) {{ fusion({casts}); }}\n}}\n"
        text += (
            f'extern "C" void run_{number}(void **a) {{ launch({code.blocks}, {code.threads}, n{number}::call, a); }}\n'
        )
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    folder.mkdir(exist_ok=True)
    (folder / "kernels.cpp").write_text(text)
    command = [*GXX, f"-I{DEVICE}", "-o", folder / "kernels.so", folder / "kernels.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernels.so"))


def run(function, problem, data):
    """The results of one kernel, which were not numbers before."""
    results = [
        in_layout(torch.full(spec.shape, float("nan"), dtype=DTYPES[spec.dtype]), problem.layout)
        for spec in result_specs(problem)
    ]
    tensors = [*data.args, *(t.contiguous() for t in data.constants), *results]
    function((ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors)))
    return results


def judged(functions, problem, number, seed=1, kind="normal"):
    """The verdict on one kernel."""
    data = make_data(problem, seed, kind)
    results = run(getattr(functions, f"run_{number}"), problem, data)
    return check(problem, "direct", results, oracle(problem, data), kind, data=data)
