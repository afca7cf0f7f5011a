"""Start torchrun for one job, wait for it with a limit, and turn any end but a good one into a status and a line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Final

from convoy.compare.runs.rows import Row
from convoy.compare.scaling.scaling_jobs import ScalingJob, parts_of
from convoy.compare.scaling.scaling_rows import result_row
from convoy.narrowing import is_dict

WORKER: Final = "convoy.compare.scaling.scaling_worker"

LAUNCHER: Final = "CONVOY_LAUNCHER"
"""Environment variable with the process that started torchrun: when that process is gone, the worker ends."""

TURN: Final = "turn"
"""Name of the file in a job's folder that tells the processes to begin: until then they only import modules. Where they prepare
first, it tells them to time."""

PREPARED: Final = "prepared"
"""Beginning of the names of the files by which processes that prepare first say that they have."""

Turn = Callable[[Callable[[], bool]], AbstractContextManager[float]]
"""Entered when a job's processes are there, and left at their end; gives the seconds that the job may take, 0 for none at all.
Its argument says whether all processes have prepared, or have ended."""

GRACE_S: Final = 10.0
"""How long torchrun may take to end its workers; a worker whose torchrun is gone ends by itself."""

_SAID_BYTES: Final = 20_000
_LINE: Final = 300
"""Most characters of a process's output that go into a row."""

_KILLED: Final = re.compile(r"Signal \d+ \((?!SIGTERM)(SIG\w+)\)")
"""How torchrun tells of a worker that a signal ended; SIGTERM is its own, for those that are left."""

_LAST_WORDS: Final = re.compile(
    r"^\s*(terminate called.*|what\(\): .*|Fatal Python error: .*|FATAL: .*)$", re.MULTILINE
)
"""Messages of C++ and Python when they abort."""


def command(job: ScalingJob, folder: Path) -> list[str]:
    """The argument list that starts a job.

    Args:
        job: to start.
        folder: where the worker finds `job.json` and writes its results.
    """
    request = job.request
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job.processes}", "--max-restarts=0"]
    if request.nodes == 1:
        words.append("--standalone")
    else:
        # The static rendezvous keeps --node-rank, so that the first process of all is on the first host, where figures go.
        host, _, port = request.endpoint.rpartition(":")
        words += [f"--nnodes={request.nodes}", f"--node-rank={request.node_rank}", "--rdzv-backend=static"]
        words += [f"--master-addr={host}", f"--master-port={port}", f"--rdzv-conf=timeout={int(request.timeout_s)}"]
        words.append(f"--rdzv-id=convoy-{job.provider}-{job.world}-{job.scaling}")
    return [*words, "-m", WORKER, str(folder)]


def run(
    job: ScalingJob,
    make: Callable[[ScalingJob, Path], Sequence[str]] = command,
    devices: Sequence[str] = (),
    turn: Turn | None = None,
    *,
    prepare_first: bool = False,
) -> Row | None:
    """Run a job to its end.

    Args:
        job: to run.
        make: gives the argument list.
        devices: GPUs that it may use, as `CUDA_VISIBLE_DEVICES` names them; none: those that this process may use.
        turn: waits until no other job uses them; by default the job begins at once and may take its request's `timeout_s`.
        prepare_first: the processes prepare the step before their turn, and only time it in their turn.

    Returns:
        Its row; None on a host that is not the first, where the result is not, and where `turn` gave no time.
    """
    taken = _port_in_use(job)
    if taken:
        return job.row(status="launch_error", reason=taken)
    with tempfile.TemporaryDirectory(prefix="convoy-scale-") as name, tempfile.TemporaryFile() as said:
        folder = Path(name)
        said_first = {PREPARED: prepare_first}
        (folder / "job.json").write_text(json.dumps(job.to_dict() | said_first), encoding="utf-8")
        process = subprocess.Popen(  # noqa: S603 - this Python and torchrun, as a list of arguments
            list(make(job, folder)),
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(job, devices),
            start_new_session=True,
        )

        def prepared() -> bool:
            return process.poll() is not None or len(list(folder.glob(f"{PREPARED}-*"))) == job.processes

        try:
            with turn(prepared) if turn is not None else _at_once(job) as limit_s:
                if limit_s <= 0:
                    return None
                (folder / TURN).touch()
                try:
                    code = process.wait(timeout=limit_s)
                except subprocess.TimeoutExpired:
                    return job.row(
                        status="timeout", reason=f"no end after {limit_s:g} s{_stages(folder) or _alone(job)}"
                    )
                finally:
                    _end(process)  # before the turn ends, and with it the right to the GPUs
        finally:
            _end(process)
        return _conclude(job, folder, code, said)


