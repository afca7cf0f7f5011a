"""The servers that builders are forked from: started before the builders are needed, where the caller knows that they will be."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, Self

from convoy.measurement.processes.worker_server import WorkerServer

ONE_COMPILER: Final = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Otherwise Inductor would start a pool of compile processes in each worker."""

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}

NO_DEVICE: Final = {"CUDA_VISIBLE_DEVICES": ""}
"""For builders that do not see the GPU."""

UNOPENED: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Has `torch.cuda.is_available()` ask NVML, which opens no GPU: some versions of Inductor ask when they are imported."""

INDUCTOR: Final = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.triton",
    "torch._inductor.runtime.triton_heuristics",
)
"""PyTorch's compiler, which takes 3 s to import. Builders that see the GPU mostly run it; the others do not need it."""


class BuilderServers:
    """Servers for builders with and without the GPU, each taken once. Those that nobody took end with the `with` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[bool, WorkerServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for server in self._started.values():
                server.close()
            self._started.clear()

    def start(self) -> None:
        """Start both kinds: they import for some seconds while the caller does something else."""
        with self._lock:
            for on_device in {False, True} - self._started.keys():
                self._started[on_device] = _server(on_device=on_device)

    def take(self, *, on_device: bool) -> WorkerServer:
        """A server for builders of this kind, which the caller closes: the one that has started, else a new one."""
        with self._lock:
            found = self._started.pop(on_device, None)
        return found or _server(on_device=on_device)


def _server(*, on_device: bool) -> WorkerServer:
    return WorkerServer({**NO_DEVICE, **UNOPENED, **ONE_THREAD, **ONE_COMPILER}, INDUCTOR if on_device else ())
