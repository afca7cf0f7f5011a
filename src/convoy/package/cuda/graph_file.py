"""A recorded CUDA graph as JSON, a member of a package, read with every field checked (docs/reference/package.md)."""

from __future__ import annotations

import json
import re
from typing import Any, Final, cast

from convoy.capture.structure_data import structure_data, structure_from_data
from convoy.errors import PackageError
from convoy.package.checked_fields import Fields, is_integer
from convoy.package.cuda.recorded_graph import (
    TENSOR_MAP_BYTES,
    Argument,
    Block,
    CudnnRun,
    DevicePlace,
    Edge,
    Join,
    KernelLaunch,
    MemoryCopy,
    MemoryFill,
    Node,
    RecordedGraph,
)
from convoy.package.program_file import MOST_BYTES, read_strides, read_tensor, tensor_data
from convoy.untrusted import parse_json

MOST_BLOCK_BYTES: Final = 1 << 40
MOST_ARGUMENT_BYTES: Final = 4096
"""Of one argument. A kernel's arguments together have at most 32,764 bytes (CUDA C++ Programming Guide, `__global__`)."""

_MOST_THREADS: Final = 1024
_MOST_GRID: Final = (1 << 31) - 1
_ADDRESS_BYTES: Final = 8

PLAN_MEMBER: Final = r"cudnn/p[0-9]{1,6}\.json"
"""Names of members with cuDNN's plans."""

_MOST_OPERANDS: Final = 64


def graph_bytes(graph: RecordedGraph) -> bytes:
    """A graph as a member's content."""
    data = {
        "inputs": [tensor_data(one) for one in graph.inputs],
        "outputs": [tensor_data(one) for one in graph.outputs],
        "places": [_place_data(place) for place in graph.places],
        "arguments": structure_data(graph.arguments, "args"),
        "results": structure_data(graph.results, "results"),
        "strides": graph.strides,
        "blocks": [{"size_bytes": block.size_bytes, "constant": block.constant} for block in graph.blocks],
        "nodes": [_node_data(node) for node in graph.nodes],
        "edges": [[edge.before, edge.after, int(edge.programmatic)] for edge in graph.edges],
    }
    return (json.dumps(data, separators=(",", ":")) + "\n").encode()


def _place_data(place: DevicePlace) -> list[int]:
    return [place.block, place.offset]


def _node_data(node: Node) -> dict[str, Any]:
    if isinstance(node, KernelLaunch):
        return {
            "kind": "kernel",
            "kernel": node.kernel,
            "grid": node.grid,
            "block": node.block,
            "shared_bytes": node.shared_bytes,
            "cluster": node.cluster,
            "arguments": [
                [one.data.hex(), [[at, *_place_data(place)] for at, place in one.addresses], int(one.tensor_map)]
                for one in node.arguments
            ],
        }
    if isinstance(node, MemoryCopy):
        places = {"source": _place_data(node.source), "target": _place_data(node.target)}
        return {"kind": "copy", **places, "size_bytes": node.size_bytes}
    if isinstance(node, MemoryFill):
        size = {"element_bytes": node.element_bytes, "count": node.count}
        return {"kind": "fill", "target": _place_data(node.target), "value": node.value, **size}
    if isinstance(node, CudnnRun):
        operands = [[uid, *_place_data(place)] for uid, place in node.operands]
        workspace = None if node.workspace is None else _place_data(node.workspace)
        kept = {"workspace": workspace, "workspace_bytes": node.workspace_bytes}
        return {"kind": "cudnn", "plan": node.plan, "operands": operands, **kept}
    return {"kind": "join"}


def read_graph(content: memoryview, where: str, kernels: int) -> RecordedGraph:
    """A graph from a member's content.

    Args:
        content: the member.
        where: its name in errors.
        kernels: number of the manifest's kernels.

    Raises:
        PackageError: naming the field.
    """
    if len(content) > MOST_BYTES:
        raise PackageError(where, len(content), f"at most {MOST_BYTES} bytes")
    fields = Fields(where, parse_json(bytes(content), where, PackageError))
    blocks = tuple(_block(f"{where}.blocks", item) for item in fields.items("blocks"))
    places = tuple(_place(f"{where}.places", item, blocks) for item in fields.items("places"))
    nodes = tuple(_node(f"{where}.nodes[{i}]", item, blocks, kernels) for i, item in enumerate(fields.items("nodes")))
    graph = RecordedGraph(
        inputs=tuple(read_tensor(f"{where}.inputs", item, len(places)) for item in fields.items("inputs")),
        outputs=tuple(read_tensor(f"{where}.outputs", item, len(places)) for item in fields.items("outputs")),
        places=places,
        arguments=structure_from_data(fields.anything("arguments"), f"{where}.arguments", PackageError),
        results=structure_from_data(fields.anything("results"), f"{where}.results", PackageError),
        strides=tuple(read_strides(f"{where}.strides", item) for item in fields.items("strides")),
        blocks=blocks,
        nodes=nodes,
        edges=tuple(_edge(f"{where}.edges", item, len(nodes)) for item in fields.items("edges")),
    )
    fields.finish()
    for one in (*graph.inputs, *graph.outputs):
        place = places[one.slot]
        if place.offset + one.spec.size_bytes > blocks[place.block].size_bytes:
            raise PackageError(
                f"{where}.places", place.offset, f"a place of {one.spec.size_bytes} bytes for {one.name}"
            )
    return graph


def _block(where: str, data: object) -> Block:
    fields = Fields(where, data)
    found = Block(fields.integer("size_bytes", 1, MOST_BLOCK_BYTES), fields.text("constant", r"\w*", 100))
    fields.finish()
    return found


