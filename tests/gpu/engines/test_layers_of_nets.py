"""Layers of real nets (bench/layers) on the GPU: each engine on some that it takes, in its directions, against float64."""

import csv
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import CompileError
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parents[3] / "bench" / "layers"
KINDS = [("fp16", "half"), ("bf16", "half"), ("fp32", "as_torch"), ("fp32", "strict")]
EPILOGUES = [Epilogue(), Epilogue(bias=True, activation="relu"), Epilogue(bias=True, residual=True, activation="relu")]
DIRECTIONS = ("fprop", "dgrad", "wgrad")
SEED = 20261122
SHARE = 4
"""Layers of each engine, direction and kind of numbers: a kernel's build takes a second or two."""

LOOKED_AT = 60
"""Layers that are offered to an engine, at most."""

TRANSFORMS = {"winograd", "fft"}
"""Algorithms of a library's plans that round on integers too; on other data their bound holds."""

NEVER = {"reference"}
"""Float64 loops: they are what others are held against."""


def sizes() -> list[dict[str, int]]:
    """Every two-dimensional layer of the nets, each once; tests/gpu/engines has tests of the three-dimensional ones."""
    found: dict[tuple[tuple[str, int], ...], None] = {}
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if "t" in row:  # a filter's depth
                    continue
                found[tuple((name, int(value)) for name, value in row.items() if name != "count")] = None
    return [dict(layer) for layer in found]


def layers(engine_id: str, direction: str, kind: tuple[str, str]) -> Iterator[ConvProblem]:
    """Layers in an order drawn for an engine, at batch 1, 2 or 9, in either memory format, with what may follow."""
    draw = random.Random(f"{SEED} {engine_id} {direction} {kind}")
    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), kind[0])
    every = sizes()
    for layer in draw.sample(every, min(LOOKED_AT, len(every))):
        epilogue = draw.choice(EPILOGUES) if direction == "fprop" else Epilogue()
        yield ConvProblem(
            **{**layer, "n": draw.choice((1, 2, 9))}, **types, layout=draw.choice(("nhwc", "nhwc", "nchw")), numerics=kind[1],
            direction=direction, epilogue=epilogue,
        )  # fmt: skip


def fault(engine, problem, target) -> str:
    """The fault of an engine's first settings, or of one drawn from all; empty where there is none."""
    space = list(engine.space(problem, target))
    words = []
    for knobs in dict.fromkeys((space[0], random.Random(problem.key).choice(space))):
        try:
            executable = engine.build(problem, knobs, target)
        except CompileError as error:
            words += [f"{problem} [{knobs}]: {error}"] if knobs == space[0] else []
            continue
        for data in ("integer", "normal"):
            made = make_data(problem, SEED, data, "cuda")
            verdict = judge(executable, engine.family, problem, made, data, tf32=problem.numerics == "as_torch")
            algorithm = engine.algorithm(problem, knobs)
            inexact = data == "integer" and TRANSFORMS & set(algorithm.split(", "))
            if not verdict.ok and not inexact:
                words.append(f"{problem} [{knobs}], {algorithm}, on {data} data: {verdict.reason}")
    return "\n".join(words)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("engine_id", [name for name in MANIFEST if name not in NEVER])
def test_layers_of_nets_are_right(engine_id, direction, kind):
    engine, target = load_engine(engine_id), detect_target("cuda")
    taken = list(islice((p for p in layers(engine_id, direction, kind) if engine.accepts(p, target)), SHARE))
    if not taken:
        pytest.skip(f"{engine_id} takes none of them")
    faults = list(filter(None, (fault(engine, problem, target) for problem in taken)))
    assert not faults, "\n".join(faults)
