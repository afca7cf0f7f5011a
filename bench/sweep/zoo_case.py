"""One net of bench/zoo.py, in a process of its own: inference and a training step, as Convoy runs them and as PyTorch does."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import convoy
from convoy.engines.manifest import MANIFEST
from convoy.pipeline import OptimizeResult, optimize_model
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.least_error import LEAST_LOOSE_ERROR
from convoy.pipeline.check.rounding import fixed_seed
from convoy.plan import Plan
from convoy.zoo import import_torchvision, load_model

STEP_ERROR = 1e-2
"""Distance of the weights from PyTorch's after a step, relative to how far the step moved them, that needs no closer look."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def run_case(name: str, device: str, *, size: int, training: bool) -> dict[str, Any]:
    """Inference at effort none, and a training step.

    Args:
        name: as `convoy.zoo.load_model` takes it.
        device: `cpu` or `cuda`.
        size: height and width of images; a net that does not take it gets its own.
        training: make a training step too.

    Returns:
        Plain data: `kind` (`whole`, `parts`, `stock`), `why` for stock, `ok`, errors, seconds, `speedup`, `own_share`; `training`
        holds the same of the step. `convolutions` is 0 where the net is none for Convoy.
    """
    model = load_model(name).to(device)
    found: dict[str, Any] = {"convolutions": sum(isinstance(module, CONVOLUTIONS) for module in model.modules())}
    if not found["convolutions"]:
        return found
    args = inputs(name, model, size, device)
    found["inputs"] = " ".join(str(list(leaf.shape)) for leaf in pytree.tree_leaves(args))
    found |= inference(model, args)
    if training:
        try:
            found["training"] = step(model, args)
        except Exception as error:  # a row, whatever it is
            found["training"] = {"ok": False, "kind": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    return found


def inputs(name: str, model: nn.Module, size: int, device: str) -> tuple[Any, ...]:
    """Arguments of a size that the model takes, as few pixels as may be."""
    last: Exception | None = None
    for args in candidates(name, model, size):
        placed = pytree.tree_map(lambda leaf: leaf.to(device), args)
        try:
            with torch.no_grad():
                model(*copy.deepcopy(placed))
        except Exception as error:  # another size may do
            last = error
            continue
        return placed
    raise RuntimeError(f"no size fits: {last}")


def candidates(name: str, model: nn.Module, size: int) -> Iterator[tuple[Any, ...]]:
    """Arguments to try, the smallest first."""
    draws = torch.Generator().manual_seed(0)
    models = import_torchvision().models
    if name in models.list_models(module=models.optical_flow):
        yield tuple(torch.rand(1, 3, 128, 128, generator=draws) * 2 - 1 for _ in range(2))
    elif name in models.list_models(module=models.video):
        for frames, side in ((4, 32), (8, 64), (16, 112), (16, 224)):
            yield (torch.rand(1, 3, frames, side, side, generator=draws),)
    elif name in models.list_models(module=models.detection):
        yield ([torch.rand(3, size, size, generator=draws)],)
    else:
        own = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
        for side in dict.fromkeys((size, 2 * size, 224, own[-1])):
            yield (torch.randn(1, own[0], side, side, generator=draws),)


def inference(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Optimize at effort none; errors against float64, beside PyTorch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.perf_counter()
        result = optimize_model(model, args, settings=convoy.Settings(effort="none"))
        with torch.no_grad(), fixed_seed():
            mine = result.program(*copy.deepcopy(args))
        first_s = time.perf_counter() - begin
    with torch.no_grad(), fixed_seed():
        theirs = model(*copy.deepcopy(args))
    kind, why = kind_of(result)
    return {
        "kind": kind,
        "why": why,
        "first_s": first_s,
        "speedup": result.summary.speedup,
        "own_share": own_share(result),
        **errors(model, args, mine, theirs),
    }


def kind_of(result: OptimizeResult) -> tuple[str, str]:
    """How a model runs (`whole`, `parts`, `kept`: captured, and PyTorch is as fast; `stock`: not captured), and why if stock."""
    if hasattr(result.program, "parts"):
        return "parts", ""
    if set(result.plan.graph_digest) == {"0"}:
        return "stock", result.plan.notes[0]
    return ("kept" if result.plan.baseline else "whole"), ""


def own_share(result: OptimizeResult) -> float:
    """Share of the planned time that is in engines of Convoy's, not of a library."""
    parts = getattr(result.program, "parts", ())
    plans: list[Plan] = [part.program.plan for part in parts] or [result.plan]
    steps = [step for plan in plans for step in plan.steps]
    whole = sum(step.median_us for step in steps)
    own = sum(step.median_us for step in steps if ".library." not in MANIFEST.get(step.config.engine, ".library."))
    return own / whole if whole else 0.0


def errors(model: nn.Module, args: tuple[Any, ...], mine: Any, theirs: Any) -> dict[str, Any]:
    """Relative L2 errors against float64, PyTorch's own beside it; against PyTorch where the net does not run in float64."""
    wide = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, args)
    try:
        with torch.no_grad(), fixed_seed():
            exact = end_to_end.float_outputs(copy.deepcopy(model).double()(*wide))
        baseline = end_to_end.errors_against(theirs, exact).rel_l2_error
    except Exception:  # a dtype that the forward names
        exact, baseline = [tensor.double() for tensor in end_to_end.float_outputs(theirs)], 0.0
    shapes = [[tensor.shape for tensor in end_to_end.float_outputs(made)] for made in (mine, theirs)]
    if shapes[0] != shapes[1]:
        return {"ok": False, "why": f"outputs of other shapes: {shapes}"[:300]}
    error = end_to_end.errors_against(mine, exact).rel_l2_error
    allowed = max(end_to_end.WORST_ERROR * baseline, LEAST_LOOSE_ERROR)
    return {"ok": error <= allowed, "error": error, "stock_error": baseline}


def step(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """One training step with SGD: its loss and the weights after it, beside PyTorch's."""

    def loss_of(outputs: Any) -> torch.Tensor:
        found = [
            leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        return torch.stack(
            [tensor.to(torch.promote_types(tensor.dtype, torch.float32)).square().mean() for tensor in found]
        ).sum()

    # Two images: a batch norm over one pixel has no variance.
    batch = pytree.tree_map(lambda leaf: torch.cat([leaf, leaf.flip(-1)]), args)
    twins = [copy.deepcopy(model).train() for _ in range(2)]
    optimizers = [torch.optim.SGD(twin.parameters(), 1e-3) for twin in twins]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = time.perf_counter()
        made = convoy.training_step(twins[0], loss_of, optimizers[0], batch, settings=convoy.Settings(effort="none"))
        with fixed_seed():
            mine = made(*batch)
        first_s = time.perf_counter() - begin
    with fixed_seed():
        theirs = loss_of(twins[1](*batch))
        theirs.backward()
    optimizers[1].step()
    said = [str(warning.message) for warning in caught if str(warning.message).startswith("convoy: ")]
    moved = distance(twins[1].parameters(), model.parameters())
    apart = distance(twins[0].parameters(), twins[1].parameters())
    error = apart / moved if moved else apart
    right = error <= STEP_ERROR or is_as_exact(model, loss_of, batch, *twins)
    stock = made.plan.baseline and not made.plan.steps
    return {
        "ok": right and abs(float(mine) - float(theirs)) <= 1e-3 * max(1e-6, abs(float(theirs))),
        "kind": "stock" if said and stock else "kept" if made.plan.baseline else "whole",
        "why": said[0][:300] if said and stock else "",
        "first_s": first_s,
        "error": error,
    }


def is_as_exact(
    model: nn.Module, loss_of: Callable[[Any], torch.Tensor], batch: Any, mine: nn.Module, theirs: nn.Module
) -> bool:
    """Whether Convoy's weights after a step are about as near to those of a step in float64 as PyTorch's are."""
    exact = copy.deepcopy(model).double().train()
    optimizer = torch.optim.SGD(exact.parameters(), 1e-3)
    with fixed_seed():
        loss_of(
            exact(*pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch))
        ).backward()
    optimizer.step()
    own, stock = (distance(twin.parameters(), exact.parameters()) for twin in (mine, theirs))
    return own <= end_to_end.WORST_ERROR * stock


@torch.no_grad()
def distance(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """L2 distance of two lists of tensors."""
    return sum(float((one - other).double().square().sum()) for one, other in zip(some, others, strict=True)) ** 0.5