@contextlib.contextmanager
def _at_once(job: ScalingJob) -> Generator[float]:
    yield job.request.timeout_s


def _alone(job: ScalingJob) -> str:
    return "; no process began: does the same command run on the other hosts?" if job.request.nodes > 1 else ""


def _port_in_use(job: ScalingJob) -> str:
    """A line if the first host's port is in use: torchrun would wait for the process that holds it."""
    request = job.request
    if request.nodes == 1 or request.node_rank > 0:
        return ""
    port = int(request.endpoint.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the store does: what has only just ended is no one
        try:
            probe.bind(("", port))
        except OSError as error:
            return (
                f"port {port} of --endpoint cannot be used ({error.strerror}): another job runs there; give another one"
            )
    return ""


def _environment(job: ScalingJob | None = None, devices: Sequence[str] = ()) -> dict[str, str]:
    """The workers import from where we do; one thread each, unless the user says otherwise, as torchrun has it."""
    if job is not None and parts_of(job.provider)[0] == "torch.ddp.compiled":
        return {**_environment(None, devices), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # PyTorch's notes on CUDA graphs
    paths = [entry for entry in sys.path if entry] + [os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
    if devices:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {**os.environ, **own}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its workers; kill it where it does not."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _conclude(job: ScalingJob, folder: Path, code: int, said: IO[bytes]) -> Row | None:
    """The row of the result, or of the failure."""
    result = _read(folder / "result.json")
    if code == 0 and result is not None:
        return result_row(job, result)
    if code == 0 and job.request.node_rank > 0:
        return None
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - _SAID_BYTES))
    words = said.read().decode(errors="replace")
    errors = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [error for path in errors if (error := _read(path)) is not None]
    if found and not _KILLED.search(words):  # what the others say of one that was killed is only that it is gone
        return job.row(status=str(found[0]["status"]), reason=str(found[0]["reason"]))
    return job.row(status="crashed", reason=explain(words, code) + _stages(folder))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if is_dict(data) else None


def _stages(folder: Path) -> str:
    """The last stage of each process."""
    found = {
        path.stem.partition("-")[2]: path.read_text(encoding="utf-8") for path in sorted(folder.glob("stage-*.txt"))
    }
    return f" (last at: {', '.join(f'process {rank}: {stage}' for rank, stage in found.items())})" if found else ""


def explain(words: str, code: int) -> str:
    """One line of torchrun's output."""
    if re.search(r"EADDRINUSE|address already in use", words, re.IGNORECASE):
        port = re.search(r"port:? ?\(?(\d{2,5})", words)
        which = f"port {port[1]}" if port else "the port of --endpoint"
        return f"{which} is in use: another job runs there, or one has only just ended; give another --endpoint"
    died = _KILLED.search(words)
    if died:
        rank = re.search(r"rank\s*: (\d+)[^[]*?Signal", words)
        memory = ", as the system does when memory is short" if died[1] == "SIGKILL" else ""
        last = " ".join(word.strip() for word in _LAST_WORDS.findall(words))
        said = f": {last[:_LINE]}" if last else ""
        return f"{f'process {rank[1]}' if rank else 'a process'} was ended by {died[1]}{memory}{said}"
    if re.search(r"Rendezvous\w*Error|RendezvousTimeout|rendezvous.*(?:timed out|timeout)", words):
        return "the hosts did not find each other in time: is --endpoint the first host's, and reachable from here?"
    lines = [line.strip() for line in words.splitlines() if line.strip() and not set(line.strip()) <= set("=-")]
    errors = [line for line in lines if re.match(r"\w*(?:Error|Exception)\b", line)]
    last = (errors or lines or ["it said nothing"])[-1]
    return f"torchrun ended with code {code}: {last[:_LINE]}"
