"""ChildRunner: measures in a child process with a time limit, so that a crash or a hang costs a row and not the session."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request, row
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Knobs, SubgraphProblem
from convoy.target import Target

START_S = 120.0
"""Time for a child to import torch and open the device, on a loaded machine."""

TIMING_FACTOR = 4.0
"""Timing all candidates of a problem may take this many times as long as one candidate's limit."""


class ChildRunner:
    """Drives a worker over pipes, in JSON lines. The worker starts with the first request and restarts after a fault.

    Args:
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: a candidate that takes longer to build and check is ended and recorded as `timeout`.
    """

    def __init__(self, target: Target, *, extra_engines: tuple[str, ...] = (), timeout_s: float = 30.0) -> None:
        self.target = target
        self.extra_engines = extra_engines
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._stderr: IO[bytes] | None = None

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """The rows of a request; configs that end the worker get a failure row, the others are measured by the next one."""
        pending = list(request.configs)
        while pending:
            found = yield from self._attempt(replace(request, configs=tuple(pending)), protocol, pending)
            if found is None:
                return
            index, status, reason = found
            if index < 0 and len(pending) > 1:  # it died while timing: measure one by one to find out who did it
                for config in list(pending):
                    yield from self.measure(replace(request, configs=(config,)), protocol)
                return
            culprit = pending.pop(max(index, 0))
            yield row(self.target, request.problem, culprit, protocol, status, reason=reason)

    def close(self) -> None:
        """End the worker."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def _attempt(
        self, request: Request, protocol: Protocol, pending: list[EngineConfig]
    ) -> Iterator[Measurement]:  # returns (index of the culprit, status, reason), or None where all went well
        self._start()
        self._send(_job(request, protocol))
        current, sent = 0, list(request.configs)
        while True:
            limit = self.timeout_s * (TIMING_FACTOR if current < 0 else 1.0)
            try:
                line = self._lines.get(timeout=limit)
            except queue.Empty:
                self.close()
                return _index(pending, sent, current), Status.TIMEOUT, f"took longer than {limit:g} s"
            if line is None:
                reason = self._obituary()
                self.close()
                return _index(pending, sent, current), Status.LAUNCH_ERROR, reason
            message = json.loads(line)
            if "at" in message:
                current = message["at"]
            elif "row" in message:
                measured = _row(message["row"])
                pending.remove(measured.config)
                yield measured
            else:
                return None

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._lines = queue.Queue()
        self._stderr = tempfile.TemporaryFile()
        environment = dict(os.environ)
        if self.target.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(self.target.units)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "convoy.measurement.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        self._send({"target": self.target.to_dict(), "engines": list(self.extra_engines)})
        try:
            ready = self._lines.get(timeout=START_S)
        except queue.Empty:
            ready = None
        if ready is None:
            reason = self._obituary()
            self.close()
            raise RuntimeError(f"the measuring process did not start: {reason}")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # its end is noticed where its answers are read

    def _obituary(self) -> str:
        """How the worker ended, with the last lines that it said."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            self._process.kill()
            code = self._process.wait()
        said = b""
        if self._stderr is not None:
            self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, self._stderr.tell() - 1000))
            said = self._stderr.read()
        words = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = said.decode(errors="replace").strip().splitlines()[-3:]
        return f"the measuring process ended with {words}" + (": " + " | ".join(last) if last else "")


def _read(pipe: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    assert pipe is not None
    try:
        for line in pipe:
            lines.put(line)
    except ValueError:  # closed while reading, because the worker was ended
        pass
    lines.put(None)


def _index(pending: list[EngineConfig], sent: list[EngineConfig], current: int) -> int:
    return pending.index(sent[current]) if current >= 0 and sent[current] in pending else -1


def _job(request: Request, protocol: Protocol) -> dict[str, Any]:
    problem = request.problem
    return {
        "problem": problem.key,
        "text": problem.text if isinstance(problem, SubgraphProblem) else "",
        "configs": [[c.engine, c.version, str(c.knobs)] for c in request.configs],
        "rounds": request.rounds,
        "protocol": {name: getattr(protocol, name) for name in Protocol.__slots__},
    }


def _row(values: dict[str, Any]) -> Measurement:
    engine, version, knobs = values.pop("config")
    status = Status(values.pop("status"))
    return Measurement(config=EngineConfig(engine, version, Knobs.parse(knobs)), status=status, **values)
