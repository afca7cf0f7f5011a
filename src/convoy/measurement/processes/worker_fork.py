"""The process behind `WorkerServer`: imports what builders need, then forks a worker for each message that asks for one.

It has one thread: a fork copies only the thread that calls it, and a lock that another one held would stay locked for ever.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, cast

import torch

from convoy.engines.manifest import MANIFEST

MOST_BYTES: Final = 1 << 16
"""Of a message that is read at once."""

FILES: Final = 3
"""Standard input, output and errors of a worker."""


def main() -> None:
    """Serve until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[2]))
    _import_all(sys.argv[3:])
    while True:
        message, files = _next(line)
        if not message:
            return
        asked = json.loads(message)
        if "ended" in asked:
            answer = _exit_code(asked["ended"])
        else:
            answer = _fork(asked, files, line)
        line.sendall(json.dumps(answer).encode() + b"\n")


def _import_all(further: Sequence[str]) -> None:
    """Import the worker, Triton, the engines' modules and others: what fails fails again, with its message, in a worker."""
    for module in ("convoy.measurement.processes.worker", "triton.compiler", *further, *MANIFEST.values()):
        with suppress(Exception):
            importlib.import_module(module)
    with suppress(Exception):
        cast("Any", importlib.import_module("triton.runtime.cache")).triton_key()  # reads all of Triton's files: 0.7 s


def _next(line: socket.socket) -> tuple[bytes, list[int]]:
    """The next message and its files; empty when the other end is closed."""
    message, files, _, _ = socket.recv_fds(line, MOST_BYTES, FILES)
    while message and not message.endswith(b"\n"):
        message += line.recv(MOST_BYTES)
    return message, files


def _exit_code(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _fork(asked: dict[str, Any], files: list[int], line: socket.socket) -> int:
    """Fork a worker; returns its id."""
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        return pid
    code = 1
    try:
        line.close()
        _become(files, asked["environment"])
        importlib.import_module(asked["module"]).main()
        code = 0
    except BaseException:  # also SystemExit: nothing of the server may run in a worker
        sys.excepthook(*cast("Any", sys.exc_info()))
    finally:
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _become(files: list[int], environment: dict[str, str]) -> None:
    """Take the worker's own files, session, environment and import path: the first line of its input."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8")
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = json.loads(sys.stdin.readline())
    check_gpu_unopened(environment)


def check_gpu_unopened(environment: dict[str, str]) -> None:
    """Raise RuntimeError in a worker that may use a GPU, if a module that the server imported has opened it before the fork."""
    if environment.get("CUDA_VISIBLE_DEVICES") != "" and cast("Any", torch.cuda)._is_in_bad_fork():
        raise RuntimeError("a module that the server imported has opened the GPU: a forked process cannot use it")
