"""Support checks of the CUDA C kernels for Hopper; each refusal has a reason."""

from __future__ import annotations

from convoy.engines.gpu.gpu_support_checks import product_support
from convoy.engines.hopper.nvrtc_kernel import absence
from convoy.engines.hopper.tensor_maps import PixelMap
from convoy.problem import ConvProblem, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target


def hopper_alone(target: Target) -> Support:
    """Accept compute capability 9.0 only, if the packages that compile and launch are installed."""
    if target.capability != 90:
        return Support.no(f"is made for compute capability 9.0 alone, got {target.arch}")
    return Support.no(absence()) if absence() else Support.yes()


def whole_vectors(problem: ConvProblem, each: int) -> Support:
    """Accept channels and filters that are multiples of 16 bytes, for values of `each` bytes."""
    whole = 16 // each
    if problem.c % whole or problem.k % whole:
        return Support.no(f"needs c and k as multiples of {whole}, got {problem.c} and {problem.k}")
    return Support.yes()


def im2col(problem: ConvProblem) -> Support:
    """Accept problems whose x TMA can copy in im2col mode."""
    if not PixelMap.of(problem, 64).fits(problem):
        return Support.no("needs padding and filter under 128, and strides up to 8")
    return Support.yes()


def copied_product(problem: Problem, target: Target, direction: str = "fprop") -> Support:
    """Accept a dense convolution for tensor cores and TMA copies, fp32 as TF32; an empty batch too."""
    if not (found := product_support(problem, target, direction, empty=True)) or not (found := hopper_alone(target)):
        return found
    assert isinstance(problem, ConvProblem)
    if not (found := whole_vectors(problem, DTYPE_BYTES[problem.x_dtype])):
        return found
    return im2col(problem) if direction == "fprop" else Support.yes()
