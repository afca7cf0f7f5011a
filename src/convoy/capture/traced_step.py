"""TracedStep: a copy of a model and its loss that AOTAutograd may run as it likes; nothing of the user's takes part."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook

from convoy.capture.batch import flatten_batch
from convoy.capture.copies import copy_around
from convoy.capture.loss_module import LossModule
from convoy.capture.state.python_state import PythonState
from convoy.capture.step_tensors import StepTensors
from convoy.capture.tensor_substitution import TensorSubstitution
from convoy.capture.unrolled_recurrence import RecurrenceGuard
from convoy.capture.user_hooks import own_user_hook
from convoy.errors import CaptureError


class UnliftedError(Exception):
    """Code read tensors that are no inputs of the graph yet."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(f"{len(tensors)} tensors are held by code")
        self.tensors = list(tensors)


class SharedGradientError(CaptureError):
    """Two parameters share one gradient value, like the biases of an LSTM; AOTAutograd's signature cannot express that."""


class UnusedParametersError(CaptureError):
    """A parameter that requires a gradient has no part in the loss."""


class TracedStep(nn.Module):
    """The batch's tensors → the loss, for a tracer.

    Modules are copied, so that attributes which a forward writes are the copy's; tensors are shared, for a tracer computes
    nothing. Every tensor is held once, as `p0`, `p1`, ... and `b0`, ..., and is put where the modules look for it in each call:
    weights that two modules share are one input.

    Args:
        module: the model and its loss.
        batch: an example.
        lifted: tensors that code holds, as far as they are known.
        idle: names of parameters that have no part in the loss.
        apart: whether each parameter's gradient must be a value of its own.

    Attributes:
        names: `p0` → the tensor's name in `StepTensors`.
        learned: names of the parameters that get a gradient.
        leaves: the batch's tensors, none sharing memory with another: each is an input of its own.
        lifted: as given.
        reached: names of the tensors that code read by itself.
    """

    def __init__(
        self,
        module: LossModule,
        batch: tuple[Any, ...],
        lifted: Sequence[torch.Tensor],
        idle: set[str],
        *,
        apart: bool = False,
    ) -> None:
        super().__init__()
        self._apart = apart
        tensors = StepTensors(module, lifted)
        self.lifted = list(lifted)
        self.reached: set[str] = set()
        self.learned = tuple(name for name in tensors.learning if name not in idle)
        self.names: dict[str, str] = {}
        self.device = next((p.device for p in tensors.parameters.values()), torch.device("cpu"))
        shared: dict[int, torch.Tensor] = {}
        self._slots: dict[int, str] = {}
        self._originals: dict[int, str] = {}
        for index, (name, tensor) in enumerate(tensors.parameters.items()):
            _refuse_strange(name, tensor, self.device)
            held = nn.Parameter(tensor.detach(), tensor.requires_grad and name not in idle)
            self.register_parameter(f"p{index}", held)
            self._hold(f"p{index}", name, tensor, held, shared)
        for index, (name, tensor) in enumerate(tensors.buffers.items()):
            _refuse_strange(name, tensor, self.device)
            held = tensor.detach()
            self.register_buffer(f"b{index}", held)
            self._hold(f"b{index}", name, tensor, held, shared)
        # In a list, so that its modules are none of this module's.
        self._copy = [module.rebuilt(partial(copy_around, tensors=shared))]
        by_held = {id(getattr(self, slot)): slot for slot in self.names}
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (part, key, by_held[id(value)])
            for inner in self._copy[0].modules()
            for part in (inner._parameters, inner._buffers)
            for key, value in part.items()
            if value is not None
        ]
        self._batch = flatten_batch(batch)
        self.leaves = _separate(self._batch.tensors)
        self._unlifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._python = PythonState(self._copy[0])

    def _hold(
        self, slot: str, name: str, tensor: torch.Tensor, held: torch.Tensor, shared: dict[int, torch.Tensor]
    ) -> None:
        self.names[slot] = name
        shared[id(tensor)] = held
        self._originals[id(tensor)] = slot
        self._slots |= {id(tensor): slot, id(held): slot}

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The loss of a batch, and where it is scaled the loss itself."""
        self._unlifted.clear()
        traced: dict[str, torch.Tensor] = {slot: getattr(self, slot) for slot in self.names}
        if self._apart:
            traced = {slot: cast("Any", _OwnGradient).apply(t) if t.requires_grad else t for slot, t in traced.items()}
        substitution = TensorSubstitution({key: traced[slot] for key, slot in self._slots.items()}, self._note)
        with self._placed(traced), substitution, RecurrenceGuard(), _no_foreign_hooks(), self._python.watched():
            try:
                made = self._copy[0](*self._batch.rebuild(leaves))
            except Exception as error:  # everything: the user's forward may fail because of the stand-ins that it got
                if self._unlifted:
                    raise UnliftedError([tensor for tensor, _ in self._unlifted.values()]) from error
                raise
            if self._unlifted:
                raise UnliftedError([tensor for tensor, _ in self._unlifted.values()])
            self._put_reassigned(traced)
        self.reached |= {self.names[slot] for key, slot in self._originals.items() if key in substitution.used}
        return made

    def idle_parameters(self) -> list[str]:
        """Names of the parameters that the loss does not depend on, by a run on fake tensors."""
        slots = {name: slot for slot, name in self.names.items()}
        with FakeTensorMode() as mode, torch.enable_grad():
            fakes: dict[str, torch.Tensor] = {slot: mode.from_tensor(getattr(self, slot)) for slot in self.names}
            leaves = [mode.from_tensor(leaf) for leaf in self.leaves]
            loss = torch.func.functional_call(self, fakes, tuple(leaves))[0]
            wanted = [fakes[slots[name]] for name in self.learned]
            found = cast("Sequence[torch.Tensor | None]", torch.autograd.grad(loss, wanted, allow_unused=True))
        return [name for name, gradient in zip(self.learned, found, strict=True) if gradient is None]

    @contextlib.contextmanager
    def faked(self) -> Generator[tuple[torch.Tensor, ...]]:
        """A context in which the parameters and buffers are fake tensors; gives the batch's leaves as such.

        The tracer runs the joint graph on the tensors that it is given: on real ones that would be a whole training step.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        before = dict(self._parameters), dict(self._buffers)
        try:
            for held in cast("list[dict[str, Any]]", [self._parameters, self._buffers]):
                for slot, tensor in held.items():
                    held[slot] = mode.from_tensor(tensor)
            yield tuple(mode.from_tensor(leaf) for leaf in self.leaves)
        finally:
            self._parameters.update(before[0])
            self._buffers.update(before[1])

    def check_python_state(self) -> None:
        """Refuse what a graph would leave out.

        Raises:
            CaptureError: a forward stores tensors on a module, counts its calls, or draws numbers from Python or NumPy.
        """
        self._python.check()

    @contextlib.contextmanager
    def _placed(self, traced: Mapping[str, torch.Tensor]) -> Generator[None]:
        """The tracer's tensors where the copy's modules look for them."""
        before = [(part, key, part[key]) for part, key, _ in self._places]
        try:
            for part, key, slot in self._places:
                part[key] = traced[slot]
            yield
        finally:
            for part, key, value in before:
                part[key] = value

    def _put_reassigned(self, traced: Mapping[str, torch.Tensor]) -> None:
        """Write a buffer that forward replaced (`self.mean = ...`) into the buffer that was there: the graph updates that one."""
        for part, key, slot in self._places:
            new, old = part.get(key), traced[slot]
            if new is old:
                continue
            if not isinstance(new, torch.Tensor) or slot.startswith("p") or new.requires_grad:
                raise CaptureError(f"forward replaces {self.names[slot]}, which a graph cannot hold")
            if new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(f"forward changes the shape or dtype of {self.names[slot]}")
            old.copy_(new)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that must be lifted; gives one of its kind, with which the run may go on and find more."""
        if id(tensor) not in self._unlifted:
            if tensor.grad_fn is not None:
                raise CaptureError("code holds a tensor with a gradient of an earlier computation")
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
                raise CaptureError(f"code holds a {type(tensor).__name__} of layout {tensor.layout}")
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            self._unlifted[id(tensor)] = tensor, made.requires_grad_(tensor.requires_grad)
        return self._unlifted[id(tensor)][1]


class _OwnGradient(torch.autograd.Function):
    """A value as it is; its gradient is copied."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        """The value."""
        return value.view_as(value)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *grad_outputs
        _: Any, gradient: torch.Tensor
    ) -> torch.Tensor:
        """A copy of the gradient."""
        return gradient.clone()


def _refuse_strange(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse tensors that are no ordinary ones of the model's device."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise CaptureError(f"{name} is a {type(tensor).__name__}, and no ordinary tensor")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise CaptureError(f"{name} is a {tensor.layout} tensor on {tensor.device}; expected a dense one with data")
    if tensor.device != device:
        raise CaptureError(f"{name} is on {tensor.device} and the model's first parameter on {device}")


def _separate(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors of which none shares memory with another: a tracer takes two that do for one."""
    seen: set[int] = set()
    made: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested:
            raise CaptureError(f"the batch holds a {tensor.layout} tensor; expected dense ones")
        if tensor.requires_grad:
            raise CaptureError("a tensor of the batch requires a gradient")
        place = tensor.untyped_storage().data_ptr()
        made.append(tensor.clone() if place in seen else tensor.detach())
        seen.add(place)
    return tuple(made)


@contextlib.contextmanager
def _no_foreign_hooks() -> Generator[None]:
    """Refuse a module with hooks of the user's before it calls them, wherever the code has it from."""
    thread = threading.get_ident()

    def check(module: nn.Module, _: object) -> None:
        hook = own_user_hook(module, backward=True) if threading.get_ident() == thread else ""
        if hook:
            raise CaptureError(f"a {type(module).__name__} has a {hook}, which Python must call in every step")

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
