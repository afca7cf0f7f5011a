"""Layers that pruned weights are measured on, and their masks: the same zeros in every run."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from convoy.problem import ConvProblem, WeightMask
from convoy.prune.patterns import group_ids, parse_pattern

OPERATORS = (
    # output side, c, k, filter side, padding, from
    (24, 1, 20, 5, 0, "LeNet-5"),
    (8, 20, 50, 5, 0, "LeNet-5"),
    (32, 3, 32, 5, 2, "CIFAR-10 quick"),
    (16, 32, 32, 5, 2, "CIFAR-10 quick"),
    (8, 32, 64, 5, 2, "CIFAR-10 quick"),
    (56, 64, 64, 3, 1, "ResNet"),
    (28, 128, 128, 3, 1, "ResNet"),
    (224, 3, 64, 3, 1, "VGG-16"),
    (224, 64, 64, 3, 1, "VGG-16"),
    (112, 64, 128, 3, 1, "VGG-16"),
)
"""The ten operators of "Code generated for pruned weights" (Dong, Liu, Li, Feng; Journal of Software 31(9), 2020)."""

LISTS = Path(__file__).parents[1] / "layers"


def words(dtype: str) -> dict[str, str]:
    """A problem's dtypes and numerics."""
    numerics = "strict" if dtype == "fp32" else "half"
    return {"x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype, "numerics": numerics}


def operators(chosen: Sequence[int], batch: int, dtype: str) -> Iterator[tuple[str, ConvProblem]]:
    """Name and problem of the operators asked for."""
    for number in chosen:
        side, c, k, r, pad, _ = OPERATORS[number - 1]
        size = side + r - 1 - 2 * pad
        yield f"op{number}", ConvProblem(batch, c, size, size, k, r, r, pad, pad, **words(dtype))


def resnet_layers(batch: int, dtype: str, least: int) -> Iterator[tuple[str, ConvProblem]]:
    """The distinct 3x3 and 1x1 layers of ResNet-50 that have at least so many channels and filters."""
    with (LISTS / "resnet50.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names = ("c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w")
            sizes = {name: int(row[name]) for name in names}
            if sizes["r"] <= 3 and min(sizes["c"], sizes["k"]) >= least:
                name = f"resnet50:{row['r']}x{row['s']}:{row['c']}x{row['h']}:{row['k']}/{row['stride_h']}"
                yield name, ConvProblem(n=batch, **words(dtype), **sizes)


def masked(problem: ConvProblem, sparsity: float, pattern: str) -> ConvProblem:
    """The problem with exactly that share of zeros in random places, filters or blocks; the same in every run."""
    shape = problem.weight_spec.shape
    generator = np.random.default_rng([*shape, int(sparsity * 1000)])
    kind = parse_pattern(pattern)
    if kind.kind == "nm":
        order = (
            generator.random((shape[0], shape[1] // kind.second, kind.second, *shape[2:]))
            .argsort(axis=2)
            .argsort(axis=2)
        )
        nonzero = order < kind.first
    else:
        ids = group_ids(kind, torch.empty(shape), problem.groups) if kind.kind == "block" else None
        places = {"channel": shape[0], "unstructured": int(np.prod(shape))}.get(kind.kind, 0)
        ids = np.repeat(np.arange(places), np.prod(shape) // places) if ids is None else ids.numpy()
        zeros = generator.permutation(ids.max() + 1)[: round(sparsity * (ids.max() + 1))]
        nonzero = ~np.isin(ids, zeros)
    return problem.with_mask(WeightMask(shape, np.packbits(nonzero).tobytes()))
