"""One process's part in measuring data-parallel training: steps with and without all-reduce, input, launches, the link.

All processes time the same rounds; the slowest counts. The learning rate is 0, so that parameters stay equal on all of them
although some rounds leave the gradients apart: the kernels are those of training.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from convoy.compare.frameworks.torch_model import set_flags
from convoy.compare.scaling import BASELINE_KEPT, MOST_REPEATS, NOISY, relative_spread
from convoy.errors import ConvoyError
from convoy.settings import Settings
from convoy.zoo import example_args, load_model, preprocessing

Stage = Callable[[str], None]
Step = Callable[[], object]
Kernel = tuple[str, float, float]
"""A kernel's name, its beginning and its end, microseconds."""

COLLECTIVE: Final = "nccl"
"""What the names of NCCL's kernels begin with, in lower case."""

WARM_UPS: Final = 3
LINK_BYTES: Final = {"cuda": 256 << 20, "cpu": 16 << 20}
"""Size of the all-reduce that tells the link's speed: large enough that latency does not count."""

_DDP_WORDS: Final = inspect.signature(DistributedDataParallel).parameters
BUFFERS_ARE_SENT: Final = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_WORDS else "broadcast_buffers"
"""DDP's word for it: torch 2.13 has a new one."""

AUXILIARY: Final = 0.3
"""Weight of the auxiliary classifiers of GoogLeNet and Inception in the loss, as their authors have it."""


@dataclass(slots=True)
class Trained:
    """What a provider offers.

    Attributes:
        steps: by name: `step`, all-reduce included; `compute`, without; `input`, with the batch copied from the host.
        setting: how the provider is set, in words.
        peak_bytes: most that PyTorch held on the GPU during some steps, what is trained and the batch included; None on a CPU.
        notes: lines for people.
    """

    steps: dict[str, Step]
    setting: str
    peak_bytes: float | None
    notes: list[str] = field(default_factory=list[str])


def measure(job: Mapping[str, Any], device: torch.device, stage: Stage) -> dict[str, Any]:
    """Time everything of one job; the same on all processes, of which the first one's answer counts.

    Args:
        job: `Job.to_dict()`.
        device: this process's own.
        stage: told what begins.
    """
    request = job["request"]
    stage("building the model")
    set_flags(device.type)
    setup = _Setup.of(request, int(job["batch"]), device)
    stage(f"preparing {job['provider']}")
    trained = _PROVIDERS[job["provider"]](setup, request, stage)
    stage("warming up")
    for step in trained.steps.values():
        for _ in range(WARM_UPS):
            step()
    _wait(device)
    counts = {name: _steps_a_round(step, float(request["round_s"]), device) for name, step in trained.steps.items()}
    rounds = _quiet_rounds(lambda number: _turns(trained.steps, counts, number, device, stage), int(request["rounds"]))
    values = {"gradient_bytes": float(setup.gradient_bytes)}
    stage("asking the link")
    values |= _link(setup.gradient_bytes, device)
    stage("launches")
    values |= _launches(trained.steps.get("compute", trained.steps["step"]), device)
    stage("watching the collectives")
    values |= _collectives(trained.steps["step"], device, able="launch_ms" in values)
    if trained.peak_bytes is not None:
        values["peak_memory_bytes"] = trained.peak_bytes
    return {
        "rounds": rounds,
        "values": values,
        "setting": trained.setting,
        "notes": [str(note) for note in trained.notes],
        "backend": dist.get_backend(),
    }


def _turns(
    steps: Mapping[str, Step], counts: Mapping[str, int], number: int, device: torch.device, stage: Stage
) -> dict[str, float]:
    """Seconds a step of each kind, one after the other."""
    stage(f"round {number}")
    return {name: _round(step, counts[name], device) for name, step in steps.items()}


