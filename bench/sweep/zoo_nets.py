"""One small member of every family of timm and torchvision, by name: the nets of bench/zoo.py."""

from __future__ import annotations

import re
from collections.abc import Iterable

from convoy.zoo import import_torchvision

SMALL = (
    "atto", "femto", "pico", "nano", "zepto", "xxs", "xxtiny", "tiny", "xs", "micro", "small", "mini", "t0", "s0", "b0",
    "lite", "_s",
)  # fmt: skip
"""Words by which small members are known, the smallest first."""


def families() -> dict[str, str]:
    """Family → name of a member, as `convoy.zoo.load_model` takes it. A family of timm is a module of it."""
    models = import_torchvision().models
    import timm

    found: dict[str, list[str]] = {}
    for module in timm.list_modules():
        found[f"timm:{module}"] = [
            f"timm:{name}" for name in timm.list_models(module=module) if not name.startswith("test_")
        ]
    for name in models.list_models():
        if not name.startswith("quantized_"):
            found.setdefault(re.sub(r"[\d_].*", "", name), []).append(name)
    return {family: smallest(names) for family, names in found.items() if names}


def smallest(names: Iterable[str]) -> str:
    """The name that promises the smallest net: by a word for it, then by the numbers in it, then by its length."""

    def order(name: str) -> tuple[int, int, int, str]:
        plain = name.rpartition(":")[2]
        word = next((place for place, word in enumerate(SMALL) if word in plain), len(SMALL))
        return word, sum(map(int, re.findall(r"\d+", plain))), len(plain), name

    return min(names, key=order)
