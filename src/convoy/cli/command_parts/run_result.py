"""The result of `convoy run`: printed in lines, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.cli.command_parts.classify import Classified, class_title
from convoy.cli.output.lines import say

if TYPE_CHECKING:
    import torch

    from convoy.pipeline.check.end_to_end import Latency


@dataclass(frozen=True, slots=True)
class LargestOutput:
    """The largest number of a sample's first output.

    Attributes:
        index: its place in the flattened output.
        value: its value.
        name: the image's file, or the number of the sample.
    """

    index: int
    value: float
    name: str


@dataclass(frozen=True, slots=True)
class RunResult:
    """All that a run found; `--json` prints it field by field.

    Attributes:
        model: the model, as the user named it.
        source: the place of the images, in words; None for random inputs, and for a package.
        batch: samples in a call.
        baseline: whether the plan is PyTorch's own.
        latencies: of PyTorch, unless a package runs, and of Convoy.
        images: every image with its classes; empty for random inputs, and for a package.
        class_names: names of the classes, where they are known.
        outputs: the largest output of each sample, for random inputs and for a package.
    """

    model: str
    source: str | None
    batch: int
    baseline: bool
    latencies: tuple[Latency, ...]
    images: tuple[Classified, ...] = ()
    class_names: tuple[str, ...] = ()
    outputs: tuple[LargestOutput, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The fields that docs/reference/json.md lists."""
        labelled = [image for image in self.images if image.label is not None]
        times = [latency.median_ms for latency in self.latencies]
        return {
            "model": self.model,
            "source": self.source,
            "batch": self.batch,
            "baseline": self.baseline,
            "latencies": [
                {"name": time.name, "median_ms": time.median_ms, "spread_ms": time.spread_ms} for time in self.latencies
            ],
            "speedup": times[0] / times[1] if len(times) > 1 else None,
            "labelled": len(labelled),
            "stock_right": sum(image.stock == image.label for image in labelled),
            "convoy_right": sum(image.convoy == image.label for image in labelled),
            "same_class": sum(image.stock == image.convoy for image in self.images),
            "images": [
                {**dataclasses.asdict(image), "class_name": class_title(self.class_names, image.convoy)}
                for image in self.images
            ],
            "outputs": [dataclasses.asdict(output) for output in self.outputs],
        }


def largest_outputs(outputs: Sequence[torch.Tensor], names: Sequence[str] = ()) -> tuple[LargestOutput, ...]:
    """The largest output of each sample.

    Args:
        outputs: first outputs of some calls, each [n, ...], or one-dimensional for one sample.
        names: of the samples, of which the first so many are reported; empty: all are, by their numbers.
    """
    rows = [row for one in outputs for row in (one.flatten(1) if one.dim() > 1 else one[None])]
    called = names or [f"input {index}" for index in range(len(rows))]
    return tuple(
        LargestOutput(int(row.argmax()), float(row.max()), name) for row, name in zip(rows, called, strict=False)
    )


def say_json(result: RunResult) -> None:
    """Print a result as one object."""
    say(json.dumps(result.to_dict(), indent=1))


def say_outputs(result: RunResult) -> None:
    """Print the largest output of each sample, and the times."""
    for output in result.outputs:
        say(f"{output.name}: largest output {output.index} ({output.value:.4g})")
    for latency in result.latencies:
        say(f"{latency.name:8} {latency.median_ms:.3f} ms +- {latency.spread_ms:.3f}")
