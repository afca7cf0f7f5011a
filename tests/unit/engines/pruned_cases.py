"""Pruned problems that the tests of this folder share: patterns of zeros on the shapes of the matrix. Not a test module."""

from dataclasses import replace

import numpy as np

from convoy.problem import ConvProblem, Epilogue, WeightMask


def mask_of(nonzero):
    """Booleans [k, c / groups, r, s] as a mask."""
    return WeightMask(tuple(nonzero.shape), np.packbits(nonzero.ravel()).tobytes())


def pattern(name, shape, seed=0):
    """Booleans of a weight's shape in one of the patterns that a generator may get wrong."""
    rng = np.random.default_rng([seed, *shape])
    nonzero = rng.random(shape) < 0.1
    if name == "half":
        nonzero = rng.random(shape) < 0.5
    elif name == "full":
        nonzero[:] = True
    elif name == "none":
        nonzero[:] = False
    elif name == "single":
        nonzero[:] = False
        nonzero[tuple(rng.integers(shape))] = True
    elif name == "empty and full filters":
        nonzero[::2] = False
        nonzero[1::4] = True
    elif name == "dead channels":
        nonzero[:, ::2] = False
    elif name == "one tap":
        nonzero[:] = False
        nonzero[:, :, shape[2] - 1, 0] = True
    return nonzero


PATTERNS = ("tenth", "half", "full", "none", "single", "empty and full filters", "dead channels", "one tap")


def pruned(problem, name, seed=0):
    """A problem with a mask in a pattern."""
    return problem.with_mask(mask_of(pattern(name, problem.weight_spec.shape, seed)))


SMALL = replace(ConvProblem(2, 6, 9, 7, 8, 3, 3, 1, 1), epilogue=Epilogue(bias=True, residual=True, activation="relu"))
