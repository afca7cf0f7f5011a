"""Start torchrun for one job, wait for it with a limit, and turn any end but a good one into a status and a line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final

from convoy.compare.runfile import Row
from convoy.compare.scaling import Job, result_row

WORKER: Final = "convoy.compare.scaling_worker"

GRACE_S: Final = 10.0
"""How long torchrun may take to end its workers; a worker whose torchrun is gone ends by itself."""

_SAID_BYTES: Final = 20_000


def command(job: Job, folder: Path) -> list[str]:
    """The argument list that starts a job.

    Args:
        job: what is started.
        folder: where the worker finds `job.json` and writes its results.
    """
    request = job.request
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job.processes}", "--max-restarts=0"]
    if request.nodes == 1:
        words.append("--standalone")
    else:
        words += [f"--nnodes={request.nodes}", f"--node-rank={request.node_rank}", "--rdzv-backend=c10d"]
        words += [f"--rdzv-endpoint={request.endpoint}", f"--rdzv-id=convoy-{job.provider}-{job.world}-{job.scaling}"]
    return [*words, "-m", WORKER, str(folder)]


def run(job: Job, make: Callable[[Job, Path], Sequence[str]] = command) -> Row | None:
    """Run a job to its end.

    Args:
        job: what is run.
        make: gives the argument list.

    Returns:
        Its row; None on a host that is not the first, where the result is not.
    """
    with tempfile.TemporaryDirectory(prefix="convoy-scale-") as name, tempfile.TemporaryFile() as said:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job.to_dict()), encoding="utf-8")
        process = subprocess.Popen(  # noqa: S603 - this Python and torchrun, as a list of arguments
            list(make(job, folder)),
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=job.request.timeout_s)
        except subprocess.TimeoutExpired:
            stages = _stages(folder)
            return job.row(status="timeout", reason=f"no end after {job.request.timeout_s:g} s{stages}")
        finally:
            _end(process)
        return _conclude(job, folder, code, said)


def _environment() -> dict[str, str]:
    """The workers import from where we do; one thread each, unless the user says otherwise, as torchrun has it."""
    paths = [entry for entry in sys.path if entry] + [os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


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


def _conclude(job: Job, folder: Path, code: int, said: IO[bytes]) -> Row | None:
    """The row of what was written, or of what went wrong."""
    result = _read(folder / "result.json")
    if code == 0 and result is not None:
        return result_row(job, result)
    if code == 0 and job.request.node_rank > 0:
        return None
    errors = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in errors:
        error = _read(path)
        if error is not None:
            return job.row(status=str(error["status"]), reason=str(error["reason"]))
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - _SAID_BYTES))
    words = said.read().decode(errors="replace")
    return job.row(status="crashed", reason=explain(words, code) + _stages(folder))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _stages(folder: Path) -> str:
    """What each process was last at."""
    found = {
        path.stem.partition("-")[2]: path.read_text(encoding="utf-8") for path in sorted(folder.glob("stage-*.txt"))
    }
    return f" (last at: {', '.join(f'process {rank}: {stage}' for rank, stage in found.items())})" if found else ""


def explain(words: str, code: int) -> str:
    """One line from what torchrun printed."""
    if re.search(r"EADDRINUSE|address already in use", words, re.IGNORECASE):
        port = re.search(r"port:? ?\(?(\d{2,5})", words)
        which = f"port {port[1]}" if port else "the port of --endpoint"
        return f"{which} is in use: another job runs there, or one has only just ended; give another --endpoint"
    died = re.search(r"Signal (\d+) \((SIG\w+)\)", words)
    rank = re.search(r"rank\s*: (\d+)", words)
    who = f"process {rank[1]}" if rank else "a process"
    if died:
        memory = ", as the system does when memory is short" if died[2] == "SIGKILL" else ""
        return f"{who} was ended by {died[2]}{memory}"
    if re.search(r"Rendezvous\w*Error|RendezvousTimeout|rendezvous.*(?:timed out|timeout)", words):
        return "the hosts did not find each other in time: is --endpoint the first host's, and reachable from here?"
    lines = [line.strip() for line in words.splitlines() if line.strip() and not set(line.strip()) <= set("=-")]
    errors = [line for line in lines if re.match(r"\w*(?:Error|Exception)\b", line)]
    last = (errors or lines or ["it said nothing"])[-1]
    return f"torchrun ended with code {code}: {last[:300]}"
