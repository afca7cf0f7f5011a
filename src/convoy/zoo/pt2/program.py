"""The program of a .pt2 file: each field by a rule, and dynamic shapes replaced by those of the example.

Guards, which are Python source in the file, are kept from torch: `SizeGuard` reads those that are arithmetic of sizes. If a file
has any other guard, its program takes the sizes of the example only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from convoy.zoo.pt2.expressions import evaluate, solve, symbol_in
from convoy.zoo.pt2.fields import Rule, checked, read_json
from convoy.zoo.pt2.program_rules import program_rules
from convoy.zoo.pt2.refusal import RefusedError

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
    program = checked(schema.ExportedProgram, value, "program", program_rules(symbols))
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
    keywords: list[str] = json.loads(tree["children_spec"][1]["context"]) or []
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
        hint = cast("dict[str, Any]", value.get("hint") or {}).get("as_int")
        if name is not None and hint is not None and symbols.setdefault(name, hint) != hint:
            raise RefusedError(
                f"Its symbol {name} is {hint} in one place and {symbols[name]} in another.", is_code=False
            )
        if name is None and hint is not None and len(value["expr_str"]) < 200 and len(derived) < 1000:
            derived[value["expr_str"]] = hint
        return value

    return {"SymExpr": expression}
