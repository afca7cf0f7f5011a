"""The end-to-end check: errors against float64, times of baseline and result in turn, and which of them runs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from convoy.deadline import Deadline
from convoy.engines import nondeterminism
from convoy.errors import SelectionError
from convoy.graph.ir import Graph
from convoy.settings import Effort, Settings

ROUNDS = 15
"""Interleaved rounds of the end-to-end timing. The number is odd, so that the median is a sample."""

FIRST_ROUNDS: Final = 5
"""The same for a first answer, which is there at once (effort `none`)."""

FIRST_S: Final = 0.5
"""Seconds after which a first answer is timed no longer."""

TIMED_SHARE: Final = 0.7
"""Most of the time left that is spent on timing a plan: its timeline and the report come after."""

LEAST_ROUNDS: Final = 3
"""Rounds that a median needs, however little time there is."""

LOST_ROUNDS: Final = 0.2
"""Most of the rounds in which a faster program may take longer than the other one. Rounds are compared one by one: on a busy
machine a program's times differ by a factor of five from round to round (MobileNetV2 on two cores beside other work: 339.7 ms as
PyTorch runs it, 62.8 ms as planned), and medians less spreads tell nothing there."""

LEAST_ROUND_S = 0.02
"""Least duration of a round: short nets are called many times, so that the timer and the scheduler add little."""

SETTLED_S = 0.1
"""Before a shorter round on a CPU, one call is not timed: the threads of the library that ran before spin on the same cores for
some milliseconds after their last call (AlexNet after ONNX Runtime took 32 ms instead of 17). In a first answer both programs run
on PyTorch's threads."""

WORST_ERROR = 4.0
"""Allowed error of outputs or gradients as a whole, as a multiple of the error of PyTorch's own run against float64. Each
candidate has a bound of its own; this one detects errors that only their sum shows. Libraries of one precision differ by less
than two."""

LEAST_ERROR = 1e-6
"""Relative error of gradients, or of a pass of a compiled graph, that is always allowed: some roundings of fp32."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of one call.

    Attributes:
        name: of the program.
        samples_ms: milliseconds, one for each round, in the order of the rounds.
    """

    name: str
    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median over rounds."""
        return statistics.median(self.samples_ms)

    @property
    def spread_ms(self) -> float:
        """Half the distance from the 20th to the 80th percentile of rounds."""
        if len(self.samples_ms) < 2:
            return 0.0
        cuts = statistics.quantiles(self.samples_ms, n=10, method="inclusive")
        return (cuts[7] - cuts[1]) / 2


@dataclass(frozen=True, slots=True)
class OutputErrors:
    """Error against a float64 run, over all floating-point outputs together."""

    rel_l2_error: float
    max_abs_error: float


def float_outputs(outputs: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a model's result, in order."""
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def detached_outputs(outputs: Any) -> list[torch.Tensor]:
    """`float_outputs` without gradients, for comparing: a model may return its parameters."""
    return [tensor.detach() for tensor in float_outputs(outputs)]


def errors_against(outputs: Any, exact: Sequence[torch.Tensor]) -> OutputErrors:
    """Compare a model's result with float64 tensors, on their device. If `exact` has fewer images, only those are compared."""
    squared = norm = worst = 0.0
    for found, wanted in zip(detached_outputs(outputs), exact, strict=True):
        compared = (found[: wanted.shape[0]] if wanted.dim() else found).to(wanted.device, torch.float64)
        difference = compared - wanted
        if not bool(torch.isfinite(difference).all()):
            same = torch.equal(torch.isfinite(compared), torch.isfinite(wanted))
            difference = torch.nan_to_num(difference) if same else torch.full_like(difference, float("inf"))
        squared += float(difference.square().sum())
        norm += float(torch.nan_to_num(wanted, posinf=0, neginf=0).square().sum())
        worst = max(worst, float(difference.abs().max()) if difference.numel() else 0.0)
    relative = (squared / norm) ** 0.5 if norm else squared**0.5
    return OutputErrors(relative, worst)


@dataclass(frozen=True, slots=True)
class TimingLimits:
    """How long two programs are timed.

    Attributes:
        rounds: timed rounds, after one that is dropped.
        most_s: after this time the rounds end, but not before there are `LEAST_ROUNDS`.
    """

    rounds: int = ROUNDS
    most_s: float = math.inf

    @staticmethod
    def of(effort: Effort, deadline: Deadline) -> TimingLimits:
        """Few rounds at effort `none`, which promises an answer at once; none takes longer than the call may."""
        if effort is Effort.NONE:
            return TimingLimits(FIRST_ROUNDS, min(FIRST_S, deadline.left_s))
        return TimingLimits(ROUNDS, TIMED_SHARE * deadline.left_s)


