"""WorkerServer: a process that has imported what workers need, and forks them: a worker starts in milliseconds.

A new process imports torch, Triton and the engines first: seconds of processor time, for all workers at the same moment. The
server does it once. It sees no GPU and never opens one, for a context does not survive a fork; a worker may open one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final

from convoy.measurement.processes.process import BOOTSTRAP, START_S, WorkerEndedError, import_path

MODULE: Final = "convoy.measurement.processes.worker_fork"
"""The module that runs as the server."""

POLL_S: Final = 0.005
"""How often a wait asks whether a worker has ended."""


def can_fork() -> bool:
    """Whether this system can fork a process and hand open files to another one."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds")


class WorkerServer:
    """The server. It starts at once, and the first fork waits for its imports; it ends with this process.

    Args:
        environment: environment variables to set for it and its workers.
        modules: what it imports besides Triton and the engines, if it can: what fails here fails again in a worker.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with a program that is a constant
                [sys.executable, "-X", "faulthandler", "-c", BOOTSTRAP, MODULE, str(theirs.fileno()), *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._line.settimeout(START_S)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # `_ask` notices a server that has ended
            pipe.write(json.dumps(import_path()) + "\n")

    def fork(self, environment: Mapping[str, str], module: str, stderr: IO[bytes]) -> ForkedProcess:
        """Fork a worker, as a way to start one for `WorkerProcess`.

        Args:
            environment: environment variables to set for it.
            module: the module whose `main` it runs.
            stderr: the file that takes its errors.

        Raises:
            WorkerEndedError: the server has ended, or has not imported everything in time.
        """
        reads, stdin = os.pipe()
        stdout, writes = os.pipe()
        pipes = (os.fdopen(stdin, "w", encoding="utf-8"), os.fdopen(stdout, encoding="utf-8"))
        try:
            pid = self._ask(
                {"module": module, "environment": {**os.environ, **environment}}, (reads, writes, stderr.fileno())
            )
        except WorkerEndedError:
            for pipe in pipes:
                pipe.close()
            raise
        finally:
            os.close(reads)
            os.close(writes)
        assert pid is not None
        return ForkedProcess(self, pid, *pipes)

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a worker, as `subprocess.Popen.returncode`; None while it runs, and -SIGKILL if the server is gone."""
        try:
            return self._ask({"ended": pid})
        except WorkerEndedError:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            return -signal.SIGKILL

    def close(self) -> None:
        """End the server; its workers end by themselves when their input ends."""
        self._process.kill()
        self._process.wait()
        self._line.close()

    def _ask(self, message: Mapping[str, Any], files: tuple[int, ...] = ()) -> int | None:
        """Send a message with open files; the answer is a number or nothing."""
        with self._lock:
            try:
                socket.send_fds(self._line, [json.dumps(message).encode() + b"\n"], files)
                answer = self._line.makefile("rb").readline()
            except OSError as error:  # a time limit too; a late answer would be taken for the next one
                self._process.kill()
                raise WorkerEndedError(f"the server of workers does not answer: {error}", killed=False) from error
        if not answer:
            raise WorkerEndedError("the server of workers has ended", killed=False)
        return json.loads(answer)


class ForkedProcess:
    """A forked worker, with the part of `subprocess.Popen` that `WorkerProcess` uses.

    Attributes:
        pid: its id, and its process group's.
        stdin: the pipe to it.
        stdout: the pipe from it.
    """

    def __init__(self, server: WorkerServer, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            self._code = self._server.exit_code(self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended; raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        """End it at once, unless its end is known: its id may then be another process's."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
