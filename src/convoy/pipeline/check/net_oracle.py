"""The oracle: what a net's outputs are to be compared with, and how far PyTorch's own are from that.

That is a float64 run of the captured graph as it was before any pass; where there is none, of a copy of the module; and where
there is neither, PyTorch's own result, with what one more rounding in every operator changes there in the place of its error. It
never ends a call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.capture import Captured, capture_with_original, captured_function, to_double
from convoy.capture.copies import separate_copy
from convoy.engines.torch_operators import DTYPES
from convoy.errors import CaptureError
from convoy.graph.randomness import draws_random
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.end_to_end import OutputErrors
from convoy.pipeline.check.rounding import fixed_seed, unit_roundoff

_T = TypeVar("_T")

_Run = Callable[[], list[torch.Tensor]]
"""Makes a net's floating-point outputs."""

MOST_ROUNDINGS: Final = 32.0
"""Times what one rounding in every operator changes that PyTorch's own error may be; it is mostly below 2."""


@dataclass(frozen=True, slots=True)
class OracleResult:
    """What outputs are compared with.

    Attributes:
        exact: floating-point outputs in float64; of fewer images where the oracle had room or time for no more.
        baseline: PyTorch's own error, or where PyTorch's own is `exact` or wrong what rounding alone changes.
        note: what was compared with; empty where it is float64.
        wrong: what to tell the user of PyTorch's own outputs; empty where they are right.
    """

    exact: list[torch.Tensor]
    baseline: OutputErrors
    note: str = ""
    wrong: str = ""


def run_oracle(
    original: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, flops: int, cuda: bool
) -> OracleResult:
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
        return OracleResult([], OutputErrors(0.0, 0.0))
    unit = unit_roundoff({DTYPES[value.spec.dtype] for value in original.graph.values.values()}, cuda=cuda)
    random = any(map(draws_random, original.graph.nodes))
    found = None if random else _exact(original, model, args, kwargs, flops, stock)
    if found is None:
        why = "draws random numbers" if random else "could not be run in float64"
        note = (
            f"the net {why}: its outputs were compared with PyTorch's own, and may be as far off as"
            f" {end_to_end.WORST_ERROR:g} times what one more rounding in every operator changes there"
        )
        wanted = [tensor.double() for tensor in stock]
        return OracleResult(wanted, _rounded(lambda: _run(model, args, kwargs), unit, wanted), note)
    exact, run = found
    errors = end_to_end.errors_against(stock, exact)
    if errors.rel_l2_error <= MOST_ROUNDINGS * unit:
        return OracleResult(exact, errors)
    explained = _rounded(run, unit, exact)
    allowed = MOST_ROUNDINGS * max(explained.rel_l2_error, unit)
    if errors.rel_l2_error <= allowed:
        return OracleResult(exact, errors)
    if _graph_errors(original, args, kwargs, exact).rel_l2_error <= allowed:
        raise CaptureError(
            f"the captured graph does not compute what the model does: they differ by {errors.rel_l2_error:.1e} (relative L2)"
        )
    return OracleResult(exact, explained, wrong=stock_error_message("outputs", errors, explained, cuda=cuda))


def stock_error_message(what: str, errors: OutputErrors, explained: OutputErrors, *, cuda: bool) -> str:
    """What to tell the user of PyTorch's own outputs, or loss and gradients, that are wrong."""
    switch = "torch.backends.cudnn.enabled = False" if cuda else "torch.backends.mkldnn.enabled = False"
    return (
        f"PyTorch's own {what} are wrong here: {errors.rel_l2_error:.1e} (relative L2) from a float64 run, where rounding"
        f" explains {explained.rel_l2_error:.1e}; see whether {switch} mends it, and `convoy doctor` for defects that are known"
    )


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with fixed_seed():
        return end_to_end.float_outputs(model(*args, **kwargs))


def _exact(
    original: Captured,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flops: int,
    stock: list[torch.Tensor],
) -> tuple[list[torch.Tensor], _Run] | None:
    """Outputs in float64, and what makes them: the first way that there is; None where there is none."""
    images = _affordable_images(args, kwargs, flops)

    def by_graph() -> _Run:
        captured, given, named = original, args, kwargs
        if images is not None:
            given, named = _first_images(args, kwargs, images)
            captured = capture_with_original(separate_copy(model), given, named)[1]
        function = captured_function(to_double(captured))
        return lambda: end_to_end.float_outputs(function(*given, **named))

    def by_module() -> _Run:
        return lambda: end_to_end.exact_outputs(model, args, kwargs, flops)

    for way in (by_graph, by_module):
        run = _tried(way)
        found = None if run is None else _tried(run)
        if run is not None and found is not None and _fits(found, stock):
            return found, run
    return None


def _affordable_images(args: tuple[Any, ...], kwargs: dict[str, Any], flops: int) -> int | None:
    """How many images of a batch a float64 run takes for all; None where it takes all, or there is no batch to be cut."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    batches = {t.shape[0] for t in tensors if t.dim()}
    if flops <= end_to_end.ORACLE_FLOPS or len(batches) != 1 or any(t.is_cuda for t in tensors):
        return None
    images = batches.pop()
    affordable = max(1, int(images * end_to_end.ORACLE_FLOPS / flops))
    return affordable if affordable < images else None


def _first_images(args: tuple[Any, ...], kwargs: dict[str, Any], images: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the first images of every tensor that has a batch."""

    def cut(leaf: Any) -> Any:
        return leaf[:images].clone() if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    given, named = pytree.tree_map(cut, (args, kwargs))
    return given, named


def _tried(way: Callable[[], _T]) -> _T | None:
    """What a way gives; None where it fails, whatever the reason: another takes its place."""
    with suppress(Exception):  # operators and the user's forward, in a precision that they were not written for
        return way()
    if torch.cuda.is_initialized():  # the exception, which is gone by now, held what there was no room for
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
) -> OutputErrors:
    """Errors of the graph by PyTorch's operators in the model's own precision."""
    found = _tried(lambda: end_to_end.float_outputs(captured_function(original)(*args, **kwargs)))
    return OutputErrors(0.0, 0.0) if found is None else end_to_end.errors_against(found, exact)


class _Rounded(TorchDispatchMode):
    """Every operator's floating-point results are off by a random share of `unit`, the same in every run.

    Views are left alone: they round nothing.
    """

    def __init__(self, unit: float) -> None:
        super().__init__()
        self._unit = unit
        self._draws = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and round what it made."""
        del types
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, (tuple, list)) else (made,)
        for value, described in zip(results, func._schema.returns, strict=False):
            alias = described.alias_info
            if isinstance(value, torch.Tensor) and value.is_floating_point() and (alias is None or alias.is_write):
                self._round(value)
        return made

    def _round(self, value: torch.Tensor) -> None:
        draws_random = torch.Generator(value.device).manual_seed(int(torch.randint(1 << 62, (), generator=self._draws)))
        wide = value.double() if value.dtype == torch.float64 else value.float()
        share = torch.rand(value.shape, generator=draws_random, device=value.device, dtype=wide.dtype)
        value.copy_(wide * share.mul_(2 * self._unit).add_(1 - self._unit))


def _rounded(run: _Run, unit: float, wanted: list[torch.Tensor]) -> OutputErrors:
    """How far a run's outputs are off where every operator rounds once more, by `unit`; of what was wanted."""

    def shaken() -> list[torch.Tensor]:
        with _Rounded(unit):
            return run()

    found = _tried(shaken)
    return (
        OutputErrors(unit, 0.0)
        if found is None or not _fits(wanted, found)
        else end_to_end.errors_against(found, wanted)
    )
