"""The executable specification of the IR: the rules that every graph must satisfy, one function each.

Each rule is named by its function; an InputError names the rule and the node or value that breaks it. The arguments of ATen
operators are not checked here (no torch): `engines.interpret` resolves them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, cast

from convoy.errors import InputError
from convoy.graph.ir import CONVOLUTIONS, GRADIENTS, LAYERS, VOLUME_GRADIENTS, Graph, Node, Ref, Symbol
from convoy.graph.layers import (
    conv3d_problem,
    conv_problem,
    gradient3d_problem,
    gradient_problem,
    is_integer,
    is_pair,
    is_triple,
    linear_problem,
)
from convoy.problem import DTYPE_BYTES, TensorSpec

_NAME = re.compile(r"\w[\w.]*", re.ASCII)
_ATEN = re.compile(r"aten\.(\w+)\.(\w+)", re.ASCII)

SYMBOLS: Final = frozenset(
    {f"dtype.{name}" for name in DTYPE_BYTES}
    | {"layout.strided", "device.inputs", "memory_format.nchw", "memory_format.nhwc", "memory_format.preserve"}
)
"""Every symbol. `device.inputs` is the device of the inputs: a graph runs on any device."""


def verify(graph: Graph) -> None:
    """Check every rule.

    Raises:
        InputError: naming the rule, and the node or value that breaks it.
    """
    for rule in RULES:
        for subject, expected in rule(graph):
            raise InputError(f"graph, rule {rule.__name__!r}", subject, expected)


Violation = tuple[str, str]
"""The node or value that breaks a rule, and what was expected of it."""


def names(graph: Graph) -> Iterator[Violation]:
    """Names are words of letters, digits, `_` and `.`, other than `_`; a value's key is its name."""
    for key, value in graph.values.items():
        if key != value.name:
            yield key, f"the key {value.name!r} for the value of that name"
    for name in [*graph.values, *(node.name for node in graph.nodes)]:
        if not _NAME.fullmatch(name) or name == "_":
            yield name, "a name of letters, digits, '_' and '.', that does not start with '.'"


def unique(graph: Graph) -> Iterator[Violation]:
    """No two nodes have one name, no value is made twice, no input is listed twice."""
    yield from _repeats((node.name for node in graph.nodes), "one node of that name")
    yield from _repeats((o for node in graph.nodes for o in node.outputs if o), "one node that makes this value")
    yield from _repeats(iter(graph.inputs), "one input of that name")


def _repeats(items: Iterator[str], expected: str) -> Iterator[Violation]:
    seen: set[str] = set()
    for item in items:
        if item in seen:
            yield item, expected
        seen.add(item)


def defined(graph: Graph) -> Iterator[Violation]:
    """Every name that is read, made or returned has a value with a spec."""
    for name in graph.inputs:
        if name not in graph.values:
            yield name, "an input that has a value"
    for node in graph.nodes:
        for name in [*node.refs(), *filter(None, node.outputs)]:
            if name not in graph.values:
                yield node.name, f"no mention of {name!r}, which has no value"


def outputs(graph: Graph) -> Iterator[Violation]:
    """Every output of the graph is one of its values."""
    for name in graph.outputs:
        if name not in graph.values:
            yield name, "an output that is a value of the graph"


def kinds(graph: Graph) -> Iterator[Violation]:
    """`inputs` lists the values of kind input, nodes make those of kind node, and nobody makes a constant."""
    made = {output for node in graph.nodes for output in node.outputs}
    for value in graph.values.values():
        right = "input" if value.name in graph.inputs else "node" if value.name in made else "constant"
        if value.kind != right or (value.name in graph.inputs and value.name in made):
            yield value.name, f"the kind {right!r}, not {value.kind!r}"


def order(graph: Graph) -> Iterator[Violation]:
    """Each node only reads inputs, constants and results of earlier nodes."""
    ready = {value.name for value in graph.values.values() if value.kind != "node"}
    for node in graph.nodes:
        for name in node.refs():
            if name not in ready:
                yield node.name, f"a node that makes {name!r} before this one"
        ready.update(node.outputs)


