"""libconvoy through ctypes, as a C program would call it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

INVALID_ARGUMENT, CANNOT_READ, DAMAGED, OTHER_VERSION, OTHER_MACHINE, NOT_PORTABLE, NOT_TRUSTED = range(1, 8)
TRUST = 1

DTYPES = {
    torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4, torch.int64: 5, torch.int32: 6, torch.uint8: 9,
}  # fmt: skip


class Info(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("layout", ctypes.c_int),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("size_bytes", ctypes.c_size_t),
    )


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


def tensors(given: Sequence[torch.Tensor]) -> ctypes.Array[Tensor]:
    """The tensors' memory as the runtime takes it."""
    made = (Tensor * len(given))()
    for one, tensor in zip(made, given, strict=True):
        shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        one.data, one.dtype, one.rank = tensor.data_ptr(), DTYPES[tensor.dtype], tensor.dim()
        one.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    return made


class Net:
    """An opened net."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self.library, self.handle = library, handle

    def info(self, kind: str, index: int, program: int = 0) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, layout and bytes of an input or output."""
        found = Info()
        function = {"input": self.library.convoy_input, "output": self.library.convoy_output}[kind]
        assert function(self.handle, ctypes.c_size_t(program), ctypes.c_size_t(index), ctypes.byref(found)) == 0
        return found.name.decode(), tuple(found.shape[: found.rank]), found.layout, found.size_bytes

    def run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        """The status of a run."""
        return self.library.convoy_run(
            self.handle, tensors(inputs), ctypes.c_size_t(len(inputs)), tensors(outputs), ctypes.c_size_t(len(outputs))
        )


class Libconvoy:
    """The library."""

    def __init__(self, path: Path) -> None:
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.convoy_last_error.restype = ctypes.c_char_p
        self.library.convoy_input_count.restype = self.library.convoy_output_count.restype = ctypes.c_size_t
        self.library.convoy_program_count.restype = ctypes.c_size_t
        self.library.convoy_close.restype = None

    def error(self) -> str:
        """The last error's text."""
        return self.library.convoy_last_error().decode()

    def status(self, path: Path, flags: int = TRUST) -> int:
        """The status of an open; what it opened is closed."""
        handle = ctypes.c_void_p()
        found = self.library.convoy_open(str(path).encode(), flags, ctypes.byref(handle))
        assert (handle.value is None) == (found != 0)
        self.library.convoy_close(handle)
        return found

    @contextmanager
    def opened(self, path: Path) -> Iterator[Net]:
        """A net that is closed again."""
        handle = ctypes.c_void_p()
        status = self.library.convoy_open(str(path).encode(), TRUST, ctypes.byref(handle))
        assert status == 0, self.error()
        yield Net(self.library, handle)
        self.library.convoy_close(handle)
