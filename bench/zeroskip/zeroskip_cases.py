"""Convolutions and inputs with zeros that zeroskip.py measures, by the name of its runs."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.layers.layer_data import DTYPES
from bench.layers.make_layers import COLUMNS as SIZES
from bench.zeroskip.zeroskip_slopes import VGG19, VGG19_ZEROS

from convoy.measurement.accuracy import make_data
from convoy.measurement.data import Data
from convoy.measurement.data_with_zeros import with_zeros
from convoy.measurement.oracle import oracle
from convoy.problem import ConvProblem, Epilogue, Pool

SHARES = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)

PAIRS = (1, 3, 7, 11, 15)
"""Indices of the convolutions that a pooling follows."""

DEEP = ((512, 512, 28), (512, 512, 14))

CURVE = ((256, 256, 56), (128, 128, 28), (512, 512, 28), (512, 512, 14), (512, 512, 7))

POOL = Pool("max", 2, 2, 2, 2)

POOLED = (
    ConvProblem(1, 3, 224, 224, 64, 11, 11, 2, 2, 4, 4, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2))),
    ConvProblem(1, 64, 27, 27, 192, 5, 5, 2, 2, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2))),
    ConvProblem(1, 64, 56, 56, 192, 3, 3, 1, 1, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2, ceil_mode=True))),
    ConvProblem(1, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, epilogue=Epilogue(True, pool=Pool("max", 3, 3, 2, 2, 1, 1))),
    *(
        ConvProblem(1, c, h, h, k, 3, 3, 1, 1, epilogue=Epilogue(True, pool=POOL))
        for c, k, h in map(VGG19.__getitem__, PAIRS)
    ),
)


@dataclass(frozen=True)
class Case:
    """A problem on one input: its percentage of zeros, how they lie, and the data."""

    problem: ConvProblem
    zeros: float
    kind: str
    data: Data
    exact: tuple[torch.Tensor, ...]

    @staticmethod
    def of(problem: ConvProblem, zeros: float, kind: str, data: Data) -> Case:
        """With its float64 results, by torch."""
        return Case(problem, zeros, kind, data, tuple(oracle(problem, data)))


Known = tuple[ConvProblem, float, str]
"""What a case is known by: its problem, its percentage of zeros, how they lie."""

Plan = tuple[ConvProblem, Callable[[], Case]]
"""A problem, and its case, which is made when its turn comes."""


def case_of(problem: ConvProblem, zeros: float, kind: str, device: str, seed: int = 1) -> Case:
    """Ordinary data with zeros: in random places, or as whole channels, the same of all images."""
    plain = make_data(problem, seed, "normal", device)
    data = with_zeros(plain, 0 if kind == "channels" else zeros, seed + 1)
    x = data.args[0]
    if kind == "channels":
        dead = torch.randperm(problem.c, generator=torch.Generator().manual_seed(seed + 2))[
            : round(problem.c * zeros / 100)
        ]
        x = x.clone(memory_format=torch.preserve_format)
        x[:, dead] = 0
    x = x.contiguous(memory_format=torch.channels_last)
    if kind == "equal planes":
        x = x[:1].expand_as(x).contiguous(memory_format=torch.channels_last)
    return Case.of(problem, zeros, kind, Data((x, *data.args[1:]), data.constants))


def laid(problem: ConvProblem, batch: int, dtype: str, numerics: str) -> ConvProblem:
    words = {"x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype, "layout": "nhwc", "numerics": numerics}
    epilogue = replace(problem.epilogue, bias=True, activation="relu")
    return replace(problem, n=batch, epilogue=epilogue, **words)


def plans(run: str, options: argparse.Namespace, batch: int) -> Iterator[Plan]:
    """A run's cases."""
    numerics = options.numerics if options.dtype == "fp32" else "half"

    def at(problem: ConvProblem, zeros: float, kind: str = "random") -> Plan:
        wanted = laid(problem, batch, options.dtype, numerics)
        return wanted, lambda: case_of(wanted, zeros, kind, options.device)

    def square(c: int, k: int, h: int, pool: Pool | None = None) -> ConvProblem:
        return ConvProblem(1, c, h, h, k, 3, 3, 1, 1, epilogue=Epilogue(pool=pool))

    if run in ("curve", "deep"):
        for sizes in CURVE if run == "curve" else DEEP:
            for kind in ("random", "channels"):
                yield from (at(square(*sizes), zeros, kind) for zeros in options.shares)
    elif run == "vgg19":
        yield from (at(square(*sizes), zeros) for sizes, zeros in zip(VGG19, VGG19_ZEROS, strict=True))
    elif run == "pairs":
        yield from (at(square(*VGG19[i], POOL), VGG19_ZEROS[i]) for i in PAIRS)
    elif run == "pools":
        yield from (at(problem, 0) for problem in POOLED)
    elif run == "nets":
        lenet = [ConvProblem(1, 1, 28, 28, 20, 5, 5), ConvProblem(1, 20, 12, 12, 50, 5, 5)]
        for problem in (*lenet, *(p for name in ("alexnet", "googlenet", "resnet50") for p in net_layers(name))):
            yield from (at(problem, zeros) for zeros in (50, 75))
    elif run == "replica":
        for (_, _, h), zeros in zip(VGG19, VGG19_ZEROS, strict=True):
            problem = laid(ConvProblem(32, 1, h, h, 1, 3, 3, 1, 1), 32, options.dtype, numerics)
            yield problem, partial(case_of, problem, zeros, "equal planes", options.device)
    elif run == "real":
        yield from real_cases(options, batch)


