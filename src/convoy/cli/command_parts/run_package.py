"""convoy run NET.convoy: run a package on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli.command_parts.run_result import RunResult, largest_outputs
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.package.packaged_module import PackagedModule


def run_package(path: str, images: list[Path] | None, others: Mapping[str, object], *, trust: bool) -> RunResult:
    """Run a package on all images, as many at a time as it takes.

    Args:
        path: the package.
        images: files and folders; None: random inputs.
        others: options that a package has no use for, by flag.
        trust: whether its compiled code may run.
    """
    for name, value in others.items():
        if value is not None:
            raise InputError(name, value, "nothing with a .convoy file, which has its own model and plan")

    import torch

    import convoy
    from convoy.zoo import Preprocessing, load_images

    net = convoy.open(path, trust=trust)
    if not images:
        shape = net.inputs[0].spec.shape if net.inputs else ()
        return _result(path, net, [net.example_inputs()], shape[0] if shape else 1)
    spec = net.inputs[0].spec
    if len(net.inputs) != 1 or len(spec.shape) != 4 or spec.shape[1] != 3:
        shapes = ", ".join(str(one.spec) for one in net.inputs)
        raise InputError("--input", shapes, "a package with one input of images, [n, 3, height, width]")
    usual = Preprocessing()
    mean, std = net.manifest.mean or usual.mean, net.manifest.std or usual.std
    loaded = load_images(images, size=(spec.shape[2], spec.shape[3]), dtype=spec.dtype, mean=mean, std=std)
    count, size = len(loaded), spec.shape[0]
    padding = loaded.new_zeros(-count % size, *spec.shape[1:])  # the package takes whole batches
    whole = (torch.cat([loaded, padding]) if len(padding) else loaded).to(net.device)
    return _result(path, net, [(whole[at : at + size],) for at in range(0, count, size)], size, count)


def _result(
    path: str, net: PackagedModule, batches: Sequence[tuple[Any, ...]], batch: int, count: int | None = None
) -> RunResult:
    """Run a net on batches and time it on the first.

    Args:
        path: the package.
        net: the net.
        batches: arguments of each call.
        batch: samples in a call.
        count: images to be reported; None: all.
    """
    import torch

    from convoy.pipeline.check.end_to_end import float_outputs, interleave

    with torch.no_grad():
        outputs = [float_outputs(net(*args))[0] for args in batches]
        timed = interleave({"Convoy": lambda: net(*batches[0])}, cuda=net.device.type == "cuda")["Convoy"]
    return RunResult(path, None, batch, False, (timed,), outputs=largest_outputs(outputs)[:count])
