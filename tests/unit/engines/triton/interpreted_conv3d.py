"""Run `triton.conv3d` in Triton's interpreter and print one JSON line a case. A script of its own, as `interpreted.py` is.

Integer data, so that every product and sum is exact: the result has to agree with float64 to the last bit.
"""

from tests.unit.engines import quick_interpreter  # noqa: F401 - turns the interpreter on, before triton is imported

# isort: split

import json
import random
import sys
from dataclasses import replace

import torch
from torch.nn import functional

from convoy.engines.base import Buffers
from convoy.engines.triton.volumes.conv3d_tile import VolumeTile
from convoy.engines.triton.volumes.triton_conv3d import ENGINE, boxes_support
from convoy.errors import InputError
from convoy.problem import Conv3dProblem, Epilogue
from convoy.target import Target

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
FULL = Epilogue(bias=True, residual=True, activation="relu")


def oracle(problem, x, weight, bias, residual):
    """The result in float64."""
    y = functional.conv3d(
        x.double(), weight.double(), bias, problem.stride, problem.pad, problem.dilation, problem.groups
    )
    y = y if residual is None else y + residual.double()
    return y if problem.epilogue.activation == "none" else y.relu()


def run(problem, tile=None, corrupt=False):
    """Largest error of one launch against float64, with NaN in the output and garbage in the workspace before."""
    support = ENGINE.supports(problem, TARGET)
    if not support:
        return {"refused": support.reason}
    knobs = ENGINE.space(problem, TARGET)[0] if tile is None else tile.knobs
    executable = ENGINE.build(problem, knobs, TARGET)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
    generator = torch.Generator().manual_seed(7)

    def integers(shape):
        found = torch.randint(-2, 3, shape, generator=generator).to(DTYPES[problem.dtype])
        return found.contiguous(memory_format=torch.channels_last_3d) if len(shape) == 5 else found

    x, weight = integers(problem.x_spec.shape), integers(problem.weight_spec.shape).contiguous()
    bias = [integers((problem.k,))] if problem.epilogue.bias else []
    residual = [integers(problem.y_spec.shape)] if problem.epilogue.residual else []
    y = torch.full_like(integers(problem.y_spec.shape), float("nan"))
    constants = executable.pack([weight, *bias])
    if corrupt:
        constants[0].view(-1)[0] += 1
    size = executable.workspace_bytes
    executable.launch(
        Buffers((x, *residual), [y], constants), torch.full((size,), 255, dtype=torch.uint8) if size else None
    )
    expected = oracle(problem, x, weight, bias[0].double() if bias else None, residual[0] if residual else None)
    error = (y.double() - expected.to(y.dtype)).abs().max().item() if y.numel() else 0.0
    return {"error": error, "splits": executable.splits, "gather": bool(knobs["gather"])}


def conv(*sizes, dtype="fp16", **rest):
    """A problem in ndhwc."""
    return Conv3dProblem(*sizes, layout="ndhwc", dtype=dtype, **rest)


def boxes(depth=1, block_d=1, block_h=4, block_w=4, block_k=16, block_c=16, **rest):
    """A tile of TMA boxes."""
    return VolumeTile(False, False, depth, block_d, block_h, block_w, block_k, block_c, **rest)


def gather(flat=False, pixels=32, block_k=16, block_c=16, **rest):
    """A tile of gathered loads."""
    return VolumeTile(True, flat, 1, 1, 1, pixels, block_k, block_c, **rest)