def net_layers(name: str) -> Iterator[ConvProblem]:
    """The convolutions of a net of bench/layers without groups."""
    with (Path(__file__).parents[1] / "layers" / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            sizes: dict[str, Any] = {size: int(row[size]) for size in SIZES}
            if sizes["groups"] == 1:
                yield ConvProblem(**sizes)


def real_cases(options: argparse.Namespace, batch: int) -> Iterator[Plan]:
    """What a net's convolutions read for real images, with the weights that they meet."""
    from convoy.zoo import load_images, load_model, preprocessing

    model, wanted = load_model(options.model, weights=options.weights), preprocessing(options.model)
    images = load_images(options.input, size=wanted.size, batch=batch, mean=wanted.mean, std=wanted.std)
    for name, plain, x, constants in layer_inputs(model, images):
        problem = laid(plain, batch, options.dtype, options.numerics)
        yield problem, partial(real_case, problem, f"real {options.model} {name}", x, constants, options.device)


def layer_inputs(
    model: torch.nn.Module, images: torch.Tensor
) -> Iterator[tuple[str, ConvProblem, torch.Tensor, Sequence[torch.Tensor]]]:
    """Each convolution of a net: its name and problem, what it reads for some images, its weight and bias."""
    from convoy.capture import capture_inference
    from convoy.engines.interpret import compile_graph
    from convoy.graph.layers import conv_problem
    from convoy.graph.rebuild import rebuild
    from convoy.measurement.count_zeros import convolution_inputs

    captured = capture_inference(model, (images,))
    graph, read = captured.graph, convolution_inputs(captured.graph)
    probe = rebuild(graph.inputs, tuple(read.values()), graph.values, list(graph.nodes))
    maps = compile_graph(probe)([images], [captured.constants[value.name] for value in probe.constants()])
    for (name, _), x in zip(read.items(), maps, strict=True):
        node = graph.node(name)
        problem = conv_problem(graph, node)
        _, weight, *bias = node.refs()
        shift = captured.constants[bias[0]] if bias else torch.zeros(problem.k)
        yield name, problem, x, (captured.constants[weight], shift)


def real_case(problem: ConvProblem, kind: str, x: torch.Tensor, constants: Sequence[torch.Tensor], device: str) -> Case:
    """A case on what a layer reads."""
    dtype = DTYPES[problem.x_dtype]
    x = x.to(device, dtype).contiguous(memory_format=torch.channels_last)
    zeros = round(100 * float((x == 0).double().mean()), 1)
    return Case.of(problem, zeros, kind, Data((x,), tuple(t.to(device, dtype) for t in constants)))


RUNS = ("curve", "deep", "vgg19", "pairs", "nets", "pools", "replica", "real")


def run_of(text: str) -> tuple[str, str | None, int | None]:
    """RUN[:DTYPE[:BATCH]] → its parts; what is not said is None."""
    name, _, rest = text.partition(":")
    dtype, _, batch = rest.partition(":")
    if name not in RUNS or dtype not in ("", *DTYPES) or not (batch.isdecimal() or not batch):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(RUNS)}, alone or with :DTYPE or :DTYPE:BATCH")
    return name, dtype or None, int(batch) if batch else None
