"""cuDNN through its own C interface: execution plans from their text, and runs of them as graphs.

The frontend, which made the plans, is not needed. Names and numbers are those of cuDNN's documentation of its backend.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from convoy.engines.compilers.cuda_bindings import driver
from convoy.errors import PackageError

LIBRARY: Final = "libcudnn.so.9"

_EXECUTION_PLAN: Final = 5
_VARIANT_PACK: Final = 16
_PLAN_HANDLE: Final = 400
_PLAN_TEXT: Final = 405
_PACK_UIDS: Final = 1000
_PACK_POINTERS: Final = 1001
_PACK_WORKSPACE: Final = 1003
_HANDLES: Final = 0
_INT64: Final = 3
_POINTERS: Final = 6
_CHARS: Final = 24


def cudnn_version() -> int:
    """The version of PyTorch's cuDNN, 91900 for 9.19.0; 0 without it."""
    return int(torch.backends.cudnn.version() or 0)


class CudnnPlans:
    """The execution plans of a package on PyTorch's current device.

    Args:
        texts: each plan's text, as cuDNN made it, by member.
        path: the package, for errors.

    Raises:
        PackageError: cuDNN is not there, or refuses a plan.
    """

    def __init__(self, texts: Mapping[str, bytes], path: str) -> None:
        self._path = path
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise PackageError("package", path, f"a machine with cuDNN 9: {error}") from error
        self._library.cudnnGetErrorString.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._checked(self._library.cudnnCreate(ctypes.byref(self._handle)), "a handle")
        self._plans: dict[str, ctypes.c_void_p] = {}
        weakref.finalize(self, _close, self._library, self._handle, self._plans).atexit = False
        for name, text in texts.items():
            plan = self._plans[name] = self._made(_EXECUTION_PLAN)
            self._set(plan, _PLAN_TEXT, _CHARS, text, len(text))
            self._set(plan, _PLAN_HANDLE, _HANDLES, ctypes.byref(self._handle), 1)
            self._checked(self._library.cudnnBackendFinalize(plan), f"plan {name}")

    def graph(
        self, name: str, operands: Sequence[tuple[int, int]], workspace: int, driver_checked: Callable[..., Any]
    ) -> Any:
        """One run of a plan as a CUgraph, which the caller destroys.

        Args:
            name: the plan's member.
            operands: (uid, device address) of each tensor.
            workspace: device address; 0: none.
            driver_checked: takes a driver's answer and what it was for, and gives its result.

        Raises:
            PackageError: cuDNN or the driver refuses.
        """
        cuda, plan = driver(), self._plans[name]
        count = len(operands)
        pack = self._made(_VARIANT_PACK)
        try:
            uids = (ctypes.c_int64 * count)(*(uid for uid, _ in operands))
            pointers = (ctypes.c_void_p * count)(*(address for _, address in operands))
            self._set(pack, _PACK_UIDS, _INT64, uids, count)
            self._set(pack, _PACK_POINTERS, _POINTERS, pointers, count)
            self._set(pack, _PACK_WORKSPACE, _POINTERS, ctypes.byref(ctypes.c_void_p(workspace or None)), 1)
            self._checked(self._library.cudnnBackendFinalize(pack), "tensors of a run")
            stream = driver_checked(cuda.cuStreamCreate(0), "a stream")
            try:
                return self._captured(plan, pack, stream, driver_checked)
            finally:
                cuda.cuStreamDestroy(stream)
        finally:
            self._library.cudnnBackendDestroyDescriptor(pack)

    def _captured(self, plan: Any, pack: Any, stream: Any, driver_checked: Callable[..., Any]) -> Any:
        """A run as a graph. The first run loads cuDNN's kernels, which a capture does not allow."""
        cuda, library = driver(), self._library
        self._checked(library.cudnnSetStream(self._handle, ctypes.c_void_p(int(stream))), "a stream")
        self._checked(library.cudnnBackendExecute(self._handle, plan, pack), "a run")
        driver_checked(cuda.cuStreamSynchronize(stream), "a run of cuDNN")
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver_checked(cuda.cuStreamBeginCapture(stream, mode), "a capture")
        error = library.cudnnBackendExecute(self._handle, plan, pack)
        ended = cuda.cuStreamEndCapture(stream)
        if error and not int(ended[0]):
            cuda.cuGraphDestroy(ended[1])
        self._checked(error, "a captured run")
        return driver_checked(ended, "a capture of cuDNN")

    def _made(self, kind: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._checked(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)), "a descriptor")
        return made

    def _set(self, descriptor: Any, attribute: int, kind: int, values: Any, count: int) -> None:
        status = self._library.cudnnBackendSetAttribute(descriptor, attribute, kind, ctypes.c_int64(count), values)
        self._checked(status, f"attribute {attribute}")

    def _checked(self, status: int, what: str) -> None:
        if status:
            said = self._library.cudnnGetErrorString(status).decode(errors="replace")
            todo = "Export the package again on this machine."
            raise PackageError("package", self._path, f"plans that this cuDNN runs, but {what}: {said}", todo)


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p, plans: Mapping[str, ctypes.c_void_p]) -> None:
    for plan in plans.values():
        library.cudnnBackendDestroyDescriptor(plan)
    library.cudnnDestroy(handle)
