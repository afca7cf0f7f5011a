"""What does skipping zeros bring on whole trained nets with real images? Question `zeroskip`, metrics `latency_ms`, `accuracy`.

Each net twice as Convoy runs it, with the engines that skip zeros and without them, both chosen on the same real images; timed in
turn with PyTorch, and each held to PyTorch's answers on many other images, whose zeros are others. fp32, numerics strict.

    python bench/zeroskip/zeroskip_nets.py --data FOLDER [--nets resnet20_cifar10 ...] [--device cpu|cuda]
                                            [--batch 1] [--images 1000] [--vgg EPOCHS] [--seconds S] [--db FILE] [--folder DIR]

FOLDER holds NET.safetensors for each net, one cifar10*train*.safetensors and one cifar10*test*.safetensors of arrays
(docs/how-to/datasets.md).
`--vgg EPOCHS` adds a VGG-16 for CIFAR-10 with batch normalisation, trained here and now for so many epochs: a
plain ReLU net, whose deep maps have the most zeros. The note says the least and most zeros and dead channels that its layers
read, and how many layers each engine does.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy import Settings
from convoy.engines.manifest import MANIFEST, entry, load_engine
from convoy.measurement import detect_target
from convoy.pipeline import optimize_model
from convoy.pipeline.check.end_to_end import interleave
from convoy.pipeline.optimize import OptimizeResult
from convoy.program import OptimizedModule
from convoy.zoo import load_dataset, load_model, preprocessing
from convoy.zoo.datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.record import Recorder

NETS = ("resnet20_cifar10", "resnet56_cifar10", "ai85nascifarnet_cifar10", "cifar10_quick")
VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)
SKIPPING = tuple(engine for engine in MANIFEST if load_engine(engine).skips_zeros)
TRAIN_BATCH = 128


class Vgg(nn.Module):
    """VGG-16's convolutions for 32x32 images (Simonyan and Zisserman), batch normalisation, one linear layer."""

    def __init__(self, layers: Iterable[int | str] = VGG16, classes: int = 10) -> None:
        super().__init__()
        found: list[nn.Module] = []
        c = 3
        for k in layers:
            if isinstance(k, str):
                found.append(nn.MaxPool2d(2))
            else:
                found += [nn.Conv2d(c, k, 3, padding=1), nn.BatchNorm2d(k), nn.ReLU()]
                c = k
        self.features, self.classifier = nn.Sequential(*found), nn.Linear(c, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, 3, 32, 32]; gives [n, classes]."""
        return self.classifier(self.features(x).amax((2, 3)))


def train(model: nn.Module, data: Dataset, epochs: int, device: str) -> nn.Module:
    """SGD with momentum, weight decay and one cycle of the learning rate."""
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * data.batch_count(TRAIN_BATCH, drop_last=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=max(2, steps))
    batches = list(data.batches(TRAIN_BATCH, seed=0, augment=False, drop_last=True))
    placed = [(x.to(device), y.to(device)) for x, y in batches]
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for _ in range(epochs):
            for index in torch.randperm(len(placed), generator=generator).tolist():
                x, y = placed[index]
                x = x.flip(3) if torch.rand((), generator=generator) < 0.5 else x
                x = x.roll(torch.randint(-3, 4, (2,), generator=generator).tolist(), (2, 3))
                optimizer.zero_grad(set_to_none=True)
                cross_entropy(model(x), y).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def answers(run: Callable[[torch.Tensor], torch.Tensor], data: Dataset, batch: int, device: str) -> torch.Tensor:
    """A net's outputs for all images, batch after batch; the last that is not full is left out."""
    found = [run(place(x, device)).float().cpu() for x, _ in data.batches(batch, drop_last=True)]
    return torch.cat(found)


def place(x: torch.Tensor, device: str) -> torch.Tensor:
    return x.to(device).contiguous(memory_format=torch.channels_last)


def replay(program: OptimizedModule, x: torch.Tensor) -> Callable[[], object]:
    """A call that runs a program once: on a GPU the replay of its graph."""
    program(x)
    if not x.is_cuda:
        return lambda: program(x)
    found = program.programs[0].runnable
    assert found is not None
    return found.replay  # type: ignore[attr-defined]


