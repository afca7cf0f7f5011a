"""The oracle: what a net's outputs are to be compared with, and how far PyTorch's own are from that.

That is a float64 run of the captured graph as it was before any pass; where there is none, of a copy of the module; and where
there is neither, PyTorch's own result, with what one rounding of every tensor changes there in the place of its error. It never
ends a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from convoy.capture import Captured, capture_with_original, captured_function, to_double
from convoy.capture.copies import separate_copy
from convoy.engines.operators import DTYPES
from convoy.errors import CaptureError
from convoy.graph.randomness import draws
from convoy.pipeline import verdict
from convoy.pipeline.rounding import Shaker, seeded, unit_roundoff
from convoy.pipeline.verdict import Errors

SUSPICIOUS: Final = 64.0
"""Roundings from which PyTorch's own error is looked into: a deep net has some in each of as many layers."""

FAR: Final = 32.0
"""Times what one rounding of every tensor changes that PyTorch's own error may be. What it takes for right is mostly below 2."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What outputs are compared with.

    Attributes:
        exact: floating-point outputs in float64; of fewer images where the oracle had room or time for no more.
        baseline: PyTorch's own error, or where PyTorch's own is `exact` or wrong what rounding alone changes.
        note: what was compared with; empty where it is float64.
        wrong: what to tell the user of PyTorch's own outputs; empty where they are right.
    """

    exact: list[torch.Tensor]
    baseline: Errors
    note: str = ""
    wrong: str = ""


def reference(
    original: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, flops: int, cuda: bool
) -> Reference:
    """Run the oracle and PyTorch's own, without gradients and under PyTorch's flags as the caller has set them.

    Args:
        original: the model as it was captured, before any pass.
        model: a copy that may be run.
        args: its arguments.
        kwargs: its keyword arguments.
        flops: operations of a call (`verdict.exact_outputs`).
        cuda: whether it runs on a GPU.

    Raises:
        CaptureError: the graph does not compute what the model does.
    """
    stock = _run(model, args, kwargs)
    if not stock:
        return Reference([], Errors(0.0, 0.0))
    random = any(map(draws, original.graph.nodes))
    exact = None if random else _exact(original, model, args, kwargs, flops, stock)
    rounding = _Rounding(original, model, args, kwargs, stock, cuda=cuda)
    if exact is None:
        why = "draws random numbers" if random else "could not be run in float64"
        note = (
            f"the net {why}: its outputs were compared with PyTorch's own, and may be as far off as"
            f" {verdict.WORST_ERROR:g} times what one rounding of every tensor changes there"
        )
        return Reference([tensor.double() for tensor in stock], rounding.changes(), note)
    errors = verdict.errors_against(stock, exact)
    if errors.rel_l2_error <= SUSPICIOUS * rounding.unit:
        return Reference(exact, errors)
    explained = rounding.changes()
    allowed = FAR * max(explained.rel_l2_error, rounding.unit)
    if errors.rel_l2_error <= allowed:
        return Reference(exact, errors)
    if _graph_errors(original, args, kwargs, exact).rel_l2_error <= allowed:
        raise CaptureError(
            f"the captured graph does not compute what the model does: they differ by {errors.rel_l2_error:.1e} (relative L2)"
        )
    return Reference(exact, explained, wrong=wrong_words("outputs", errors, explained, cuda=cuda))


def wrong_words(what: str, errors: Errors, explained: Errors, *, cuda: bool) -> str:
    """What to tell the user of PyTorch's own outputs, or loss and gradients, that are wrong."""
    switch = "torch.backends.cudnn.enabled = False" if cuda else "torch.backends.mkldnn.enabled = False"
    return (
        f"PyTorch's own {what} are wrong here: {errors.rel_l2_error:.1e} (relative L2) from a float64 run, where rounding"
        f" explains {explained.rel_l2_error:.1e}; see whether {switch} mends it, and `convoy doctor` for defects that are known"
    )


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with seeded():
        return verdict.float_outputs(model(*args, **kwargs))


