"""A capture that the driver itself refuses: the net is launched step by step, and the process is left as it was."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

from convoy.engines.base import Buffers  # noqa: E402
from convoy.plan import Step  # noqa: E402
from convoy.problem import EngineConfig, Knobs, TensorSpec  # noqa: E402
from convoy.program import CudaGraphProgram  # noqa: E402
from convoy.program.bound_plan import BoundPlan, BoundStep  # noqa: E402
from convoy.program.step_timeline import measure_timeline  # noqa: E402

SPEC = TensorSpec((1 << 16,), "fp32")


class Adds:
    """Adds one and waits for the device, which no capture allows."""

    workspace_bytes = 0
    allocates_results = False

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits

    def launch(self, buffers: Buffers, workspace: object) -> None:
        torch.add(buffers.args[0], 1, out=buffers.results[0])
        if self._waits:
            torch.cuda.current_stream().synchronize()


def program(*, waits: bool) -> CudaGraphProgram:
    config = EngineConfig("aten", 1, Knobs())
    steps = [
        BoundStep(
            Step("region", "op", (f"v{at + 1}",), (f"v{at}",), (f"v{at + 1}",), "p", config, "any"),
            Adds(waits=waits),  # type: ignore[arg-type]
            (),
            (at,),
            (at + 1,),
            (SPEC,),
        )
        for at in range(2)
    ]
    device = torch.device("cuda", torch.cuda.current_device())
    return CudaGraphProgram(BoundPlan(steps, ["v0", "v1", "v2"], [(SPEC, "any")], [2], 0, 0), device)


@pytest.mark.parametrize("side", [False, True])
def test_a_net_that_waits_for_the_device_is_launched_step_by_step(side: bool) -> None:
    caller = torch.cuda.Stream() if side else torch.cuda.default_stream()
    with torch.cuda.stream(caller):
        x = torch.rand(SPEC.shape, device="cuda")
        for _ in range(3):  # the process is not spoiled for further ones, either kind
            refused, captured = program(waits=True), program(waits=False)
            assert "captur" in refused.refused
            assert "\n" not in refused.refused
            assert captured.refused == ""
            assert torch.cuda.current_stream() == caller
            for one in (refused, captured):
                assert torch.equal(one([x])[0], x + 1 + 1)
                one.replay()
            assert len(measure_timeline(refused.eager, [x])) == len(measure_timeline(captured.eager, [x])) == 2
            drawn = (
                torch.rand(4, device="cuda"),
                torch.rand(4, device="cuda"),
            )  # the generator draws outside of graphs again
            assert not torch.equal(*drawn)
    torch.cuda.synchronize()
