"""Where does oneDNN's convolution give wrong numbers on this CPU? Random sizes on small integers, whose sums are exact.

    python bench/defects/onednn_defects.py --seconds 120 [--dtype bf16] [--direction fprop] [--volumes]

Each wrong problem is printed with the known defect that explains it, or with `UNEXPLAINED`; then counts by defect. A child
process computes, so that a crash costs one problem. What is unexplained wants a row in `convoy/engines/known_defects.py`; a
defect without a wrong problem may be mended in this version.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import random
import time
from typing import Any

import torch

from convoy.engines.compilers.instruction_sets import onednn_in_force
from convoy.engines.known_defects import KNOWN_DEFECTS, defect_of
from convoy.engines.torch_flags import without_onednn
from convoy.errors import InputError
from convoy.measurement.accuracy import make_data
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import conv_sizes, oracle
from convoy.problem import Conv3dProblem, ConvolutionProblem, ConvProblem, parse_problem

MOST_FLOPS = 2e6
CRASH = "crash"


def drawn(draw: random.Random, dtype: str, direction: str) -> ConvProblem:
    """A small convolution; one in two has one output column, where most defects are."""
    while True:
        r, s = draw.choice((1, 2, 3, 3, 4, 5, 7)), draw.choice((1, 2, 3, 3, 4, 5, 7))
        dilation_h, dilation_w = (draw.choice((1, 1, 1, 2, 3)) for _ in "hw")
        stride_h, stride_w = (draw.choice((1, 1, 2, 3, 5)) for _ in "hw")
        pad_h, pad_w = (draw.randint(0, side + draw.choice((0, 0, 3))) for side in (r, s))
        least_h, least_w = (
            max(1, d * (side - 1) + 1 - 2 * pad) for d, side, pad in ((dilation_h, r, pad_h), (dilation_w, s, pad_w))
        )
        groups = draw.choice((1, 1, 1, 1, 2, 4))
        try:
            problem = ConvProblem(
                draw.choice((1, 1, 2, 3)), groups * draw.choice((1, 2, 3, 9, 16, 33)), least_h + draw.randint(0, 9),
                least_w + (draw.randint(0, stride_w - 1) if draw.random() < 0.5 else draw.randint(0, 20)),
                groups * draw.choice((1, 1, 2, 8, 16, 40)), r, s, pad_h, pad_w, stride_h, stride_w, dilation_h,
                dilation_w, groups, layout=draw.choice(("nchw", "nhwc")), direction=direction,
                x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, numerics="as_torch" if dtype == "fp32" else "half",
            )  # fmt: skip
        except InputError:
            continue
        if problem.flops <= MOST_FLOPS:
            return problem


def drawn_volume(draw: random.Random, dtype: str, direction: str) -> Conv3dProblem:
    """A small three-dimensional convolution, of which height and width are those of a drawn one."""
    while True:
        flat = drawn(draw, dtype, direction)
        depth, pad, stride = draw.choice((1, 2, 3, 4)), draw.randint(0, 4), draw.choice((1, 1, 2, 3))
        dilation = draw.choice((1, 1, 2))
        size = max(1, dilation * (depth - 1) + 1 - 2 * pad) + draw.randint(0, 4)
        problem = Conv3dProblem(
            flat.n, flat.c, (size, flat.h, flat.w), flat.k, (depth, flat.r, flat.s), (pad, flat.pad_h, flat.pad_w),
            (stride, flat.stride_h, flat.stride_w), (dilation, flat.dilation_h, flat.dilation_w), flat.groups,
            draw.choice(("ncdhw", "ndhwc")), dtype, flat.numerics, direction=direction,
        )  # fmt: skip
        if problem.flops <= 2 * MOST_FLOPS:
            return problem


def wrong_values(problem: ConvolutionProblem, seed: int) -> int:
    """How many values of stock PyTorch's result are wrong, where its own convolution without oneDNN is right."""
    data = make_data(problem, seed, "integer")
    (exact,) = oracle(problem, data)

    def stock() -> torch.Tensor:
        stride, padding, dilation, groups = conv_sizes(problem)
        first, second = (*data.args, *data.constants)[:2]
        if problem.direction == "fprop":
            convolve = torch.conv3d if len(stride) == 3 else torch.conv2d
            return convolve(first, second, None, stride, padding, dilation, groups)
        dgrad = problem.direction == "dgrad"
        shape = problem.x_spec.shape if dgrad else problem.weight_spec.shape
        missing = torch.empty(shape, dtype=first.dtype)
        x, dy, weight = (missing, first, second) if dgrad else (first, second, missing)
        made = torch.ops.aten.convolution_backward(
            dy, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, [dgrad, not dgrad, False]
        )
        return made[0 if dgrad else 1]

    wanted = exact.to(data.args[0].dtype)
    count = int((stock() != wanted).sum())
    if count:
        with without_onednn():
            assert int((stock() != wanted).sum()) == 0, f"the oracle and PyTorch without oneDNN differ: {problem}"
    return count


def serve(connection: Any) -> None:
    """A child: counts wrong values of the problems that it is sent."""
    torch.set_num_threads(1)
    while asked := connection.recv():
        key, seed = asked
        problem = parse_problem(key)
        assert isinstance(problem, ConvolutionProblem)
        connection.send(wrong_values(problem, seed))


class Child:
    """A process that computes; another takes its place when it crashes."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._ours, theirs = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        """Let the process end."""
        self._ours.send(None)
        self._process.join()

    def ask(self, problem: ConvolutionProblem, seed: int) -> int | str:
        """Wrong values, or `CRASH`."""
        self._ours.send((problem.key, seed))
        try:
            return self._ours.recv()
        except EOFError:
            self._start()
            return CRASH


def main() -> None:
    """Draw problems until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), action="append")
    parser.add_argument("--direction", choices=("fprop", "dgrad", "wgrad"), action="append")
    parser.add_argument("--volumes", action="store_true", help="three-dimensional convolutions")
    asked = parser.parse_args()
    dtypes = asked.dtype or ["bf16", "bf16", "bf16", "fp32", "fp16"]
    directions = asked.direction or ["fprop", "fprop", "dgrad", "wgrad"]
    target, draw, child = detect_target("cpu"), random.Random(asked.seed), Child()
    print(f"{target.name}, oneDNN {target.version('onednn')} up to {onednn_in_force()[-1:]}, torch {torch.__version__}")
    tried: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + asked.seconds
    while time.monotonic() < end:
        problem = (drawn_volume if asked.volumes else drawn)(draw, draw.choice(dtypes), draw.choice(directions))
        defect = defect_of(problem, target)
        name = defect.name if defect else "UNEXPLAINED"
        tried[name] += 1
        if found := child.ask(problem, tried.total()):
            wrong[name] += 1
            print(f"{name}: {problem.key}: {found if found == CRASH else f'{found} of {_results(problem)} values'}")
    child.end()
    for name in (*(d.name for d in KNOWN_DEFECTS), "UNEXPLAINED"):
        print(f"{name}: {wrong[name]} wrong of {tried[name]}")


def _results(problem: ConvolutionProblem) -> int:
    specs = {"fprop": problem.y_spec, "dgrad": problem.x_spec, "wgrad": problem.weight_spec}
    return specs[problem.direction].elements


if __name__ == "__main__":
    main()
