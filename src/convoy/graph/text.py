"""The text form of a graph: printer, parser and digest. One line per value; equal graphs have equal texts.

    graph 1
    input %x: fp32[1,3,8,8]
    constant %conv.weight: fp32[4,3,3,3]
    %conv: fp32[1,4,8,8] = conv2d(%x, %conv.weight, None, (1, 1), (1, 1), (1, 1), 1)
    %pool: fp32[1,4,4,4], _ = aten.max_pool2d_with_indices.default(%conv, (2, 2))
    return %pool, %x

Values are `%NAME`; an unread output is `_`. Arguments are None, True, False, integers, floats in Python's `repr` (also `inf`
and `nan`), strings in double quotes with JSON's escapes, symbols (`dtype.fp32`) and tuples. A node is named after its first
named output; any other name follows as ` as %NAME`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Final

from convoy.errors import InputError
from convoy.graph.ir import Arg, Graph, Node, Ref, Symbol, Value, ValueKind
from convoy.graph.tokens import GraphLine
from convoy.problem import TensorSpec

HEADER: Final = "graph 1"
"""First line: the format and its version."""

MAX_DEPTH: Final = 16
"""Most nested tuples: the parser is recursive, and an untrusted text must not exhaust the stack."""

_WORDS: Final[dict[str, Arg]] = {"None": None, "True": True, "False": False}


def print_graph(graph: Graph) -> str:
    """The text form of a graph, ending in a newline; `parse_graph` reads it back to an equal graph."""
    lines = [HEADER]
    lines += [f"input {_declare(graph, name)}" for name in graph.inputs]
    lines += [f"constant {_declare(graph, value.name)}" for value in graph.constants()]
    lines += [_node_text(graph, node) for node in graph.nodes]
    lines.append("return " + ", ".join(f"%{name}" for name in graph.outputs) if graph.outputs else "return")
    return "\n".join(lines) + "\n"


def digest(graph: Graph) -> str:
    """Sixteen hex digits that identify a graph: equal graphs have equal digests."""
    return hashlib.sha256(print_graph(graph).encode()).hexdigest()[:16]


def print_arg(arg: Arg) -> str:
    """The text form of one argument."""
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Symbol):
        return arg.text
    if isinstance(arg, str):
        return json.dumps(arg)
    if isinstance(arg, tuple):
        items = ", ".join(map(print_arg, arg))
        return f"({items},)" if len(arg) == 1 else f"({items})"
    return repr(arg)


def _declare(graph: Graph, name: str) -> str:
    return f"%{name}: {graph.values[name].spec}" if name else "_"


def _node_text(graph: Graph, node: Node) -> str:
    outputs = ", ".join(_declare(graph, name) for name in node.outputs)
    args = [*map(print_arg, node.args), *(f"{name}={print_arg(arg)}" for name, arg in node.kwargs)]
    suffix = "" if node.name == _default_name(node.outputs) else f" as %{node.name}"
    return f"{outputs} = {node.op}({', '.join(args)}){suffix}"


def _default_name(outputs: tuple[str, ...]) -> str:
    return next(filter(None, outputs), "")


def parse_graph(text: str) -> Graph:
    """Read a graph from its text form.

    The syntax is checked, and that every value is defined once, before it is read; `verify` checks the rest.

    Raises:
        InputError: naming the line.
    """
    lines = text.split("\n")
    if lines[0] != HEADER:
        raise InputError("graph text, line 1", lines[0], repr(HEADER))
    reader = _GraphReader()
    for number, line in enumerate(lines[1:], start=2):
        if reader.finished and line:
            raise InputError(f"graph text, line {number}", line, "nothing after the return line")
        if line:
            reader.read(GraphLine(line, number))
    if not reader.finished:
        raise InputError(f"graph text, line {len(lines)}", "", "a return line at the end")
    return Graph(tuple(reader.inputs), reader.outputs, reader.values, tuple(reader.nodes))


class _GraphReader:
    """Collects a graph line by line."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.outputs: tuple[str, ...] = ()
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.finished = False

    def read(self, line: GraphLine) -> None:
        if line.accept("input"):
            self.inputs.append(self._define(line, "input"))
        elif line.accept("constant"):
            self._define(line, "constant")
        elif line.accept("return"):
            self.outputs = tuple(self._returned(line))
            self.finished = True
        else:
            self._read_node(line)
        line.end()

    def _define(self, line: GraphLine, kind: ValueKind) -> str:
        name = line.ref()
        line.expect(":")
        if name in self.values:
            raise line.error(f"a new name: %{name} is defined above")
        self.values[name] = Value(name, line.spec(), kind)
        return name

    def _returned(self, line: GraphLine) -> Iterator[str]:
        while not line.at_end():
            yield self._known(line)
            if not line.accept(","):
                return

    def _known(self, line: GraphLine) -> str:
        name = line.ref()
        if name not in self.values:
            raise line.error(f"a value defined above, not %{name}")
        return name

    def _read_node(self, line: GraphLine) -> None:
        # The outputs are written first, but defined after the arguments: a node cannot read itself.
        declared: list[tuple[str, TensorSpec | None]] = []
        names: set[str] = set()
        while not line.accept("="):
            if declared:
                line.expect(",")
            if line.accept("_"):
                declared.append(("", None))
                continue
            name = line.ref()
            if name in self.values or name in names:
                raise line.error(f"a new name: %{name} is defined already")
            names.add(name)
            line.expect(":")
            declared.append((name, line.spec()))
        op = line.word("an operator such as aten.relu.default")
        args, kwargs = self._read_call(line)
        outputs = tuple(name for name, _ in declared)
        name = line.ref() if line.accept("as") else _default_name(outputs)
        self.values.update((n, Value(n, spec, "node")) for n, spec in declared if spec is not None)
        self.nodes.append(Node(name, op, tuple(args), tuple(kwargs), outputs))

    def _read_call(self, line: GraphLine) -> tuple[list[Arg], list[tuple[str, Arg]]]:
        args: list[Arg] = []
        kwargs: dict[str, Arg] = {}
        line.expect("(")
        while not line.accept(")"):
            if args or kwargs:
                line.expect(",")
            before = line.position
            kind, text = line.token("an argument")
            if kind == "word" and line.accept("="):
                if text in kwargs:
                    raise line.error(f"one argument {text!r}")
                kwargs[text] = self._read_arg(line, 0)
                continue
            line.position = before
            if kwargs:
                raise line.error("an argument by name, after those by name")
            args.append(self._read_arg(line, 0))
        return args, list(kwargs.items())

    def _read_arg(self, line: GraphLine, depth: int) -> Arg:
        if line.accept("("):
            return self._read_tuple(line, depth + 1)
        before = line.position
        kind, text = line.token("an argument")
        if kind == "ref":
            line.position = before
            return Ref(self._known(line))
        if kind == "int":
            return int(text)
        if kind == "float":
            value = float(text)
            if math.isinf(value) and not text.endswith("inf"):
                line.position = before
                raise line.error("a number that a 64-bit float holds")
            return value
        if kind == "string":
            return _unquote(line, text)
        if text in _WORDS:
            return _WORDS[text]
        if kind == "word" and text.count(".") == 1 and not text.endswith("."):
            return Symbol(text)
        line.position = before
        raise line.error("an argument: None, True, False, a number, a string, a symbol, a value or a tuple of them")

    def _read_tuple(self, line: GraphLine, depth: int) -> tuple[Arg, ...]:
        if depth > MAX_DEPTH:
            raise line.error(f"at most {MAX_DEPTH} tuples inside one another")
        items: list[Arg] = []
        while not line.accept(")"):
            items.append(self._read_arg(line, depth))
            if not line.accept(","):
                line.expect(")")
                if len(items) == 1:
                    raise line.error("a comma after the only item of a tuple")
                break
        return tuple(items)


def _unquote(line: GraphLine, text: str) -> str:
    try:
        found = str(json.loads(text))
        found.encode()  # a lone surrogate has no digest
    except ValueError as error:
        raise line.error("a string with JSON's escapes") from error
    return found
