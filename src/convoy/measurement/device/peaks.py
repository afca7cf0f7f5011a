"""Peak rates of a device, measured in about a second, and the time that a direct, dense algorithm needs at these rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import cycle
from typing import Any, Final

import torch

from convoy.engines.base import Buffers
from convoy.engines.library import onednn
from convoy.engines.torch_flags import HeldPrecision
from convoy.measurement.data import make_data
from convoy.measurement.device.shortest_run import (
    AGREEMENT,
    BRIEF,
    NO_RATE,
    PATIENT,
    Patience,
    Rate,
    ShortestRun,
    faster,
    shortest_run,
)
from convoy.measurement.protocol import MAX_COPIES
from convoy.problem import ConvProblem, LayerProblem, Problem
from convoy.target import Target

_MAX_BYTES: Final = 256 << 20
"""Largest buffer of the bandwidth test: larger than every cache but those of the largest servers."""

_CHUNK_BYTES: Final = 2 << 20
"""Bytes of a buffer that one timed copy on a CPU reads: less than a millisecond, which often passes undisturbed. The copies walk
over the whole buffer, so none finds its bytes in the cache."""

_LONG_S: Final = 2e-3
"""A run of this time has enough work: a larger one would reach no higher rate."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peak rates of a device.

    Attributes:
        bytes_per_s: the highest rate of a large copy (bytes read and written) or a large sum (bytes read) from memory.
        flops: FLOP per second of a large matrix product, on a CPU of a convolution if that is faster, by dtype; `tf32` on a
            GPU.
        cache_bytes_per_s: the same bandwidth if everything fits into the last-level cache.
        cache_bytes: size of that cache; 0: unknown, everything is then assumed to come from memory.
        settled: whether every rate came again from sample to sample; not on a machine that is busy with other work.
    """

    bytes_per_s: float
    flops: dict[str, float]
    cache_bytes_per_s: float = 0.0
    cache_bytes: int = 0
    settled: bool = True


ROUNDS: Final = 2
"""Most times that a rate is measured until it comes again: a machine that is busy now may be less so a second later."""


@lru_cache(maxsize=4)
def peaks(target: Target, *, brief: bool = False) -> Peaks:
    """Measure the peak rates of this process's device; cached for the process.

    On a busy CPU several threads seldom run undisturbed at the same time. Where a rate does not come again, that of one thread
    counts too, if it is higher.

    Args:
        target: the device.
        brief: take less time for each rate, and measure it once and with all threads alone, for an answer at once. (One thread
            doubled that time, and reached half the rates of two even on a noisy machine: Intel family 6 model 207, 2 cores.)
    """
    with torch.no_grad():
        measures = _measures(target, BRIEF if brief else PATIENT)
        found = settled_rates(measures, 1 if brief else ROUNDS)
        open_ = {name: measures[name] for name, rate in found.items() if not rate.settled}
        threads = torch.get_num_threads()
        if target.device == "cpu" and threads > 1 and open_ and not brief:
            torch.set_num_threads(1)
            try:
                found |= {name: faster(found[name], measure()) for name, measure in open_.items()}
            finally:
                torch.set_num_threads(threads)
    flops = {name: rate.per_s for name, rate in found.items() if name not in _BANDWIDTHS}
    memory, cached = (found[name].per_s for name in _BANDWIDTHS)
    return Peaks(memory, flops, max(memory, cached), target.cache_bytes, all(rate.settled for rate in found.values()))


_BANDWIDTHS: Final = ("memory", "cache")
"""Names of the rates that are bytes per second; the others are dtypes."""

Measure = Callable[[], Rate]


def settled_rates(measures: Mapping[str, Measure], rounds: int = ROUNDS) -> dict[str, Rate]:
    """Measure each rate until it comes again: within one measurement, or as the best of two rounds.

    Args:
        measures: by name, what measures a rate.
        rounds: most measurements of a rate. They go over all open rates, so that those of one are far apart in time.
    """
    found = {name: measure() for name, measure in measures.items()}
    for _ in range(rounds - 1):
        for name in [name for name, rate in found.items() if not rate.settled]:
            before, again = found[name], measures[name]()
            best = faster(before, again)
            agree = min(before.per_s, again.per_s) >= (1 - AGREEMENT) * best.per_s
            found[name] = replace(best, settled=best.settled or agree)
    return found


def _measures(target: Target, patience: Patience) -> dict[str, Measure]:
    """What measures each rate, by name."""
    large = min(max(64 << 20, 2 * target.cache_bytes), _MAX_BYTES)
    small = target.cache_bytes // 8 or large
    found: dict[str, Measure] = {
        "memory": partial(_bandwidth, large, target.device, patience),
        "cache": partial(_bandwidth, small, target.device, patience),
    }
    if target.device == "cpu":
        return found | {name: partial(_cpu_rate, name, target, patience) for name in ("fp32", "bf16")}
    found |= {name: partial(_matmul_rate, (4096,), dtype, "cuda", patience) for name, dtype in _DTYPES.items()}
    return found | {"tf32": partial(_tf32_rate, patience)}


_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _cpu_rate(dtype: str, target: Target, patience: Patience) -> Rate:
    sizes = (256, 512) if dtype == "fp32" else (128, 256, 512)  # without instructions for bf16, 128 takes 14 ms
    product = _matmul_rate(sizes, _DTYPES[dtype], "cpu", patience)
    return faster(product, _convolution_rate(dtype, target, patience))


def _tf32_rate(patience: Patience) -> Rate:
    with HeldPrecision(lambda: torch.backends.cuda.matmul, lambda: torch.backends.cudnn, "tf32").held():
        return _matmul_rate((4096,), torch.float32, "cuda", patience)


def _bandwidth(size_bytes: int, device: str, patience: Patience) -> Rate:
    """Bytes per second of copies and sums that walk over a buffer; on a GPU each takes the whole buffer."""
    step = min(size_bytes, _CHUNK_BYTES) if device == "cpu" else size_bytes
    source = torch.ones(size_bytes // step * step // 4, device=device)
    into = torch.zeros_like(source)
    places = cycle(slice(start, start + step // 4) for start in range(0, source.numel(), step // 4))

    def copy() -> object:
        place = next(places)
        return into[place].copy_(source[place])

    def add() -> object:
        return source[next(places)].sum()

    copied, added = (shortest_run(run, device, patience=patience) for run in (copy, add))
    return faster(Rate.of(2 * step, copied), Rate.of(step, added))


def _matmul_rate(sizes: Sequence[int], dtype: torch.dtype, device: str, patience: Patience) -> Rate:
    """The best rate of square products; larger sizes are tried until a product takes `_LONG_S`."""
    best = NO_RATE
    for size in sizes:
        a = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        found = shortest_run(partial(torch.mm, a, a, out=out), device, patience=patience)
        best = faster(best, Rate.of(2 * size**3, found))
        if found.time_s > _LONG_S:
            break
    return best


def _convolution_rate(dtype: str, target: Target, patience: Patience = PATIENT) -> Rate:
    """The rate that oneDNN reaches on packed weights; 0 if it cannot run the convolution.

    MKL, which torch.mm uses, is much slower on an AMD CPU with AVX-512, and layers would take less than their roofline time.
    """
    best = NO_RATE
    for side in (14, 28):
        work, found = _time_of_layer(dtype, side, target, patience)
        best = faster(best, Rate.of(work, found))
        if not work or found.time_s > _LONG_S:
            break
    return best


def _time_of_layer(dtype: str, side: int, target: Target, patience: Patience) -> tuple[int, ShortestRun]:
    """Operations of a convolution, and its time with oneDNN; no operations if oneDNN does not support it."""
    types: dict[str, Any] = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    problem = ConvProblem(1, 128, side, side, 128, 3, 3, 1, 1, layout="nhwc", numerics="as_torch", **types)
    engine = onednn.ENGINE
    if not engine.accepts(problem, target):
        return 0, ShortestRun(1.0, settled=True)
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    data = make_data(problem, 0)
    buffers = Buffers(data.args, [None], executable.pack(data.constants))
    return problem.flops, shortest_run(lambda: executable.launch(buffers, None), target.device, patience=patience)


def floor_us(problem: Problem, rates: Peaks, dtype: str = "", flops: int = 0) -> float:
    """The roofline time of a direct, dense algorithm for a problem, microseconds (Williams et al., 2009).

    It is no limit for other algorithms: Winograd and FFT need fewer operations than are counted, and engines that skip zeros of
    the input need fewer too.

    It is the largest of three times: operations at the fastest arithmetic that the problem's numerics allow; all bytes at the
    bandwidth of the cache if they fit there, else of memory; and constants at the memory's bandwidth, if the protocol keeps
    them out of the cache. Of pruned weights only the non-zeros count.

    Args:
        problem: the problem.
        rates: the device's peak rates.
        dtype: storage type, if the problem does not say (a subgraph).
        flops: operations, likewise.
    """
    fits = problem.bytes_min <= rates.cache_bytes
    bandwidth = rates.cache_bytes_per_s if fits and rates.cache_bytes_per_s else rates.bytes_per_s
    constants = problem.weight_spec.size_bytes if isinstance(problem, LayerProblem) else 0
    mask = problem.mask if isinstance(problem, ConvProblem) else None
    density = 1.0 if mask is None else 1 - mask.sparsity
    spared, constants = (1 - density) * constants, density * constants
    cold = constants if constants * MAX_COPIES > rates.cache_bytes else 0
    seconds = max(
        density * (problem.flops or flops) / _rate(problem, rates, dtype),
        (problem.bytes_min - spared) / bandwidth,
        cold / rates.bytes_per_s,
    )
    return seconds * 1e6


def _rate(problem: Problem, rates: Peaks, dtype: str) -> float:
    """The fastest allowed arithmetic: a narrower dtype may use wider arithmetic, because it holds all its values."""
    known = isinstance(problem, LayerProblem)
    storage = problem.x_spec.dtype if known else dtype or "fp32"
    allowed = {"fp32", storage}
    if known and storage == "fp32" and problem.numerics != "strict":
        allowed.add("tf32")
        if problem.numerics == "half":
            allowed |= {"fp16", "bf16"}
    return max(rate for name, rate in rates.flops.items() if name in allowed)
