"""The net of `convoy bench`: a package, or a model with its plans, as programs of several batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli.options import values
from convoy.cli.output.lines import tell
from convoy.errors import InputError

if TYPE_CHECKING:
    import torch

    from convoy.measurement.scenarios.batched_net import BatchedNet
    from convoy.problem import TensorSpec

Specs = tuple["TensorSpec", ...]
"""Inputs of one program."""


def packaged_net(path: str, others: Mapping[str, object], *, trust: bool, signers: Path | None = None) -> BatchedNet:
    """The net of a package.

    Args:
        path: the package.
        others: options that a package has no use for, by flag.
        trust: whether its compiled code may run.
        signers: people whose signature is trusted (`convoy.open`).
    """
    for name, value in others.items():
        if value is not None:
            raise InputError(name, value, "nothing with a .convoy file, which has its own model and plan")
    import convoy
    from convoy.measurement.scenarios.batched_net import BatchedNet

    net = convoy.open(path, trust=trust, signers=signers)
    specs = [tuple(one.spec for one in program.inputs) for program in net.packed]
    first = [one.spec.shape[:1] for one in (*net.packed[0].inputs, *net.packed[0].outputs)]
    sizes = batch_sizes(specs, is_batch=len(set(first)) == 1)
    return BatchedNet(net, {size: net.example_inputs(index) for size, index in sizes.items()})


def planned_net(
    model: str, plans: Sequence[Path], device: str | None, weights: str | None, *, trust: bool
) -> BatchedNet:
    """A model, run by one plan for each batch size."""
    if not plans:
        todo = "Write one with `convoy optimize --plan`, or give a .convoy file."
        raise InputError("--plan", None, "a plan", todo)
    from convoy.plan import load as load_plan
    from convoy.problem import TensorSpec

    saved = [load_plan(plan) for plan in plans]  # refuse a bad plan before the model is loaded
    specs = [tuple(map(TensorSpec.parse, plan.inputs)) for plan in saved]
    where = values.pick_device(device)
    module = values.load(model, weights, specs[0][0].dtype if specs[0] else "fp32", where, trust=trust)

    import convoy
    from convoy.measurement.scenarios.batched_net import BatchedNet

    sizes = batch_sizes(specs, is_batch=True)
    inputs = {size: example(specs[index], where) for size, index in sizes.items()}
    first = min(sizes.values())
    kept = [first, *(index for index in sizes.values() if index != first)]
    fast = convoy.load(module, [plans[index] for index in kept], example(specs[first], where))
    return BatchedNet(fast, inputs)


def batch_sizes(programs: Sequence[Specs], *, is_batch: bool) -> dict[int, int]:
    """Batch size → index of its program. A program whose inputs are no batches has the size 1: a sample is a call.

    Programs whose images have another size than the first program's are left out, with a line that says so.

    Args:
        programs: the inputs' specs of each.
        is_batch: whether the first program's outputs begin with as many images as its inputs.
    """
    first = programs[0]
    sizes = [_size(specs) for specs in programs]
    if sizes[0] is None or not is_batch:
        if len(programs) > 1:
            tell(f"only the first of {len(programs)} programs is measured: its inputs are no batches")
        return {1: 0}
    found: dict[int, int] = {}
    for index, (specs, size) in enumerate(zip(programs, sizes, strict=True)):
        if size is None or _tails(specs) != _tails(first):
            tell(f"left out, for its images have another size: {', '.join(map(str, specs))}")
        else:
            found.setdefault(size, index)
    return found


def _size(specs: Specs) -> int | None:
    """The first size of all inputs, if they share it."""
    sizes = {spec.shape[:1] for spec in specs}
    return next(iter(sizes))[0] if len(sizes) == 1 and () not in sizes and (0,) not in sizes else None


def _tails(specs: Specs) -> list[tuple[str, tuple[int, ...]]]:
    return [(spec.dtype, spec.shape[1:]) for spec in specs]


def example(specs: Specs, device: str) -> tuple[torch.Tensor, ...]:
    """Inputs of given shapes: standard normal with a fixed seed, or zeros for integers."""
    import torch

    from convoy.engines.torch_operators import DTYPES

    draw = torch.Generator().manual_seed(0)

    def made(spec: Any) -> torch.Tensor:
        dtype = DTYPES[spec.dtype]
        values = torch.randn(spec.shape, generator=draw) if dtype.is_floating_point else torch.zeros(spec.shape)
        return values.to(device, dtype)

    return tuple(map(made, specs))
