"""Calls of a library in a captured graph: their nodes become one, and edges to and from it wait for all of its work."""

from __future__ import annotations

import pytest
import torch

from convoy.engines.gpu.library_calls import LibraryCall, NotedCall, noted, noting
from convoy.package.cuda.read_cuda_graph import merged_calls
from convoy.package.cuda.recorded_graph import Edge

CALL = LibraryCall("plan", ((101, 64),))


def test_the_nodes_of_a_call_become_one() -> None:
    """10 → 11 → 12 → 13, of which 11 and 12 are the call's."""
    edges = [((10, 11), True), ((11, 12), False), ((12, 13), True), ((10, 13), True)]
    called, kept, found = merged_calls([10, 11, 12, 13], edges, [NotedCall(CALL, frozenset({12, 11}))])
    assert called == {11: CALL}
    assert kept == [10, 11, 13]
    assert found == [Edge(0, 1), Edge(1, 2), Edge(0, 2, programmatic=True)]


def test_edges_that_become_one_are_full_if_one_was() -> None:
    edges = [((1, 2), False), ((1, 3), False), ((2, 4), False), ((3, 4), False)]
    _, kept, found = merged_calls([1, 2, 3, 4], edges, [NotedCall(CALL, frozenset({2, 3}))])
    assert kept == [1, 2, 4]
    assert found == [Edge(0, 1), Edge(1, 2)]


def test_a_call_without_work_leaves_no_node() -> None:
    called, kept, found = merged_calls([1, 2], [((1, 2), True)], [NotedCall(CALL, frozenset())])
    assert (called, kept, found) == ({}, [1, 2], [Edge(0, 1, programmatic=True)])


def test_nothing_is_noted_outside_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ran: list[str] = []

    def described() -> LibraryCall:
        raise AssertionError("nobody asked")

    noted(lambda: ran.append("alone"), described)
    with noting() as found:
        noted(lambda: ran.append("noted"), described)
    assert (ran, found) == (["alone", "noted"], [])