def _quiet_rounds(turns: Callable[[int], Mapping[str, float]], count: int) -> dict[str, list[float]]:
    """Rounds of all kinds; noisy ones are taken again, and that repeat is kept whose noisiest kind is the quietest.

    Repeats are kept whole: kinds are compared round by round, and rounds of two repeats have nothing to do with each other. All
    processes see the same figures, those of the slowest, and so take as many.
    """
    best: dict[str, list[float]] = {}
    least = math.inf
    for _ in range(MOST_REPEATS + 1):
        taken = [turns(number) for number in range(count)]
        repeat = {name: [one[name] for one in taken] for name in taken[0]}
        noise = max(relative_spread(values) for values in repeat.values())
        if noise < least:
            best, least = repeat, noise
        if least <= NOISY:
            break
    return best


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the logits, and of the auxiliary ones where the net has any."""
    if isinstance(output, torch.Tensor):
        return functional.cross_entropy(output, target)
    logits, *others = [part for part in output if isinstance(part, torch.Tensor)]
    loss = functional.cross_entropy(logits, target)
    for other in others:
        loss = loss + AUXILIARY * functional.cross_entropy(other, target)
    return loss


@dataclass(slots=True)
class _Setup:
    """The net and a batch, on the device and on the host."""

    model: nn.Module
    x: torch.Tensor
    target: torch.Tensor
    host_x: torch.Tensor
    device: torch.device
    amp: torch.dtype | None

    @staticmethod
    def of(request: Mapping[str, Any], batch: int, device: torch.device) -> _Setup:
        name = request["model"]
        model = load_model(name).to(device).to(memory_format=torch.channels_last)
        wanted = preprocessing(name)
        args = example_args(model, batch=batch, size=request["size"] or None, default_size=wanted.size)
        host = args[0].contiguous(memory_format=torch.channels_last)
        if device.type == "cuda":
            host = host.pin_memory()
        x = host.to(device)
        with torch.no_grad():
            logits = model(x[:1])
        classes = (logits if isinstance(logits, torch.Tensor) else logits[0]).shape[-1]
        target = torch.arange(batch, device=device) % classes
        amp = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(request["dtype"])
        return _Setup(model.train(), x, target, host, device, amp)

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    def optimizer(self) -> torch.optim.Optimizer:
        """SGD with momentum, as nets of images are trained; one fused kernel on a GPU."""
        fused = True if self.device.type == "cuda" else None
        return torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4, fused=fused)

    def scaler(self) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler(self.device.type) if self.amp is torch.float16 else None

    def refill(self) -> None:
        """Copy the batch from the host, as a loader that is never late would."""
        self.x.copy_(self.host_x, non_blocking=True)


def _ddp(setup: _Setup, request: Mapping[str, Any], stage: Stage) -> Trained:
    del request, stage
    devices = [setup.device] if setup.device.type == "cuda" else None
    # Statistics of batch norms stay each process's own, as in Convoy's step: sending them is no part of the gradients' way.
    model = DistributedDataParallel(
        setup.model, device_ids=devices, gradient_as_bucket_view=True, **{BUFFERS_ARE_SENT: False}
    )
    optimizer, scaler = setup.optimizer(), setup.scaler()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setup.device.type, setup.amp or torch.bfloat16, enabled=setup.amp is not None):
            loss = loss_of(model(setup.x), setup.target)
        if scaler is None:
            loss.backward()
            optimizer.step()
            return
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def alone() -> None:
        with model.no_sync():
            step()

    def fed() -> None:
        setup.refill()
        step()

    words = ["channels_last", "gradient_as_bucket_view", "buffers not broadcast"]
    words += ["cudnn.benchmark", "TF32", "fused SGD"] if setup.device.type == "cuda" else []
    words += [f"autocast {str(setup.amp).rpartition('.')[2]}"] if setup.amp else []
    return Trained({"step": step, "compute": alone, "input": fed}, ", ".join(words), _peak_bytes(step, setup.device))


def _convoy(setup: _Setup, request: Mapping[str, Any], stage: Stage) -> Trained:
    """Convoy's step in the process group, and the same plan without it."""
    import convoy

    settings = Settings(effort=request["effort"], db=Path(request["db"]) if request["db"] else None)
    devices = [setup.device] if setup.device.type == "cuda" else None
    batch = (setup.x, setup.target)
    common: dict[str, Any] = {
        "amp": setup.amp,
        "scaler": setup.scaler(),
        "settings": settings,
        "name": request["model"],
    }
    together = convoy.training_step(
        DistributedDataParallel(setup.model, device_ids=devices), loss_of, setup.optimizer(), batch, **common
    )
    steps: dict[str, Step] = {"step": lambda: together(*batch)}
    peak_bytes = _peak_bytes(steps["step"], setup.device)  # there is no second step yet, which has an arena of its own
    notes = together.notes  # its own list, which grows while it runs: where a step cannot be captured, it says so then
    stage("preparing convoy without all-reduce")
    try:
        with tempfile.TemporaryDirectory() as folder:
            together.save(Path(folder) / "plan.json")
            plan = Path(folder) / "plan.json"
            alone = convoy.training_step(setup.model, loss_of, setup.optimizer(), batch, plan=plan, **common)
        steps["compute"] = lambda: alone(*batch)
    except ConvoyError as error:
        notes.append(f"no time without all-reduce: {error}")

    def fed() -> None:
        setup.refill()
        together(*batch)

    setting = f"channels_last, training_step, effort {request['effort']}"
    setting += f", {BASELINE_KEPT}" if together.plan.baseline else ""
    return Trained({**steps, "input": fed}, setting, peak_bytes, notes)