def constant_order(graph: Graph) -> Iterator[Violation]:
    """Constants are listed in order of first mention, so that equal graphs have equal texts."""
    mentioned = dict.fromkeys([name for node in graph.nodes for name in node.refs()] + list(graph.outputs))
    right = [name for name in mentioned if graph.values[name].kind == "constant"]
    for value, expected in zip(graph.constants(), right, strict=False):
        if value.name != expected:
            yield value.name, f"constants in order of first mention: {expected!r} comes here"


def alive(graph: Graph) -> Iterator[Violation]:
    """Nothing is dead: every constant and every named output of a node is read or returned (an input need not be)."""
    read = {name for node in graph.nodes for name in node.refs()} | set(graph.outputs)
    for value in graph.values.values():
        if value.kind != "input" and value.name not in read:
            yield value.name, "a value that is read or returned (an output that nobody reads has the name '')"
    for node in graph.nodes:
        if not any(node.outputs):
            yield node.name, "a node with an output that is read or returned"


def operators(graph: Graph) -> Iterator[Violation]:
    """Operators are layers (`LAYERS`) and functional ATen overloads, by their names."""
    for node in graph.nodes:
        if node.op in LAYERS:
            continue
        match = _ATEN.fullmatch(node.op)
        if match is None:
            yield node.name, f"one of {', '.join(LAYERS)} or aten.NAME.OVERLOAD, not {node.op!r}"
        elif (match[1].endswith("_") and not match[1].endswith("__")) or match[2].endswith("out"):
            yield node.name, f"an operator that makes new values, not {node.op!r}, which overwrites one"


def arguments(graph: Graph) -> Iterator[Violation]:
    """Arguments are of the types that `Arg` names, symbols are known ones, keywords are not repeated."""
    for node in graph.nodes:
        for arg in [*node.args, *(arg for _, arg in node.kwargs)]:
            wrong = _wrong_arg(arg)
            if wrong:
                yield node.name, wrong
        for name, expected in _repeats((name for name, _ in node.kwargs), "each keyword once"):
            yield node.name, f"{expected}, not twice {name!r}"


def _wrong_arg(arg: object) -> str:
    if isinstance(arg, tuple):
        return next((wrong for item in cast("tuple[object, ...]", arg) if (wrong := _wrong_arg(item))), "")
    if isinstance(arg, Symbol):
        return "" if arg.text in SYMBOLS else f"a symbol that there is, not {arg.text!r}"
    known = arg is None or isinstance(arg, (bool, int, float, str, Ref))
    return "" if known else f"arguments of the IR's types, not {type(arg).__name__}"


def convolutions(graph: Graph) -> Iterator[Violation]:
    """`conv2d` and `conv3d` have (x, weight, bias or None, stride, padding, dilation, groups), and specs that agree."""
    for node in graph.nodes:
        if node.op in CONVOLUTIONS:
            for expected in _convolution(graph, node):
                yield node.name, expected


def _convolution(graph: Graph, node: Node) -> Iterator[str]:
    if len(node.args) != 7 or node.kwargs or len(node.outputs) != 1:
        yield "seven arguments (x, weight, bias, stride, padding, dilation, groups), none by keyword, and one output"
        return
    right_sizes, words = (is_pair, "pairs of") if node.op == "conv2d" else (is_triple, "three")
    if not all(right_sizes(arg) for arg in node.args[3:6]) or not is_integer(node.args[6]):
        yield f"{words} integers for stride, padding and dilation, and an integer for groups"
        return
    found = _operand_specs(graph, node)
    if isinstance(found, str):
        yield found
        return
    try:
        problem = conv_problem(graph, node) if node.op == "conv2d" else conv3d_problem(graph, node)
    except InputError as error:
        yield f"a convolution that can be computed ({error})"
        return
    right = (problem.x_spec, problem.weight_spec, TensorSpec((problem.k,), problem.y_dtype), problem.y_spec)
    yield from _disagreements(found, right)


