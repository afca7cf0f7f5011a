"""Engines of one kernel that is cut in several ways: what they all do with their forms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from convoy.engines.base import Engine, Executable
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.target import Target


class KernelForm(Protocol):
    """How a kernel's work is cut."""

    @property
    def knobs(self) -> Knobs:
        """The form's name in the database."""
        ...

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for what no kernel can be made of."""
        ...


FormT = TypeVar("FormT", bound=KernelForm)


class FormedEngine(Engine, Generic[FormT]):
    """A convolution engine on GPUs whose settings are forms of one kernel, tried in the order of a model of their time."""

    form: ClassVar[type[Any]]
    """The class of its forms, a `KernelForm`."""

    def kind(self, problem: ConvProblem) -> type[Any]:
        """The class of a problem's forms, where that is not always the same one."""
        del problem
        return self.form

    @abstractmethod
    def forms(self, problem: ConvProblem, units: int) -> Sequence[FormT]:
        """Forms worth trying for a supported problem on so many multiprocessors, by rising guess."""

    @abstractmethod
    def guess_us(self, problem: ConvProblem, form: FormT, units: int) -> float:
        """What the model says of a form, in microseconds."""

    @abstractmethod
    def executable(self, problem: ConvProblem, form: FormT, target: Target) -> Executable:
        """Compile one form; no GPU is needed."""

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Forms by guessed time."""
        assert isinstance(problem, ConvProblem)
        return [form.knobs for form in self.forms(problem, target.units)]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The model's guess."""
        assert isinstance(problem, ConvProblem)
        return self.guess_us(problem, self.kind(problem).of(knobs), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one form."""
        assert isinstance(problem, ConvProblem)
        return self.executable(problem, self.kind(problem).of(knobs), target)