_PROVIDERS: Final[dict[str, Callable[[_Setup, Mapping[str, Any], Stage], Trained]]] = {
    "torch.ddp": _ddp,
    "convoy": _convoy,
}


# --- clocks -----------------------------------------------------------------------------------------------------------------


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(step: Step, device: torch.device) -> float | None:
    """The peak of some steps alone, without what preparing them took (Convoy checks its gradients in float64)."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UPS):
        step()
    _wait(device)
    return float(torch.cuda.max_memory_allocated(device))


def _seconds(step: Step, count: int, device: torch.device) -> float:
    dist.barrier()
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return (time.perf_counter() - start) / count


def _round(step: Step, count: int, device: torch.device) -> float:
    """Seconds a step of the slowest process."""
    return _agreed(_seconds(step, count, device), device)


def _agreed(value: float, device: torch.device) -> float:
    """The largest over the processes."""
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held.item())


def _steps_a_round(step: Step, round_s: float, device: torch.device) -> int:
    """Steps that make a round long enough; the same number on all processes, or they would wait for each other for ever."""
    return max(1, round(round_s / max(_round(step, 2, device), 1e-6)))


def _link(gradient_bytes: int, device: torch.device) -> dict[str, float]:
    """Time of an all-reduce of the gradients' bytes alone, and the bus speed of a large one: 2 (n-1) / n of its bytes."""
    world = dist.get_world_size()
    if world == 1:
        return {}
    own = torch.zeros(max(1, gradient_bytes // 4), device=device)
    large = torch.zeros(LINK_BYTES[device.type] // 4, device=device)
    own_s, large_s = (_fastest(lambda t=t: dist.all_reduce(t), device) for t in (own, large))
    moved = 2 * (world - 1) / world * large.numel() * 4
    return {"allreduce_ms": 1e3 * own_s, "link_gb_per_s": moved / large_s / 1e9}


def _fastest(step: Step, device: torch.device) -> float:
    step()
    return min(_round(step, 3, device) for _ in range(5))


def _launches(step: Step, device: torch.device) -> dict[str, float]:
    """What the host takes to launch a step, and how long the GPU waits for it: the step's time beyond that of its kernels."""
    if device.type != "cuda":
        return {}
    _wait(device)
    start = time.perf_counter()
    step()
    host_s = time.perf_counter() - start
    _wait(device)
    whole_s = min(_seconds(step, 3, device) for _ in range(3))
    found = {"host_ms": 1e3 * host_s}
    with contextlib.suppress(RuntimeError):  # a machine that lets nobody profile
        busy_s = _busy_s(step, device)
        if busy_s:
            found["launch_ms"] = 1e3 * max(0.0, whole_s - busy_s)
    return found


def _collectives(step: Step, device: torch.device, *, able: bool) -> dict[str, float]:
    """How long a step's collectives run, and how long nothing else does meanwhile.

    Args:
        step: with all-reduce; all processes make it together.
        device: this process's own.
        able: whether this process may profile; the figures are left out unless all may.
    """
    if dist.get_world_size() == 1 or _agreed(float(not able), device):
        return {}
    return collective_ms(_kernels(step, device))


def collective_ms(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Of a step's kernels: time in which a collective runs, and in which it runs alone, milliseconds; empty where none runs."""
    spans = [(start, stop) for _, start, stop in kernels]
    own = [(start, stop) for name, start, stop in kernels if COLLECTIVE in name.lower()]
    others = [(start, stop) for name, start, stop in kernels if COLLECTIVE not in name.lower()]
    if not own:
        return {}
    return {"collective_ms": union_us(own) / 1e3, "bare_ms": (union_us(spans) - union_us(others)) / 1e3}


def _busy_s(step: Step, device: torch.device) -> float:
    """Seconds of a step in which at least one kernel runs."""
    return union_us([(start, stop) for _, start, stop in _kernels(step, device)]) / 1e6


def _kernels(step: Step, device: torch.device) -> list[Kernel]:
    """What runs on the device in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        _wait(device)
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
