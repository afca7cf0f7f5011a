"""Support checks that all GPU engines share; each refusal has a reason."""

from __future__ import annotations

from convoy.engines.subgraph import torch_support
from convoy.engines.support_checks import without_pooling
from convoy.engines.triton.triton_build import TORCH_DTYPE, device_support
from convoy.problem import Conv3dProblem, ConvProblem, LinearProblem, Problem, SubgraphProblem, kind_in_words
from convoy.support import Support
from convoy.target import Target

INDEX_LIMIT = 2**31
"""Tensors of this many elements or more cannot be indexed with 32 bits."""


def conv_support(problem: Problem, target: Target, capability: int, direction: str = "fprop") -> Support:
    """Accept a dense NHWC convolution in one direction, of one dtype, on a GPU of at least the compute capability."""
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
    return _indices_support(problem)


def conv3d_support(problem: Problem, target: Target, capability: int) -> Support:
    """Accept a dense ndhwc three-dimensional convolution without groups, forward, on a GPU of at least the compute capability."""
    if not isinstance(problem, Conv3dProblem):
        return Support.no("computes three-dimensional convolutions only")
    if not (device := device_support(target, capability)):
        return device
    if problem.direction != "fprop":
        return Support.no(f"computes direction fprop only, got {problem.direction}")
    if problem.layout != "ndhwc":
        return Support.no(f"needs layout ndhwc, got {problem.layout}")
    if problem.dtype not in TORCH_DTYPE:
        return Support.no(f"needs fp16, bf16 or fp32, got {problem.dtype}")
    if problem.groups != 1:
        return Support.no(f"needs groups = 1, got {problem.groups}")
    return _indices_support(problem)


def _indices_support(problem: ConvProblem | Conv3dProblem | LinearProblem) -> Support:
    """Refuses tensors that 32-bit indices do not reach."""
    largest = max(s.elements for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
    if largest >= INDEX_LIMIT:
        return Support.no(f"indexes tensors of fewer than 2^31 elements, got {largest}")
    return Support.yes()


def product_support(problem: Problem, target: Target, direction: str = "fprop", *, empty: bool = False) -> Support:
    """Accept a convolution without groups for Hopper's tensor cores, which compute fp32 as TF32; batch 0 only with `empty`."""
    if not (found := conv_support(problem, target, 90, direction)):
        return found
    assert isinstance(problem, ConvProblem)
    if is_strict(problem):
        return Support.no("multiplies fp32 as TF32, which numerics strict forbids")
    epilogue = problem.epilogue
    if direction == "dgrad" and epilogue:
        return Support.no(f"a data gradient has no epilogue, got {epilogue}")
    if direction == "wgrad" and (epilogue.residual or epilogue.activation != "none"):
        return Support.no(f"a weight gradient has no epilogue but the bias's, got {epilogue}")
    if problem.groups != 1:
        return Support.no(f"needs groups = 1, got {problem.groups}")
    if not empty and not problem.y_spec.elements:
        return Support.no("needs at least one image")
    return Support.yes()


def first_layer_support(
    problem: Problem, target: Target, most: int, direction: str = "fprop", *, empty: bool
) -> Support:
    """As `product_support`, for kernels that read image windows: at most `most` channels, and no dilation."""
    if not (found := product_support(problem, target, direction, empty=empty)):
        return found
    assert isinstance(problem, ConvProblem)
    if problem.c > most:
        return Support.no(f"needs at most {most} channels in one group, got {problem.c}")
    if problem.dilation_h * problem.dilation_w != 1:
        return Support.no("needs dilation 1")
    return Support.yes()


def subgraph_support(problem: Problem, target: Target, does: str, layout: str = "nhwc") -> Support:
    """Accept a subgraph in one layout that PyTorch can run, on compute capability 8.0 or newer."""
    if not isinstance(problem, SubgraphProblem):
        return Support.no(f"{does}, got {kind_in_words(problem)}")
    if not (found := device_support(target, 80)):
        return found
    if problem.layout != layout:
        return Support.no(f"needs layout {layout}, got {problem.layout}")
    return torch_support(problem)


def values_support(dtype: str, elements: int) -> Support:
    """Accept a dtype that the kernels support and a tensor that 32-bit indices reach."""
    if dtype not in TORCH_DTYPE:
        return Support.no(f"needs fp16, bf16 or fp32, got {dtype}")
    if elements >= INDEX_LIMIT:
        return Support.no(f"indexes tensors of fewer than 2^31 elements, got {elements}")
    return Support.yes()


def linear_support(problem: LinearProblem, target: Target, capability: int) -> Support:
    """Accept a linear layer of one dtype on a GPU of at least the compute capability."""
    if not (device := device_support(target, capability)):
        return device
    if problem.dtype not in ("fp16", "bf16", "fp32"):
        return Support.no(f"needs dtype fp16, bf16 or fp32, got {problem.dtype}")
    return _indices_support(problem)


def is_strict(problem: ConvProblem | Conv3dProblem | LinearProblem) -> bool:
    """Whether TF32 is forbidden. It is for every fp32 linear layer: by default torch allows TF32 only for convolutions."""
    dtype = problem.dtype if isinstance(problem, LinearProblem) else problem.x_dtype
    return dtype == "fp32" and (problem.numerics == "strict" or isinstance(problem, LinearProblem))
