"""Which kernels of a CUDA graph are the last to read a large value, and that they alone get a window. The driver is planted."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.engines.base import Buffers, Executable
from convoy.plan import Step
from convoy.problem import EngineConfig, Knobs, TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.cuda import last_reads as module
from convoy.program.cuda.last_reads import LEAST_BYTES, LastRead, LastReads, last_reads

LARGE, SMALL = TensorSpec((LEAST_BYTES // 2,), "fp16"), TensorSpec((LEAST_BYTES // 2 - 1,), "fp16")
KERNEL, COPY = "kernel", "copy"


class Reads(Executable):
    """Launches nothing."""

    def __init__(self, readers: Mapping[int, int] | None = None) -> None:
        self.last_readers = readers

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Nothing."""


def step(
    args: tuple[int, ...], result: int, frees: tuple[int, ...], spec: TensorSpec = LARGE, **words: Any
) -> BoundStep:
    names = tuple(f"v{slot}" for slot in args)
    planned = Step("region", "op", ("n",), names, (f"v{result}",), "p", EngineConfig("aten", 1, Knobs()), "any")
    return BoundStep(planned, Reads(**words), (), args, (result,), (spec,), frees)


def plan(*steps: BoundStep, inputs: tuple[TensorSpec, ...] = (LARGE,)) -> BoundPlan:
    last = steps[-1].results[0]
    return BoundPlan(steps, [f"v{i}" for i in range(last + 1)], [(spec, "any") for spec in inputs], [last], 0, 0)


def test_a_step_that_frees_a_large_value_reads_it_last():
    residual = step((2, 0), 3, (0,))
    assert last_reads(plan(step((0,), 1, ()), step((1,), 2, (1,)), residual)) == {1: LastRead(1), 2: LastRead(0)}


def test_the_largest_of_several_is_taken():
    inputs = (LARGE, TensorSpec((LEAST_BYTES,), "fp16"))
    assert last_reads(plan(step((0, 1), 2, (0, 1)), inputs=inputs)) == {0: LastRead(1)}


def test_small_values_results_and_what_is_read_twice_are_left_out():
    assert last_reads(plan(step((0,), 1, (0,)), inputs=(SMALL,))) == {}
    assert last_reads(plan(step((0,), 1, (1,)))) == {}  # its own result, which nobody reads
    assert last_reads(plan(step((0,), 1, (0,), readers={}))) == {}
    assert last_reads(plan(step((0,), 1, (0,)), inputs=(LARGE,))) == {0: LastRead(0)}


def test_of_several_kernels_the_executable_says_which_reads_a_value_last():
    inputs = (LARGE, TensorSpec((LEAST_BYTES,), "fp16"))
    assert last_reads(plan(step((0, 1), 2, (0, 1), readers={0: -1, 1: -2}), inputs=inputs)) == {0: LastRead(1, -2)}
    assert last_reads(plan(step((0, 1), 2, (0, 1), readers={0: -1}), inputs=inputs)) == {0: LastRead(0, -1)}


def test_a_value_that_is_several_arguments_is_read_last_by_the_latest_kernel():
    assert last_reads(plan(step((0, 0), 1, (0,), readers={0: -2, 1: -1}))) == {0: LastRead(0, -1)}
    assert last_reads(plan(step((0, 0), 1, (0,), readers={0: -1, 1: -2}))) == {0: LastRead(0, -1)}
    assert last_reads(plan(step((0, 0), 1, (0,), readers={0: -2}))) == {}  # the other argument's reader is not told


