"""The emulated device as Python sees it: tensor maps as structures, kernels as libraries of the host. Not a test module."""

import ctypes
import subprocess

from convoy.engines.hopper.tensor_maps import BoxMap, PixelMap
from convoy.problem import ConvProblem


class Map(ctypes.Structure):
    """`Map` of emulated.h."""

    _fields_ = [
        ("base", ctypes.c_void_p), ("size", ctypes.c_longlong * 4), ("stride", ctypes.c_longlong * 4),
        ("low", ctypes.c_int * 2), ("high", ctypes.c_int * 2), ("step", ctypes.c_int * 2),
        ("rows", ctypes.c_int), ("channels", ctypes.c_int), ("box", ctypes.c_int * 4),
    ]  # fmt: skip


def emulated_map(tensor, described):
    """A tensor map of `convoy.engines.hopper.tensor_maps` for the emulated copies."""
    found = Map(tensor.data_ptr(), rows=getattr(described, "rows", 0), channels=getattr(described, "channels", 0))
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


def compiled(folder):
    """A function from a kernel's text to its library in a folder; each is compiled once."""
    made = {}

    def build(content):
        if content not in made:
            source = folder / f"{len(made)}.cpp"
            source.write_text(content)
            target = source.with_suffix(".so")
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-o", target, source]
            subprocess.run(command, check=True, timeout=120)
            made[content] = ctypes.CDLL(str(target))
        return made[content]

    return build


def conv(*sizes, dtype="fp16", **rest):
    """A problem in NHWC on tensors of a dtype."""
    return ConvProblem(*sizes, layout="nhwc", x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, **rest)


def address(tensor):
    """A tensor's address, or null."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
