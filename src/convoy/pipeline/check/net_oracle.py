"""The oracle: reference outputs of a net, and the error of PyTorch's own outputs against them.

The reference is a float64 run of the captured graph before any pass. If that fails, a float64 run of a copy of the module; if
that fails too, PyTorch's own result, whose error is then taken to be the change that one more rounding in every operator
causes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.capture import Captured, capture_with_original, captured_function, to_double
from convoy.engines.torch_flags import unsearched_convolutions, without_onednn
from convoy.engines.torch_operators import DTYPES
from convoy.errors import CaptureError
from convoy.graph.randomness import draws_random
from convoy.pipeline.check import end_to_end, float64
from convoy.pipeline.check.end_to_end import OutputErrors
from convoy.pipeline.check.rounding import fixed_seed, unit_roundoff

_T = TypeVar("_T")

_Run = Callable[[], list[torch.Tensor]]
"""Computes a net's floating-point outputs."""

FP32_UNIT: Final = 2.0**-24
"""Unit roundoff of fp32."""

MOST_ROUNDINGS: Final = 32.0
"""Most error of PyTorch's own run, as a multiple of the change that one rounding in every operator causes. It is mostly below
2."""


@dataclass(frozen=True, slots=True)
class OracleResult:
    """Reference outputs.

    Attributes:
        exact: floating-point outputs in float64; of the first images only if memory or time did not suffice for all.
        baseline: error of PyTorch's own outputs. If those are the reference or wrong, the error that rounding explains.
        note: the reference, if it is not float64; else empty.
        wrong: warning that PyTorch's own outputs are wrong; empty if they are right.
    """

    exact: list[torch.Tensor]
    baseline: OutputErrors
    note: str = ""
    wrong: str = ""


def run_oracle(
    original: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, flops: int, cuda: bool
) -> OracleResult:
    """Run the oracle and PyTorch's own, without gradients, under the flags that the caller has set.

    Args:
        original: the model as it was captured, before any pass.
        model: a copy that may be run.
        args: its arguments.
        kwargs: its keyword arguments.
        flops: operations of a call (`float64.exact_outputs`).
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
            f"the net {why}: its outputs were compared with PyTorch's own, with an allowed error of"
            f" {end_to_end.WORST_ERROR:g} times the change that one more rounding in every operator causes"
        )
        wanted = [tensor.double() for tensor in stock]
        return OracleResult(wanted, _rounding_errors(lambda: _run(model, args, kwargs), unit, wanted), note)
    exact, run = found
    errors = end_to_end.errors_against(stock, exact)
    if errors.rel_l2_error <= _plain_roundings(len(original.graph.nodes), unit) * unit:
        return OracleResult(exact, errors)
    explained = _rounding_errors(run, unit, exact)
    allowed = MOST_ROUNDINGS * max(explained.rel_l2_error, unit)
    if errors.rel_l2_error <= allowed:
        return OracleResult(exact, errors)
    faulty = not cuda and _errors_without_onednn(model, args, kwargs, exact).rel_l2_error <= allowed
    if not faulty and _graph_errors(original, args, kwargs, exact).rel_l2_error <= allowed:
        raise CaptureError(
            f"the captured graph does not compute what the model does: they differ by {errors.rel_l2_error:.1e} (relative L2)"
        )
    return OracleResult(exact, explained, wrong=stock_error_message("outputs", errors, explained, cuda=cuda))


def _plain_roundings(operators: int, unit: float) -> float:
    """Most error, in roundings, that no second run in float64 must explain: in fp32 that of a random walk over all operators.

    Coarser types would be allowed some percent that way.
    """
    return MOST_ROUNDINGS * (operators**0.5 if unit <= FP32_UNIT else 1.0)


def _errors_without_onednn(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], exact: list[torch.Tensor]
) -> OutputErrors:
    """What oneDNN leaves unwritten is right by chance in some runs: the graph's run then says nothing of the capture."""
    with without_onednn():
        return end_to_end.errors_against(_run(model, args, kwargs), exact)


def stock_error_message(what: str, errors: OutputErrors, explained: OutputErrors, *, cuda: bool) -> str:
    """Warning that PyTorch's own outputs, or loss and gradients, are wrong."""
    switch = "torch.backends.cudnn.enabled = False" if cuda else "torch.backends.mkldnn.enabled = False"
    return (
        f"PyTorch's own {what} are wrong here: {errors.rel_l2_error:.1e} (relative L2) from a float64 run, where rounding"
        f" explains {explained.rel_l2_error:.1e}; see whether {switch} mends it, and `convoy doctor` for defects that are known"
    )


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with fixed_seed():
        return end_to_end.detached_outputs(model(*args, **kwargs))


