"""Blocks of nets: what one kernel for a whole block saves, and what it costs. `python bench/chains/blocks.py` prints the tables.

Kinds: `bottleneck` (1x1, 3x3, 1x1), `basic` (3x3, 3x3) and `inverted` (1x1 expand, depthwise, 1x1 project; with a gate in two
passes, whose pooled values need the whole image). Floors are the larger of bytes over 3.1 TB/s and operations over 800 TFLOP/s,
both measured on an H100; a depthwise layer's operations run at 60 TFLOP/s outside the tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from convoy.engines.hopper.chains.bottleneck_cost import estimate_us, tiles
from convoy.engines.hopper.chains.bottleneck_tile_config import Bottleneck
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_cost import estimate_inverted_us, inverted_tiles

BYTES_NS, FLOPS_NS, PLAIN_FLOPS_NS = 3100.0, 800_000.0, 60_000.0
SHARED_BYTES = 227 << 10
UNITS = 132


@dataclass(frozen=True)
class LayerSizes:
    """A convolution: pixels in and out, channels, taps, groups; `read_too` channels of a residual at its output."""

    pixels_in: int
    pixels: int
    c: int
    k: int
    taps: int
    depthwise: bool = False
    read_too: int = 0

    @property
    def weight_bytes(self) -> int:
        """In half precision."""
        return 2 * self.taps * self.k * (1 if self.depthwise else self.c)

    @property
    def flops(self) -> float:
        """Operations; a multiply-add counts as two."""
        return 2.0 * self.pixels * self.k * self.taps * (1 if self.depthwise else self.c)

    @property
    def bytes(self) -> int:
        """Input, weights, residual and output once."""
        return 2 * (self.pixels_in * self.c + self.pixels * (self.k + self.read_too)) + self.weight_bytes

    @property
    def product_ns(self) -> float:
        """Of its operations alone."""
        return self.flops / (PLAIN_FLOPS_NS if self.depthwise else FLOPS_NS)


@dataclass(frozen=True)
class Chain:
    """A block of a net.

    Attributes:
        kind: of the block.
        name: channels and side.
        count: how often the net has it.
        layers: its convolutions.
        launches: by layers, with its gate's.
        outside: elements that one kernel reads and writes, without weights.
        window_rows: rows of the first result that the second reads for one row.
        width: pixels of a row of the first result.
        gated: whether a gate needs the whole image before the last convolution: the first two are then computed twice.
    """

    kind: str
    name: str
    count: int
    layers: tuple[LayerSizes, ...]
    launches: int
    outside: int
    window_rows: int
    width: int
    gated: bool = False

    @property
    def layers_us(self) -> float:
        """The sum of the layers' floors."""
        return sum(max(layer.bytes / BYTES_NS, layer.product_ns) for layer in self.layers) / 1000

    @property
    def bytes(self) -> int:
        """Of one kernel: what lies outside and the weights; x is read twice where there is a gate."""
        again = 2 * self.layers[0].pixels_in * self.layers[0].c if self.gated else 0
        return 2 * self.outside + again + self.weight_bytes

    @property
    def weight_bytes(self) -> int:
        """Of all layers."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def block_us(self) -> float:
        """The floor of one kernel."""
        products = sum(layer.product_ns for layer in self.layers)
        products += sum(layer.product_ns for layer in self.layers[:-1]) if self.gated else 0.0
        return max(self.bytes / BYTES_NS, products) / 1000

    @property
    def saved_bytes(self) -> int:
        """Bytes that do not go to memory and back."""
        return sum(layer.bytes for layer in self.layers) - self.bytes

    @property
    def window_bytes(self) -> int:
        """Shared memory for the rows of the first result that the second layer reads, and one row of the second."""
        return 2 * (self.window_rows * self.width * self.layers[0].k + self.width * self.layers[1].k)

    @property
    def weights_read(self) -> str:
        """How weights come: kept, if they fit beside the window; else once a pass for each multiprocessor."""
        return "kept" if self.weight_bytes + self.window_bytes < SHARED_BYTES - 40_000 else "each pass"


@dataclass(frozen=True)
class Block:
    """A bottleneck that `cuda.bottleneck` takes."""

    name: str
    count: int
    sizes: Bottleneck

    @property
    def chain(self) -> Chain:
        """The same for the tables."""
        s = self.sizes
        pixels = s.n * s.h * s.w
        layers = (
            LayerSizes(pixels, pixels, s.c, s.mid, 1), LayerSizes(pixels, pixels, s.mid, s.mid, 9),
            LayerSizes(pixels, pixels, s.mid, s.k, 1, read_too=0 if s.residual == "none" else s.k),
        )  # fmt: skip
        outside = pixels * (s.c + s.k * (1 + (s.residual == "other")))
        return Chain("bottleneck", self.name, self.count, layers, 3, outside, 3, s.w)

    @property
    def floor_us(self) -> float:
        """Of one kernel."""
        return self.chain.block_us

    @property
    def layers_floor_us(self) -> float:
        """The sum of the layers' floors."""
        return self.chain.layers_us


def _bottleneck(side: int, c: int, mid: int, count: int, n: int, dtype: str) -> Block:
    k, relu = 4 * mid, ("relu", "relu", "relu")
    sizes = Bottleneck(n, side, side, c, mid, k, dtype, relu, "x" if c == k else "other")
    return Block(f"{c}-{mid}-{k} @{side} n{n}", count, sizes)


