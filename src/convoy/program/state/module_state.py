"""ModuleState: what a program assumes about the module that it was made from, and what has changed since."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter, getitem, is_
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.program.calls import is_plain
from convoy.program.state.module_contents import Container, ModuleContents, has_pointer, is_lazy, joined
from convoy.program.state.quick_compare import Addresses, DictVersions, ObjectTypes, VersionCounters

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: Final = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_KIND: Final = attrgetter("dtype", "device", "shape")


class ModuleState:
    """A snapshot of a module: its submodules, parameters, buffers, attributes, training flags and hooks.

    The check must cost less than a replay of the program (ResNet-50: 151 modules, 320 tensors). So the live containers are
    found once, and whether they were written to is asked of all at once. If one was, lists of them are compared with lists of
    copies, which Python does in C, by identity first.

    Args:
        module: the module.
        learned: the part of it whose parameters and buffers are a training program's inputs: their values may change, a buffer
            may be replaced by one like it, and every training flag and every `requires_grad` counts. Without it all values
            count, and evaluation mode that is switched on is no change, because the program computes evaluation.
        inputs: further tensors that are inputs of the training program.
        values: whether values that are written in place count; not where a copy runs on the module's own tensors.

    Not seen: values written through `.data`, a pointer or NumPy; values in inference tensors; what Python reaches through
    closures, globals and other objects' attributes. `docs/concepts/stale-weights.md` lists every kind of change.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        learned: nn.Module | None = None,
        inputs: Sequence[torch.Tensor] = (),
        values: bool = True,
    ) -> None:
        self._module, self._learned, self._inputs, self._values = module, learned, inputs, values
        self._leftovers: list[CallLeftovers] = []
        self._outdated: str | None = None
        self._trains = False
        self._take()

    def _take(self) -> None:
        """Take the snapshot."""
        found = ModuleContents()
        found.add(self._module, "", 0)
        self._modules, self._names = found.modules, found.names
        self._live, self._paths = found.containers, found.paths
        self._kept = [_copied(live) for live in self._live]
        self._empty = found.empty
        self._written = DictVersions([live for live in (*self._live, *self._empty) if isinstance(live, dict)])
        others = [pair for pair in zip(self._live, self._kept, strict=True) if not isinstance(pair[0], dict)]
        self._others = [live for live, _ in others]
        self._others_kept = [kept for _, kept in others]
        self._classes = ObjectTypes(self._modules)
        self._distinct = list(dict.fromkeys(self._classes))
        self._forwards = list(_forwards_of(self._distinct))
        # A tensor of one element compares equal to another of the same value: these are compared by identity besides.
        single = [(live, name, value) for live, name, value in found.held if _is_single(value)]
        self._single = _columns(single)
        self._single_in_lists = _columns([item for item in single if not isinstance(item[0], dict)])
        self._tensors = list({id(value): (path, value) for path, value in found.tensors}.values())
        fixed = self._tensors
        self._parameters: list[torch.Tensor] = []
        self._given: list[tuple[str, torch.Tensor]] = []
        if self._learned is not None:
            free = {id(tensor) for tensor in (*self._learned.parameters(), *self._learned.buffers(), *self._inputs)}
            self._given = [(path, tensor) for path, tensor in fixed if id(tensor) in free and not is_lazy(tensor)]
            fixed = [(path, tensor) for path, tensor in fixed if id(tensor) not in free]
            self._parameters = [tensor for _, tensor in self._tensors if isinstance(tensor, nn.Parameter)]
        self._given_tensors = [tensor for _, tensor in self._given]
        self._kinds = list(map(_KIND, self._given_tensors))
        self._requires_grad = list(map(_REQUIRES_GRAD, self._parameters))
        # Tensors made in inference mode count no versions.
        self._counted = [(path, tensor) for path, tensor in fixed if self._values and not tensor.is_inference()]
        self._versions = [tensor._version for _, tensor in self._counted]
        self._placed = [(path, tensor) for path, tensor in fixed if has_pointer(tensor)]
        self._pointers = Addresses([tensor for _, tensor in self._placed])
        # While these live, nothing else can be given their memory: an equal address is the same memory.
        self._held = {id(tensor): tensor.detach() for _, tensor in self._placed}
        self._counters = self._counters_now()
        self._hooks = self._hooks_now()
        self._handles = RemovableHandle.next_id

    def _counters_now(self) -> VersionCounters:
        counted = [tensor for _, tensor in self._counted]
        aliases = [self._held[id(tensor)] for tensor in counted if id(tensor) in self._held]
        return VersionCounters(aliases, [tensor for tensor in counted if id(tensor) not in self._held])

    def change(self) -> str | None:
        """The first change since the snapshot in words, such as "0.weight was changed in place"; None if there is none."""
        if self._outdated is not None:
            return self._outdated
        if self._is_same():
            return None
        found = next(self._changes(), None)
        if found is None:  # only what the program allows for was changed
            self._take()
        return found

    def outdate(self, change: str | None, *, trains: bool = False) -> None:
        """Say that the programs do not fit what the snapshot was taken of, as in a copy of a module that was changed.

        Args:
            change: what was changed before; None leaves things as they are.
            trains: whether training mode was switched on before.
        """
        self._outdated = change if change is not None else self._outdated
        self._trains = self._trains or trains

    def allow(self, leftovers: CallLeftovers) -> None:
        """Do not count what calls of the module themselves leave in its attributes as a change."""
        if leftovers.filled or leftovers.overwritten:
            self._leftovers.append(leftovers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every parameter, buffer and other tensor that the module held when the snapshot was taken."""
        return [tensor for _, tensor in self._tensors]

    def trains(self) -> bool:
        """Whether training mode was switched on since, on the module or a part of it."""
        own = zip(self._live, self._kept, strict=True)
        return self._trains or any(
            isinstance(live, dict)
            and isinstance(kept, dict)
            and live.get("training") is True
            and kept.get("training") is False
            for live, kept in own
        )

    def _is_same(self) -> bool:
        try:
            return (
                self._holds_the_same()
                and self._handles == RemovableHandle.next_id
                and self._classes.unchanged()
                and list(_forwards_of(self._distinct)) == self._forwards
                and list(map(_REQUIRES_GRAD, self._parameters)) == self._requires_grad
                and list(map(_KIND, self._given_tensors)) == self._kinds
                and self._counters.unwritten()
                and self._pointers.unmoved()
            )
        except Exception:  # everything: an attribute's own __eq__ may raise, as a tensor's does; then it differs
            return False

    def _holds_the_same(self) -> bool:
        """Whether every container holds what it held. Dicts that nobody wrote to need no look at what is in them."""
        if self._written.unwritten():
            return not self._others or (self._others == self._others_kept and _are_held(*self._single_in_lists))
        if any(self._empty):
            return False
        same = self._live == self._kept and _are_held(*self._single)
        if same:
            self._written.renew()
        return same

    # --- the change in words ------------------------------------------------------------------------------------------------

    def _changes(self) -> Iterator[str]:
        for path, live, kept in zip(self._paths, self._live, self._kept, strict=True):
            yield from self._container_changes(path, live, kept)
        if any(self._empty):
            yield "a parameter, buffer or submodule was added"
        for name, module, kind in zip(self._names, self._modules, self._classes, strict=True):
            if type(module) is not kind:
                yield f"{_shown(name)} became a {type(module).__name__}"
        for kind, forward in zip(self._distinct, self._forwards, strict=True):
            if next(_forwards_of([kind])) is not forward:
                yield f"{kind.__name__}.forward was replaced"
        yield from self._tensor_changes()

    def _tensor_changes(self) -> Iterator[str]:
        if self._hooks_now() != self._hooks:
            yield "a hook was registered or removed"
        yield from (f"{_shown(path)}.requires_grad was changed" for path in self._flag_changes())
        for (path, tensor), kind in zip(self._given, self._kinds, strict=True):
            if _KIND(tensor) != kind:
                yield f"{_shown(path)} got another dtype, device or shape"
        for (path, tensor), version in zip(self._counted, self._versions, strict=True):
            if tensor._version != version:
                yield f"{_shown(path)} was changed in place"
        for (path, tensor), pointer in zip(self._placed, self._pointers, strict=True):
            if not has_pointer(tensor) or tensor.data_ptr() != pointer:
                yield f"{_shown(path)} lies in other memory"

    def _container_changes(self, path: str, live: Container, kept: Container) -> Iterator[str]:
        if not isinstance(live, dict) or not isinstance(kept, dict):
            if not _is_equal(live, kept) and not self._is_left_by_calls(path):
                yield f"{_shown(path)} was changed"
            return
        for key in dict.fromkeys((*kept, *live)):
            before, now = kept.get(key, _MISSING), live.get(key, _MISSING)
            if before is now or (not isinstance(before, torch.Tensor) and _is_equal(before, now)):
                continue
            if self._is_allowed(key, before, now) or self._is_left_by_calls(joined(path, key)):
                continue
            if key == "training":
                yield f"the training flag of {_shown(path)} was changed"
                continue
            how = "was replaced" if isinstance(before, (torch.Tensor, nn.Module)) else "was changed"
            if before is _MISSING or now is _MISSING:
                how = "was added" if before is _MISSING else "was removed"
            yield f"{_shown(joined(path, key))} {how}"

    def _is_allowed(self, key: object, before: object, now: object) -> bool:
        if self._learned is None:
            return key == "training" and now is False
        if (
            not isinstance(before, torch.Tensor)
            or not isinstance(now, torch.Tensor)
            or isinstance(before, nn.Parameter)
        ):
            return False
        kind = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
        # `Module.to` replaces buffers, and a program's input is what the name stands for.
        return kind and is_plain(now) and any(now is buffer for buffer in self._learned.buffers())

    def _is_left_by_calls(self, path: str) -> bool:
        if not self._leftovers:
            return False
        modules = dict(zip(self._names, self._modules, strict=True))
        return any(one.explain(path, modules) for one in self._leftovers)

    def _flag_changes(self) -> Iterator[str]:
        paths = {id(tensor): path for path, tensor in self._tensors}
        for tensor, before in zip(self._parameters, self._requires_grad, strict=True):
            if tensor.requires_grad != before:
                yield paths[id(tensor)]

    def _hooks_now(self) -> list[tuple[int, str, tuple[Any, ...]]]:
        """All hooks that a call of the module runs: (module's index, kind, hooks); -1 for hooks of all modules."""
        everywhere = ((-1, kind, getattr(nn_module, kind, {})) for kind in GLOBAL_HOOKS)
        own = ((index, kind, getattr(m, kind, {})) for index, m in enumerate(self._modules) for kind in HOOKS)
        return [(index, kind, tuple(hooks.items())) for index, kind, hooks in (*everywhere, *own) if hooks]


_MISSING: Final = object()


def _forwards_of(kinds: Sequence[type[nn.Module]]) -> Iterator[object]:
    """The forward of each class; None for a scripted module's, which belongs to the object."""
    return map(getattr, kinds, repeat("forward"), repeat(None))


def _copied(container: Container) -> Container:
    kinds = (dict, list, set, deque)
    return next(kind(container) for kind in kinds if isinstance(container, kind))  # pyright: ignore


def _is_equal(one: object, other: object) -> bool:
    try:
        return bool(one is other or one == other)
    except Exception:  # everything: any class's own __eq__ or __bool__ may raise, as an array's does
        return False


def _is_single(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.numel() <= 1


def _columns(items: Sequence[tuple[Any, Any, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    return [a for a, _, _ in items], [b for _, b, _ in items], [c for _, _, c in items]


def _are_held(containers: list[Any], keys: list[Any], values: list[Any]) -> bool:
    """Whether each container holds that very value at its key."""
    return all(map(is_, map(getitem, containers, keys), values))


def _shown(path: str) -> str:
    return path or "the module"
