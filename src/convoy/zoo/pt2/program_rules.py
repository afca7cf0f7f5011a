"""Rules for the objects of a .pt2 file's program, by their class in torch's schema.

Names become attributes and Python source when torch makes a module of a program; the rules accept plain identifiers only.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from typing import Any, Final

from convoy.narrowing import is_dict, is_list
from convoy.zoo.pt2.expressions import evaluate
from convoy.zoo.pt2.fields import Rule, read_json
from convoy.zoo.pt2.operators import check_operator
from convoy.zoo.pt2.refusal import RefusedError, shown

NAME: Final = re.compile(r"[A-Za-z_]\w{0,500}", re.ASCII)
PATH: Final = re.compile(r"\w{1,200}(?:\.\w{1,200}){0,60}", re.ASCII)
"""Of a parameter or buffer: `layer1.0.conv1.weight`."""
TEXT: Final = re.compile(r"[\w ,.:;/+\-=>()\[\]]{0,300}", re.ASCII)
"""Text that a program holds as a value; torch writes it into source between quotes."""
VERIFIERS: Final = ("TRAINING", "ATEN")
TREES: Final = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
"""Containers of arguments and results; other types would be looked up by name."""
DEVICES: Final = ("cpu", "cuda")
STRIDED: Final = 7
_KEPT_METADATA: Final = "nn_module_stack"
"""Which layer a call came from; reports show it."""
_STACK: Final = re.compile(r"[\w.,;@\[\]()<>' \-]{0,10000}", re.ASCII)


def check_name(name: str) -> None:
    """Refuse a name that is no plain identifier."""
    if NAME.fullmatch(name) is None or keyword.iskeyword(name) or name.startswith("__"):
        raise RefusedError(f"It has a value named {shown(name)}.")


def check_path(path: str) -> None:
    """Refuse the path of a parameter or buffer that is not made of plain names."""
    parts = path.split(".")
    if PATH.fullmatch(path) is None or any(p.startswith("__") or p in ("forward", "_guards_fn") for p in parts):
        raise RefusedError(f"It has a parameter named {shown(path)}.")


def check_text(text: str) -> None:
    """Refuse a text value with quotes, escapes or control characters."""
    if TEXT.fullmatch(text) is None:
        raise RefusedError(f"It holds the text {shown(text)}.")


def program_rules(symbols: Mapping[str, int]) -> dict[str, Rule]:
    """Rules of the second pass, by the schema's class."""

    def symbolic(kind: str) -> Rule:
        def rule(value: Any, where: str) -> Any:
            if "as_expr" not in value:
                return value
            number = evaluate(value["as_expr"]["expr_str"], symbols)
            if isinstance(number, bool) != (kind == "as_bool"):
                raise RefusedError(f"Its {where} is {number}, which is of another type.", is_code=False)
            hint: dict[str, Any] = value["as_expr"].get("hint") or {}
            if kind == "as_int" and hint.get(kind, number) != number:
                raise RefusedError(f"Its {where} is {number}, and said to be {hint[kind]}.", is_code=False)
            return {kind: float(number) if kind == "as_float" else number}

        return rule

    return {
        "SymInt": symbolic("as_int"),
        "SymFloat": symbolic("as_float"),
        "SymBool": symbolic("as_bool"),
        "TensorMeta": tensor_meta,
        "Device": device,
        "TensorArgument": _named("name"),
        "TokenArgument": _named("name"),
        "GraphArgument": _named("name"),
        "SymIntArgument": _named("as_name"),
        "SymFloatArgument": _named("as_name"),
        "SymBoolArgument": _named("as_name"),
        "NamedArgument": _named_argument,
        "CustomObjArgument": _custom,
        "InputToCustomObjSpec": _custom,
        "Argument": _argument,
        "ConstantValue": _text_of("as_string"),
        "InputToConstantInputSpec": _named("name"),
        "InputToParameterSpec": _pathed("parameter_name"),
        "InputToBufferSpec": _pathed("buffer_name"),
        "InputToTensorConstantSpec": _pathed("tensor_constant_name"),
        "BufferMutationSpec": _pathed("buffer_name"),
        "ParameterMutationSpec": _pathed("parameter_name"),
        "GradientToParameterSpec": _pathed("parameter_name"),
        "GradientToUserInputSpec": _named("user_input_name"),
        "UserInputMutationSpec": _named("user_input_name"),
        "Node": _node,
        "Graph": _graph,
        "GraphModule": _graph_module,
        "ExportedProgram": _program,
    }


def tensor_meta(value: Any, where: str) -> Any:
    """The rule of a tensor's sizes: not negative, strided."""
    sizes = [s.get("as_int", -1) for s in (*value["sizes"], *value["strides"], value["storage_offset"])]
    if value["layout"] != STRIDED or len(value["sizes"]) != len(value["strides"]) or len(value["sizes"]) > 64:
        raise RefusedError(f"Its {where} is no strided tensor.", is_code=False)
    if min(sizes) < 0:
        raise RefusedError(f"Its {where} has a negative size.", is_code=False)
    return value


