"""How much faster is a whole training step? Question `training`, metric `step_ms`.

Convoy's step (forward pass, loss, backward pass, update) beside PyTorch's: eager in channels_last with cudnn.benchmark and a
fused optimizer, the same captured as a CUDA graph on one stream, and torch.compile. Same weights and batch; after the
timing each has made the same number of steps, and its loss must be PyTorch's. `convoy.serial` is Convoy on one stream.

    python bench/training.py [--nets resnet50,googlenet] [--batch 32,128] [--dtype bf16,fp32] [--peers eager,graph,inductor]
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from record import Recorder
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.measurement import detect_target
from convoy.pipeline.verdict import interleave
from convoy.zoo import input_size, load_model

NETS = "alexnet,googlenet,inception_v3,resnet50,densenet121,mobilenet_v2"
CHECKED = 5
"""Steps of the check, from the same weights: losses of chaotic nets drift apart after more."""

WARMUP = 3
"""Steps that are made before a capture: the first loss that a captured step shows is that of the step after them."""

FAR = {"fp32": 2e-2, "bf16": 5e-2}
"""Relative difference that the last of these losses may have: TF32 and bf16 products, rounded in another order."""

LR = 1e-3
MODES = {"default": "inductor.default", "reduce-overhead": "inductor.reduce-overhead"}
MODES |= {"max-autotune": "inductor.max-autotune"}

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One net, batch and precision."""

    net: str
    batch: int
    dtype: str
    device: str

    @property
    def amp(self) -> torch.dtype | None:
        """The dtype of autocast."""
        return torch.bfloat16 if self.dtype == "bf16" else None

    def model(self) -> nn.Module:
        """The model in training mode, dropout off: losses are compared."""
        model = load_model(self.net).train().to(self.device, memory_format=torch.channels_last)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of random images and labels."""
        size = input_size(self.net)
        side = size if isinstance(size, int) else size[-1]
        x = torch.randn(self.batch, 3, side, side, generator=torch.Generator().manual_seed(self.batch))
        x = x.to(self.device, memory_format=torch.channels_last)
        return x, (torch.arange(self.batch) % 10).to(self.device)


def loss_of(output: object, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the first output."""
    scores = output[0] if isinstance(output, tuple) else output
    assert isinstance(scores, torch.Tensor)
    return cross_entropy(scores, labels)


def optimizer_of(model: nn.Module, device: str) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum, fused where PyTorch has that."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=device == "cuda")


def eager(case: Case, mode: str = "") -> Step:
    """PyTorch's step, compiled in a mode where one is given."""
    model, (x, y) = case.model(), case.data()
    optimizer = optimizer_of(model, case.device)
    if mode:
        torch._dynamo.reset()
    run = torch.compile(model, mode=mode) if mode else model

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(case.device, case.amp, enabled=case.amp is not None):
            loss = loss_of(run(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graph(case: Case) -> Step:
    """PyTorch's step captured as one CUDA graph on one stream."""
    step = eager(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            loss = step()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(reads: Step = step) -> torch.Tensor:
        del reads  # held: the graph reads its model and its batch
        captured.replay()
        return loss

    return replay


def ours(case: Case, effort: str, streams: int) -> tuple[Step, str]:
    """Convoy's step, and what tuning cost."""
    model, (x, y) = case.model(), case.data()
    settings = convoy.Settings(effort=convoy.Effort(effort), streams=streams)
    start = time.perf_counter()
    optimizer = optimizer_of(model, case.device)
    step = convoy.training_step(model, loss_of, optimizer, (x, y), amp=case.amp, settings=settings, name=case.net)
    note = f"tuning_s={time.perf_counter() - start:.0f}"
    note += " baseline" if step.plan.baseline else f" streams={1 + max(s.stream for s in step.plan.steps)}"
    return lambda: step(x, y), note


def first_losses(step: Step, count: int = CHECKED) -> list[float]:
    """The losses of the first steps, from the net's own weights."""
    return [float(step()) for _ in range(count)]


def compare(case: Case, wanted: list[str], effort: str, recorder: Recorder) -> str:
    """Check and time one case; records every figure and returns a line for people."""
    cuda = case.device == "cuda"
    makers: dict[str, Callable[[], Step]] = {"torch.eager": lambda: eager(case)}
    if "graph" in wanted and cuda:
        makers["torch.graph"] = lambda: graph(case)
    makers |= {name: (lambda mode=mode: eager(case, mode)) for mode, name in MODES.items() if name in wanted}
    if "inductor" in wanted:
        mode = "reduce-overhead" if cuda else "default"
        makers[MODES[mode]] = lambda: eager(case, mode)
    notes: dict[str, str] = {}

    def tuned(name: str, streams: int) -> Step:
        step, notes[name] = ours(case, effort, streams)
        return step

    makers["convoy"] = lambda: tuned("convoy", 4)
    if cuda:
        makers["convoy.serial"] = lambda: tuned("convoy.serial", 1)
    steps: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    for name, make in makers.items():
        try:
            steps[name] = make()
            losses[name] = first_losses(steps[name], CHECKED + (WARMUP if name == "torch.eager" else 0))
        except Exception as error:  # a peer that fails is a row with its reason
            steps.pop(name, None)
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    timed = interleave(dict(steps), cuda=cuda)
    if "torch.eager" not in losses:
        raise SystemExit(f"{case.net}: PyTorch's own step fails: {notes['torch.eager']}")
    expected = losses["torch.eager"]
    line = f"{case.net:14} b{case.batch:<4} {case.dtype} "
    for name in makers:
        figures = timed.get(name)
        ahead = WARMUP if name == "torch.graph" else 0
        far = abs(losses[name][CHECKED - 1] / expected[CHECKED - 1 + ahead] - 1) if name in losses else math.nan
        middle = figures.median_ms if figures else math.nan
        spread = figures.spread_ms if figures else 0.0
        recorder.add(
            subject=case.net,
            batch=case.batch,
            dtype=case.dtype,
            provider=name,
            metric="step_ms",
            unit="ms",
            p50=middle,
            p20=middle - spread,
            p80=middle + spread,
            ok=figures is not None and far < FAR[case.dtype],
            note=f"loss_off={far:.1e} {notes.get(name, '')}".strip(),
        )
        line += f"  {name} {middle:.2f}"
    others = [f.median_ms for name, f in timed.items() if not name.startswith("convoy")]
    gain = min(others) / timed["convoy"].median_ms if "convoy" in timed else math.nan
    return line + f"  gain {gain:.2f}"


def main() -> None:
    """Run the comparison, print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--batch", default="32,128")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--peers", default="graph,inductor")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    target = detect_target(options.device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    recorder = Recorder(
        "training",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol="interleaved rounds=15, whole steps with update, median, p20 and p80 as median -+ spread",
    )
    lines: list[str] = []
    for net in options.nets.split(","):
        for batch in options.batch.split(","):
            for dtype in options.dtype.split(","):
                case = Case(net, int(batch), dtype, options.device)
                lines.append(compare(case, options.peers.split(","), options.effort, recorder))
                print(lines[-1], flush=True)
                recorder.write()
    print("\nmilliseconds a step, medians")
    print("\n".join(lines))
    print(recorder.path)


if __name__ == "__main__":
    main()
