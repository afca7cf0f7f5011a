"""A program of a package as JSON: inputs, outputs, where values lie, and the launch of each step (docs/reference/package.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, cast

from convoy.capture.structure import Structure
from convoy.capture.structure_data import structure_data, structure_from_data
from convoy.errors import InputError, PackageError
from convoy.package.checked_fields import Fields, is_integer
from convoy.problem import TensorSpec
from convoy.untrusted import parse_json

MOST_BYTES: Final = 64 << 20
MOST_ARENA_BYTES: Final = 1 << 40
MOST_THREADS: Final = 1024

SlotKind = Literal["input", "output", "arena", "python"]
OperandKind = Literal["arg", "result", "workspace", "constant"]

_SLOT: Final = ("input", "output", "arena", "python")
_OPERANDS: Final = ("arg", "result", "workspace", "constant")
_LAYOUT: Final = "nchw|nhwc|ncdhw|ndhwc|any"


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """An input or output of a program.

    Attributes:
        name: of the graph's value.
        spec: dtype and shape.
        layout: `nchw` or `nhwc` for 4-D tensors, `ncdhw` or `ndhwc` for volumes, else `any`: rows of contiguous values.
        slot: where it lies.
    """

    name: str
    spec: TensorSpec
    layout: str
    slot: int


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where the C runtime puts the value of a slot.

    Attributes:
        kind: an input or output of the call, the arena, or `python`: only Python's programs have a place for it.
        offset: index of the input or output, or bytes from the arena's beginning.
        size_bytes: bytes of the value.
    """

    kind: SlotKind
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a compiled kernel.

    Attributes:
        kernel: index among the manifest's kernels.
        settings: 64-bit words of its first argument.
        calls: (index of a word, kernel whose address the word gets).
        tensors: sources of its pointers, (kind, index); None for NULL.
    """

    kernel: int
    settings: tuple[int, ...]
    calls: tuple[tuple[int, int], ...]
    tensors: tuple[tuple[OperandKind, int] | None, ...]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step of the plan.

    Attributes:
        args: slots that it reads.
        results: slots that it writes.
        constants: names of tensors, or a constant of another kind.
        packed: whether the constants are arranged for its kernel; else they are those of the graph.
        launch: the call of compiled code; None if only Python can run the step.
    """

    args: tuple[int, ...]
    results: tuple[int, ...]
    constants: tuple[str | bool | None, ...]
    packed: bool
    launch: Launch | None


@dataclass(frozen=True, slots=True)
class PackedProgram:
    """One program.

    Attributes:
        inputs: in call order.
        outputs: in return order.
        arguments: how a call's arguments nest.
        results: how its results nest.
        strides: strides of PyTorch's own outputs; None: not known.
        slots: place of each value.
        copies: (slot, output): values that are copied to an output at the end.
        arena_bytes: memory for inner values.
        workspace_bytes: scratch memory of launches.
        threads: most threads that a launch can use.
        steps: in order.
    """

    inputs: tuple[PackedTensor, ...]
    outputs: tuple[PackedTensor, ...]
    arguments: Structure
    results: Structure
    strides: tuple[tuple[int, ...] | None, ...]
    slots: tuple[SlotPlace, ...]
    copies: tuple[tuple[int, int], ...]
    arena_bytes: int
    workspace_bytes: int
    threads: int
    steps: tuple[PackedStep, ...]


def program_bytes(program: PackedProgram) -> bytes:
    """A program as a member's content."""
    data = {
        "inputs": [tensor_data(one) for one in program.inputs],
        "outputs": [tensor_data(one) for one in program.outputs],
        "arguments": structure_data(program.arguments, "args"),
        "results": structure_data(program.results, "results"),
        "strides": program.strides,
        "slots": [[place.kind, place.offset, place.size_bytes] for place in program.slots],
        "copies": program.copies,
        "arena_bytes": program.arena_bytes,
        "workspace_bytes": program.workspace_bytes,
        "threads": program.threads,
        "steps": [asdict(step) for step in program.steps],
    }
    return (json.dumps(data, separators=(",", ":")) + "\n").encode()


def tensor_data(one: PackedTensor) -> dict[str, Any]:
    """A tensor as JSON."""
    return {
        "name": one.name,
        "dtype": one.spec.dtype,
        "shape": list(one.spec.shape),
        "layout": one.layout,
        "slot": one.slot,
    }


