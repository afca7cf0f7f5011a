"""Recorded graphs as JSON: a graph that was written is read again, and every wrong field is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import convoy
from convoy.package.cuda.graph_file import graph_bytes, read_graph
from tests.unit.package.cuda.recorded import launches


def read(data: dict[str, Any]) -> object:
    return read_graph(memoryview(json.dumps(data).encode()), "program", 2)


def test_what_is_written_is_read_again() -> None:
    graph = launches("t0")
    found = read_graph(memoryview(graph_bytes(graph)), "program", 2)
    assert graph_bytes(found) == graph_bytes(graph)
    assert replace(found, arguments=graph.arguments, results=graph.results) == graph


KERNEL, MAP, COPY, FILL = 3, 4, 1, 0


@pytest.mark.parametrize(
    ("node", "field", "value"),
    [
        (KERNEL, "kernel", 2),
        (KERNEL, "grid", [0, 1, 1]),
        (KERNEL, "grid", [1, 1]),
        (KERNEL, "block", [1025, 1, 1]),
        (KERNEL, "cluster", [17, 1, 1]),
        (KERNEL, "shared_bytes", -1),
        (KERNEL, "kind", "shell"),
        (KERNEL, "arguments", [["00", [[0, 0, 0]], 0]]),
        (KERNEL, "arguments", [["0g", [], 0]]),
        (KERNEL, "arguments", [["00" * 8, [[0, 4, 0]], 0]]),
        (KERNEL, "arguments", [["00" * 8, [[0, 0, 128]], 0]]),
        (KERNEL, "arguments", [["00" * 8, [[4, 0, 0]], 0]]),
        (KERNEL, "arguments", [["00" * 8, [], 2]]),
        (KERNEL, "arguments", [["00" * 5000, [], 0]]),
        (MAP, "arguments", [["00" * 128, [], 1]]),
        (MAP, "arguments", [["00" * 64, [[0, 0, 0]], 1]]),
        (COPY, "size_bytes", 129),
        (COPY, "source", [9, 0]),
        (COPY, "target", [0]),
        (FILL, "element_bytes", 3),
        (FILL, "count", 33),
        (FILL, "value", 1 << 32),
    ],
)
def test_a_wrong_node_is_named(node: int, field: str, value: object) -> None:
    data = json.loads(graph_bytes(launches("t0")))
    data["nodes"][node][field] = value
    with pytest.raises(convoy.PackageError, match=rf"nodes\[{node}\]"):
        read(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("edges", [[0, 5, 0]]),
        ("edges", [[1, 1, 0]]),
        ("edges", [[0, 1, 2]]),
        ("places", [[0, 0], [2, 65]]),
        ("blocks", [{"size_bytes": 0, "constant": ""}]),
        ("blocks", [{"size_bytes": 8, "constant": "../x"}]),
        ("extra", 1),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    data = json.loads(graph_bytes(launches("t0")))
    data[field] = value
    with pytest.raises(convoy.PackageError, match="program"):
        read(data)
