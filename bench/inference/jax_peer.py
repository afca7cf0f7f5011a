"""JAX beside the providers of `inference.py`: XLA's process, given weights, input and exact results by `convoy.compare`."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from convoy.compare.case import Case
from convoy.compare.child_processes import ChildProcesses
from convoy.compare.child_session import ChildFailedError
from convoy.compare.frameworks import FRAMEWORKS
from convoy.compare.limits import Limits
from convoy.compare.samples import rounds_for
from convoy.pipeline.check.end_to_end import Latency

NAME = "jax"


@dataclass(frozen=True, slots=True)
class JaxFigures:
    """What JAX took; its outputs were right.

    Attributes:
        timed: one call among calls that follow each other, as the other providers are timed.
        compile_s: seconds of building, compiling and the first call.
        memory: bytes that XLA planned for the call, weights included; None where it does not tell.
        error: relative L2 error to float64.
    """

    timed: Latency
    compile_s: float
    memory: int | None
    error: float


def jax_figures(net: str, batch: int, dtype: str, seconds: float, device: str = "cuda") -> JaxFigures:
    """Build, check and time a net of `convoy.compare.nets` with `jax.jit`, in a process of its own.

    Args:
        net: its name; the weights are the zoo's seeded ones.
        batch: images of one call.
        dtype: `fp32` (with TF32 products where the device has them), `fp16` or `bf16`.
        seconds: that all of it may take.
        device: `cuda` or `cpu`.

    Raises:
        ChildFailedError: JAX is not installed, has no such net, gives other numbers, fails or takes longer.
    """
    case, entry = Case(net, batch=batch, dtype=dtype, device=device, trust=True), FRAMEWORKS[NAME]
    if missing := entry.absence(case.device):
        raise ChildFailedError("absent", missing)
    limits = Limits(timeout_s=seconds).on_this_machine()
    children = ChildProcesses(limits, time.monotonic() + seconds)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with children.one(case, folder, {"role": "material"}) as child:
            child.wait_for("material")
        child = children.start(case, folder, {"role": "framework", "entry": dataclasses.asdict(entry)}, NAME)
        try:
            ready = child.wait_for("ready")
            rounds = rounds_for(ready["call_s"], limits.rounds)
            samples = child.ask({"do": "sample", "rounds": rounds}, "samples")["call_ms"]
            finished = child.ask({"do": "finish", "kinds": False}, "finished")
        finally:
            children.end(child)
    return JaxFigures(Latency(NAME, tuple(samples)), ready["compile_s"], finished["peak_memory_bytes"], ready["error"])
