"""Classes of images by two programs side by side, stock PyTorch and Convoy, and the lines that `convoy run` prints of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convoy.cli.output.lines import say

if TYPE_CHECKING:
    import torch

    from convoy.cli.output.progress import Bar
    from convoy.pipeline.check.end_to_end import Latency
    from convoy.zoo import Dataset

Program = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Classified:
    """One image.

    Attributes:
        name: its file, or its number.
        label: its class; None for images without labels.
        stock: class by PyTorch.
        convoy: class by Convoy.
        share: probability of that class, by softmax of Convoy's scores.
    """

    name: str
    label: int | None
    stock: int
    convoy: int
    share: float


def classified(
    stock: Program, fast: Program, images: Dataset, batch: int, place: tuple[str, torch.dtype], bar: Bar
) -> list[Classified]:
    """Run both programs on all images, `batch` at a time; a last batch that is not full is filled up with its last image.

    Args:
        stock: PyTorch's own.
        fast: Convoy's.
        images: labelled; a label of -1 says that there is none.
        batch: images in a call.
        place: device and dtype of the input.
        bar: told of the progress.
    """
    import torch

    from convoy.prune.accuracy import class_scores

    device, dtype = place
    found: list[Classified] = []
    with torch.no_grad():
        for x, labels in images.batches(batch):
            bar("running images", len(found), len(images))
            there = len(x)
            filled = torch.cat([x, x[-1:].expand(batch - there, *x.shape[1:])]).to(device, dtype)
            first = class_scores(stock(filled))[:there].float().argmax(1).cpu()
            scores = class_scores(fast(filled))[:there].float().softmax(1).cpu()
            shares, second = scores.max(1)
            for row in range(there):
                label = int(labels[row])
                found.append(
                    Classified(
                        name=images.image_name(len(found)),
                        label=label if label >= 0 else None,
                        stock=int(first[row]),
                        convoy=int(second[row]),
                        share=float(shares[row]),
                    )
                )
    return found


def say_classes(found: Sequence[Classified], names: Sequence[str]) -> None:
    """Print a line for each image: file, class, probability; the label where it is another one; PyTorch's class likewise."""
    for image in found:
        words = [image.name, class_title(names, image.convoy), f"{image.share:.1%}"]
        if image.label is not None and image.label != image.convoy:
            words.append(f"labelled {class_title(names, image.label)}")
        if image.stock != image.convoy:
            words.append(f"PyTorch: {class_title(names, image.stock)}")
        say("  ".join(words))


def class_title(names: Sequence[str], index: int) -> str:
    """The name of a class, or its number where it has none."""
    return names[index] if index < len(names) else f"class {index}"


def say_result(found: Sequence[Classified], timed: Sequence[Latency], source: str, batch: int) -> None:
    """Print accuracy and time of a call of PyTorch and Convoy, one under the other.

    Args:
        found: every image.
        timed: latency of PyTorch and of Convoy.
        source: where the images come from, in words.
        batch: images in a call.
    """
    from convoy.report import print_table

    labelled = [image for image in found if image.label is not None]
    stock, fast = timed
    rows: list[tuple[str, ...]] = []
    for name, time in (("PyTorch", stock), ("Convoy", fast)):
        right = sum((image.stock if time is stock else image.convoy) == image.label for image in labelled)
        accuracy = (f"{right / len(labelled):.2%}", f"{right:,} of {len(labelled):,}") if labelled else ("", "")
        times = (f"{time.median_ms:.3f}", f"{time.spread_ms:.3f}", f"{stock.median_ms / time.median_ms:.2f}x")
        rows.append((name, *accuracy, *times))
    heads = ("", "accuracy", "right", "ms a call", "+-", "speed-up")
    shown = [(head, index) for index, head in enumerate(heads) if labelled or head not in ("accuracy", "right")]
    say(f"{len(found):,} image{'s' if len(found) != 1 else ''} of {source}, {batch} in a call")
    columns = [index for _, index in shown]
    print_table([head for head, _ in shown], [[row[i] for i in columns] for row in rows], numbers=range(1, len(shown)))
    same = sum(image.stock == image.convoy for image in found)
    say(f"PyTorch and Convoy give the same class for {same:,} of {len(found):,} images")