def read_program(content: memoryview, where: str, kernels: int) -> PackedProgram:
    """A program from a member's content.

    Args:
        content: the member.
        where: its name in errors.
        kernels: number of the manifest's kernels.

    Raises:
        PackageError: naming the field.
    """
    if len(content) > MOST_BYTES:
        raise PackageError(where, len(content), f"at most {MOST_BYTES} bytes")
    data: object = parse_json(bytes(content), where, PackageError)
    fields = Fields(where, data)
    places = tuple(_place(f"{where}.slots", item) for item in fields.items("slots"))
    program = PackedProgram(
        inputs=tuple(read_tensor(f"{where}.inputs", item, len(places)) for item in fields.items("inputs")),
        outputs=tuple(read_tensor(f"{where}.outputs", item, len(places)) for item in fields.items("outputs")),
        arguments=structure_from_data(fields.anything("arguments"), f"{where}.arguments", PackageError),
        results=structure_from_data(fields.anything("results"), f"{where}.results", PackageError),
        strides=tuple(read_strides(f"{where}.strides", item) for item in fields.items("strides")),
        slots=places,
        copies=tuple(_pair(f"{where}.copies", item) for item in fields.items("copies")),
        arena_bytes=fields.integer("arena_bytes", 0, MOST_ARENA_BYTES),
        workspace_bytes=fields.integer("workspace_bytes", 0, MOST_ARENA_BYTES),
        threads=fields.integer("threads", 1, MOST_THREADS),
        steps=tuple(
            _step(f"{where}.steps[{i}]", item, len(places), kernels) for i, item in enumerate(fields.items("steps"))
        ),
    )
    fields.finish()
    for place in program.slots:
        if place.kind == "arena" and place.offset + place.size_bytes > program.arena_bytes:
            raise PackageError(f"{where}.slots", place.offset, "places within the arena")
    return program


def read_tensor(where: str, data: object, slots: int) -> PackedTensor:
    """A tensor from JSON, in one of so many slots; raises PackageError naming the field."""
    fields = Fields(where, data)
    try:
        spec = TensorSpec(fields.integers("shape", 0, 1 << 40), fields.text("dtype", r"\w+", 10))
    except InputError as error:
        raise PackageError(where, error.value, error.expected) from None
    found = PackedTensor(
        fields.text("name", r"\w[\w.]*", 400),
        spec,
        fields.text("layout", _LAYOUT),
        fields.integer("slot", 0, slots - 1),
    )
    fields.finish()
    return found


def _place(where: str, data: object) -> SlotPlace:
    items = cast("list[Any]", data) if isinstance(data, list) else []
    if len(items) != 3 or items[0] not in _SLOT or not all(is_integer(item) for item in items[1:]):
        raise PackageError(where, items, f"one of {', '.join(_SLOT)}, an offset and a size")
    return SlotPlace(*items)


def read_strides(where: str, data: object) -> tuple[int, ...] | None:
    """Strides from JSON; None for null."""
    if data is None:
        return None
    items = cast("list[Any]", data) if isinstance(data, list) else ["no list"]
    if not all(is_integer(item, 0, 1 << 40) for item in items):
        raise PackageError(where, items, "strides")
    return tuple(cast("list[int]", items))


def _pair(where: str, data: object) -> tuple[int, int]:
    items = cast("list[Any]", data) if isinstance(data, list) else []
    if len(items) != 2 or not all(is_integer(item) for item in items):
        raise PackageError(where, items, "two indices")
    return items[0], items[1]


def _step(where: str, data: object, slots: int, kernels: int) -> PackedStep:
    fields = Fields(where, data)
    launch = fields.anything("launch")

    def right(item: Any) -> bool:
        return item is None or isinstance(item, bool) or (isinstance(item, str) and len(item) <= 400)

    found = PackedStep(
        args=fields.integers("args", 0, slots - 1),
        results=fields.integers("results", 0, slots - 1),
        constants=tuple(fields.items("constants", right, "names of tensors")),
        packed=fields.boolean("packed"),
        launch=None if launch is None else _launch(f"{where}.launch", launch, kernels),
    )
    fields.finish()
    if found.launch is not None:
        counts = {
            "arg": len(found.args),
            "result": len(found.results),
            "workspace": 1,
            "constant": len(found.constants),
        }
        for operand in found.launch.tensors:
            if operand is not None and operand[1] >= counts[operand[0]]:
                raise PackageError(f"{where}.launch.tensors", operand, "operands of the step")
    return found


def _launch(where: str, data: object, kernels: int) -> Launch:
    fields = Fields(where, data)
    found = Launch(
        kernel=fields.integer("kernel", 0, kernels - 1),
        settings=fields.integers("settings", -(1 << 63), (1 << 63) - 1),
        calls=tuple(_pair(f"{where}.calls", item) for item in fields.items("calls")),
        tensors=tuple(_operand(f"{where}.tensors", item) for item in fields.items("tensors")),
    )
    fields.finish()
    for word, kernel in found.calls:
        if word >= len(found.settings) or kernel >= kernels:
            raise PackageError(f"{where}.calls", (word, kernel), "words of the settings, and kernels")
    return found


def _operand(where: str, data: object) -> tuple[OperandKind, int] | None:
    if data is None:
        return None
    items = cast("list[Any]", data) if isinstance(data, list) else []
    if len(items) != 2 or items[0] not in _OPERANDS or not is_integer(items[1], 0, 1 << 20):
        raise PackageError(where, items, f"null, or one of {', '.join(_OPERANDS)} with an index")
    return items[0], items[1]
