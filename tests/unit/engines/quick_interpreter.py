"""Triton's interpreter in less than half of the time, for scripts that import this module before they import any kernel.

The arithmetic is Triton's own. Bookkeeping is left out: the interpreter replaces the functions of `triton.language` again for
each nested call, and makes types anew for each operation.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import builtins
from collections.abc import Callable
from types import FunctionType

from triton.language import core
from triton.runtime import interpreter

from convoy.engines.triton import split_planes

# Thread blocks that look for the largest value: here each costs milliseconds.
split_planes.MAXIMA = 4

# Half of the time. Devices check this in debug mode alone, and no index of a small tensor comes near 2^31.
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


_REPLACED: set[str] = set()


def _replace_once(
    function: FunctionType, slow: Callable[[FunctionType], interpreter._LangPatchScope] = interpreter._patch_lang
) -> interpreter._LangPatchScope:
    """Replace the language that a module's kernels see, once for the whole process."""
    module = function.__globals__["__name__"]
    if module not in _REPLACED:
        _REPLACED.add(module)
        slow(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _replace_once

_SCALARS: dict[object, object] = {}


def _np_dtype(kind: core.dtype, slow: Callable[[core.dtype], object] = interpreter._get_np_dtype) -> object:
    """NumPy's type, looked up by Triton once for each scalar type."""
    if isinstance(kind, core.block_type):
        kind = kind.element_ty
    if isinstance(kind, core.pointer_type):
        return slow(kind)
    if kind not in _SCALARS:
        _SCALARS[kind] = slow(kind)
    return _SCALARS[kind]


interpreter._get_np_dtype = _np_dtype

_SHAPES: dict[object, core.tuple_type] = {}


def _shape_type(
    values: list[object], fields: object = None, slow: Callable[..., core.tuple_type] = core._type_for_tuple_values
) -> core.tuple_type:
    """The type of a tuple; made once for each shape."""
    plain = [value.value if type(value) is core.constexpr else value for value in values]
    if fields is not None or any(type(value) is not int for value in plain):
        return slow(values, fields)
    key = builtins.tuple(plain)
    if key not in _SHAPES:
        _SHAPES[key] = slow(values)
    return _SHAPES[key]


core._type_for_tuple_values = _shape_type
