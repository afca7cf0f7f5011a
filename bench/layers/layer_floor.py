"""The least time that a GPU could take for a layer, from its rates: what pictures and tables of single layers measure by."""

from __future__ import annotations

from convoy.problem import Conv3dProblem, ConvProblem, LinearProblem, parse_problem

BYTES_PER_US = {"H100": 3.1e6, "H200": 4.4e6}
"""What memory delivers: a large copy on an H100 SXM reached 3.1 of its 3.35 TB/s; the same share of an H200's 4.8."""

FLOPS_PER_US = {"half": 8.0e8, "as_torch": 4.0e8, "strict": 8.0e8 / 3}
"""What Hopper's tensor cores deliver: 800 TFLOP/s in half types, 400 in TF32; strict fp32 takes three half products."""


def floor(subject: str, numerics: str, device: str) -> float:
    """Microseconds that no implementation can go below: what must be moved, or what must be multiplied, at the device's rates."""
    problem = parse_problem(subject)
    assert isinstance(problem, ConvProblem | Conv3dProblem | LinearProblem)
    return max(problem.bytes_min / memory_rate(device), problem.flops / FLOPS_PER_US[numerics])


def memory_rate(device: str) -> float:
    """Bytes a microsecond of a device.

    Raises:
        ValueError: a device whose rates are not known here.
    """
    for name, rate in BYTES_PER_US.items():
        if name in device:
            return rate
    raise ValueError(
        f"device {device!r}: its rates are not in bench/layers/layer_floor.py, which knows {', '.join(BYTES_PER_US)}"
    )