class FakeDriver:
    """As much of `cuda.bindings.driver` as is asked. Each launch adds nodes.

    Attributes:
        windows: (node, address, bytes) of each window that was set.
        most: the largest window.
        refuses: whether setting one fails.
        invalid: whether the capture has become invalid.
    """

    class CUgraph:
        def __init__(self, handle: int = 7) -> None:
            self.handle = handle

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE="most")
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=KERNEL)
    CUaccessProperty = SimpleNamespace(CU_ACCESS_PROPERTY_STREAMING="streaming")
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW="window")
    CUaccessPolicyWindow = CUkernelNodeAttrValue = SimpleNamespace

    def __init__(self, most: int = 1 << 27, *, refuses: bool = False) -> None:
        self.nodes: list[str] = []
        self.windows: list[tuple[str, int, int]] = []
        self.most, self.refuses, self.invalid = most, refuses, False

    def CUstream(self, handle: int) -> int:
        return handle

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[object, ...]:
        return (901,) if self.invalid else (0, "active", 1, self.CUgraph(), None, 0)

    def cuGraphGetNodes(self, graph: CUgraph, count: int) -> tuple[object, ...]:
        assert graph.handle == 7
        return 0, self.nodes[:count] + [""] * 2, len(self.nodes)

    def cuGraphNodeGetType(self, node: str) -> tuple[int, str]:
        return 0, node.split(maxsplit=1)[0]

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[int, int]:
        assert (attribute, device) == ("most", 0)
        return 0, self.most

    def cuGraphKernelNodeSetAttribute(self, node: str, identifier: str, value: Any) -> tuple[int]:
        window = value.accessPolicyWindow
        assert (identifier, window.hitProp, window.missProp, window.hitRatio) == (
            "window",
            "streaming",
            "streaming",
            1.0,
        )
        self.windows.append((node, window.base_ptr, window.num_bytes))
        return (1 if self.refuses else 0,)


STREAM: Any = SimpleNamespace(cuda_stream=1, device=torch.device("cuda", 0))
GRAPH: Any = SimpleNamespace(raw_cuda_graph=lambda: 7)


def observed(
    driver: FakeDriver, launches: list[list[str]], last: dict[int, LastRead]
) -> tuple[int, list[torch.Tensor]]:
    """Marks in a graph to which each step adds some nodes; values of 3 numbers in as many slots as steps."""
    values = [torch.zeros(3) for _ in launches]
    reads = LastReads(last, STREAM)
    for index, added in enumerate(launches):
        driver.nodes += added
        reads.after(index, values)
    reads.end()
    return reads.mark(GRAPH), values


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(module, "driver", lambda: driver)
    return driver


def test_the_only_kernel_of_a_step_gets_the_window(planted: FakeDriver):
    launches = [["kernel a"], ["copy b", "kernel c"], ["kernel d", "kernel e"], ["copy f"], ["kernel g"]]
    marked, values = observed(planted, launches, {i + 1: LastRead(i) for i in range(4)})
    assert planted.windows == [("kernel c", values[0].data_ptr(), 12), ("kernel g", values[3].data_ptr(), 12)]
    assert marked == 2


def test_the_kernel_that_reads_a_value_last_gets_the_window(planted: FakeDriver):
    launches = [["kernel a", "kernel b"], ["copy c", "kernel d", "copy e", "kernel f"], ["kernel g"], ["kernel h"]]
    last = {0: LastRead(0, -1), 1: LastRead(1, -2), 2: LastRead(2, -2), 3: LastRead(3, -1)}
    marked, values = observed(planted, launches, last)
    names = [(name, address) for name, address, _ in planted.windows]
    assert names == [
        ("kernel b", values[0].data_ptr()),
        ("kernel d", values[1].data_ptr()),
        ("kernel h", values[3].data_ptr()),  # and none for the step with fewer kernels than its executable says
    ]
    assert marked == 3


def test_a_gpu_without_windows_gets_none_and_a_small_limit_holds(planted: FakeDriver):
    planted.most = 0
    assert observed(planted, [["kernel a"]], {0: LastRead(0)})[0] == 0
    planted.most = 8
    planted.nodes.clear()
    assert observed(planted, [["kernel a"]], {0: LastRead(0)})[0] == 1
    assert [size for _, _, size in planted.windows] == [8]


def test_a_driver_that_refuses_leaves_the_graph_as_it_is(planted: FakeDriver):
    planted.refuses = True
    assert observed(planted, [["kernel a"]], {0: LastRead(0)})[0] == 0


def test_an_invalid_capture_is_left_to_its_end(planted: FakeDriver):
    planted.invalid = True
    LastReads({0: LastRead(0)}, STREAM).after(0, [torch.zeros(3)])