def interleave(
    runs: dict[str, Callable[[], object]],
    *,
    cuda: bool,
    rounds: int = ROUNDS,
    least_s: float = LEAST_ROUND_S,
    most_s: float = math.inf,
    warm: bool = False,
) -> dict[str, Latency]:
    """Time several programs in turn (A B C A B C ...), each round long enough for the clock.

    Args:
        runs: name → a function that runs the program once.
        cuda: wait for the device at the end of each round.
        rounds: timed rounds, on a GPU after one that is dropped if rounds are short.
        least_s: least duration of a round. Work of the host before the first launch counts once per round.
        most_s: time after which no further round begins, if there are `LEAST_ROUNDS`.
        warm: every program has run before, and all run on the same threads. Then no run is untimed, and where one run makes a
            round the first counts.
    """
    begin = time.perf_counter()
    once = {name: _once_s(run, least_s, cuda=cuda, warm=warm) for name, run in runs.items()}
    repeats = {name: max(1, round(least_s / took)) for name, took in once.items()}
    short = {name for name, took in once.items() if took * repeats[name] < SETTLED_S}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    first = 0 if short and cuda else 1  # on a CPU an untimed call precedes each short round anyway
    if warm and set(repeats.values()) == {1}:
        samples, first = {name: [took * 1e3] for name, took in once.items()}, 2
    for index in range(first, rounds + 1):
        if index > LEAST_ROUNDS and time.perf_counter() - begin > most_s:
            break
        for name, run in runs.items():
            if not cuda and not warm and name in short:
                run()
            elapsed = _round(run, repeats[name], cuda=cuda)
            if index:
                samples[name].append(elapsed / repeats[name] * 1e3)
    return {name: Latency(name, tuple(values)) for name, values in samples.items()}


def is_faster(result: Latency, baseline: Latency) -> bool:
    """Whether the result takes less time than the baseline in the median, and in four of five rounds.

    Most rounds are enough where the median is half the baseline's: a busy machine leaves time for three rounds only.

    Rounds of programs that were timed in turn are compared one by one, so what slows both down does not count. Of programs
    that were timed one after the other, any two rounds may be compared.
    """
    pairs = list(zip(result.samples_ms, baseline.samples_ms, strict=False))
    won = sum(ours < theirs for ours, theirs in pairs)
    lost = len(pairs) - won
    if 2 * result.median_ms <= baseline.median_ms:
        return lost < won
    return result.median_ms < baseline.median_ms and lost <= LOST_ROUNDS * len(pairs)


def why_slow(what: str, result: Latency, baseline: Latency) -> str:
    """Why a plan is not worth using, for `falls_back`; empty if it is."""
    if is_faster(result, baseline):
        return ""
    times = f"{result.median_ms:.3f} ms as planned and {baseline.median_ms:.3f} ms as run by PyTorch"
    return f"{what} took {times}: not faster in four of five rounds"


def why_wrong(what: str, errors: OutputErrors, baseline: OutputErrors, least: float) -> str:
    """Why a result is wrong as a whole, for `falls_back`; empty if it is not.

    Args:
        what: name of the compared values, for the message.
        errors: errors of the result.
        baseline: errors of PyTorch's own run.
        least: the relative error that is always allowed.
    """
    allowed = max(WORST_ERROR * baseline.rel_l2_error, least)
    error = errors.rel_l2_error
    return "" if error <= allowed else f"{what} error of {error:.2e} is over {allowed:.2e}"


def falls_back(
    slow: str, wrong: str, graph: Graph, device: str, settings: Settings, stock_wrong: bool = False
) -> tuple[bool, str]:
    """Whether PyTorch's own run replaces a plan, and a note with the reason; the note is empty if the plan is simply faster.

    PyTorch replaces a plan that is slow or wrong. A slow plan is kept if `deterministic` is set and PyTorch's own operators may
    give different bits from run to run, or if PyTorch's own run is wrong.

    Args:
        slow: why the plan is not faster; empty if it is.
        wrong: why its results are wrong as a whole; empty if they are right.
        graph: the graph that PyTorch runs.
        device: `cpu` or `cuda`.
        settings: `solver` and `deterministic` are used.
        stock_wrong: whether PyTorch's own run is wrong, or may be because of a known defect.

    Raises:
        SelectionError: the plan is wrong, and PyTorch's own run may give different bits.
    """
    if settings.solver == "baseline" or not (slow or wrong):
        return False, ""
    if stock_wrong and not wrong:
        return False, f"{slow}, but kept: PyTorch's own run is wrong there, or may be"
    differs = nondeterminism.describe(nondeterminism.in_aten(graph, device)) if settings.deterministic else ""
    if not differs:
        return True, f"{wrong or slow}, so the plan is the baseline"
    asked = f"`deterministic` was asked for, and as PyTorch runs it {differs}"
    if wrong:
        raise SelectionError(f"{wrong}; {asked}. Leave `deterministic` out, or restrict the engines (`only_engines`).")
    return False, f"{slow}, but kept: {asked}"


def _round(run: Callable[[], object], repeats: int, *, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _once_s(run: Callable[[], object], least_s: float, *, cuda: bool, warm: bool) -> float:
    """Seconds of one run, after runs that warm up if it is not warm."""
    if not warm:
        run()
    once = max(_round(run, 1, cuda=cuda), 1e-6)
    if once < least_s:  # the second run of a short program is not yet typical
        once = max(_round(run, 1, cuda=cuda), 1e-6)
    return once
