"""A training step fed by a data loader, with images as in training on ImageNet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch.utils.data import DataLoader

LOADED_S: Final = 3.0
"""How long a step is fed by a data loader, at least."""

LEAST_LOADED: Final = 4
"""Batches of each worker that a step is fed with at least."""

BATCH_S: Final = 60.0
"""How long one batch may take a data loader: workers that hang end the child, and the row says why."""

PICTURE: Final = 256
"""Height and width of the stored images of the loader's synthetic set, as ImageNet is commonly prepared."""


def fed_by(x: torch.Tensor, labels: torch.Tensor, step: Callable[[], object], workers: int) -> list[float]:
    """Milliseconds of each step when a data loader with so many workers feeds it.

    Args:
        x: the step's input, which batches are copied into.
        labels: its labels.
        step: runs it, and waits for it.
        workers: processes of the loader; 0: this one loads.
    """
    n, _, height, _ = x.shape
    pictures = StoredImages(n * 10_000, height)
    limit = BATCH_S if workers else 0.0
    # A fork of this process takes the locks of threads along that hold them, compilers' among them: a worker waited for ever.
    begun = "forkserver" if workers else None
    loader = DataLoader(
        pictures, n, num_workers=workers, pin_memory=x.is_cuda, timeout=limit, multiprocessing_context=begun
    )
    found: list[float] = []
    ahead = 2 * workers + 1  # begun before the first step, or waiting for a worker to start
    start = last = time.perf_counter()
    for index, (images, classes) in enumerate(loader):
        with torch.no_grad():
            x.copy_(images, non_blocking=True)
            labels.copy_(classes, non_blocking=True)
        step()
        now = time.perf_counter()
        if index >= ahead:
            found.append((now - last) * 1e3)
        else:
            start = now
        last = now
        if now - start > LOADED_S and len(found) >= LEAST_LOADED * max(1, workers):
            break
    return by_turn(found, workers)


def by_turn(steps: list[float], workers: int) -> list[float]:
    """Means over so many steps in a row as there are workers, which all hand in a batch in that time: they come in bursts."""
    size = max(1, workers)
    return [sum(steps[at : at + size]) / size for at in range(0, len(steps) - size + 1, size)]


class StoredImages(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Stored bytes, cropped, flipped and normalised as in training on ImageNet; labels without meaning.

    Args:
        count: how many.
        size: height and width after cropping, pixels.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        side = max(PICTURE, size + 1)
        self.stored = torch.randint(
            0, 256, (16, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self.stored[index % len(self.stored)]
        room = stored.shape[-1] - self.size
        top, left = index * 31 % room, index * 17 % room
        picture = stored[:, top : top + self.size, left : left + self.size].float().div_(255).sub_(0.45).div_(0.225)
        return picture.flip(-1) if index % 2 else picture, torch.tensor(index % 2)