RESNET50: tuple[Callable[[int, str], Block], ...] = tuple(
    partial(_bottleneck, *case)
    for case in ((56, 64, 64, 1), (56, 256, 64, 2), (28, 512, 128, 3), (14, 1024, 256, 5), (7, 2048, 512, 2))
)
"""Bottlenecks of stride 1; the first one's residual is the projection's result."""


def basic(n: int, side: int, c: int, count: int) -> Chain:
    """A basic block of ResNet-18 or 34."""
    pixels = n * side * side
    layers = (LayerSizes(pixels, pixels, c, c, 9), LayerSizes(pixels, pixels, c, c, 9, read_too=c))
    return Chain("basic", f"{c}-{c} @{side} n{n}", count, layers, 2, 2 * pixels * c, 5, side)


def inverted(n: int, side: int, c: int, wide: int, k: int, taps: int, stride: int, count: int, *, gated: bool) -> Chain:
    """An inverted residual block: MobileNetV2's, or EfficientNet's with a gate."""
    before, after = n * side * side, n * (side // stride) ** 2
    residual = k if stride == 1 and c == k else 0
    layers = (
        LayerSizes(before, before, c, wide, 1), LayerSizes(before, after, wide, wide, taps * taps, depthwise=True),
        LayerSizes(after, after, wide, k, 1, read_too=residual),
    )  # fmt: skip
    name = f"{c}-{wide}-{k} {taps}x{taps}/{stride} @{side} n{n}"
    outside = before * c + after * k
    return Chain("inverted", name, count, layers, 6 if gated else 3, outside, taps, side, gated)


MOBILENET_V2 = (
    (112, 16, 24, 2, 1), (56, 24, 24, 1, 1), (56, 24, 32, 2, 1), (28, 32, 32, 1, 2), (28, 32, 64, 2, 1), (14, 64, 64, 1, 3),
    (14, 64, 96, 1, 1), (14, 96, 96, 1, 2), (14, 96, 160, 2, 1), (7, 160, 160, 1, 2), (7, 160, 320, 1, 1),
)  # fmt: skip
"""side, c, k, stride, count; six times the channels inside."""

EFFICIENTNET_B0 = (
    (112, 16, 24, 3, 2, 1), (56, 24, 24, 3, 1, 1), (56, 24, 40, 5, 2, 1), (28, 40, 40, 5, 1, 1), (28, 40, 80, 3, 2, 1),
    (14, 80, 80, 3, 1, 2), (14, 80, 112, 5, 1, 1), (14, 112, 112, 5, 1, 2), (14, 112, 192, 5, 2, 1), (7, 192, 192, 5, 1, 3),
    (7, 192, 320, 3, 1, 1),
)  # fmt: skip
"""side, c, k, side of the depthwise filter, stride, count."""


def table(chains: Sequence[Chain], predicted: Sequence[float | None] = ()) -> str:
    """The chains as a table in Markdown."""
    heads = [
        "block", "times", "launches saved", "MB saved", "floor by layers, µs", "as one kernel", "weights, KB", "window, KB",
        "weights come", *(["predicted"] if predicted else []),
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|" + "---|" * len(heads))
    for index, chain in enumerate(chains):
        cells = [
            chain.name, str(chain.count), str(chain.launches - (2 if chain.gated else 1)), f"{chain.saved_bytes / 1e6:.1f}",
            f"{chain.layers_us:.1f}", f"{chain.block_us:.1f}", f"{chain.weight_bytes / 1024:.0f}",
            f"{chain.window_bytes / 1024:.0f}", chain.weights_read,
        ]  # fmt: skip
        if predicted:
            guess = predicted[index]
            cells.append("no tile fits" if guess is None else f"{guess:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def predicted_us(block: Block) -> float | None:
    """The cost model's estimate of `cuda.bottleneck`'s best tile; None where none fits."""
    found = tiles(block.sizes, UNITS)
    return min((estimate_us(block.sizes, tile, UNITS) for tile in found), default=None)


def inverted_us(n: int, side: int, c: int, k: int, stride: int) -> float:
    """The cost model's estimate of `cuda.inverted_residual`'s best tile for a block of MobileNetV2."""
    block = InvertedResidual(
        n, side, side, c, 6 * c, k, 3, stride, "fp16", ("relu6", "relu6"), residual=stride == 1 and c == k
    )
    return estimate_inverted_us(block, inverted_tiles(block, UNITS, SHARED_BYTES)[0], UNITS)


def main() -> None:
    """Print the tables of the page on chains."""
    for n in (1, 32, 128):
        blocks = [make(n, "fp16") for make in RESNET50]
        print(f"ResNet-50, batch {n}\n\n{table([b.chain for b in blocks], [predicted_us(b) for b in blocks])}\n")
    print("ResNet-34, batch 32\n\n" + table([basic(32, 56 >> i, 64 << i, (3, 3, 5, 2)[i]) for i in range(4)]) + "\n")
    for n in (1, 32):
        mobile = [inverted(n, side, c, 6 * c, k, 3, s, count, gated=False) for side, c, k, s, count in MOBILENET_V2]
        predicted = [inverted_us(n, side, c, k, stride) for side, c, k, stride, _ in MOBILENET_V2]
        print(f"MobileNetV2, batch {n}\n\n{table(mobile, predicted)}\n")
    efficient = [
        inverted(32, side, c, 6 * c, k, t, stride, n, gated=True) for side, c, k, t, stride, n in EFFICIENTNET_B0
    ]
    print("EfficientNet-B0, batch 32\n\n" + table(efficient))


if __name__ == "__main__":
    main()
