"""Run the Triton engines in Triton's interpreter and print one JSON line a case. A script of its own: the interpreter is
chosen by the environment before triton is imported, and other tests of the same process may have imported it already.

Integer data, so that every product and sum is exact: a direct method has to agree with float64 to the last bit.
"""

from tests.unit.engines import quick_interpreter  # noqa: F401 - turns the interpreter on, before triton is imported

# isort: split

import json
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

from convoy.engines.activations import pool2d
from convoy.engines.base import Buffers
from convoy.engines.manifest import load_engine
from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem, Pool
from convoy.target import Target

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
ACTIVATIONS = {
    "none": lambda v: v,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
}


def oracle(problem, x, weight, bias, residual):
    bias = None if bias is None else bias.double()
    if isinstance(problem, LinearProblem):
        y = F.linear(x.double(), weight.double(), bias)
    else:
        stride, pad = (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w)
        dilation = (problem.dilation_h, problem.dilation_w)
        y = F.conv2d(x.double(), weight.double(), bias, stride, pad, dilation, problem.groups)
    y = y if residual is None else y + residual.double()
    y = ACTIVATIONS[problem.epilogue.activation](y)
    return y if problem.epilogue.pool is None else pool2d(y, problem.epilogue.pool)


def gradient(problem, first, second):
    """Float64 dx, or dweight and dbias."""
    if problem.direction == "dgrad":
        dy, weight, x = first, second, torch.zeros(problem.x_spec.shape)
    else:
        x, dy, weight = first, second, torch.zeros(problem.weight_spec.shape)
    wanted = [problem.direction == "dgrad", problem.direction == "wgrad", problem.direction == "wgrad"]
    stride, pad = [problem.stride_h, problem.stride_w], [problem.pad_h, problem.pad_w]
    dilation = [problem.dilation_h, problem.dilation_w]
    made = torch.ops.aten.convolution_backward(
        dy.double(),
        x.double(),
        weight.double(),
        [problem.k],
        stride,
        pad,
        dilation,
        False,
        [0, 0],
        problem.groups,
        wanted,
    )
    return [t for t in made if t is not None]


def backward(engine_id, problem, knobs=None):
    """Largest error of one gradient against float64; operands and results in channels_last."""
    engine = load_engine(engine_id)
    support = engine.supports(problem, TARGET)
    if not support:
        return {"refused": support.reason}
    knobs = knobs or engine.space(problem, TARGET)[0]
    executable = engine.build(problem, knobs, TARGET)
    assert executable.workspace_bytes == engine.workspace_bytes(problem, knobs)
    generator = torch.Generator().manual_seed(7)
    dtype = DTYPES[problem.x_dtype]

    def integers(shape):
        return torch.randint(-2, 3, shape, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last)

    shapes = {"x": problem.x_spec.shape, "weight": problem.weight_spec.shape, "dy": problem.y_spec.shape}
    first, second, result = ("dy", "weight", "x") if problem.direction == "dgrad" else ("x", "dy", "weight")
    args = integers(shapes[first]), integers(shapes[second])
    results = [torch.full_like(integers(shapes[result]), float("nan"))]
    if problem.epilogue.bias:
        results.append(torch.full((problem.k,), float("nan"), dtype=dtype))
    size = executable.workspace_bytes
    workspace = torch.full((size,), 255, dtype=torch.uint8) if size else None
    executable.launch(Buffers(args, results), workspace)
    expected = gradient(problem, *args)
    error = max((made.double() - right).abs().max().item() for made, right in zip(results, expected, strict=False))
    return {"error": error, "splits": getattr(executable, "split_count", 1)}


BEFORE = 16
"""Channels of the larger tensor in front of a slice; behind it are 24, and as many as make pixels whole 16 bytes."""


