"""torch.compile with Convoy's backend in training on a GPU: the eager loop's gradients, under autocast and with a scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from convoy.torch_compile import dynamo_backend, training_graph
from tests.gpu.program.branches import FEW, batches, keep_ours, net, sgd
from tests.gpu.program.judge import Judge

pytestmark = pytest.mark.gpu


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[training_graph.TracedGraph]:
    """The graphs that were compiled, in order; their plans are kept, whatever the clock says."""
    keep_ours(monkeypatch)
    torch.compiler.reset()
    made: list[training_graph.TracedGraph] = []
    before = training_graph.TracedGraph.__init__

    def remember(self: training_graph.TracedGraph, *args: Any) -> None:
        before(self, *args)
        made.append(self)

    monkeypatch.setattr(training_graph.TracedGraph, "__init__", remember)
    return made


@pytest.mark.parametrize(("amp", "scaled"), [(torch.bfloat16, False), (torch.float16, True)], ids=["bf16", "fp16"])
def test_an_eager_loop_has_the_gradients_of_pytorch(
    graphs: list[training_graph.TracedGraph], tmp_path: Path, amp: torch.dtype, scaled: bool
):
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3, enabled=scaled)
    judge = Judge(model, sgd, amp=amp, scaler=scaler)
    options = {"db": tmp_path / "perf.db", "isolate": False, "only_engines": FEW}
    compiled = torch.compile(model, backend=dynamo_backend, options=options)
    for x, y in batches(6):
        with judge.step((x, y)) as losses:
            optimizer.zero_grad()
            with torch.autocast("cuda", amp):
                loss = cross_entropy(compiled(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    forward, backward = graphs
    for graph in (forward, backward):
        assert graph.plan is not None
        assert not graph.plan.baseline, graph.plan.notes
    word = {torch.bfloat16: ".bf16.", torch.float16: ".fp16."}[amp]
    assert any(word in step.problem for step in forward.plan.steps if step.pattern == "conv")
    assert {"dgrad", "wgrad"} <= {step.pattern for step in backward.plan.steps}
    assert scaler.get_scale() == (4096.0 if scaled else 1.0)  # every step was taken
    judge.check()
