"""convoy run NET.convoy: run a package on images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli.command_parts.labelled_data import checked
from convoy.cli.command_parts.run_result import RunResult, largest_outputs
from convoy.errors import InputError

if TYPE_CHECKING:
    import torch

    from convoy.package.packaged_module import PackagedModule
    from convoy.zoo import Dataset


def run_package(
    path: str, images: list[Path] | None, others: Mapping[str, object], *, trust: bool, signers: Path | None = None
) -> RunResult:
    """Run a package on all images, as many at a time as it takes.

    Args:
        path: the package.
        images: files and folders; None: random inputs.
        others: options that a package has no use for, by flag.
        trust: whether its compiled code may run.
        signers: people whose signature is trusted (`convoy.open`).
    """
    for name, value in others.items():
        if value is not None:
            raise InputError(name, value, "nothing with a .convoy file, which has its own model and plan")

    import convoy
    from convoy.cli.output.progress import Bar

    net = convoy.open(path, trust=trust, signers=signers)
    if not images:
        shape = net.inputs[0].spec.shape if net.inputs else ()
        return _result(path, net, [net.example_inputs()], shape[0] if shape else 1)
    with Bar() as bar:
        found = checked(_images_for(net, images), bar)
    names = [found.image_name(index) for index in range(len(found))]
    return _result(path, net, list(_whole_batches(net, found)), net.inputs[0].spec.shape[0], names)


def _images_for(net: PackagedModule, images: Sequence[Path]) -> Dataset:
    """The images, in the size and the normalisation that a package takes.

    Raises:
        InputError: the package takes no images.
    """
    from convoy.zoo import Preprocessing
    from convoy.zoo.unlabelled import unlabelled

    spec = net.inputs[0].spec
    if len(net.inputs) != 1 or len(spec.shape) != 4 or spec.shape[1] != 3:
        shapes = ", ".join(str(one.spec) for one in net.inputs)
        raise InputError("--input", shapes, "a package with one input of images, [n, 3, height, width]")
    usual = Preprocessing()
    mean, std = net.manifest.mean or usual.mean, net.manifest.std or usual.std
    return unlabelled(images, Preprocessing((spec.shape[2], spec.shape[3]), mean, std))


def _whole_batches(net: PackagedModule, images: Dataset) -> Iterator[tuple[torch.Tensor]]:
    """The arguments of each call: as many images as the package takes, the last batch filled up with zeros."""
    import torch

    from convoy.zoo import parse_dtype

    spec = net.inputs[0].spec
    for x, _ in images.batches(spec.shape[0]):
        padding = x.new_zeros(spec.shape[0] - len(x), *spec.shape[1:])
        yield (torch.cat([x, padding]).to(net.device, parse_dtype(spec.dtype)),)


def _result(
    path: str, net: PackagedModule, batches: Sequence[tuple[Any, ...]], batch: int, names: Sequence[str] = ()
) -> RunResult:
    """Run a net on batches and time it on the first.

    Args:
        path: the package.
        net: the net.
        batches: arguments of each call.
        batch: samples in a call.
        names: of the images to be reported; empty for random inputs, of which all are.
    """
    import torch

    from convoy.pipeline.check.end_to_end import float_outputs, interleave

    with torch.no_grad():
        outputs = [float_outputs(net(*args))[0] for args in batches]
        timed = interleave({"Convoy": lambda: net(*batches[0])}, cuda=net.device.type == "cuda")["Convoy"]
    return RunResult(path, None, batch, False, (timed,), outputs=largest_outputs(outputs, names))
