"""The process that torchrun starts for each GPU: it sets up the process group and measures; rank 0 writes the result.

Each outcome has a file: `result.json` by rank 0, `error-RANK.json` by a process that fails, `stage-RANK.txt` always. Until the
launcher writes the file `turn`, the process only imports modules: the GPUs may still be another job's. A job that prepares first
waits for that file when its step is there, and says so by the file `prepared-RANK`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from convoy.compare.scaling.scaling_jobs import parts_of
from convoy.compare.scaling.scaling_launch import LAUNCHER, PREPARED, TURN
from convoy.compare.scaling.scaling_measure import measure
from convoy.errors import ConvoyError
from convoy.typed_torch import barrier

IMPORTED: Final = {
    "torch.ddp": (),
    "torch.ddp.compiled": ("torch._dynamo", "torch._inductor.compile_fx"),
    "convoy": ("convoy.training", "convoy.pipeline"),
}
"""By provider, modules that a job needs besides this one's: a process imports them before its turn."""


def main() -> NoReturn:
    """Measure the job of the folder that is named, and end the process."""
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    _end_with_parents()
    job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))

    def stage(text: str) -> None:
        (folder / f"stage-{os.environ['LOCAL_RANK']}.txt").write_text(text, encoding="utf-8")

    try:
        stage("start")
        if job["request"]["device"] == "cuda":
            _number_own_gpu_first()
        for module in IMPORTED[parts_of(job["provider"])[0]]:
            importlib.import_module(module)
        prepare_first = bool(job.get(PREPARED))
        if not prepare_first:
            _await_turn(folder)

        def before_timing() -> None:
            if prepare_first:
                stage("waiting for its turn")
                (folder / f"{PREPARED}-{os.environ['LOCAL_RANK']}").touch()
                _await_turn(folder)

        result = measure(job, _join(job), stage, before_timing)
        stage("done")
        if rank == 0:
            _write(folder / "result.json", result)
    except Exception as error:  # whatever it is, it becomes this process's line, and torchrun ends the others
        _write(folder / f"error-{rank}.json", {"status": _status(error), "reason": f"process {rank}: {_line(error)}"})
        os._exit(1)  # a process group with a dead member may hang in its own end
    # The result is written. Processes leave together: one that ends first may reset the connection of one that waits here.
    with contextlib.suppress(RuntimeError):
        barrier()
    # Taking a process apart may still fail: a captured step holds NCCL's communicator, whose own end would wait for that step for
    # ever, and a DistributedDataParallel that is left to Python's end may abort there.
    os._exit(0)


def _number_own_gpu_first() -> None:
    """Let this process's GPU be device 0, before CUDA starts; the others follow, which peers must see.

    Inductor's cache has other entries for each number of a device: the second process would compile again what the first one has
    compiled.
    """
    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(index) for index in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((*devices[local:], *devices[:local]))


def _await_turn(folder: Path) -> None:
    while not (folder / TURN).exists():
        time.sleep(0.05)


def _join(job: dict[str, Any]) -> torch.device:
    """Join the process group; the limit is the job's, for one process may tune while the others wait."""
    request = job["request"]
    limit = dt.timedelta(seconds=float(request["timeout_s"]))
    if request["device"] == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device)
        return device
    dist.init_process_group("gloo", timeout=limit)
    return torch.device("cpu")


def _status(error: Exception) -> str:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error):
        return "out_of_memory"
    return "unsupported" if isinstance(error, ConvoyError) else "launch_error"


def _line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:400]}" if words else type(error).__name__


def _write(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all: the launcher may look at any moment."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


def _end_with_parents() -> None:
    """End when torchrun or the process that started it is gone: each has its own session, so nothing else would end this one."""
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER, "0"))

    def watch() -> None:
        while os.getppid() == parent and (not launcher or _is_there(launcher)):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _is_there(process: int) -> bool:
    """Whether a process still runs; one that has ended and is not yet taken note of does not."""
    try:
        os.kill(process, 0)
        status = Path(f"/proc/{process}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
