"""Write bench/layers/NET.csv: the distinct convolutions of each net at batch 1, columns = ConvProblem's sizes and a count.

`unet3d`, a 3-D U-Net at 128 x 128 x 128 as nnU-Net plans it, and `r3d_18` at 16 frames of 112 x 112 have three-dimensional ones.

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

from convoy.graph.layers import triple
from convoy.problem import Conv3dProblem, ConvProblem

NETS = (
    "alexnet", "vgg19", "googlenet", "resnet50", "inception_v3", "mobilenet_v2", "densenet121", "efficientnet_b0",
    "regnet_y_400mf", "resnext50_32x4d",
)  # fmt: skip
COLUMNS = ("n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w",
           "groups")  # fmt: skip
VOLUME_COLUMNS = ("n", "c", "d", "h", "w", "k", "t", "r", "s", "pad_d", "pad_h", "pad_w", "stride_d", "stride_h", "stride_w",
                  "dilation_d", "dilation_h", "dilation_w", "groups")  # fmt: skip
VOLUME_NETS = ("unet3d", "r3d_18")
UNET_CHANNELS = (32, 64, 128, 256, 320, 320)
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


class UNet3d(nn.Module):
    """Two 3x3x3 convolutions at each size, the first of stride 2 but for the largest; transposed ones on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.after = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        before = 1
        for level, c in enumerate(UNET_CHANNELS):
            first = nn.Conv3d(before, c, 3, stride=2 if level else 1, padding=1)
            self.down.append(nn.Sequential(first, nn.Conv3d(c, c, 3, padding=1)))
            before = c
        for c in UNET_CHANNELS[-2::-1]:
            self.up.append(nn.ConvTranspose3d(before, c, 2, stride=2))
            self.after.append(nn.Sequential(nn.Conv3d(2 * c, c, 3, padding=1), nn.Conv3d(c, c, 3, padding=1)))
            before = c
        self.head = nn.Conv3d(before, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 1, d, h, w] to [n, 2, d, h, w]."""
        skips: list[torch.Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        for up, after, skip in zip(self.up, self.after, skips[-2::-1], strict=True):
            x = after(torch.cat([up(x), skip], 1))
        return self.head(x)


def volume_layers(net: str) -> Counter[Conv3dProblem]:
    """A net's three-dimensional convolutions; runs on the meta device."""
    found: Counter[Conv3dProblem] = Counter()

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del output
        assert isinstance(module, nn.Conv3d)
        n, c, *size = inputs[0].shape
        sides = [triple(side) for side in (module.kernel_size, module.padding, module.stride, module.dilation)]
        window, *others = sides
        found[Conv3dProblem(n, c, triple(size), module.out_channels, window, *others, groups=module.groups)] += 1

    from convoy.zoo import load_model

    shape = (1, 1, 128, 128, 128) if net == "unet3d" else (1, 3, 16, 112, 112)
    model, x = (UNet3d() if net == "unet3d" else load_model(net)).to("meta"), torch.empty(shape, device="meta")
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_hook(note)
    model.eval()(x)
    return found


def write_volumes(net: str) -> None:
    """Write a net's three-dimensional convolutions."""
    found = volume_layers(net)
    with (FOLDER / f"{net}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*VOLUME_COLUMNS, "count"))
        for p, count in found.items():
            writer.writerow((p.n, p.c, *p.size, p.k, *p.window, *p.pad, *p.stride, *p.dilation, p.groups, count))
    print(f"{net}.csv: {len(found)} distinct of {sum(found.values())}")


def main() -> None:
    for net in sys.argv[1:] or (*NETS, *VOLUME_NETS):
        if net in VOLUME_NETS:
            write_volumes(net)
            continue
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