SAME = {"pad": (1, 1, 1)}
CASES = {
    "boxes 3x3x3": (conv(1, 16, (3, 5, 6), 24, (3, 3, 3), **SAME, epilogue=FULL), boxes()),
    "boxes of slices": (conv(2, 24, (5, 4, 3), 16, (3, 3, 3), **SAME, epilogue=FULL), boxes(block_d=2, block_w=2)),
    "boxes that share slices": (conv(2, 16, (5, 4, 5), 16, (3, 3, 3), **SAME, epilogue=FULL), boxes(2)),
    "boxes that share slices of 4": (conv(1, 16, (6, 4, 4), 40, (3, 1, 2), pad=(1, 0, 1)), boxes(4, block_k=32)),
    "boxes, dilated depth": (
        conv(1, 8, (7, 4, 5), 16, (2, 2, 2), (1, 1, 0), (1, 1, 1), (2, 1, 2)),
        boxes(4, block_h=2),
    ),
    "boxes, depth 2 of stride 2": (conv(1, 16, (7, 4, 4), 16, (3, 1, 1), (1, 0, 0), (2, 1, 1)), boxes(2)),
    "boxes, stride 2": (conv(2, 16, (5, 6, 8), 24, (3, 3, 3), (1, 1, 1), (2, 2, 2), epilogue=FULL), boxes(2)),
    "boxes, stride 1x2x2": (conv(1, 16, (3, 4, 6), 16, (1, 3, 2), (0, 1, 0), (1, 2, 2)), boxes(block_h=2)),
    "boxes split": (conv(1, 32, (2, 3, 3), 16, (3, 3, 3), **SAME, epilogue=FULL), boxes(2, split=3)),
    "boxes tf32": (conv(1, 12, (3, 4, 4), 8, (3, 3, 3), **SAME, dtype="fp32", epilogue=FULL), boxes(2)),
    "boxes 1x1x1": (conv(1, 40, (2, 3, 5), 16, (1, 1, 1), epilogue=FULL), boxes(block_d=2)),
    "gather": (conv(2, 16, (3, 4, 5), 24, (3, 3, 3), **SAME, epilogue=FULL), gather()),
    "gather flat": (conv(2, 3, (3, 5, 6), 10, (3, 3, 2), (1, 1, 0), (1, 2, 2), epilogue=FULL), gather(True)),
    "gather one channel": (conv(1, 1, (4, 4, 5), 8, (3, 3, 3), **SAME), gather(True)),
    "gather odd channels": (conv(1, 21, (3, 4, 3), 7, (2, 2, 2), (0, 0, 0), (2, 2, 1)), gather()),
    "gather split": (conv(1, 16, (2, 3, 4), 12, (3, 2, 2), pad=(1, 0, 1), epilogue=FULL), gather(split=4)),
    "gather dilation": (conv(1, 5, (7, 6, 5), 8, (3, 2, 2), (2, 1, 0), (2, 1, 1), (2, 3, 2)), gather(True)),
    "gather strict": (
        conv(1, 6, (3, 4, 4), 8, (3, 3, 3), **SAME, dtype="fp32", numerics="strict", epilogue=FULL),
        None,
    ),
    "gather many slices": (conv(1, 8, (11, 2, 2), 8, (9, 1, 1)), None),
    "first guess": (conv(1, 16, (4, 4, 4), 16, (3, 3, 3), **SAME, epilogue=FULL), None),
    "no volumes": (conv(0, 16, (4, 4, 4), 16, (3, 3, 3)), None),
}


def drawn(rng):
    """A small problem that the engine takes, with a tile that fits its kernel."""
    while True:
        multiple = rng.choice([1, 8])
        sides = [[rng.randint(low, high) for _ in range(3)] for low, high in ((1, 6), (1, 3), (0, 2), (1, 2), (1, 2))]
        size, window, pad, stride, dilation = map(tuple, sides)
        try:
            problem = conv(
                *(rng.randint(1, 2), multiple * rng.randint(1, 3), size, multiple * rng.randint(1, 3), window),
                *(pad, stride, dilation),
                epilogue=Epilogue(rng.random() < 0.5, rng.random() < 0.5, rng.choice(["none", "relu"])),
            )
        except InputError:  # the output would be empty
            continue
        split = rng.choice([1, 1, 2])
        if multiple == 1 or not boxes_support(problem, TARGET):
            return problem, gather(rng.random() < 0.5, split=split)
        depth = rng.choice([1, 2, 4])
        slices = 2 if depth == 1 and stride[1:] == (1, 1) else 1
        return problem, boxes(depth, slices, rng.choice([2, 4]), rng.choice([4, 8]), split=split)


if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps({"case": name, **run(*case)}))
    problem, tile = CASES["boxes that share slices"]
    print(json.dumps({"case": "a planted fault", **run(problem, tile, corrupt=True)}))
    print(json.dumps({"case": "groups", **run(replace(problem, groups=2))}))
    rng = random.Random(5)
    for number in range(12):
        problem, tile = drawn(rng)
        print(json.dumps({"case": f"drawn {number}", "problem": f"{problem} [{tile.knobs}]", **run(problem, tile)}))
    sys.stdout.flush()
