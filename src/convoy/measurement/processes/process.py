"""WorkerProcess: a Python process that answers in JSON lines and can be ended at any time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import IO, Any, Final, Protocol, cast

import torch

from convoy.engines.torch_flags import precision_owners
from convoy.measurement.device.memory_limit import MemoryLimit
from convoy.target import Target

START_S: Final = 120.0
"""Time limit for a process to import torch and open the device, on a loaded machine."""

CLEAN_UP_S: Final = 1.0
"""Time for compilers to remove partly written files before they are killed."""

BOOTSTRAP: Final = (
    "import importlib, json, sys; "
    "sys.path[:] = json.loads(sys.stdin.readline()); "
    "importlib.import_module(sys.argv[1]).main()"
)
"""The worker uses its parent's sys.path, extra engines included, regardless of its own start-up."""


def import_path() -> list[str]:
    """The first line that a worker reads: this process's sys.path."""
    return [entry for entry in cast("list[object]", sys.path) if isinstance(entry, str)]


_STDERR_BYTES: Final = 4000
_STDERR_LINES: Final = 8


class WorkerEndedError(Exception):
    """The process has ended; the message says how, with its last output."""

    def __init__(self, reason: str, *, killed: bool) -> None:
        super().__init__(reason)
        self.killed = killed
        """By SIGKILL, which nobody but the system sends when memory is short."""


class Process(Protocol):
    """The part of `subprocess.Popen` that a worker needs."""

    @property
    def pid(self) -> int:
        """Its id, and its process group's."""
        ...

    @property
    def stdin(self) -> IO[str] | None:
        """The pipe to it."""
        ...

    @property
    def stdout(self) -> IO[str] | None:
        """The pipe from it."""
        ...

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended; raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


Start = Callable[[Mapping[str, str], str, IO[bytes]], Process]
"""Starts a worker: environment variables to set, the module whose `main` it runs, and the file that takes its errors."""


def spawn(environment: Mapping[str, str], module: str, stderr: IO[bytes]) -> Process:
    """Start a worker as a new Python process."""
    return subprocess.Popen(  # noqa: S603 - this Python, with a program that is a constant
        [sys.executable, "-X", "faulthandler", "-c", BOOTSTRAP, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        env={**os.environ, **environment},
        start_new_session=True,
    )


class WorkerProcess:
    """One worker. It has its own process group, so a Ctrl-C does not reach it and its compilers end with it.

    Args:
        hello: the first message; the answer says that the worker is ready.
        environment: environment variables to set for it.
        module: the module whose `main` it runs.
        start: starts it: a new Python process, or `WorkerServer.fork`.
    """

    def __init__(
        self,
        hello: Mapping[str, Any],
        environment: Mapping[str, str],
        module: str = "convoy.measurement.processes.worker",
        start: Start = spawn,
    ) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        try:
            self._process = start(environment, module, self._stderr)
        except BaseException:  # KeyboardInterrupt too
            self._stderr.close()
            raise
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()
        self.send(import_path())
        self.send(hello)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Write one line; `receive` notices a process that has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            TimeoutError: none came in time.
            WorkerEndedError: the process has ended.
        """
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                raise TimeoutError(f"took longer than {timeout_s:g} s") from None
            if line is None:
                raise self._ended()
            with contextlib.suppress(ValueError):  # output that a library prints while it is imported
                message = json.loads(line)
                if isinstance(message, dict):
                    return cast("dict[str, Any]", message)

    def terminate(self) -> None:
        """Ask the process and everything that it started to end, without waiting for it: `kill` then has less to wait for."""
        if hasattr(os, "killpg") and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process with everything that it started. A waiting `receive` then raises WorkerEndedError."""
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                self._end_group()
            self._process.kill()

    def _end_group(self) -> None:
        """Ask all processes of the group to end, then kill those that do not.

        A killed compiler leaves a partly written file. Inductor would take half a precompiled header for a complete one, and
        each of its later compilations would take four times as long.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGTERM)
            end = time.monotonic() + CLEAN_UP_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLEAN_UP_S)
            while time.monotonic() < end:
                os.killpg(self._process.pid, 0)  # raises when no process is left
                time.sleep(0.005)
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, wait for it and close everything; only for the thread that uses it."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ended(self) -> WorkerEndedError:
        """How the process ended. Its output is closed, so it has ended or is about to."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_BYTES))
        words = _crash_report(self._stderr.read().decode(errors="replace"))
        killed = code == -signal.SIGKILL if hasattr(signal, "SIGKILL") else False
        how = f"signal {-code} ({_signal_name(-code)})" if code < 0 else f"exit code {code}"
        return WorkerEndedError(
            f"the measuring process ended with {how}" + (f"\n{words}" if words else ""), killed=killed
        )


def _pump(pipe: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    assert pipe is not None
    with contextlib.suppress(ValueError, OSError):  # closed while reading: the process was ended
        for line in pipe:
            lines.put(line)
    lines.put(None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _crash_report(text: str) -> str:
    """The part of faulthandler's output about the thread that crashed, or else the last lines."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return "\n".join(lines[-_STDERR_LINES:])
    thread = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), crash + 1)
    return "\n".join([lines[crash], *lines[thread : thread + _STDERR_LINES]])


def worker_handshake(
    target: Target,
    extra_engines: tuple[str, ...],
    timeout_s: float,
    *,
    role: str,
    memory_limit: MemoryLimit | None = None,
) -> dict[str, Any]:
    """The first message: settings that make the worker's torch behave like this process's."""
    hello: dict[str, Any] = {
        "role": role,
        "target": target.to_dict(),
        "engines": list(extra_engines),
        "timeout_s": timeout_s,
        "memory_limit": None if memory_limit is None else asdict(memory_limit),
        "device_index": torch.cuda.current_device() if target.device == "cuda" and role == "measure" else 0,
    }
    with contextlib.suppress(RuntimeError):  # torch refuses to answer if old and new precision settings are mixed
        hello["fp32_matmul"], hello["cudnn_tf32"] = (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
        )
    hello["fp32_precision"] = {name: owner.fp32_precision for name, owner in precision_owners().items()}
    return hello