def _integers(where: str, data: object, count: int, expected: str) -> list[int]:
    items = cast("list[Any]", data) if isinstance(data, list) else []
    if len(items) != count or not all(is_integer(item) for item in items):
        raise PackageError(where, cast("object", data), expected)
    return items


def _place(where: str, data: object, blocks: tuple[Block, ...], size_bytes: int = 1) -> DevicePlace:
    block, offset = _integers(where, data, 2, "a block and an offset")
    if block >= len(blocks) or offset + size_bytes > blocks[block].size_bytes:
        raise PackageError(where, [block, offset], f"{size_bytes} bytes within a block")
    return DevicePlace(block, offset)


def _edge(where: str, data: object, nodes: int) -> Edge:
    before, after, programmatic = _integers(where, data, 3, "two nodes and 0 or 1")
    if max(before, after) >= nodes or before == after or programmatic > 1:
        raise PackageError(where, [before, after, programmatic], f"two of {nodes} nodes and 0 or 1")
    return Edge(before, after, bool(programmatic))


def _node(where: str, data: object, blocks: tuple[Block, ...], kernels: int) -> Node:
    fields = Fields(where, data)
    kind = fields.text("kind", "kernel|copy|fill|cudnn|join")
    if kind == "kernel":
        found: Node = _kernel(where, fields, blocks, kernels)
    elif kind == "copy":
        size = fields.integer("size_bytes", 1, MOST_BLOCK_BYTES)
        source = _place(f"{where}.source", fields.anything("source"), blocks, size)
        found = MemoryCopy(source, _place(f"{where}.target", fields.anything("target"), blocks, size), size)
    elif kind == "fill":
        each = fields.take("element_bytes", lambda value: value in (1, 2, 4) and is_integer(value), "1, 2 or 4")
        count = fields.integer("count", 1, MOST_BLOCK_BYTES)
        target = _place(f"{where}.target", fields.anything("target"), blocks, each * count)
        found = MemoryFill(target, fields.integer("value", 0, (1 << 8 * each) - 1), each, count)
    elif kind == "cudnn":
        found = _cudnn_run(where, fields, blocks)
    else:
        found = Join()
    fields.finish()
    return found


def _cudnn_run(where: str, fields: Fields, blocks: tuple[Block, ...]) -> CudnnRun:
    operands: list[tuple[int, DevicePlace]] = []
    for item in fields.items("operands"):
        uid, block, offset = _integers(f"{where}.operands", item, 3, "a uid, a block and an offset")
        operands.append((uid, _place(f"{where}.operands", [block, offset], blocks)))
    if not 1 <= len(operands) <= _MOST_OPERANDS or len({uid for uid, _ in operands}) < len(operands):
        raise PackageError(f"{where}.operands", len(operands), f"1 to {_MOST_OPERANDS} operands, each once")
    size = fields.integer("workspace_bytes", 0, MOST_BLOCK_BYTES)
    place = fields.anything("workspace")
    workspace = _place(f"{where}.workspace", place, blocks, size) if size else None
    if not size and place is not None:
        raise PackageError(f"{where}.workspace", place, "null where workspace_bytes is 0")
    return CudnnRun(fields.text("plan", PLAN_MEMBER, 100), tuple(operands), workspace, size)


def _kernel(where: str, fields: Fields, blocks: tuple[Block, ...], kernels: int) -> KernelLaunch:
    arguments = [_argument(f"{where}.arguments", item, blocks) for item in fields.items("arguments")]
    return KernelLaunch(
        kernel=fields.integer("kernel", 0, kernels - 1),
        grid=_three(f"{where}.grid", fields.anything("grid"), _MOST_GRID),
        block=_three(f"{where}.block", fields.anything("block"), _MOST_THREADS),
        shared_bytes=fields.integer("shared_bytes", 0, 1 << 20),
        cluster=_three(f"{where}.cluster", fields.anything("cluster"), 16),
        arguments=tuple(arguments),
    )


def _three(where: str, data: object, most: int) -> tuple[int, int, int]:
    x, y, z = _integers(where, data, 3, f"three integers from 1 to {most}")
    if not all(1 <= side <= most for side in (x, y, z)):
        raise PackageError(where, data, f"three integers from 1 to {most}")
    return x, y, z


def _argument(where: str, data: object, blocks: tuple[Block, ...]) -> Argument:
    items = cast("list[Any]", data) if isinstance(data, list) else []
    text = items[0] if len(items) == 3 else None
    if not isinstance(text, str) or not re.fullmatch(r"([0-9a-f]{2})+", text) or len(text) > 2 * MOST_ARGUMENT_BYTES:
        raise PackageError(where, cast("object", data), "bytes in hex digits, addresses, and 0 or 1")
    raw, marks = bytes.fromhex(text), items[1]
    if not isinstance(marks, list) or items[2] not in (0, 1):
        raise PackageError(where, cast("object", data), "bytes in hex digits, addresses, and 0 or 1")
    addresses: list[tuple[int, DevicePlace]] = []
    for mark in cast("list[Any]", marks):
        at, block, offset = _integers(where, mark, 3, "a byte, a block and an offset")
        if at % _ADDRESS_BYTES or at + _ADDRESS_BYTES > len(raw):
            raise PackageError(where, mark, "addresses within the argument")
        addresses.append((at, _place(where, [block, offset], blocks)))
    is_map = bool(items[2])
    if is_map and (len(raw) != TENSOR_MAP_BYTES or len(addresses) != 1):
        raise PackageError(where, len(raw), f"a tensor map of {TENSOR_MAP_BYTES} bytes with one address")
    return Argument(raw, tuple(addresses), is_map)