def run(engine_id, problem, knobs=None, corrupt=False, sliced=False):
    """Largest error of one launch against float64, with NaN in the output and garbage in the workspace before."""
    if getattr(problem, "direction", "fprop") != "fprop":
        return backward(engine_id, problem, knobs)
    engine = load_engine(engine_id)
    support = engine.supports(problem, TARGET)
    if not support:
        return {"refused": support.reason}
    space = list(engine.space(problem, TARGET))
    executable = engine.build(problem, knobs or space[0], TARGET)
    assert executable.workspace_bytes == engine.workspace_bytes(problem, knobs or space[0])
    generator = torch.Generator().manual_seed(7)
    dtype = DTYPES[problem.dtype if isinstance(problem, LinearProblem) else problem.x_dtype]

    def integers(shape):
        found = torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return found.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else found

    x, weight = integers(problem.x_spec.shape), integers(problem.weight_spec.shape).contiguous()
    bias = integers((problem.k,)) if problem.epilogue.bias else None
    residual = integers(problem.y_spec.shape) if problem.epilogue.residual else None
    y = whole = torch.full_like(integers(problem.y_spec.shape), float("nan"))
    if sliced:
        n, k, p, q = problem.y_spec.shape
        pitch = BEFORE + k + -k % 8 + 24
        whole = torch.full((n, p, q, pitch), float("nan"), dtype=dtype).permute(0, 3, 1, 2)
        y = whole.narrow(1, BEFORE, k)
        assert executable.accept_slice(0, pitch, BEFORE)
    constants = executable.pack([weight] if bias is None else [weight, bias])
    if corrupt:
        constants[0].view(-1)[0] += 1
    workspace = (
        torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8) if executable.workspace_bytes else None
    )
    executable.launch(Buffers((x,) if residual is None else (x, residual), [y], constants), workspace)
    expected = oracle(problem, x, weight, bias, residual)
    error = (y.double() - expected).abs().max().item() if y.numel() else 0.0
    if sliced:
        outside = whole.isnan().sum().item() - (whole.numel() - y.numel())
        return {"error": error, "outside": outside, "splits": getattr(executable, "splits", 1)}
    return {"error": error, "splits": getattr(executable, "splits", 1), "space": len(space)}