def _exact(
    original: Captured,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flops: int,
    stock: list[torch.Tensor],
) -> list[torch.Tensor] | None:
    """Outputs in float64 by the first way that there is; None where there is none."""
    images = _affordable_images(args, kwargs, flops)

    def by_graph() -> list[torch.Tensor]:
        captured, given, named = original, args, kwargs
        if images is not None:
            given, named = _first_images(args, kwargs, images)
            captured = capture_with_original(separate_copy(model), given, named)[1]
        return verdict.float_outputs(captured_function(to_double(captured))(*given, **named))

    for way in (by_graph, lambda: verdict.exact_outputs(model, args, kwargs, flops)):
        found = _tried(way)
        if found is not None and _fits(found, stock):
            return found
    return None


def _affordable_images(args: tuple[Any, ...], kwargs: dict[str, Any], flops: int) -> int | None:
    """How many images of a batch a float64 run takes for all; None where it takes all, or there is no batch to be cut."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    batches = {t.shape[0] for t in tensors if t.dim()}
    if flops <= verdict.ORACLE_FLOPS or len(batches) != 1 or any(t.is_cuda for t in tensors):
        return None
    images = batches.pop()
    affordable = max(1, int(images * verdict.ORACLE_FLOPS / flops))
    return affordable if affordable < images else None


def _first_images(args: tuple[Any, ...], kwargs: dict[str, Any], images: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the first images of every tensor that has a batch."""

    def cut(leaf: Any) -> Any:
        return leaf[:images].clone() if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    given, named = pytree.tree_map(cut, (args, kwargs))
    return given, named


def _tried(way: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | None:
    """What a way gives; None where it fails, whatever the reason: another takes its place."""
    try:
        return way()
    except Exception:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return None


def _fits(exact: list[torch.Tensor], stock: list[torch.Tensor]) -> bool:
    """Whether results can be compared: as many, of the same sides but for the first, which counts images."""
    return len(exact) == len(stock) and all(
        e.dim() == s.dim() and e.shape[1:] == s.shape[1:] and e.shape[:1] <= s.shape[:1]
        for e, s in zip(exact, stock, strict=True)
    )


def _graph_errors(
    original: Captured, args: tuple[Any, ...], kwargs: dict[str, Any], exact: list[torch.Tensor]
) -> Errors:
    """Errors of the graph by PyTorch's operators in the model's own precision."""
    found = _tried(lambda: verdict.float_outputs(captured_function(original)(*args, **kwargs)))
    return Errors(0.0, 0.0) if found is None else verdict.errors_against(found, exact)


class _Rounding:
    """What rounding does to PyTorch's own outputs.

    Attributes:
        unit: the largest relative error of one rounding.
    """

    def __init__(
        self,
        original: Captured,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stock: list[torch.Tensor],
        *,
        cuda: bool,
    ) -> None:
        dtypes = {DTYPES[value.spec.dtype] for value in original.graph.values.values()}
        self.unit = unit_roundoff(dtypes, cuda=cuda)
        self._model, self._args, self._kwargs, self._stock = model, args, kwargs, stock

    def changes(self) -> Errors:
        """How far outputs of tensors that are off by one rounding each are from those of the tensors as they are."""
        found = _tried(self._shaken)
        wanted = [tensor.double() for tensor in self._stock]
        if found is None or not _fits(found, self._stock):
            return Errors(self.unit, 0.0)
        return verdict.errors_against(found, wanted)

    def _shaken(self) -> list[torch.Tensor]:
        shake = Shaker(self.unit)
        module = separate_copy(self._model, share_parameters=False)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.copy_(shake(tensor))
        leaves, spec = pytree.tree_flatten((self._args, self._kwargs))
        given = [shake(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return _run(module, args, kwargs)
