"""Generated kernels as functions of the host: many of them compiled together. Not a test module."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch

from convoy.engines.fusion.kernel_code import FusionCode, code_of, header_text
from convoy.engines.torch_operators import DTYPES
from convoy.measurement.accuracy import Data, check, make_data, oracle
from convoy.measurement.data import in_layout, result_specs

DEVICE = Path(__file__).with_name("device")
GXX = ["g++", "-std=c++17", "-O0", "-w", "-fPIC", "-shared"]


def code_for(problem):
    """A problem's kernels; fails with the reason where there are none."""
    found = code_of(problem.text, problem.layout)
    assert isinstance(found, FusionCode), f"{found}\n{problem.text}"
    return found


def library(folder, codes, changes=()):
    """A library with a function `run_N` for each subgraph; `changes` are faults, (before, after) in any text."""
    operators = header_text("fusion_operators.cuh")
    text = '#include "fusion_device.cuh"\n' + operators.replace("#pragma once", "")
    for number, code in enumerate(codes):
        text += f"namespace n{number} {{\n"
        launches = ""
        for kernel in code.kernels:
            parameters = re.search(rf"{kernel.name}\((.*)\) \{{", kernel.text)[1].split(", ")
            casts = [p.rsplit(" ", 1)[0].replace("RESTRICT", "") for p in parameters]
            call = ", ".join(f"({cast})a[{place}]" for place, cast in enumerate(casts))
            text += f"{kernel.text}\nstatic void call_{kernel.name}(void **a) {{ {kernel.name}({call}); }}\n"
            launches += f"launch({kernel.blocks}, {kernel.threads}, n{number}::call_{kernel.name}, a);"
            launches += f" a += {len(parameters)}; "
        text += f'}}\nextern "C" void run_{number}(void **a) {{ {launches} }}\n'
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    folder.mkdir(exist_ok=True)
    (folder / "kernels.cpp").write_text(text)
    command = [*GXX, f"-I{DEVICE}", "-o", folder / "kernels.so", folder / "kernels.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernels.so"))


def run(function, problem, data, code, results=()):
    """The results of one kernel, which were not numbers before; in tensors that are given or new ones."""
    results = results or [
        in_layout(torch.full(spec.shape, float("nan"), dtype=DTYPES[spec.dtype]), problem.layout)
        for spec in result_specs(problem)
    ]
    held = [torch.full((code.workspace_bytes // 4 + 4,), float("nan"))]  # one place behind the end is a guard
    places = {f"x{place}": t.data_ptr() for place, t in enumerate(data.args)}
    constants = [t.contiguous() for t in data.constants]
    places |= {f"c{place}": t.data_ptr() for place, t in enumerate(constants)}
    places |= {f"y{place}": t.data_ptr() for place, t in enumerate(results)}
    places |= {f"w{place}": held[0].data_ptr() + offset for place, offset in enumerate(code.offsets)}
    pointers = [places[name] for kernel in code.kernels for name in kernel.parameters]
    function((ctypes.c_void_p * len(pointers))(*pointers))
    assert held[0][code.workspace_bytes // 4 :].isnan().all()
    return results


def scaled(data, factor):
    """Data of another magnitude."""
    return Data(tuple(t * factor for t in data.args), data.constants)


def judged(functions, problem, number, factor=1):
    """The verdict on one kernel, for normal data times a factor."""
    data, kind = scaled(make_data(problem, 1, "normal"), factor), "normal"
    results = run(getattr(functions, f"run_{number}"), problem, data, code_for(problem))
    return check(problem, "direct", results, oracle(problem, data), kind, data=data)
