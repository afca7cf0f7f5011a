"""Forms of a call: arguments by position or by keyword, with or without those that have defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Final, cast

import torch
from torch import nn

from convoy.errors import InputError

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and keyword arguments by name."""

_BY_POSITION: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class ForwardSignature:
    """Parameters of a module's forward. `f(a, b)`, `f(a, b=b)` and `f(b=b, a=a)` are the same call.

    Args:
        forward: the method.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(forward)
        except (TypeError, ValueError):  # some functions in C have no signature
            self._signature = None
        parameters: Mapping[str, Parameter] = self._signature.parameters if self._signature else dict[str, Parameter]()
        self._order = {name: index for index, name in enumerate(parameters)}
        self._names = tuple(name for name, parameter in parameters.items() if parameter.kind in _BY_POSITION)

    @property
    def open_parameters(self) -> str:
        """The parameters `*args` and `**kwargs`, which do not tell what a call means; empty if there are none."""
        parameters = self._signature.parameters.values() if self._signature else ()
        stars = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
        return ", ".join(stars[p.kind] + p.name for p in parameters if p.kind in stars)

    def normal(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments | None:
        """The form that all forms of a call have in common: defaults filled in, by position what can be given so.

        Returns:
            None if the arguments do not fit the signature, or if the signature is unknown.
        """
        if self._signature is None:
            return None
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return bound.args, self.in_order(bound.kwargs)

    def in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments in the order of the parameters; those that only `**kwargs` takes follow by name."""
        last = len(self._order)
        return {name: kwargs[name] for name in sorted(kwargs, key=lambda name: (self._order.get(name, last), name))}

    def arrangement(self, args: Sequence[Any], kwargs: Mapping[str, Any], example: CallArguments) -> Arrangement | None:
        """How arguments in the form of a call are brought into the form of another call with the same normal form."""
        given = [_Source(position=index) for index in range(len(args))], {name: _Source(name=name) for name in kwargs}
        normal = self.normal(*given)
        if normal is None:
            return None
        named = dict(zip(self._names, normal[0], strict=False)) | normal[1]
        return Arrangement(
            tuple(map(_Source.of, normal[0][: len(example[0])])),
            tuple((name, _Source.of(named[name])) for name in example[1]),
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a call's argument comes from: a position, a keyword, or a default."""

    position: int = -1
    name: str = ""
    default: Any = None

    @staticmethod
    def of(value: Any) -> _Source:
        """The source itself, or the source that is a default value."""
        return value if isinstance(value, _Source) else _Source(default=value)

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The argument."""
        if self.position >= 0:
            return args[self.position]
        return kwargs[self.name] if self.name else self.default


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Brings arguments from one form of a call into another.

    Attributes:
        args: sources of the positional arguments.
        kwargs: names and sources of the keyword arguments.
    """

    args: tuple[_Source, ...]
    kwargs: tuple[tuple[str, _Source], ...]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArguments:
        """The arguments in the other form."""
        return (
            tuple([source.take(args, kwargs) for source in self.args]),
            {name: source.take(args, kwargs) for name, source in self.kwargs},
        )


def checked_arguments(model: nn.Module, args: Any, kwargs: Any) -> CallArguments:
    """Arguments as a tuple, and as a dict in the order of the parameters of `forward`; one tensor means a tuple of it.

    Raises:
        InputError: neither.
    """
    if isinstance(args, torch.Tensor):
        given: tuple[Any, ...] = (args,)
    elif isinstance(args, (tuple, list)):
        given = tuple(cast("Sequence[Any]", args))
    else:
        raise InputError("args", args, "a tuple of the model's arguments, or one tensor", "Pass (x,).")
    named: dict[Any, Any] | None = cast("Any", kwargs) if isinstance(kwargs, dict) or kwargs is None else {None: kwargs}
    if named is not None and not all(isinstance(name, str) for name in named):
        raise InputError("kwargs", cast("object", kwargs), "a dict of keyword arguments by name, or None")
    return given, ForwardSignature(model.forward).in_order(named or {})
