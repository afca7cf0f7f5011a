"""What every kernel here asks of a problem and a target, each "no" with its reason."""

from __future__ import annotations

from convoy.engines.conditions import without_pooling
from convoy.engines.triton.compiled import device_support
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.support import Support
from convoy.target import Target

_INDEX_LIMIT = 2**31


def conv_support(problem: Problem, target: Target, capability: int, direction: str = "fprop") -> Support:
    """A dense convolution in one direction, in NHWC, of one dtype, on a device that is new enough."""
    if not isinstance(problem, ConvProblem):
        return Support.no("computes convolutions only")
    if not (device := device_support(target, capability)):
        return device
    if problem.direction != direction:
        return Support.no(f"computes direction {direction} only, got {problem.direction}")
    if not (unpooled := without_pooling(problem)):
        return unpooled
    if problem.layout != "nhwc":
        return Support.no(f"needs layout nhwc, got {problem.layout}")
    dtypes = {problem.x_dtype, problem.weight_dtype, problem.y_dtype}
    if len(dtypes) > 1 or not dtypes <= {"fp16", "bf16", "fp32"}:
        return Support.no(f"needs x, weight and y of one dtype of fp16, bf16, fp32, got {', '.join(sorted(dtypes))}")
    if problem.acc_dtype != "fp32":
        return Support.no(f"accumulates in fp32, got acc_dtype {problem.acc_dtype}")
    largest = max(s.elements for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
    if largest >= _INDEX_LIMIT:
        return Support.no(f"indexes tensors of fewer than 2^31 elements, got {largest}")
    return Support.yes()


def linear_support(problem: LinearProblem, target: Target, capability: int) -> Support:
    """A linear layer of one dtype on a device that is new enough."""
    if not (device := device_support(target, capability)):
        return device
    if problem.dtype not in ("fp16", "bf16", "fp32"):
        return Support.no(f"needs dtype fp16, bf16 or fp32, got {problem.dtype}")
    largest = max(s.elements for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
    if largest >= _INDEX_LIMIT:
        return Support.no(f"indexes tensors of fewer than 2^31 elements, got {largest}")
    return Support.yes()


def is_strict(problem: ConvProblem | LinearProblem) -> bool:
    """Whether fp32 products must be exact. A linear layer's are: torch allows TF32 for convolutions alone by default."""
    dtype = problem.dtype if isinstance(problem, LinearProblem) else problem.x_dtype
    return dtype == "fp32" and (problem.numerics == "strict" or isinstance(problem, LinearProblem))