def graph_of(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """PyTorch: on a GPU in a CUDA graph too."""
    if not x.is_cuda:
        return lambda: model(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model(x)
    return graph.replay


def told(result: OptimizeResult) -> str:
    """Zeros and dead channels of the layers, and which engines do them."""
    layers = [layer for layer in result.summary.layers if layer.problem.startswith("conv:")]
    used = Counter(layer.engine for layer in layers)
    words = [f"{engine}={count}" for engine, count in used.most_common()]
    for name in ("zeros", "dead_channels"):
        shares = [share for layer in layers if (share := getattr(layer, name)) is not None]
        if shares:
            words.insert(0, f"{name} {100 * min(shares):.0f} to {100 * max(shares):.0f} %")
    return " ".join(["the stock model was kept", *words] if result.plan.baseline else words)


def measure(name: str, model: nn.Module, data: Dataset, options: argparse.Namespace, recorder: Recorder) -> None:
    """One net: plans, times in turn, accuracies."""
    device, batch = options.device, options.batch
    first, _ = next(data.batches(batch))
    x = place(first, device)
    model = model.eval().to(device, memory_format=torch.channels_last)
    plain = Settings(numerics="strict", db=options.db, deny_engines=SKIPPING)
    skipping = Settings(numerics="strict", db=options.db, engines=tuple(map(entry, SKIPPING)))
    results = {
        "convoy.dense": optimize_model(model, (x,), name=name, settings=plain),
        "convoy": optimize_model(model, (x,), name=name, settings=skipping),
    }
    stock = "torch.graph" if device == "cuda" else "torch.eager"
    runs = {stock: graph_of(model, x), **{p: replay(result.program, x) for p, result in results.items()}}
    timed = interleave(runs, cuda=device == "cuda")
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {stock: model}
    calls.update((provider, result.program) for provider, result in results.items())
    labels = data.labels[: len(data) - len(data) % batch]
    outputs = {provider: answers(call, data, batch, device) for provider, call in calls.items()}
    for provider, figures in timed.items():
        found = outputs[provider]
        accuracy = float((found.argmax(1) == labels).double().mean())
        apart = float((found - outputs[stock]).norm() / outputs[stock].norm())
        note = told(results[provider]) if provider in results else ""
        common = {"batch": batch, "numerics": "strict", "ok": apart < 1e-4}
        recorder.add(
            subject=name, provider=provider, metric="latency_ms", unit="ms", p50=figures.median_ms,
            p20=max(0.0, figures.median_ms - figures.spread_ms), p80=figures.median_ms + figures.spread_ms,
            note=note, **common,
        )  # fmt: skip
        said = f"{len(found)} images, rel_l2_to_torch={apart:.1e}"
        recorder.add(subject=name, provider=provider, metric="accuracy", unit="1", p50=accuracy, note=said, **common)
        print(f"{name} b{batch} {provider}: {figures.median_ms:.4f} ms, {accuracy:.2%} of {said} {note}", flush=True)
    gain = timed["convoy.dense"].median_ms / timed["convoy"].median_ms
    print(f"{name} b{batch}: {gain:.2f} times as fast with the engines that skip zeros", flush=True)


def main() -> None:
    """All nets, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--nets", nargs="*", default=NETS)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--vgg", type=int, default=0, metavar="EPOCHS")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    target, began = detect_target(options.device), time.monotonic()
    recorder = Recorder(
        "zeroskip", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol=f"whole net, interleaved, median, p20 and p80 as median -+ spread, {target.units} units",
        folder=options.folder,
    )  # fmt: skip
    source = f"cifar10:{options.data}"
    for name in options.nets:
        if time.monotonic() - began > options.seconds:
            print("out of time before", name)
            break
        data = load_dataset(source, "test", preprocessing=preprocessing(name), limit=options.images)
        weights = str(options.data / f"{name}.safetensors")
        measure(name, load_model(name, weights=weights), data, options, recorder)
        recorder.write()
    if options.vgg and time.monotonic() - began < options.seconds:
        wanted = preprocessing("resnet20_cifar10")
        torch.manual_seed(0)
        trained = train(Vgg(), load_dataset(source, "train", preprocessing=wanted), options.vgg, options.device)
        print(f"vgg16_cifar10 trained for {options.vgg} epochs in {time.monotonic() - began:.0f} s", flush=True)
        data = load_dataset(source, "test", preprocessing=wanted, limit=options.images)
        measure("vgg16_cifar10", trained, data, options, recorder)
    print(recorder.write())


if __name__ == "__main__":
    with torch.no_grad():
        main()
