"""Write bench/layers/NET.csv: the distinct convolutions of each net at batch 1, columns = ConvProblem's sizes and a count.

Usage: python bench/layers/make_layers.py [NET ...]
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from convoy.problem import ConvProblem

NETS = ("alexnet", "vgg19", "googlenet", "resnet50", "inception_v3", "mobilenet_v2", "densenet121", "efficientnet_b0")
COLUMNS = (
    "n",
    "c",
    "h",
    "w",
    "k",
    "r",
    "s",
    "pad_h",
    "pad_w",
    "stride_h",
    "stride_w",
    "dilation_h",
    "dilation_w",
    "groups",
)
FOLDER = Path(__file__).parent


def layers(net: str) -> Counter[ConvProblem]:
    """The net's convolutions at batch 1 with the number of times each occurs, in the order in which they run."""
    from convoy.zoo import load_model

    model = load_model(net).eval()
    found: Counter[ConvProblem] = Counter()

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del output
        assert isinstance(module, nn.Conv2d)
        n, c, h, w = inputs[0].shape
        pad_h, pad_w = module.padding if isinstance(module.padding, tuple) else (0, 0)
        found[
            ConvProblem(
                n,
                c,
                h,
                w,
                module.out_channels,
                *module.kernel_size,
                pad_h,
                pad_w,
                *module.stride,
                *module.dilation,
                module.groups,
            )
        ] += 1

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.zeros(1, 3, *(299, 299) if net == "inception_v3" else (224, 224)))
    return found


def main() -> None:
    for net in sys.argv[1:] or NETS:
        found = layers(net)
        path = FOLDER / f"{net}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*COLUMNS, "count"))
            for problem, count in found.items():
                values = asdict(problem)
                writer.writerow((*(values[name] for name in COLUMNS), count))
        print(f"{path.name}: {len(found)} distinct of {sum(found.values())}")


if __name__ == "__main__":
    main()