def conv(*sizes, dtype="fp16", **rest):
    rest = {"layout": "nhwc", "x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype} | rest
    return ConvProblem(*sizes, **rest)


FULL = Epilogue(bias=True, residual=True, activation="relu")


def swapped_knobs(**changes):
    base = {"block_k": 16, "block_n": 1, "block_h": 4, "block_w": 4, "block_c": 16, "stages": 2, "warps": 4, "split": 1}
    return Knobs.of(**(base | {"pdl": False, "prefetch": False} | changes))


def gather_knobs(**changes):
    base = {"block_k": 16, "block_p": 16, "block_c": 16, "stages": 2, "warps": 4, "split": 1, "pdl": False}
    return Knobs.of(**(base | {"flat": False} | changes))


def gemv_knobs(**changes):
    base = {"block_n": 2, "block_k": 4, "block_c": 256, "stages": 2, "warps": 4, "split": 1, "pdl": False}
    return Knobs.of(**(base | changes))


def persistent_knobs(**changes):
    base = {
        "block_k": 16,
        "block_n": 1,
        "block_h": 4,
        "block_w": 4,
        "block_c": 16,
        "stages": 2,
        "warps": 4,
        "pdl": False,
    }
    return Knobs.of(**(base | {"parts": 1, "blocks": 1, "swapped": True} | changes))


def dgrad_knobs(**changes):
    return swapped_knobs(**({"block_k": 16, "block_h": 4, "block_w": 4} | changes))


def wgrad_knobs(**changes):
    base = {"block_k": 16, "block_c": 16, "block_n": 2, "block_h": 1, "block_w": 1, "stages": 2, "warps": 4, "split": 1}
    return Knobs.of(**(base | {"images": True, "pdl": False} | changes))


def grad(direction, *sizes, **rest):
    return conv(*sizes, direction=direction, **rest)


PERSISTENT, DGRAD, WGRAD = "triton.persistent", "triton.dgrad", "triton.wgrad"
SWAPPED, GATHER, POINTWISE = "triton.swapped", "triton.implicit_gemm", "triton.pointwise"
DEPTHWISE, GEMV, SPLIT = "triton.depthwise", "triton.gemv", "triton.split_fp32"
STEM, POOLED = "triton.stem", "triton.pooled"
POOL = Epilogue(bias=True, activation="relu", pool=Pool("max", 2, 2, 2, 2))
ONE_EACH = "triton.depthwise_gradients"


def one_each(direction, n, c, h, w, *rest, **more):
    return grad(direction, n, c, h, w, c, *rest, groups=c, **more)


CASES = {
    "swapped 3x3": (SWAPPED, conv(1, 16, 7, 7, 24, 3, 3, 1, 1, epilogue=FULL)),
    "swapped split": (SWAPPED, conv(1, 16, 7, 7, 24, 3, 3, 1, 1, epilogue=FULL), swapped_knobs(split=3)),
    "swapped stride 2": (SWAPPED, conv(2, 16, 6, 8, 24, 3, 3, 1, 1, 2, 2, epilogue=FULL), swapped_knobs()),
    "swapped stride 1x2": (SWAPPED, conv(1, 16, 5, 8, 16, 5, 3, 2, 1, 1, 2), swapped_knobs()),
    "swapped 1x1 stride 2": (SWAPPED, conv(2, 16, 7, 9, 24, 1, 1, 0, 0, 2, 2, epilogue=FULL), swapped_knobs()),
    "swapped dilation": (SWAPPED, conv(1, 24, 7, 9, 24, 3, 3, 2, 2, 1, 1, 2, 2), swapped_knobs()),
    "swapped images": (SWAPPED, conv(4, 16, 3, 3, 16, 3, 3, 1, 1), swapped_knobs(block_n=2, block_h=2, split=2)),
    "swapped tf32": (SWAPPED, conv(1, 8, 5, 5, 8, 3, 3, 1, 1, dtype="fp32"), swapped_knobs()),
    "swapped tf32, 4 channels": (SWAPPED, conv(1, 4, 5, 6, 8, 3, 3, 1, 1, dtype="fp32", epilogue=FULL)),
    "swapped tf32, 8 channels": (SWAPPED, conv(2, 8, 5, 6, 12, 3, 3, 1, 1, dtype="fp32", epilogue=FULL)),
    "swapped tf32 stride 2": (SWAPPED, conv(1, 16, 6, 8, 8, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=FULL)),
    "swapped tf32 stride 2, 48 channels": (SWAPPED, conv(1, 48, 6, 8, 8, 3, 3, 1, 1, 2, 2, dtype="fp32")),
    "swapped no images": (SWAPPED, conv(0, 16, 7, 7, 24, 3, 3)),
    "pointwise": (POINTWISE, conv(2, 24, 3, 5, 24, 1, 1, epilogue=FULL)),
    "pointwise tf32, 4 channels": (POINTWISE, conv(2, 4, 3, 5, 8, 1, 1, dtype="fp32", epilogue=FULL)),
    "pointwise tf32, 8 channels": (POINTWISE, conv(2, 8, 3, 5, 8, 1, 1, dtype="fp32", epilogue=FULL)),
    "pointwise linear": (POINTWISE, LinearProblem(3, 40, 16, "fp16", "half", replace(FULL, activation="none"))),
    "depthwise": (DEPTHWISE, conv(2, 40, 6, 5, 40, 3, 3, 1, 1, groups=40, epilogue=FULL)),
    "depthwise 5x5 stride 2": (DEPTHWISE, conv(1, 20, 9, 8, 20, 5, 5, 2, 2, 2, 2, groups=20, epilogue=FULL)),
    "depthwise dilation": (DEPTHWISE, conv(1, 3, 7, 7, 3, 3, 2, 2, 1, 1, 2, 2, 1, groups=3, dtype="fp32")),
    "gemv": (GEMV, LinearProblem(1, 530, 37, "fp16", "half", FULL)),
    "gemv batch": (GEMV, LinearProblem(5, 530, 6, "fp32", "strict", FULL)),
    "gemv split": (GEMV, LinearProblem(2, 1030, 6, "fp32", "strict", FULL), gemv_knobs(split=2)),
    "gemv 1x1 map": (GEMV, conv(3, 10, 1, 1, 24, 1, 1, epilogue=FULL)),
    "split": (SPLIT, conv(2, 8, 5, 5, 16, 3, 3, 1, 1, dtype="fp32", numerics="strict", epilogue=FULL), swapped_knobs()),
    "split parts": (SPLIT, conv(1, 40, 5, 5, 24, 3, 3, 1, 1, dtype="fp32", epilogue=FULL), swapped_knobs(split=3)),
    "split 1x1": (SPLIT, conv(2, 24, 3, 5, 24, 1, 1, dtype="fp32", numerics="strict"), swapped_knobs(block_h=1)),
    "split stride 2": (SPLIT, conv(1, 16, 6, 6, 16, 3, 3, 1, 1, 2, 2, dtype="fp32"), swapped_knobs()),
    "persistent": (
        PERSISTENT,
        conv(1, 16, 9, 7, 24, 3, 3, 1, 1, epilogue=FULL),
        persistent_knobs(),
    ),
    "persistent parts": (
        PERSISTENT,
        conv(2, 16, 5, 6, 40, 3, 3, 1, 1, 1, 2, epilogue=FULL),
        persistent_knobs(block_n=2, block_h=2, block_k=32, parts=2),
    ),
    "persistent quarters": (PERSISTENT, conv(1, 8, 5, 5, 64, 3, 1, 1, 0), persistent_knobs(block_k=64, parts=4)),
    "persistent row": (
        PERSISTENT,
        conv(2, 40, 5, 5, 24, 1, 1, epilogue=FULL),
        persistent_knobs(block_h=1, block_w=16, block_k=32, swapped=False, parts=2),
    ),
    "persistent 1x1 stride 2": (PERSISTENT, conv(2, 16, 7, 9, 24, 1, 1, 0, 0, 2, 2), persistent_knobs()),
    "persistent few blocks": (
        PERSISTENT,
        conv(3, 8, 14, 14, 16, 1, 1, epilogue=FULL),
        persistent_knobs(block_h=1, block_w=4, block_k=16),
    ),
    "persistent tf32, 4 channels": (PERSISTENT, conv(1, 4, 5, 6, 8, 3, 3, 1, 1, dtype="fp32", epilogue=FULL)),
    "persistent tf32 row, 8 channels": (PERSISTENT, conv(2, 8, 5, 6, 8, 1, 1, dtype="fp32", epilogue=FULL)),
    "persistent tf32 stride 2": (PERSISTENT, conv(1, 16, 6, 8, 8, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=FULL)),
    "dgrad": (DGRAD, grad("dgrad", 1, 24, 7, 6, 40, 3, 3, 1, 1), dgrad_knobs()),
    "dgrad stride 2": (DGRAD, grad("dgrad", 2, 16, 7, 8, 24, 3, 3, 1, 1, 2, 2), dgrad_knobs(block_n=2)),
    "dgrad strides 3 and 2": (DGRAD, grad("dgrad", 1, 16, 11, 9, 16, 5, 4, 2, 0, 3, 2), dgrad_knobs(block_c=32)),
    "dgrad stride over filter": (DGRAD, grad("dgrad", 1, 8, 8, 9, 16, 1, 2, 0, 0, 2, 3), dgrad_knobs()),
    "dgrad unseen rows": (DGRAD, grad("dgrad", 1, 8, 8, 8, 8, 2, 2, 0, 0, 3, 3), dgrad_knobs()),
    "dgrad dilation": (DGRAD, grad("dgrad", 1, 16, 8, 7, 16, 3, 3, 2, 1, 1, 1, 2, 3), dgrad_knobs()),
    "dgrad 1x1": (DGRAD, grad("dgrad", 2, 24, 3, 5, 24, 1, 1), dgrad_knobs(block_h=1, block_w=16)),
    "dgrad padded 1x1": (DGRAD, grad("dgrad", 1, 8, 3, 3, 16, 1, 1, 2, 2), dgrad_knobs()),
    "dgrad tf32": (DGRAD, grad("dgrad", 1, 12, 5, 5, 48, 3, 3, 1, 1, dtype="fp32"), dgrad_knobs()),
    "dgrad first guess": (DGRAD, grad("dgrad", 1, 8, 4, 4, 8, 3, 3, 1, 1)),
    "depthwise dgrad": (ONE_EACH, one_each("dgrad", 2, 40, 6, 5, 3, 3, 1, 1)),
    "depthwise dgrad 5x5 stride 2": (ONE_EACH, one_each("dgrad", 1, 24, 9, 8, 5, 5, 2, 2, 2, 2)),
    "depthwise dgrad dilation": (ONE_EACH, one_each("dgrad", 2, 3, 8, 7, 3, 2, 2, 1, 1, 2, 2, 1, dtype="fp32")),
    "depthwise dgrad unseen rows": (ONE_EACH, one_each("dgrad", 1, 16, 8, 8, 2, 2, 0, 0, 3, 3)),
    "depthwise wgrad": (ONE_EACH, one_each("wgrad", 2, 40, 6, 5, 3, 3, 1, 1)),
    "depthwise wgrad 5x5 stride 2": (ONE_EACH, one_each("wgrad", 3, 24, 9, 8, 5, 5, 2, 2, 2, 2)),
    "depthwise wgrad dilation": (ONE_EACH, one_each("wgrad", 2, 3, 8, 7, 3, 2, 2, 1, 1, 2, 2, 1, dtype="fp32")),
    "depthwise wgrad 1x1": (ONE_EACH, one_each("wgrad", 2, 16, 5, 7, 1, 1)),
    "depthwise wgrad no images": (ONE_EACH, one_each("wgrad", 0, 16, 5, 7, 3, 3, 1, 1)),
    "wgrad": (WGRAD, grad("wgrad", 3, 24, 3, 3, 24, 3, 2, 1, 1), wgrad_knobs(split=3)),
    "wgrad bias": (WGRAD, grad("wgrad", 2, 8, 5, 4, 16, 3, 3, 1, 1, epilogue=Epilogue(bias=True)), wgrad_knobs()),
    "wgrad stride 2": (WGRAD, grad("wgrad", 2, 16, 7, 9, 16, 3, 3, 1, 1, 2, 2), wgrad_knobs(split=2)),
    "wgrad dilation": (WGRAD, grad("wgrad", 2, 8, 8, 7, 8, 3, 2, 2, 1, 1, 3, 2, 1), wgrad_knobs()),
    "wgrad 1x1": (WGRAD, grad("wgrad", 2, 24, 3, 5, 24, 1, 1), wgrad_knobs(block_n=1, block_w=16, images=False)),
    "wgrad box": (
        WGRAD,
        grad("wgrad", 1, 16, 6, 7, 24, 3, 3, 1, 1),
        wgrad_knobs(block_n=1, block_h=4, block_w=4, images=False, split=2),
    ),
    "wgrad box stride 2": (
        WGRAD,
        grad("wgrad", 2, 16, 8, 6, 16, 3, 3, 1, 1, 2, 2),
        wgrad_knobs(block_n=2, block_h=2, block_w=4, images=False),
    ),
    "wgrad 1x1 stride 2": (
        WGRAD,
        grad("wgrad", 1, 16, 7, 9, 16, 1, 1, 0, 0, 2, 2),
        wgrad_knobs(block_n=1, block_h=4, block_w=4, images=False),
    ),
    "wgrad tf32": (WGRAD, grad("wgrad", 2, 8, 4, 4, 12, 3, 3, 1, 1, dtype="fp32"), wgrad_knobs(split=2)),
    "wgrad tf32 stride 2, 8 channels": (WGRAD, grad("wgrad", 1, 8, 6, 6, 8, 3, 3, 1, 1, 2, 2, dtype="fp32")),
    "wgrad first guess": (WGRAD, grad("wgrad", 20, 8, 3, 3, 8, 2, 2)),
    "stem 7x7": (STEM, conv(2, 3, 12, 11, 16, 7, 7, 3, 3, 2, 2, epilogue=FULL)),
    "stem 11x11": (STEM, conv(1, 3, 23, 23, 8, 11, 11, 2, 2, 4, 4, epilogue=FULL)),
    "stem 3x3": (STEM, conv(1, 3, 6, 7, 8, 3, 3, 1, 1, epilogue=FULL)),
    "stem tf32": (STEM, conv(1, 1, 9, 9, 8, 5, 3, 1, 2, 1, 2, dtype="fp32"), swapped_knobs(split=2)),
    "stem tf32 stride 2": (STEM, conv(1, 3, 9, 9, 8, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=FULL)),
    "pooled tf32, 4 channels": (POOLED, conv(1, 4, 8, 8, 8, 3, 3, 1, 1, dtype="fp32", epilogue=POOL)),
    "pooled tf32, 8 channels": (POOLED, conv(1, 8, 8, 8, 8, 3, 3, 1, 1, dtype="fp32", epilogue=POOL)),
    "pooled tf32 stride 2": (POOLED, conv(1, 16, 8, 8, 8, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=POOL)),
    "pooled tf32 stride 2, 24 channels": (POOLED, conv(1, 24, 8, 8, 8, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=POOL)),
    "pooled tf32 stem": (POOLED, conv(1, 3, 8, 8, 8, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=POOL)),
    "gather stem": (GATHER, conv(1, 3, 9, 9, 5, 3, 3, 1, 1, 2, 2, epilogue=FULL)),
    "gather dilation": (GATHER, conv(2, 24, 5, 6, 5, 3, 3, 1, 2, 2, 1, 2, 1, epilogue=FULL)),
    "gather groups": (
        GATHER,
        conv(2, 6, 5, 6, 4, 3, 3, 1, 2, 2, 1, 2, 1, 2, dtype="fp32", numerics="strict", epilogue=FULL),
    ),
    "gather depthwise": (GATHER, conv(1, 8, 5, 5, 8, 3, 3, 1, 1, groups=8, dtype="fp32")),
    "gather split": (GATHER, conv(1, 32, 4, 5, 18, 3, 3, 1, 1, epilogue=FULL), gather_knobs(split=3)),
    "gather split groups": (GATHER, conv(1, 64, 2, 3, 12, 1, 1, groups=2, epilogue=FULL), gather_knobs(split=2)),
    "gather one channel": (GATHER, conv(1, 1, 9, 9, 1, 3, 3, dtype="fp32")),
    "gather padded 1x1": (GATHER, conv(1, 4, 3, 3, 4, 1, 1, 2, 2)),
    "gather stride over filter": (GATHER, conv(1, 4, 9, 9, 4, 1, 2, 0, 0, 3, 4)),
    "gather filter over image": (GATHER, conv(1, 4, 2, 2, 4, 5, 5, 2, 2)),
    "gather no images": (GATHER, conv(0, 3, 7, 7, 4, 3, 3)),
}
for _name in ACTIVATIONS:
    CASES[f"activation {_name}"] = (SWAPPED, conv(1, 8, 3, 3, 8, 1, 3, 0, 1, epilogue=Epilogue(True, True, _name)))

MERGED = """graph 1
input %x: fp16[2,24,3,5]
constant %w1: fp16[24,24,1,1]
constant %b1: fp16[24]
constant %w2: fp16[8,24,1,1]
constant %b2: fp16[8]
constant %w3: fp16[40,24,1,1]
constant %b3: fp16[40]
%a: fp16[2,24,3,5] = conv2d(%x, %w1, %b1, (1, 1), (0, 0), (1, 1), 1)
%b: fp16[2,8,3,5] = conv2d(%x, %w2, %b2, (1, 1), (0, 0), (1, 1), 1)
%p: fp16[2,8,3,5] = aten.relu.default(%b)
%c: fp16[2,40,3,5] = conv2d(%x, %w3, %b3, (1, 1), (0, 0), (1, 1), 1)
%r: fp16[2,40,3,5] = aten.relu.default(%c)
%q: fp16[2,24,3,5] = aten.relu.default(%a)
return %r, %p, %q
"""


def merged(text, knobs=None):
    """Largest error of parallel convolutions against float64, the first result a slice of a larger tensor."""
    from convoy.graph.text import parse_graph
    from convoy.regions import propose

    graph = parse_graph(text)
    regions = propose(graph, layouts=("nhwc",), numerics="half", patterns=("merge",))
    (region,) = [region for region in regions if region.pattern == "merge"]
    (problem,) = region.problems
    engine = load_engine("triton.merged")
    assert engine.supports(problem, TARGET)
    executable = engine.build(problem, knobs or engine.space(problem, TARGET)[0], TARGET)
    generator = torch.Generator().manual_seed(7)
    drawn = {
        v.name: torch.randint(-2, 3, v.spec.shape, generator=generator).half()
        for v in graph.values.values()
        if v.kind != "node"
    }
    x = drawn["x"].contiguous(memory_format=torch.channels_last)
    made = [
        torch.full(graph.values[name].spec.shape, float("nan")).half().contiguous(memory_format=torch.channels_last)
        for name in region.results
    ]
    n, k, p, q = made[0].shape
    assert executable.accept_slice(0, k + 24, 16)
    whole = torch.full((n, p, q, k + 24), float("nan")).half().permute(0, 3, 1, 2)
    made[0] = whole.narrow(1, 16, k)
    packed = executable.pack([drawn[name] for name in region.constants])
    fresh = [drawn[name] for name in region.args[1:]]
    executable.launch(Buffers((x, *fresh), made, packed), None)
    weights = {"q": ("w1", "b1"), "p": ("w2", "b2"), "r": ("w3", "b3")}
    error = 0.0
    for name, result in zip(region.results, made, strict=True):
        expected = F.conv2d(*(drawn[operand].double() for operand in ("x", *weights[name]))).relu()
        error = max(error, (result.double() - expected).abs().max().item())
    return {"error": error, "outside": whole.isnan().sum().item() - n * p * q * 24}


class Rearranged:
    """The copying kernel of `cuda/stem.cu` in torch's words; itself it is tested beside its own engine."""

    def __init__(self, engine, windows, target):
        self.windows = windows

    def launch(self, x, room):
        w = self.windows
        p = w.problem
        copy = room.view(x.dtype)[: w.bytes // x.element_size()].view(p.n, w.groups, w.columns, p.stride_h, w.vector)
        wide = torch.zeros(p.n, p.c, p.pad_h + p.h + w.groups * p.stride_h, p.pad_w + p.w + w.columns, dtype=x.dtype)
        wide[:, :, p.pad_h : p.pad_h + p.h, p.pad_w : p.pad_w + p.w] = x
        wide = wide[:, :, : w.groups * p.stride_h, : w.columns].reshape(p.n, p.c, w.groups, p.stride_h, w.columns)
        copy.zero_()[..., : p.c] = wide.permute(0, 2, 4, 3, 1)


def stem_gradient(problem, place):
    """Largest error of a first layer's weight gradient against float64."""
    from convoy.engines.triton import stem_wgrad

    stem_wgrad.ImageCopy = Rearranged
    engine = stem_wgrad.ENGINE
    knobs = list(engine.space(problem, TARGET))[place]
    executable = engine.build(problem, knobs, TARGET)
    generator = torch.Generator().manual_seed(3)
    x, dy = (
        torch.randint(-2, 3, spec.shape, generator=generator).half().contiguous(memory_format=torch.channels_last)
        for spec in (problem.x_spec, problem.y_spec)
    )
    dweight = torch.full(problem.weight_spec.shape, float("nan")).half().contiguous(memory_format=torch.channels_last)
    dbias = torch.empty(problem.k).half()
    workspace = torch.full((engine.workspace_bytes(problem, knobs) + 512,), 255, dtype=torch.uint8)
    executable.launch(Buffers((x, dy), [dweight, dbias]), workspace)
    stride, pad = [problem.stride_h, problem.stride_w], [problem.pad_h, problem.pad_w]
    expected = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), dweight.double(), None, stride, pad, [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]
    return {"error": (dweight.double() - expected).abs().max().item(), "splits": dict(knobs.items_)["split"]}


STEMS = {
    "stem gradient": (conv(2, 3, 18, 15, 16, 7, 7, 3, 3, 2, 2, direction="wgrad", epilogue=Epilogue(bias=True)), 0),
    "stem gradient, one share": (
        conv(1, 2, 15, 19, 8, 11, 5, 2, 2, 4, 2, direction="wgrad", epilogue=Epilogue(bias=True)),
        1,
    ),
    "stem gradient, a filter shorter than its step": (
        conv(2, 3, 14, 13, 16, 3, 3, 1, 1, 4, 4, direction="wgrad", epilogue=Epilogue(bias=True)),
        0,
    ),
    "stem gradient, one row of overlapping windows": (
        conv(2, 2, 9, 12, 16, 1, 3, 0, 1, 1, 2, direction="wgrad", epilogue=Epilogue(bias=True)),
        0,
    ),
    "stem gradient, patches": (
        conv(2, 3, 16, 12, 16, 4, 4, 0, 0, 4, 4, direction="wgrad", epilogue=Epilogue(bias=True)),
        0,
    ),
}


def cut(numerics):
    """How far gathered fp32 values are from themselves, and from TF32's nearest ones, behind a filter that copies them."""
    from convoy.engines.gpu.device_tensors import round_tf32

    problem = conv(1, 16, 5, 5, 16, 1, 1, 0, 0, dtype="fp32", numerics=numerics)
    executable = load_engine("triton.implicit_gemm").build(problem, gather_knobs(flat=False), TARGET)
    x = torch.randn(1, 16, 5, 5, generator=torch.Generator().manual_seed(4))
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.eye(16).reshape(16, 16, 1, 1)
    y = torch.full_like(x, float("nan"))
    executable.launch(Buffers((x,), [y], executable.pack((weight,))), None)
    return {"error": (y - round_tf32(x)).abs().max().item(), "from_x": (y - x).abs().max().item()}


SLICED = ["swapped 3x3", "swapped split", "swapped stride 2", "pointwise", "persistent parts", "persistent row",
          "split parts", "stem 7x7", "gather stem", "gather split groups", "gather dilation"]  # fmt: skip
"""Cases that are run once more with y as some of the channels of a larger tensor."""

if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps({"case": name, **run(*case)}))
    print(json.dumps({"case": "merged", **merged(MERGED, swapped_knobs(block_h=1, block_w=16))}))
    print(json.dumps({"case": "merged first guess", **merged(MERGED)}))
    fresh = MERGED.replace("constant", "input")
    print(json.dumps({"case": "merged fresh", **merged(fresh, swapped_knobs(block_h=1, block_w=16))}))
    for numerics in ("as_torch", "strict"):
        print(json.dumps({"case": f"gathered values, {numerics}", **cut(numerics)}))
    for name, case in STEMS.items():
        print(json.dumps({"case": name, **stem_gradient(*case)}))
    for name in SLICED:
        print(json.dumps({"case": f"slice {name}", **run(*CASES[name], sliced=True)}))
    print(json.dumps({"case": "a planted fault", **run(*CASES["gather stem"], corrupt=True)}))
    sys.stdout.flush()