def device(value: Any, where: str) -> Any:
    """The rule of a device."""
    if value["type"] not in DEVICES or not 0 <= (value.get("index") or 0) < 64:
        raise RefusedError(f"Its {where} is {shown(value['type'])}, expected cpu or cuda.", is_code=False)
    return value


def _named(field: str) -> Rule:
    def rule(value: Any, _: str) -> Any:
        if field in value:
            check_name(value[field])
        return value

    return rule


def _pathed(field: str) -> Rule:
    def rule(value: Any, _: str) -> Any:
        check_path(value[field])
        return value

    return rule


def _text_of(field: str) -> Rule:
    def rule(value: Any, _: str) -> Any:
        if field in value:
            check_text(value[field])
        return value

    return rule


def _named_argument(value: Any, _: str) -> Any:
    name = value["name"]  # a positional argument of an operator on graphs has none
    if name and (NAME.fullmatch(name) is None or name.startswith("__")):
        raise RefusedError(f"It has an argument named {shown(name)}.")
    return value


def _custom(_: Any, where: str) -> Any:
    raise RefusedError(f"Its {where} is a custom object.")


def _argument(value: Any, where: str) -> Any:
    ((kind, content),) = value.items()
    if kind in ("as_custom_obj", "as_operator", "as_string_to_argument"):
        raise RefusedError(f"Its {where} is a {kind.removeprefix('as_')}.")
    for text in (content,) if kind == "as_string" else content if kind == "as_strings" else ():
        check_text(text)
    return value


def _node(value: Any, _: str) -> Any:
    check_operator(value["target"])
    if value.get("name") is not None:
        check_name(value["name"])
    stack = value["metadata"].get(_KEPT_METADATA, "")
    kept = {_KEPT_METADATA: stack} if _STACK.fullmatch(stack) else {}
    return value | {"metadata": kept}


def _graph(value: Any, _: str) -> Any:
    if value.get("custom_obj_values"):
        raise RefusedError("Its graph has custom objects.")
    for field in ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"):
        names: dict[str, Any] = value.get(field) or {}
        for name in names:
            check_name(name)
    return value


def _graph_module(value: Any, where: str) -> Any:
    calls = value["module_call_graph"]
    root = calls[0]["signature"] if calls and calls[0]["fqn"] == "" else None
    if root is None:
        raise RefusedError(f"Its {where} lacks the signature of the whole program.", is_code=False)
    for name in root.get("forward_arg_names") or ():
        check_name(name)
    specs = {field: json.dumps(_tree(root[field], where)) for field in ("in_spec", "out_spec")}
    top = json.loads(specs["in_spec"])[1]
    if [top["type"], *(child["type"] for child in top["children_spec"])] != [TREES[0], TREES[0], TREES[2]]:
        raise RefusedError(f"Its {where} takes no arguments and keyword arguments.", is_code=False)
    return value | {
        "module_call_graph": [{"fqn": "", "signature": root | specs}],
        "metadata": {},
        "treespec_namedtuple_fields": {},
    }


def _tree(text: str, where: str) -> Any:
    """How arguments or results are nested: tuples, lists and dictionaries alone."""
    found = read_json(text.encode(), "nesting of arguments")
    if not (is_list(found) and len(found) == 2 and found[0] == 1):
        raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
    _check_tree(found[1], where, 0)
    return found


def _check_tree(tree: Any, where: str, depth: int) -> None:
    if not is_dict(tree) or set(tree) != {"type", "context", "children_spec"} or depth > 32:
        raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    if not is_list(children) or (kind is None and (context is not None or children)):
        raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
    if kind is not None:
        if kind not in TREES or not isinstance(context, str):
            raise RefusedError(f"It has arguments or results of the type {shown(kind)}.")
        keys = read_json(context.encode(), "nesting of arguments")
        if kind in ("builtins.tuple", "builtins.list"):
            if keys is not None:
                raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
        elif not is_list(keys) or len(keys) != len(children):
            raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
        else:
            for key in keys:
                if type(key) is not int and not (isinstance(key, str) and TEXT.fullmatch(key)):
                    raise RefusedError(f"It has an argument named {shown(key)}.")
    for child in children:
        _check_tree(child, where, depth + 1)


def _program(value: Any, _: str) -> Any:
    unknown = [name for name in value.get("verifiers") or () if name not in VERIFIERS]
    if unknown:
        raise RefusedError(f"It names the verifier {shown(unknown[0])}.")
    check_text(value.get("torch_version") or "")
    return value | {"guards_code": [], "range_constraints": {}}
