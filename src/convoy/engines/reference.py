"""reference: every problem in float64, by the shortest way from its definition. Slow; the oracle of the other engines.

A convolution is unfolded image by image: column j of an image holds the c·r·s values that output pixel j reads. With
weights W [k, c·r·s] of one group, columns X [c·r·s, p·q] and output gradients D [k, p·q]:

    fprop   y  = W · X          dgrad   dx = fold(W^T · D)          wgrad   dW = sum over images of D · X^T
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Final

import torch
from torch.nn.functional import fold, pad, unfold

from convoy.engines.activations import activate, pool2d
from convoy.engines.base import Buffers, Engine, Executable, Knobs
from convoy.engines.interpret import compile_graph
from convoy.engines.subgraph import parse_subgraph, torch_support
from convoy.engines.support_checks import plain_convolution, volume_convolution
from convoy.problem import (
    DIRECTIONS,
    Conv3dProblem,
    ConvProblem,
    LayerProblem,
    LayoutProblem,
    LinearProblem,
    Problem,
    SubgraphProblem,
)
from convoy.support import Support
from convoy.target import Target

MOST_FLOPS: Final = 1 << 36
"""Largest sum of products that it takes on: a few seconds of float64 on one CPU core."""

MOST_BYTES: Final = 1 << 32
"""Most bytes of float64 values that it holds at once."""


class _Convolution(Executable):
    """All three directions, one image at a time, so that memory does not grow with the batch."""

    def __init__(self, problem: ConvProblem) -> None:
        self._problem = problem
        self._window = {
            "kernel_size": (problem.r, problem.s),
            "dilation": (problem.dilation_h, problem.dilation_w),
            "padding": (problem.pad_h, problem.pad_w),
            "stride": (problem.stride_h, problem.stride_w),
        }

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Results are copied to where they belong, image by image."""
        return True

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        {"fprop": self._fprop, "dgrad": self._dgrad, "wgrad": self._wgrad}[self._problem.direction](buffers)

    def _fprop(self, buffers: Buffers) -> None:
        problem, y = self._problem, buffers.results[0]
        assert y is not None
        weight = self._by_group(buffers.constants[0])
        for image in range(problem.n):
            exact = (weight @ self._columns(buffers.args[0][image])).reshape(problem.k, problem.p, problem.q)
            if problem.epilogue.bias:
                exact = exact + buffers.constants[1].double().reshape(-1, 1, 1)
            if problem.epilogue.residual:
                exact = exact + buffers.args[1][image].double()
            y[image].copy_(pool2d(activate(exact, problem.epilogue.activation), problem.epilogue.pool))

    def _dgrad(self, buffers: Buffers) -> None:
        problem, dx = self._problem, buffers.results[0]
        assert dx is not None
        dy, weight = buffers.args
        transposed = self._by_group(weight).transpose(1, 2)
        for image in range(problem.n):
            columns = (transposed @ self._pixels(dy[image])).reshape(1, -1, problem.p * problem.q)
            dx[image].copy_(fold(columns, (problem.h, problem.w), **self._window)[0])

    def _wgrad(self, buffers: Buffers) -> None:
        problem, dweight = self._problem, buffers.results[0]
        assert dweight is not None
        x, dy = buffers.args
        total = torch.zeros_like(self._by_group(dweight))
        for image in range(problem.n):
            total += self._pixels(dy[image]) @ self._columns(x[image]).transpose(1, 2)
        dweight.copy_(total.reshape(problem.weight_spec.shape))
        if problem.epilogue.bias:
            dbias = buffers.results[1]
            assert dbias is not None
            dbias.copy_(dy.double().sum((0, 2, 3)))

    def _columns(self, image: torch.Tensor) -> torch.Tensor:
        """[groups, c / groups · r · s, p · q] of one image [c, h, w]."""
        unfolded = unfold(image.double().unsqueeze(0), **self._window)[0]
        return unfolded.reshape(self._problem.groups, -1, self._problem.p * self._problem.q)

    def _pixels(self, image: torch.Tensor) -> torch.Tensor:
        """[groups, k / groups, p · q] of one output image [k, p, q]."""
        return image.double().reshape(self._problem.groups, -1, self._problem.p * self._problem.q)

    def _by_group(self, weight: torch.Tensor) -> torch.Tensor:
        """[groups, k / groups, c / groups · r · s]."""
        return weight.double().reshape(self._problem.groups, self._problem.k // self._problem.groups, -1)


class _Volumes(Executable):
    """A three-dimensional convolution or gradient: a sum of products for each place in the filter."""

    def __init__(self, problem: Conv3dProblem) -> None:
        self._problem = problem

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        {"fprop": self._fprop, "dgrad": self._dgrad, "wgrad": self._wgrad}[self._problem.direction](buffers)

    def _taps(self, padded: torch.Tensor) -> Iterator[tuple[tuple[int, int, int], torch.Tensor]]:
        """Each place in the filter, and the view of padded volumes that it meets: [n, groups, c / groups, pixels of y]."""
        p = self._problem
        t, r, s = p.window
        for place in product(range(t), range(r), range(s)):
            firsts = [at * dilation for at, dilation in zip(place, p.dilation, strict=True)]
            sides = zip(firsts, p.stride, p.y_size, strict=True)
            d, h, w = (slice(first, first + stride * (size - 1) + 1, stride) for first, stride, size in sides)
            yield place, padded[:, :, d, h, w].view(p.n, p.groups, p.c // p.groups, *p.y_size)

    def _by_group(self, weight: torch.Tensor) -> torch.Tensor:
        """[groups, k / groups, c / groups, t, r, s]."""
        p = self._problem
        return weight.double().reshape(p.groups, p.k // p.groups, p.c // p.groups, *p.window)

    def _padded(self) -> list[int]:
        """Padding in the order of `torch.nn.functional.pad`."""
        return [pad for side in reversed(self._problem.pad) for pad in (side, side)]

    def _fprop(self, buffers: Buffers) -> None:
        p, y = self._problem, buffers.results[0]
        assert y is not None
        weight = self._by_group(buffers.constants[0])
        exact = torch.zeros(p.y_spec.shape, dtype=torch.float64, device=y.device)
        for (t, r, s), view in self._taps(pad(buffers.args[0].double(), self._padded())):
            exact += torch.einsum("gkc,ngcdhw->ngkdhw", weight[..., t, r, s], view).flatten(1, 2)
        if p.epilogue.bias:
            exact += buffers.constants[1].double().reshape(-1, 1, 1, 1)
        if p.epilogue.residual:
            exact += buffers.args[1].double()
        y.copy_(activate(exact, p.epilogue.activation))

    def _dgrad(self, buffers: Buffers) -> None:
        p, dx = self._problem, buffers.results[0]
        assert dx is not None
        dy, weight = (tensor.double() for tensor in buffers.args)
        sides = [size + 2 * side for size, side in zip(p.size, p.pad, strict=True)]
        whole = torch.zeros((p.n, p.c, *sides), dtype=torch.float64, device=dx.device)
        filters, gradients = self._by_group(weight), dy.reshape(p.n, p.groups, p.k // p.groups, *p.y_size)
        for (t, r, s), view in self._taps(whole):
            view += torch.einsum("gkc,ngkdhw->ngcdhw", filters[..., t, r, s], gradients)
        for dim, (side, size) in enumerate(zip(p.pad, p.size, strict=True), 2):
            whole = whole.narrow(dim, side, size)
        dx.copy_(whole)

    def _wgrad(self, buffers: Buffers) -> None:
        p, dweight = self._problem, buffers.results[0]
        assert dweight is not None
        x, dy = (tensor.double() for tensor in buffers.args)
        gradients = dy.reshape(p.n, p.groups, p.k // p.groups, *p.y_size)
        for (t, r, s), view in self._taps(pad(x, self._padded())):
            dweight[..., t, r, s].copy_(torch.einsum("ngkdhw,ngcdhw->gkc", gradients, view).flatten(0, 1))
        if p.epilogue.bias:
            dbias = buffers.results[1]
            assert dbias is not None
            dbias.copy_(dy.sum((0, 2, 3, 4)))


class _Linear(Executable):
    """x · weight^T with its epilogue."""

    def __init__(self, problem: LinearProblem) -> None:
        self._epilogue = problem.epilogue

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        y = buffers.results[0]
        assert y is not None
        exact = buffers.args[0].double() @ buffers.constants[0].double().t()
        if self._epilogue.bias:
            exact = exact + buffers.constants[1].double()
        if self._epilogue.residual:
            exact = exact + buffers.args[1].double()
        y.copy_(activate(exact, self._epilogue.activation))


class _Piece(Executable):
    """The operators of a subgraph, with every floating-point value in float64."""

    def __init__(self, problem: SubgraphProblem) -> None:
        self._function = compile_graph(parse_subgraph(problem.text), double=True)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        made = self._function([_wide(t) for t in buffers.args], [_wide(t) for t in buffers.constants])
        for result, exact in zip(buffers.results, made, strict=True):
            assert result is not None
            result.copy_(exact)


class _Copy(Executable):
    """A change of memory format."""

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """A copy goes anywhere."""
        return True

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        assert buffers.results[0] is not None
        buffers.results[0].copy_(buffers.args[0])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class Reference(Engine):
    """float64 throughout, rounded once at the end. Never a candidate of the search."""

    id = "reference"
    family = "reference"
    writes_slices = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Everything of moderate size, on any device."""
        del target
        if isinstance(problem, SubgraphProblem):
            support = torch_support(problem)
            return (
                _small(sum(v.spec.elements for v in parse_subgraph(problem.text).values.values()))
                if support
                else support
            )
        if isinstance(problem, LayoutProblem):
            blocked = "blocked" in (problem.source, problem.layout)
            return Support.no("takes nchw and nhwc tensors, got blocked") if blocked else Support.yes()
        if isinstance(problem, ConvProblem):
            support = _definite(problem)
            if not support:
                return support
        elif isinstance(problem, Conv3dProblem) and not (support := volume_convolution(problem, DIRECTIONS)):
            return support
        if problem.flops > MOST_FLOPS:
            return Support.no(f"is slow: takes at most {MOST_FLOPS:.1e} operations, got {problem.flops:.1e}")
        return _small(_held(problem))

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Nothing is compiled."""
        del knobs, target
        if isinstance(problem, ConvProblem):
            return _Convolution(problem)
        if isinstance(problem, Conv3dProblem):
            return _Volumes(problem)
        if isinstance(problem, LinearProblem):
            return _Linear(problem)
        return _Piece(problem) if isinstance(problem, SubgraphProblem) else _Copy()


def _definite(problem: ConvProblem) -> Support:
    """The conditions of the other engines, but that dtypes may be mixed: every value is read as float64."""
    wide = replace(problem, x_dtype="fp64", weight_dtype="fp64", y_dtype="fp64")
    return plain_convolution(wide, ("fprop", "dgrad", "wgrad"), pools=True)


def _held(problem: LayerProblem) -> int:
    """Elements of float64 that it holds at once."""
    weight = problem.weight_spec.elements
    if isinstance(problem, LinearProblem):
        return weight + problem.n * (problem.c + problem.k)
    if isinstance(problem, Conv3dProblem):
        return 4 * (weight + problem.x_spec.elements + problem.y_spec.elements)
    columns = prod((problem.c, problem.r, problem.s, problem.p, problem.q))
    return columns + 2 * weight + problem.c * problem.h * problem.w + 2 * problem.k * problem.p * problem.q


def _small(elements: int) -> Support:
    if 8 * elements > MOST_BYTES:
        return Support.no(f"holds at most {MOST_BYTES} bytes of float64 values, would need {8 * elements}")
    return Support.yes()


ENGINE = Reference()
