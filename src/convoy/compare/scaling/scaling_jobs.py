"""Data-parallel training over processes: the request, its jobs, and the rows of their results.

A job is one number of processes with one provider, started by torchrun (`scaling_launch`) and measured by `scaling_worker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from convoy.compare.runs.rows import Row
from convoy.errors import InputError, unknown_name
from convoy.setting_values import is_count

DTYPES: Final = ("fp32", "fp16", "bf16")
"""Types of a step: fp32, or autocast with fp32 parameters."""

PROVIDERS: Final = ("torch.ddp", "torch.ddp.compiled", "convoy")
"""PyTorch's own DistributedDataParallel at its best eager setting; the same compiled by Inductor and captured as a CUDA graph;
the step of `convoy.training_step`."""

DEFAULT_PROVIDERS: Final = ("torch.ddp", "convoy")
"""Those of a command that names none: Inductor compiles for a minute or more in each job."""

BF16_SENT: Final = ("bf16", "bf16_error_feedback")
"""Ways to send gradients in half the bytes of fp32."""

FACTORS: Final = "factors"
"""Gradients of linear layers are multiplied from gathered factors."""

GRADIENTS: Final = {"torch.ddp": ("bf16",), "torch.ddp.compiled": ("bf16",), "convoy": (*BF16_SENT, FACTORS)}
"""How a provider can send its gradients besides in their own dtype: `convoy+bf16` is the name of such a provider."""

PROVIDER_NAMES: Final = (*PROVIDERS, *(f"{name}+{sent}" for name, all_sent in GRADIENTS.items() for sent in all_sent))

BASELINE_KEPT: Final = "baseline kept"
"""In a setting of Convoy's: its plan was not better than PyTorch's own loss and gradients, which run in its place."""

MOST_REPEATS: Final = 2
"""How often noisy rounds are taken again."""

COUNT_AXIS: Final = {"cuda": "gpus", "cpu": "processes"}
"""By device, the axis of a row that says how many GPUs or processes trained."""

WEAK: Final = "weak"
STRONG: Final = "strong"


def parts_of(provider: str) -> tuple[str, str | None]:
    """A provider's name of `PROVIDERS`, and how its gradients are sent; None: in their own dtype."""
    name, _, sent = provider.partition("+")
    return name, sent or None


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A scaling run as requested.

    Attributes:
        model: the net's name, as `convoy.zoo.load_model` takes it.
        gpus: numbers of processes on each host, one GPU each; on a CPU, processes.
        batch: images of one GPU and step (weak scaling), or of all together (strong).
        scalings: `weak`, `strong` or both.
        providers: of `PROVIDER_NAMES`.
        dtype: `fp32`, or `fp16` or `bf16` for autocast with fp32 parameters.
        device: `cpu` or `cuda`.
        size: of the images, pixels; one number for square images, or (height, width); 0: the model's own.
        nodes: hosts.
        node_rank: which of them this is.
        endpoint: `HOST:PORT` of the first host, for more than one.
        timeout_s: most seconds of one job.
        round_s: least seconds of one timed round.
        rounds: timed rounds.
        effort: how much Convoy's step may tune.
        db: the performance database; empty: the default one.
        trust: the model's file may run code.
        plans: a folder of Convoy's plans: a job replays the plan of its model, batch and dtype, or writes it; empty: none.
    """

    model: str
    gpus: tuple[int, ...]
    batch: int
    scalings: tuple[str, ...] = (WEAK,)
    providers: tuple[str, ...] = DEFAULT_PROVIDERS
    dtype: str = "fp32"
    device: str = "cuda"
    size: int | tuple[int, int] = 0
    nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    timeout_s: float = 900.0
    round_s: float = 0.3
    rounds: int = 7
    effort: str = "quick"
    db: str = ""
    trust: bool = False
    plans: str = ""

    def check(self, available: int) -> None:
        """Refuse a request that cannot run.

        Args:
            available: GPUs of this host; on a CPU, its cores.

        Raises:
            InputError: naming the option.
        """
        if not self.gpus or len(set(self.gpus)) != len(self.gpus) or min(self.gpus) < 1:
            raise InputError("--gpus", self.gpus, "numbers of at least 1, each once, separated by commas")
        if self.device == "cuda" and max(self.gpus) > available:
            raise InputError("--gpus", max(self.gpus), f"at most the {available} GPUs of this machine")
        if self.device == "cpu" and max(self.gpus) > max(4, available):
            raise InputError("--gpus", max(self.gpus), f"at most {max(4, available)} processes on this machine")
        if self.batch < 1:
            raise InputError("--batch", self.batch, "an integer of at least 1")
        for provider in self.providers:
            if provider not in PROVIDER_NAMES:
                raise unknown_name("--providers", provider, PROVIDER_NAMES)
        if self.dtype not in DTYPES:
            raise unknown_name("--dtype", self.dtype, DTYPES)
        if self.nodes < 1:
            raise InputError("--nodes", self.nodes, "an integer of at least 1")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(
                "--node-rank", self.node_rank, f"a number from 0 to {self.nodes - 1}: --nodes is {self.nodes}"
            )
        if not self.timeout_s > 0:
            raise InputError("--timeout-s", self.timeout_s, "a positive number of seconds")
        if not 0 < self.round_s <= self.timeout_s:
            raise InputError("--round-s", self.round_s, "a positive number of seconds, at most --timeout-s")
        self._check_hosts()

    def _check_hosts(self) -> None:
        host, colon, port = self.endpoint.rpartition(":")
        if self.nodes > 1 and not (host and colon and is_count(port) and int(port) < 1 << 16):
            todo = "All hosts are given the same one: that of the first."
            raise InputError("--endpoint", self.endpoint, "HOST:PORT, where there is more than one host", todo)
        for count in self.gpus if STRONG in self.scalings else ():
            if self.batch % (count * self.nodes):
                raise InputError("--batch", self.batch, f"a multiple of {count * self.nodes} for strong scaling")


@dataclass(frozen=True, slots=True)
class ScalingJob:
    """One start of torchrun.

    Attributes:
        request: the whole run.
        provider: of the training step.
        processes: on each host.
        scaling: `weak` or `strong`.
    """

    request: ScaleRequest
    provider: str
    processes: int
    scaling: str

    @property
    def world(self) -> int:
        """Processes of all hosts."""
        return self.processes * self.request.nodes

    @property
    def batch(self) -> int:
        """Images of one process."""
        return self.request.batch if self.scaling == WEAK else self.request.batch // self.world

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the worker."""
        return {"provider": self.provider, "batch": self.batch, "request": asdict(self.request)}

    def row(self, **values: Any) -> Row:
        """Its row, with a result."""
        request = self.request
        return Row(
            subject=request.model,
            provider=self.provider,
            mode="training",
            batch=self.batch,
            dtype=request.dtype,
            axes={COUNT_AXIS[request.device]: self.world, "nodes": request.nodes, "scaling": self.scaling},
            **values,
        )


def jobs(request: ScaleRequest) -> Iterator[ScalingJob]:
    """All jobs, the fewest processes first, the providers of one number next to each other."""
    for scaling in request.scalings:
        for count in sorted(request.gpus):
            for provider in request.providers:
                yield ScalingJob(request, provider, count, scaling)