def _exact(
    original: Captured,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flops: int,
    stock: list[torch.Tensor],
) -> tuple[list[torch.Tensor], _Run] | None:
    """Outputs in float64 and the function that computes them: by the graph, else by the module; None if both fail."""
    images = _affordable_images(args, kwargs, flops)

    def by_graph() -> _Run:
        captured, given, named = original, args, kwargs
        if images is not None:
            given, named = _first_images(args, kwargs, images)
            captured = capture_with_original(model, given, named, run=True)[1]
        function = captured_function(to_double(captured))
        return searched_if_needed(lambda: end_to_end.detached_outputs(function(*given, **named)), stock[0].device)

    def by_module() -> _Run:
        return searched_if_needed(lambda: float64.exact_outputs(model, args, kwargs, flops), stock[0].device)

    for way in (by_graph, by_module):
        run = _tried(way)
        found = None if run is None else _tried(run)
        if run is not None and found is not None and _fits(found, stock):
            return found, run
    return None


def searched_if_needed(run: _Run, device: torch.device) -> _Run:
    """The same in float64 without cuDNN's search by the clock, which takes seconds on a net that then runs once."""

    def unsearched() -> list[torch.Tensor]:
        with unsearched_convolutions(device):
            return run()

    def either() -> list[torch.Tensor]:
        found = _tried(unsearched)
        return run() if found is None else found

    return either if device.type == "cuda" else run


def _affordable_images(args: tuple[Any, ...], kwargs: dict[str, Any], flops: int) -> int | None:
    """Images of a batch that a float64 run computes; None if all, or if there is no batch dimension."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    batches = {t.shape[0] for t in tensors if t.dim()}
    if flops <= float64.ORACLE_FLOPS or len(batches) != 1 or any(t.is_cuda for t in tensors):
        return None
    images = batches.pop()
    affordable = max(1, int(images * float64.ORACLE_FLOPS / flops))
    return affordable if affordable < images else None


def _first_images(args: tuple[Any, ...], kwargs: dict[str, Any], images: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the first images of every tensor that has a batch."""

    def cut(leaf: Any) -> Any:
        return leaf[:images].clone() if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    given, named = pytree.tree_map(cut, (args, kwargs))
    return given, named


def _tried(way: Callable[[], _T]) -> _T | None:
    """The function's result; None if it raises: the caller tries another way."""
    with suppress(Exception):  # operators and the user's forward, in a precision that they were not written for
        return way()
    if torch.cuda.is_initialized():  # the exception, deleted by now, kept the memory in use
        torch.cuda.empty_cache()
    return None


def _fits(exact: list[torch.Tensor], stock: list[torch.Tensor]) -> bool:
    """Whether results can be compared: equal in number and shapes, except for the number of images."""
    return len(exact) == len(stock) and all(
        e.dim() == s.dim() and e.shape[1:] == s.shape[1:] and e.shape[:1] <= s.shape[:1]
        for e, s in zip(exact, stock, strict=True)
    )


def _graph_errors(
    original: Captured, args: tuple[Any, ...], kwargs: dict[str, Any], exact: list[torch.Tensor]
) -> OutputErrors:
    """Errors of the graph by PyTorch's operators in the model's own precision."""
    found = _tried(lambda: end_to_end.detached_outputs(captured_function(original)(*args, **kwargs)))
    return OutputErrors(0.0, 0.0) if found is None else end_to_end.errors_against(found, exact)


class _OperatorPerturbation(TorchDispatchMode):
    """Changes every operator's floating-point results by a random relative error of up to `unit`, the same in every run.

    Views are not changed: they do not round.
    """

    def __init__(self, unit: float) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  - torch declares no types
        self._unit = unit
        self._draws = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and change its results."""
        del types
        made: Any = func(*args, **(kwargs or {}))
        results = cast("Sequence[Any]", made) if isinstance(made, (tuple, list)) else (made,)
        for value, described in zip(results, func._schema.returns, strict=False):
            alias = described.alias_info
            if isinstance(value, torch.Tensor) and value.is_floating_point() and (alias is None or alias.is_write):
                self._round(value)
        return cast("Any", made)

    def _round(self, value: torch.Tensor) -> None:
        draws_random = torch.Generator(value.device).manual_seed(int(torch.randint(1 << 62, (), generator=self._draws)))
        wide = value.double() if value.dtype == torch.float64 else value.float()
        share = torch.rand(value.shape, generator=draws_random, device=value.device, dtype=wide.dtype)
        value.copy_(wide * share.mul_(2 * self._unit).add_(1 - self._unit))


def _rounding_errors(run: _Run, unit: float, wanted: list[torch.Tensor]) -> OutputErrors:
    """Error of a run's outputs if every operator rounds once more, by `unit`, against the reference."""

    def perturbed() -> list[torch.Tensor]:
        with _OperatorPerturbation(unit):
            return run()

    found = _tried(perturbed)
    return (
        OutputErrors(unit, 0.0)
        if found is None or not _fits(wanted, found)
        else end_to_end.errors_against(found, wanted)
    )
