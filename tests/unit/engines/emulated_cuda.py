"""The emulated device as Python sees it: tensor maps as structures, kernels as libraries of the host. Not a test module."""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

from convoy.engines.hopper.nvrtc_source import kernel_source
from convoy.engines.hopper.tensor_maps import BoxMap, PixelMap
from convoy.problem import ConvProblem
from convoy.problem.spec import DTYPE_BYTES

HOPPER_DEVICE = Path(__file__).with_name("hopper") / "device"


class EmulatedMap(ctypes.Structure):
    """`TensorMap` of emulated_device.h."""

    _fields_ = [
        ("base", ctypes.c_void_p), ("size", ctypes.c_longlong * 4), ("stride", ctypes.c_longlong * 4),
        ("low", ctypes.c_int * 2), ("high", ctypes.c_int * 2), ("step", ctypes.c_int * 2),
        ("rows", ctypes.c_int), ("channels", ctypes.c_int), ("box", ctypes.c_int * 4),
    ]  # fmt: skip


def emulated_map(tensor, described):
    """A tensor map of `convoy.engines.hopper.tensor_maps` for the emulated copies."""
    found = EmulatedMap(
        tensor.data_ptr(), rows=getattr(described, "rows", 0), channels=getattr(described, "channels", 0)
    )
    for index, size in enumerate(described.sizes):
        found.size[index] = size
    for index, stride in enumerate(described.strides):
        found.stride[index + 1] = stride
    if isinstance(described, BoxMap):
        found.box[:] = described.box
    if isinstance(described, PixelMap):
        for name in ("low", "high", "step"):
            getattr(found, name)[:] = getattr(described, name)
    return found


GXX = ["g++", "-std=c++17", "-Og", "-w", "-fPIC", "-D__device__=", "-D__forceinline__=inline"]
"""The host's compiler, for kernels and for the device's header alike. -Og, because most kernels are compiled for one launch."""


def kernel_libraries(folder, device):
    """A function that compiles a kernel for the host, each once.

    Args:
        folder: where sources and libraries are written.
        device: the folder of headers that stand in front of those of `hopper/include`.
    """
    made = {}

    @cache
    def precompiled():
        """Options that include the emulated device first, compiled once: half of a kernel's time is its standard headers."""
        header = device / "emulated_device.h"
        if not header.exists():
            return []
        place = folder / "precompiled"
        place.mkdir()
        shutil.copy(header, place)  # which the compiler reads where the header is included once more
        command = [*GXX, "-includecmath", "-x", "c++-header", header, "-o", place / f"{header.name}.gch"]
        subprocess.run(command, check=True, timeout=120)
        return [f"-I{place}", "-include", header.name]

    def build(kernel, parameters, launch, *, changes=(), macros=()):
        """The library.

        Args:
            kernel: the name of its file without the ending.
            parameters: values of its configuration's header.
            launch: C++ behind the kernel: a function `run`.
            changes: (before, after) for the text of the kernel and its headers: faults that are planted.
            macros: NAME=value, for the compiler.
        """
        source = kernel_source(kernel, parameters)
        texts = {
            name: text for name, text in (*source.headers, (source.name, source.text)) if not (device / name).exists()
        }
        for before, after in changes:
            assert any(before in text for text in texts.values()), before
            texts = {name: text.replace(before, after) for name, text in texts.items()}
        texts["main.cpp"] = f'#include "{source.name}"\n{launch}'
        key = (*sorted(texts.items()), *macros)
        if key not in made:
            own = folder / str(len(made))
            own.mkdir()
            for name, text in texts.items():
                (own / name).parent.mkdir(exist_ok=True)
                (own / name).write_text(text)
            include = [f"-I{path}" for path in (own, device, device.parent)]
            command = [*GXX, *(f"-D{macro}" for macro in macros), *precompiled(), "-includecmath", *include]
            subprocess.run([*command, "-shared", "-o", own / "kernel.so", own / "main.cpp"], check=True, timeout=120)
            made[key] = ctypes.CDLL(str(own / "kernel.so"))
        return made[key]

    return build


def hopper_libraries(folder):
    """`kernel_libraries` on the emulated Hopper device, for operands of a dtype."""
    build = kernel_libraries(folder, HOPPER_DEVICE)

    def of(kernel, parameters, launch, dtype, changes=()):
        macros = (f"EMULATED_VALUE_BYTES={DTYPE_BYTES[dtype]}", f"EMULATED_BFLOAT={int(dtype == 'bf16')}")
        return build(kernel, parameters, f'#include "launch.h"\n{launch}', changes=changes, macros=macros)

    return of


def conv(*sizes, dtype="fp16", **rest):
    """A problem in NHWC on tensors of a dtype."""
    return ConvProblem(*sizes, layout="nhwc", x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, **rest)


def address(tensor):
    """A tensor's address, or null."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