def linears(graph: Graph) -> Iterator[Violation]:
    """`linear` has (x, weight, bias or None), x of two or more dimensions but not four, and agreeing specs (`LinearProblem`)."""
    for node in graph.nodes:
        if node.op == "linear":
            for expected in _linear(graph, node):
                yield node.name, expected


def _linear(graph: Graph, node: Node) -> Iterator[str]:
    if len(node.args) != 3 or node.kwargs or len(node.outputs) != 1:
        yield "three arguments (x, weight, bias), none by keyword, and one output"
        return
    found = _operand_specs(graph, node)
    if isinstance(found, str):
        yield found
        return
    try:
        problem = linear_problem(graph, node)
    except InputError as error:
        yield f"a linear layer that can be computed ({error})"
        return
    bias = TensorSpec((problem.k,), problem.dtype)
    y = TensorSpec((*found[0].shape[:-1], problem.k), problem.dtype)
    yield from _disagreements(found, (found[0], problem.weight_spec, bias, y))


def _operand_specs(graph: Graph, node: Node) -> tuple[TensorSpec, TensorSpec, TensorSpec | None, TensorSpec] | str:
    """Specs of x, weight, bias and y; or what was expected of the arguments."""
    x, weight, bias = node.args[:3]
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or not (bias is None or isinstance(bias, Ref)):
        return "values for x and weight, and a value or None for bias"
    if not node.outputs[0]:
        return "an output with a name"
    specs = graph.values
    bias_spec = specs[bias.name].spec if bias is not None else None
    return specs[x.name].spec, specs[weight.name].spec, bias_spec, specs[node.outputs[0]].spec


def _disagreements(
    found: tuple[TensorSpec, TensorSpec, TensorSpec | None, TensorSpec],
    right: tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec],
) -> Iterator[str]:
    for name, have, want in zip(("x", "weight", "bias", "y"), found, right, strict=True):
        if have is not None and have != want:
            yield f"{name} of spec {want}, not {have}"


def gradients(graph: Graph) -> Iterator[Violation]:
    """`conv2d_dgrad` has (dy, weight, size of x, ...), `conv2d_wgrad` (x, dy, size of the filter, ...), as `ir.Node` says."""
    for node in graph.nodes:
        if node.op in GRADIENTS:
            for expected in _gradient(graph, node):
                yield node.name, expected


def _gradient(graph: Graph, node: Node) -> Iterator[str]:
    if len(node.args) != 7 or node.kwargs or len(node.outputs) != 1 or not node.outputs[0]:
        yield "seven arguments, none by keyword, and one output with a name"
        return
    if not all(isinstance(arg, Ref) for arg in node.args[:2]):
        yield "values for its first two arguments"
        return
    volumes = node.op in VOLUME_GRADIENTS
    right_sizes, words = (is_triple, "three") if volumes else (is_pair, "pairs of")
    if not all(right_sizes(arg) for arg in node.args[2:6]) or not is_integer(node.args[6]):
        yield f"{words} integers for sizes, stride, padding and dilation, and an integer for groups"
        return
    try:
        problem = gradient3d_problem(graph, node) if volumes else gradient_problem(graph, node)
    except InputError as error:
        yield f"a gradient that can be computed ({error})"
        return
    first, second, made = (graph.values[name].spec for name in (*node.refs(), node.outputs[0]))
    x, weight, y = problem.x_spec, problem.weight_spec, problem.y_spec
    right = (y, weight, x) if problem.direction == "dgrad" else (x, y, weight)
    for position, have, want in zip(("first", "second", "made"), (first, second, made), right, strict=True):
        if have != want:
            yield f"the {position} value of spec {want}, not {have}"


RULES: Final[tuple[Callable[[Graph], Iterator[Violation]], ...]] = (
    names,
    unique,
    outputs,
    defined,
    kinds,
    order,
    arguments,
    operators,
    convolutions,
    linears,
    gradients,
    alive,
    constant_order,
)
"""The rules, in an order in which each may rely on the earlier ones."""
