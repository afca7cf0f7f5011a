"""Which operators a program from a file may call: PyTorch's on tensors and sizes, and none that reads or writes files."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, cast

import torch

from convoy.zoo.pt2.refusal import RefusedError, shown

ON_SIZES: Final = frozenset(
    [
        f"_operator.{n}"
        for n in [
            "add",
            "sub",
            "mul",
            "floordiv",
            "truediv",
            "mod",
            "neg",
            "pos",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "and_",
            "or_",
            "not_",
            "getitem",
        ]
    ]
    + [f"math.{n}" for n in ("ceil", "floor", "trunc")]
    + [f"torch.{n}" for n in ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_sum", "sym_ite")]
)
"""Functions of Python on sizes that torch.export writes into programs; no powers, whose results have no bound."""

HIGHER_ORDER: Final = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators that call a graph of the same file."""

NAMESPACES: Final = ("aten", "prims", "torchvision")

WORDS: Final = frozenset(
    [
        "reduce",
        "norm",
        "assert_msg",
        "approximate",
        "mode",
        "ord",
        "rounding_mode",
        "interpolation",
        "driver",
        "p",
        "pad_mode",
        "UPLO",
        "side",
        "padding",
        "equation",
        "indexing",
        "padding_side",
        "activation",
    ]
)
"""Arguments that are text in the schemas of operators on tensors: each chooses among a few variants."""

_TARGET: Final = re.compile(r"torch\.ops\.([a-z]+)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
_HARMLESS: Final = re.compile(
    r"(?:(?:Optional|List)\[)*(?:Tensor|int|float|bool|number|complex|Device|ScalarType|Layout|MemoryFormat|SymInt|Generator|str)\]*",
)
"""Types of arguments: values alone. No Storage, Stream, Any or class."""


def check_operator(target: str) -> None:
    """Refuse a target that is no operator of PyTorch on tensors and sizes; raises RefusedError."""
    if target in ON_SIZES or target in {f"torch.ops.higher_order.{name}" for name in HIGHER_ORDER}:
        return
    if not is_allowed(target):
        raise RefusedError(f"It calls {shown(target)}, which is no operator on tensors that Convoy knows.")


_PACKET: Final = cast("type[Any]", torch._ops.OpOverloadPacket)


@cache
def is_allowed(target: str) -> bool:
    """Whether a target names an operator that takes and gives values alone."""
    found = _TARGET.fullmatch(target)
    if found is None or found[1] not in NAMESPACES or found[2].startswith("__"):
        return False
    if found[1] == "torchvision":
        from convoy.zoo.torchvision_import import import_torchvision

        import_torchvision()
    packet = cast("Any", getattr(getattr(torch.ops, found[1]), found[2], None))
    if not isinstance(packet, _PACKET) or found[3] not in packet.overloads():
        return False
    schema = getattr(packet, found[3])._schema
    arguments = [(a.name, str(a.type)) for a in schema.arguments]
    results = [str(r.type) for r in schema.returns]
    if any(_HARMLESS.fullmatch(kind) is None for kind in [*results, *(kind for _, kind in arguments)]):
        return False
    texts = [name for name, kind in arguments if "str" in kind]
    return set(texts) <= WORDS and (
        any("Tensor" in kind for kind in [*results, *(kind for _, kind in arguments)])
        or found[2] in ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
    )
