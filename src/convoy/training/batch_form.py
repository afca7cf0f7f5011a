"""The form of a batch: the model's inputs by position or by name, the targets by position or by the names of the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from convoy.capture.loss_module import model_arguments
from convoy.errors import InputError
from convoy.narrowing import is_dict
from convoy.program.call_forms import Arrangement, CallArguments, ForwardSignature
from convoy.program.calls import Signature, signature_of


@dataclass(frozen=True, slots=True)
class InputForm:
    """How the first entry of a step's example batch holds the model's inputs.

    Attributes:
        kind: `tuple`, `list` or `dict` of several inputs; None for one input.
        count: number of inputs by position.
        names: names of the inputs by keyword.
        normal: signature of the call's normal form (`ForwardSignature.normal`); None if it has none.
    """

    kind: type | None
    count: int
    names: tuple[str, ...]
    normal: Signature | None

    @staticmethod
    def of(model: nn.Module, x: Any) -> InputForm:
        """The form of a batch's first entry."""
        args, kwargs = model_arguments(model, x)
        several = kwargs or not (len(args) == 1 and args[0] is x)
        kind = next((kind for kind in (tuple, list, dict) if type(x) is kind), None) if several else None
        return InputForm(
            kind, len(args), tuple(kwargs), _normal_signature(ForwardSignature(model.forward), args, kwargs)
        )

    @property
    def example(self) -> CallArguments:
        """A call of this form, without values."""
        return (None,) * self.count, dict.fromkeys(self.names)

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The batch's first entry that holds these inputs."""
        if self.kind is None:
            return args[0]
        return kwargs if self.kind is dict else self.kind(args)


class BatchForms:
    """Brings batches into the form of the example that a step was made for.

    Args:
        model: the model.
        loss_fn: (output, *targets) → one number.
        form: form of the example's inputs; None if the step has no program.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], form: InputForm | None) -> None:
        self._model, self._loss_fn, self._form = model, loss_fn, form
        self._forward = ForwardSignature(model.forward)
        self._routes: dict[Signature, Arrangement | None] = {}

    def inputs(self, x: Any) -> Any:
        """A batch's first entry in the form of the example's; as it is if it is another call of the model."""
        form = self._form
        if form is None or form.normal is None or (form.kind is None and isinstance(x, torch.Tensor)):
            return x
        args, kwargs = model_arguments(self._model, x)
        if type(x) is form.kind and len(args) == form.count and tuple(kwargs) == form.names:
            return x
        signature = signature_of(tuple(args), kwargs)
        if signature not in self._routes:
            if _normal_signature(self._forward, args, kwargs) != form.normal:
                return x
            self._routes[signature] = self._forward.arrangement(args, kwargs, form.example)
        arrangement = self._routes[signature]
        return x if arrangement is None else form.pack(*arrangement(tuple(args), kwargs))

    def targets(self, targets: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Targets by position, from targets of which some are given by the names of the loss function's parameters.

        Raises:
            InputError: the loss function has no such parameter, or takes it by name only.
        """
        function = self._loss_fn.forward if isinstance(self._loss_fn, nn.Module) else self._loss_fn
        expected = "names of parameters of the loss that it takes by position"
        try:
            signature = inspect.signature(function)
            bound = signature.bind(None, *targets, **named)
        except (TypeError, ValueError) as error:
            raise InputError("step", list(named), expected, f"{error}: pass them as step(x, *targets).") from error
        by_position = [p for p in signature.parameters.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        places = {parameter.name: index for index, parameter in enumerate(by_position)}
        wrong = [name for name in named if name not in places]
        if wrong:
            raise InputError(
                "step", wrong, expected, "Put what the loss takes by name only into a function of your own."
            )
        last = max(len(targets), *(places[name] for name in named))
        return tuple(bound.arguments.get(p.name, p.default) for p in by_position[1 : last + 1])


def ordered(model: nn.Module, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """A batch whose dictionary of inputs by name is in the order of the model's parameters, so that all orders have one plan."""
    x = batch[0]
    if not is_dict(x) or type(x) is not dict or model_arguments(model, x)[1] is not x:
        return batch
    return (ForwardSignature(model.forward).in_order(x), *batch[1:])


def _normal_signature(forward: ForwardSignature, args: Any, kwargs: Mapping[str, Any]) -> Signature | None:
    normal = forward.normal(args, kwargs)
    return None if normal is None else signature_of(*normal)
