"""Peak rates of a device, measured in under a second, and the roofline time of a problem."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from convoy.engines.base import Buffers
from convoy.engines.library import onednn
from convoy.measurement.data import make_data
from convoy.measurement.protocol import MAX_COPIES
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.target import Target

_MIN_REPEATS: Final = 3
_BUDGET_S: Final = 0.1
"""Time for one peak rate. The best of many short runs counts, because disturbances only make runs slower."""

_MAX_BYTES: Final = 256 << 20
"""Largest buffer of the bandwidth test: larger than every cache but those of the largest servers, copied in well under 0.1 s."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peak rates of a device.

    Attributes:
        bytes_per_s: the highest rate of a large copy (bytes read and written) or a large sum (bytes read) from memory.
        flops: FLOP per second of a large matrix product, on a CPU of a convolution if that is faster, by dtype; `tf32` on a
            GPU.
        cache_bytes_per_s: the same bandwidth if everything fits into the last-level cache.
        cache_bytes: size of that cache; 0: unknown, everything is then assumed to come from memory.
    """

    bytes_per_s: float
    flops: dict[str, float]
    cache_bytes_per_s: float = 0.0
    cache_bytes: int = 0


@lru_cache(maxsize=4)
def peaks(target: Target) -> Peaks:
    """Measure the peak rates of this process's device; cached for the process."""
    with torch.no_grad():
        large = min(max(64 << 20, 2 * target.cache_bytes), _MAX_BYTES)
        small = target.cache_bytes // 8
        memory = _bandwidth(large, target.device)
        cached = max(memory, _bandwidth(small, target.device)) if small else memory
        rates = _matmul_rates(target)
        if target.device == "cpu":
            rates = {name: max(rate, _convolution_rate(name, target)) for name, rate in rates.items()}
        return Peaks(memory, rates, cached, target.cache_bytes)


def _bandwidth(size_bytes: int, device: str) -> float:
    source = torch.ones(size_bytes // 4, device=device)
    into = torch.empty_like(source)
    copied = 2 * size_bytes / _best_s(lambda: into.copy_(source), device)
    return max(copied, size_bytes / _best_s(source.sum, device))


def _matmul_rates(target: Target) -> dict[str, float]:
    cuda = target.device == "cuda"
    size = 4096 if cuda else 512
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    wanted = dtypes if cuda else {name: dtypes[name] for name in ("fp32", "bf16")}
    rates = {name: _matmul_rate(size, dtype, target.device) for name, dtype in wanted.items()}
    if cuda:
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high")
            rates["tf32"] = _matmul_rate(size, torch.float32, target.device)
        finally:
            torch.set_float32_matmul_precision(before)
    return rates


def _matmul_rate(size: int, dtype: torch.dtype, device: str) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / _best_s(lambda: torch.mm(a, a, out=out), device)


def _convolution_rate(dtype: str, target: Target) -> float:
    """The rate that oneDNN reaches on packed weights; 0 if it cannot run the convolution.

    MKL, which torch.mm uses, is much slower on an AMD CPU with AVX-512, and layers would take less than their roofline time.
    """
    types: dict[str, Any] = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    problem = ConvProblem(1, 128, 28, 28, 128, 3, 3, 1, 1, layout="nhwc", numerics="as_torch", **types)
    engine = onednn.ENGINE
    if not engine.accepts(problem, target):
        return 0.0
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    data = make_data(problem, 0)
    buffers = Buffers(data.args, [None], executable.pack(data.constants))
    return problem.flops / _best_s(lambda: executable.launch(buffers, None), target.device)


def _best_s(run: Callable[[], object], device: str) -> float:
    """Shortest of several runs by the host's clock, the device synchronized before and after."""
    best, repeats, begin = float("inf"), 0, time.perf_counter()
    while repeats < _MIN_REPEATS or time.perf_counter() - begin < _BUDGET_S:
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
        repeats += 1
    return best


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def floor_us(problem: Problem, rates: Peaks, dtype: str = "", flops: int = 0) -> float:
    """The roofline time of a problem, microseconds: no direct method can be faster (Williams et al., 2009).

    Winograd and FFT need fewer operations than are counted, and may be faster if arithmetic is the limit.

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
    constants = problem.weight_spec.size_bytes if isinstance(problem, (ConvProblem, LinearProblem)) else 0
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
    known = isinstance(problem, (ConvProblem, LinearProblem))
    storage = problem.x_spec.dtype if known else dtype or "fp32"
    allowed = {"fp32", storage}
    if known and storage == "fp32" and problem.numerics != "strict":
        allowed.add("tf32")
        if problem.numerics == "half":
            allowed |= {"fp16", "bf16"}
    return max(rate for name, rate in rates.flops.items() if name in allowed)
