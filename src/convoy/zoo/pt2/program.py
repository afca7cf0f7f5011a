"""The program of a .pt2 file: each field by a rule, and dynamic shapes replaced by those of the example.

Names become attributes and Python source when torch makes a module of a program; they are identifiers here and nothing else.
Guards, which are Python source in the file, are kept from torch: `SizeGuard` reads those that are arithmetic of sizes. Where one
is anything else, the program takes the example's sizes alone.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from convoy.zoo.pt2.expressions import evaluate, solve, symbol_in
from convoy.zoo.pt2.fields import Rule, checked, read_json
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


_SIZE: Final = re.compile(r"L\['([A-Za-z_]\w{0,500})'\]\.size\(\)\[(\d{1,2})\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """A condition on the sizes of inputs.

    Attributes:
        text: as the file has it: `(L['x'].size()[2] % 2) == 0`.
        expression: the same with the symbols s0, s1, ... for sizes.
        sizes: the input's name and the dimension of each.
    """

    text: str
    expression: str
    sizes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(text: str) -> SizeGuard:
        """Parse one."""
        sizes = tuple(dict.fromkeys((name, int(dim)) for name, dim in _SIZE.findall(text)))
        places = {size: f"s{index}" for index, size in enumerate(sizes)}
        return SizeGuard(text, _SIZE.sub(lambda found: places[found[1], int(found[2])], text), sizes)

    def holds(self, given: Mapping[tuple[str, int], int]) -> bool:
        """Whether it holds for these sizes; raises RefusedError where it is no condition on them."""
        values = {f"s{index}": given[size] for index, size in enumerate(self.sizes) if size in given}
        return evaluate(self.expression, values) is True


@dataclass(frozen=True, slots=True)
class DynamicSizes:
    """Sizes of a program's inputs that its file lets vary.

    Attributes:
        inputs: by the input's name, its sizes: a number, or an expression of symbols.
        ranges: by symbol, the least and the largest value; None where there is no bound.
        guards: conditions that the sizes must meet together.
        keywords: names of the keyword arguments, in their order.
    """

    inputs: Mapping[str, tuple[int | str, ...]]
    ranges: Mapping[str, tuple[int | None, int | None]]
    guards: tuple[SizeGuard, ...]
    keywords: tuple[str, ...]


def read_program_json(data: bytes) -> tuple[dict[str, Any], DynamicSizes]:
    """Check `models/model.json`.

    Returns:
        The program with the example's sizes in place of symbolic ones, as JSON; and which sizes may vary.

    Raises:
        RefusedError: a part that is not on the list of allowed parts.
    """
    from torch._export.serde import schema

    value = read_json(data, "models/model.json")
    symbols: dict[str, int] = {}
    derived: dict[str, int] = {}
    checked(schema.ExportedProgram, value, "program", _collecting(symbols, derived))
    _solve_all(derived, symbols)
    program = checked(schema.ExportedProgram, value, "program", _rules(symbols))
    return program, _dynamic(value, program)


def _dynamic(value: dict[str, Any], program: dict[str, Any]) -> DynamicSizes:
    """Which sizes may vary: `value` is as in the file, `program` has the example's sizes."""
    before, after = (v["graph_module"]["graph"]["tensor_values"] for v in (value, program))
    specs = value["graph_module"]["signature"]["input_specs"]
    arguments = [spec["user_input"]["arg"] for spec in specs if "user_input" in spec]
    names = [argument["as_tensor"]["name"] for argument in arguments if "as_tensor" in argument]
    if not set(names) <= set(before):
        raise RefusedError("It lacks the sizes of an input.", is_code=False)
    example = {name: tuple(size["as_int"] for size in after[name]["sizes"]) for name in names}
    inputs = {
        name: tuple(s["as_int"] if "as_int" in s else s["as_expr"]["expr_str"] for s in before[name]["sizes"])
        for name in names
    }
    tree = json.loads(program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"])[1]
    keywords = json.loads(tree["children_spec"][1]["context"]) or []
    guards = tuple(map(SizeGuard.of, value.get("guards_code") or ()))
    given = {(name, dim): size for name, sizes in example.items() for dim, size in enumerate(sizes)}
    try:
        whole = all(guard.holds(given) for guard in guards)
    except RefusedError:
        whole = False
    if not whole:
        return DynamicSizes(example, {}, (), tuple(keywords))
    ranges = {name: (r["min_val"], r["max_val"]) for name, r in value["range_constraints"].items()}
    return DynamicSizes(inputs, ranges, guards, tuple(keywords))


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


def _solve_all(derived: Mapping[str, int], symbols: dict[str, int]) -> None:
    """Values of symbols that no size is by itself: `2*s0` is 8 where s0 is 4."""
    for _ in range(4):  # s1 from s0, s2 from s1, ...
        for text, value in derived.items():
            found = solve(text, value, symbols)
            if found is not None:
                symbols[found[0]] = found[1]


def _collecting(symbols: dict[str, int], derived: dict[str, int]) -> dict[str, Rule]:
    """Rules of the first pass: the value of each symbol in the example, and of expressions of one symbol."""

    def expression(value: Any, _: str) -> Any:
        name = symbol_in(value["expr_str"])
        hint = (value.get("hint") or {}).get("as_int")
        if name is not None and hint is not None and symbols.setdefault(name, hint) != hint:
            raise RefusedError(
                f"Its symbol {name} is {hint} in one place and {symbols[name]} in another.", is_code=False
            )
        if name is None and hint is not None and len(value["expr_str"]) < 200 and len(derived) < 1000:
            derived[value["expr_str"]] = hint
        return value

    return {"SymExpr": expression}


def _rules(symbols: Mapping[str, int]) -> dict[str, Rule]:
    """Rules of the second pass, by the schema's class."""

    def symbolic(kind: str) -> Rule:
        def rule(value: Any, where: str) -> Any:
            if "as_expr" not in value:
                return value
            number = evaluate(value["as_expr"]["expr_str"], symbols)
            if isinstance(number, bool) != (kind == "as_bool"):
                raise RefusedError(f"Its {where} is {number}, which is of another type.", is_code=False)
            hint = value["as_expr"].get("hint") or {}
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
        for name in value.get(field) or {}:
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
    if not (isinstance(found, list) and len(found) == 2 and found[0] == 1):
        raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
    _check_tree(found[1], where, 0)
    return found


def _check_tree(tree: Any, where: str, depth: int) -> None:
    if not isinstance(tree, dict) or set(tree) != {"type", "context", "children_spec"} or depth > 32:
        raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    if not isinstance(children, list) or (kind is None and (context is not None or children)):
        raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
    if kind is not None:
        if kind not in TREES or not isinstance(context, str):
            raise RefusedError(f"It has arguments or results of the type {shown(kind)}.")
        keys = read_json(context.encode(), "nesting of arguments")
        if kind in ("builtins.tuple", "builtins.list"):
            if keys is not None:
                raise RefusedError(f"Its {where} has an unknown nesting of arguments.")
        elif not isinstance(keys, list) or len(keys) != len(children):
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
