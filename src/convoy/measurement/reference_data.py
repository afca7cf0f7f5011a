"""The data that all candidates of a problem are measured on, with the oracle's results, and the check against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeGuard

import torch

from convoy.engines.activation_sparsity import sparsity_kind
from convoy.engines.base import Engine, Executable, Packed
from convoy.measurement.accuracy import check
from convoy.measurement.data import Data, dense, dynamic_constants, in_layout, make_data
from convoy.measurement.data_with_zeros import with_zeros
from convoy.measurement.failure import Failure, T, first_lines, is_out_of_memory, run_or_fail
from convoy.measurement.guards import checksum, run_guarded
from convoy.measurement.oracle import oracle
from convoy.measurement.output_buffers import OutputBuffers
from convoy.perfdb.row import Status
from convoy.problem import (
    Conv3dProblem,
    ConvolutionProblem,
    ConvProblem,
    EngineConfig,
    LayerProblem,
    LayoutProblem,
    Pool,
    Problem,
    SubgraphProblem,
)
from convoy.target import Target

CHECKED_KINDS: Final = ("integer", "normal")
"""Kinds of data that every candidate is checked on; the last is also used for timing."""

SEED: Final = 20231

ORACLE_FLOPS: Final = {"cpu": 4e9, "cuda": 1e12}
"""Operations from which the oracle computes only some images of a batch: about half a second of float64 on either device."""

MIN_CHECKED: Final = 2
"""Images that are always checked: the first and the last."""


class ReferenceData:
    """The data of one problem with the oracle's results, made once for all its candidates.

    If the oracle of the whole batch would take too long, or more memory than available, the first images and the last are
    checked: a kernel treats the images of a batch alike, except in its first and last tiles.

    Args:
        problem: the problem.
        target: the device.
        sibling: the data of another problem. If that differs only in memory format, activation and pooling, its data is
            reused, and its results too if activation and pooling are the same (`make_data` gives the same values for both).

    Attributes:
        output_buffers: where timed launches write.
    """

    def __init__(self, problem: Problem, target: Target, sibling: ReferenceData | None = None) -> None:
        self.problem = problem
        self.target = target
        self.checked = checked_images(problem, target.device)
        self._data: dict[str, Data] = {}
        self._exact: dict[str, list[torch.Tensor]] = {}
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._with_zeros: dict[tuple[str, int], Data] = {}
        self.output_buffers = OutputBuffers(problem, target.device)
        if sibling is not None and data_key(sibling.problem) == data_key(problem):
            layout = problem.source if isinstance(problem, LayoutProblem) else problem.layout
            for kind in list(sibling._data):
                sibling._remake_if_changed(kind)
                data, _ = sibling.of(kind)
                self._data[kind] = Data(tuple(in_layout(dense(t), layout) for t in data.args), data.constants)
            if _epilogue_end(sibling.problem) == _epilogue_end(problem):
                self._exact, self.checked = sibling._exact, sibling.checked
        self._check(self.checked)

    def _check(self, images: tuple[int, ...]) -> None:
        """Check only these images of the batch; empty: all. Results of other images are dropped; a sibling keeps its own."""
        if images != self.checked:
            self._exact = {}
        self.checked = images
        self._small = self.problem
        if images and isinstance(self.problem, LayerProblem):
            self._small = replace(self.problem, n=len(images))

    def fill(self) -> None:
        """Make all data and results now."""
        for kind in CHECKED_KINDS:
            self._sums[kind] = self._sums_now(kind)

    def of(self, kind: str) -> tuple[Data, list[torch.Tensor]]:
        """Data of a kind, and its exact results (of the images that are checked)."""
        if kind not in self._data:
            self._data[kind] = self._made(kind)
        if kind not in self._exact:
            self._exact[kind] = self._answers(kind)
        return self._data[kind], self._exact[kind]

    def _made(self, kind: str) -> Data:
        try:
            return make_data(self.problem, SEED, kind, self.target.device)
        except Exception as error:  # everything: out of memory has several types; any other error is raised again
            if not (is_out_of_memory(error) and self._spare(kind)):
                raise
        return make_data(self.problem, SEED, kind, self.target.device)

    def _spare(self, kind: str) -> bool:
        """Free everything that can be made again, except data of this kind; returns whether there was anything."""
        others = [other for other in self._data if other != kind]
        for other in others:
            del self._data[other]
        found = bool(others or self._with_zeros) or self.output_buffers.is_held
        self._with_zeros.clear()
        self.output_buffers.clear()
        if self.target.device == "cuda":
            torch.cuda.empty_cache()
        return found

    def _answers(self, kind: str) -> list[torch.Tensor]:
        return self._retry_with_less_memory(kind, lambda: oracle(self._small, self._picked(self._data[kind])))

    def _retry_with_less_memory(self, kind: str, attempt: Callable[[], T]) -> T:
        """Run a function; if memory runs out, free what can be made again, then check fewer images if images are independent.

        If that does not help either, as many images are checked as before: the results are not at fault.
        """
        before = self.checked
        spared = False
        while True:
            try:
                return attempt()
            except Exception as error:  # everything: out of memory has several types; any other error is raised again
                fewer = _fewer(self.problem, self.checked)
                if not is_out_of_memory(error) or (spared and not fewer):
                    self._check(before)
                    raise
            if not spared:
                spared = True
                self._spare(kind)
            else:
                self._check(fewer)

    def timed_on(self, config: EngineConfig) -> Data:
        """The data that a candidate is timed on: the normal data, or for an engine that skips zeros, the same with zeros in x."""
        data, _ = self.of("normal")
        kind = sparsity_kind(config.knobs)
        if kind is None:
            return data
        wanted = kind, config.knobs.integer(kind)
        if wanted not in self._with_zeros:
            self._with_zeros[wanted] = with_zeros(data, wanted[1], SEED, kind)
        return self._with_zeros[wanted]

    def _remake_if_changed(self, kind: str) -> None:
        """Make the data again if an earlier candidate wrote to it, so that no other candidate is blamed."""
        sums = self._sums_now(kind)
        before = self._sums.setdefault(kind, sums)
        if not all(torch.equal(a, b) for a, b in zip(before, sums, strict=True)):
            del self._data[kind]

    def _sums_now(self, kind: str) -> list[torch.Tensor]:
        data, _ = self.of(kind)
        return checksum((*data.args, *data.constants))

    def _picked(self, data: Data) -> Data:
        if not self.checked:
            return data
        weights = range(1, 1 + dynamic_constants(self.problem))
        picked = [t if index in weights else self._pick(t) for index, t in enumerate(data.args)]
        return Data(tuple(picked), data.constants)

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[list(self.checked)]

    def verify(self, engine: Engine, executable: Executable, kind: str) -> tuple[float, Packed]:
        """Launch once on guarded buffers filled with garbage, and check the results.

        If launch and check run out of memory, the oracle's results are made again for fewer images.

        Returns:
            The relative L2 error against the oracle, and the packed constants.

        Raises:
            Failure: the candidate raised, wrote outside its buffers, or is wrong.
            ContextLostError: it broke the device's context.
        """
        return self._retry_with_less_memory(kind, lambda: self._verify(engine, executable, kind))

    def _verify(self, engine: Engine, executable: Executable, kind: str) -> tuple[float, Packed]:
        self._remake_if_changed(kind)
        data, exact = self.of(kind)
        trial = run_or_fail(lambda: run_guarded(executable, self.problem, data), self.target.device)
        if trial.fault:
            raise Failure(Status.WRONG_RESULT, trial.fault)
        results = trial.results
        if self.checked:
            results = [r if r is None or r.shape[0] != self.problem.n else self._pick(r) for r in results]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        tf32 = self.target.device == "cuda" and not _is_strict(self.problem)
        small, picked = self._small, self._picked(data)
        verdict = run_or_fail(
            lambda: check(small, engine.family, results, exact, kind, tf32=tf32, data=picked), self.target.device
        )
        if not verdict.ok:
            raise Failure(Status.WRONG_RESULT, f"on {kind} data: {first_lines(verdict.reason)}")
        return verdict.error, trial.packed


def checked_images(problem: Problem, device: str) -> tuple[int, ...]:
    """Which images of a large batch are checked; empty: all."""
    if not _has_images(problem) or problem.flops <= ORACLE_FLOPS[device]:
        return ()
    return _first_and_last(problem.n, int(problem.n * ORACLE_FLOPS[device] / problem.flops))


def _fewer(problem: Problem, checked: tuple[int, ...]) -> tuple[int, ...]:
    """Half as many images, including the last; empty if there are no fewer."""
    if not _has_images(problem) or len(checked) == MIN_CHECKED:
        return ()
    return _first_and_last(problem.n, (len(checked) or problem.n) // 2)


def _first_and_last(images: int, count: int) -> tuple[int, ...]:
    """The first images of a batch and the last, `count` in all."""
    return (*range(max(MIN_CHECKED, count) - 1), images - 1)


def _has_images(problem: Problem) -> TypeGuard[LayerProblem]:
    """Whether a problem's images are independent and numerous enough that some may stand for all."""
    if isinstance(problem, ConvolutionProblem) and problem.direction != "fprop":
        return False
    return isinstance(problem, LayerProblem) and problem.n > MIN_CHECKED


def data_key(problem: Problem) -> str:
    """A text that is equal for problems with the same data: they differ only in memory format, activation and pooling."""
    if isinstance(problem, LayoutProblem):
        return problem.key
    if isinstance(problem, SubgraphProblem):
        return problem.text
    plain = replace(problem, epilogue=replace(problem.epilogue, activation="none", pool=None))
    if isinstance(plain, Conv3dProblem):
        return plain.with_layout("ncdhw").key
    return (plain.with_layout("nchw") if isinstance(plain, ConvProblem) else plain).key


def _epilogue_end(problem: Problem) -> tuple[str, Pool | None]:
    layer = isinstance(problem, LayerProblem)
    return (problem.epilogue.activation, problem.epilogue.pool) if layer else ("", None)


def _is_strict(problem: Problem) -> bool:
    return isinstance(problem, LayerProblem) and problem.numerics == "strict"
