"""WatchedModule: a stock module of which a copy runs; what calls keep in its attributes stays its own, other changes are seen."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.program.state.module_state import ModuleState

_MISSING: Final = object()


class WatchedModule:
    """A stock module with a snapshot of its modules, attributes, flags, hooks and tensors' addresses, taken when it was copied.

    Values that are written in place do not count here: the copy has the same tensors, and each part looks at its own.

    Args:
        model: the stock module.
        leftovers: what its calls leave in its attributes, which does not count. Those that are overwritten, and buffers that
            calls replace, are lent to the copy.
        outdated: what was changed already, in a copy or a pickle of a module that is stale; empty if nothing was.
        trains: whether training mode was switched on already.
    """

    def __init__(self, model: nn.Module, leftovers: CallLeftovers, outdated: str = "", trains: bool = False) -> None:
        self.model, self._leftovers = model, leftovers
        self._lent = [(owner, name) for owner, _, name in (path.rpartition(".") for path in leftovers.overwritten)]
        self._state = _LendingState(model, [(model.get_submodule(owner), name) for owner, name in self._lent])
        self._state.allow(leftovers)
        self._state.outdate(outdated or None, trains=trains)

    def renewed(self) -> WatchedModule:
        """The same module, as it is now."""
        return WatchedModule(self.model, self._leftovers)

    @contextmanager
    def lent_to(self, copy: nn.Module) -> Generator[None]:
        """Lend the stock module's attributes to the copy for one call, and take them back afterwards.

        A user may then reset a hidden state on the stock module, or read a counter there.
        """
        pairs = [(self.model.get_submodule(owner), copy.get_submodule(owner), name) for owner, name in self._lent]
        for stock, running, name in pairs:
            _carry(stock, running, name)
        try:
            yield
        finally:
            for stock, running, name in pairs:
                _carry(running, stock, name)
            self._state.accept_lent()

    def change(self) -> str:
        """The change since then, in words; empty if there was none."""
        return self._state.change() or ""

    def trains(self) -> bool:
        """Whether training mode was switched on since."""
        return self._state.trains()

    def __reduce__(self) -> tuple[type[WatchedModule], tuple[nn.Module, CallLeftovers, str, bool]]:
        """In a copy or a pickle: the objects are others there."""
        return WatchedModule, (self.model, self._leftovers, self.change(), self.trains())


class _LendingState(ModuleState):
    """A module's state, of which some attributes and buffers may have any value.

    Args:
        module: the module.
        lent: a module inside and the name of an attribute or buffer of it, for each of those.
    """

    def __init__(self, module: nn.Module, lent: list[tuple[nn.Module, str]]) -> None:
        self._tables = [(table, name) for owner, name in lent for table in (vars(owner), owner._buffers)]
        super().__init__(module, values=False)

    def accept_lent(self) -> None:
        """Put the present values of lent attributes into the snapshot: `change` then finds no difference in them."""
        for table, name in self._tables:
            kept = self._kept_of.get(id(table))
            if kept is not None:
                _copy_item(table, kept, name)

    def _take(self) -> None:
        super()._take()
        lent = {id(table) for table, _ in self._tables}
        pairs = zip(self._live, self._kept, strict=True)
        self._kept_of: dict[int, Any] = {id(live): kept for live, kept in pairs if id(live) in lent}


def _carry(source: nn.Module, target: nn.Module, name: str) -> None:
    """Make an attribute or buffer of one module the very object that another one has, or remove it as there."""
    _copy_item(vars(source), vars(target), name)
    _copy_item(source._buffers, target._buffers, name)


def _copy_item(source: dict[str, Any], target: dict[str, Any], name: str) -> None:
    value = source.get(name, _MISSING)
    if value is not _MISSING:
        target[name] = value
    else:
        target.pop(name, None)
