"""StockInterface: the attributes, items and state dict of a stock module, on the module that stands in for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from torch import nn

_OWN: Final = frozenset({"model", "program_cache", "size_programs", "parts", "_watched", "_recopy"})
"""Attributes of the optimized modules themselves, which their constructors set."""


class StockInterface(nn.Module):
    """What a module that stands in for another offers besides `forward`.

    Reading, setting and deleting an attribute or an item that the stock module has does so on the stock module. An operator that
    the stock module does not have, such as `len()` of a module that is no container, raises the stock module's error.

    Attributes:
        model: the module that runs where no program does.
    """

    model: nn.Module

    @property
    def stock(self) -> nn.Module:
        """The module that was optimized, as the user gave it."""
        return self.model

    # --- attributes ---------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """The stock module's attributes and methods, such as `num_classes`, besides its own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _OWN or name.startswith("__") or not self._has_stock():
                raise
            return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute: on the stock module if it has one of this name, and this module has none."""
        if not self._is_own(name) and hasattr(self.stock, name):
            setattr(self.stock, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute, of the stock module if it is its own."""
        if not self._is_own(name) and hasattr(self.stock, name):
            delattr(self.stock, name)
        else:
            cast("Any", super()).__delattr__(name)

    def __dir__(self) -> list[str]:
        """The names of both."""
        return sorted({*super().__dir__(), *dir(self.stock)})

    def _has_stock(self) -> bool:
        """Whether the stock module is known: it is not while an object is constructed, copied or unpickled."""
        return "model" in self.__dict__.get("_modules", {})

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is this module's, not the stock module's."""
        held = self.__dict__
        tables = (held, *(held.get(table, {}) for table in ("_parameters", "_buffers", "_modules")))
        return name in _OWN or not self._has_stock() or hasattr(type(self), name) or any(name in one for one in tables)

    # --- items --------------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        """An item of the stock module, such as a layer of an `nn.Sequential`; a slice of one is an `nn.Sequential`."""
        return cast("Any", self.stock)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replace an item of the stock module. The programs are stale then; see `refresh`."""
        cast("Any", self.stock)[key] = value

    def __delitem__(self, key: Any) -> None:
        """Delete an item of the stock module. The programs are stale then; see `refresh`."""
        del cast("Any", self.stock)[key]

    def __len__(self) -> int:
        """The number of the stock module's items."""
        return len(cast("Any", self.stock))

    def __iter__(self) -> Iterator[Any]:
        """The stock module's items."""
        return iter(cast("Any", self.stock))

    def __reversed__(self) -> Iterator[Any]:
        """The stock module's items from the last to the first."""
        return reversed(cast("Any", self.stock))

    def __contains__(self, item: Any) -> bool:
        """Whether the stock module has such an item."""
        return item in cast("Any", self.stock)

    def __bool__(self) -> bool:
        """Truth of the stock module: true, unless it is a container without items or defines it otherwise."""
        return bool(self.stock)

    # --- state dict ---------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The stock module's state dict, under its own names."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the stock module's state dict; names may begin with `model.`, as a wrapper adds it. Call `refresh` afterwards."""
        return self.model.load_state_dict(stock_names(state_dict, self.model), strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As a part of a larger module that loads its state dict: rename the entries as `model` expects them."""
        part = {key.removeprefix(prefix): state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        found = stock_names(part, self.model)
        state_dict.update((f"{prefix}model.{key}", value) for key, value in found.items())
        cast("Any", super())._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def stock_names(state_dict: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """A state dict under the stock module's names: a prefix `model.` on all of them, as a wrapper adds it, is removed."""
    own = model.state_dict().keys()
    wrapped = bool(state_dict) and all(key.startswith("model.") for key in state_dict) and not own >= state_dict.keys()
    if not wrapped:
        return state_dict
    found = OrderedDict((key.removeprefix("model."), value) for key, value in state_dict.items())
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        kept = {key.removeprefix("model").removeprefix("."): value for key, value in versions.items()}
        setattr(found, "_metadata", kept)  # noqa: B010 - PyTorch's state dicts have this attribute too, outside of their type
    return found
