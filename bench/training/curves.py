"""Does a net learn the same? Question `curves`, metric `loss_distance`: ResNet-20 on CIFAR-10 images, the same seed throughout.

PyTorch's own training in NCHW is what the others are held against: PyTorch in channels_last, whose sums are rounded in another
order (how far two stock runs lie apart), and Convoy. The distance is the root mean square of the difference of their losses
over all steps; `accuracy` is the share of test images that are right at the end.

    python bench/training/curves.py --data cifar10:PATH [--steps 200] [--batch 64] [--device cpu]
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import convoy
from convoy.measurement import detect_target
from convoy.pipeline.check import end_to_end
from convoy.prune.accuracy import accuracy
from convoy.training.trainer.fit import classification_loss
from convoy.zoo import Dataset, load_dataset, load_model, preprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder

NET = "resnet20_cifar10"
Losses = list[float]


def stock(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """PyTorch's step."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = classification_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def train(
    images: Dataset, test: Dataset, options: argparse.Namespace, *, layout: torch.memory_format, tuned: bool
) -> tuple[Losses, float, str]:
    """Losses of all steps, accuracy at the end, and what was used."""
    torch.manual_seed(0)
    model = load_model(NET).train().to(options.device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    step: Callable[..., torch.Tensor] | None = None
    losses: list[torch.Tensor] = []
    note, epoch = "", 0
    while len(losses) < options.steps:
        for x, y in images.batches(options.batch, seed=epoch, augment=True, drop_last=True):
            x, y = x.to(options.device, memory_format=layout), y.to(options.device)
            if step is None and tuned:
                settings = convoy.Settings(effort=convoy.Effort(options.effort))
                made = convoy.training_step(model, classification_loss, optimizer, (x, y), settings=settings)
                engines = {s.config.engine for s in made.plan.steps}
                note = "baseline" if made.plan.baseline else "engines " + " ".join(sorted(engines))
                step = made
            step = step or stock(model, optimizer)
            losses.append(step(x, y))
            if len(losses) == options.steps:
                break
        epoch += 1
    return [float(loss) for loss in losses], accuracy(model, test, batch=options.batch), note


def distance(losses: Losses, others: Losses) -> float:
    """Root mean square of the differences."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(losses, others, strict=True)) / len(losses))


def main() -> None:
    """Train three times, print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--effort", default="quick")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    target = detect_target(options.device)
    wanted = preprocessing(NET)
    images = load_dataset(options.data, "train", preprocessing=wanted, classes=10)
    test = load_dataset(options.data, "test", preprocessing=wanted, classes=10, limit=2000)
    # What is asked here is whether a plan is right, not whether it is fast: the one that was chosen is used.
    end_to_end.is_faster = lambda *_: True
    runs = {
        "torch.eager": train(images, test, options, layout=torch.contiguous_format, tuned=False),
        "torch.eager.nhwc": train(images, test, options, layout=torch.channels_last, tuned=False),
        "convoy": train(images, test, options, layout=torch.contiguous_format, tuned=True),
    }
    recorder = Recorder(
        "curves",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol=f"steps={options.steps} SGD lr=0.1 momentum=0.9, CIFAR-10 images, one seed",
    )
    first = runs["torch.eager"][0]
    for provider, (losses, right, note) in runs.items():
        apart = distance(losses, first)
        limit = 2 * max(distance(runs["torch.eager.nhwc"][0], first), 1e-3)
        shared = {"subject": NET, "batch": options.batch, "provider": provider, "unit": "1", "ok": apart <= limit}
        recorder.add(metric="loss_distance", p50=apart, note=f"last loss {losses[-1]:.4f} {note}".strip(), **shared)
        recorder.add(metric="accuracy", p50=right, note=f"after {len(losses)} steps", **shared)
        print(f"{provider:18} distance {apart:.2e}  last loss {losses[-1]:.4f}  accuracy {right:.2%}  {note}")
    print(recorder.write())


if __name__ == "__main__":
    run_main(main)
