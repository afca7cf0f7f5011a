"""A first answer, and a start from a stored plan in another process: neither waits for what it does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
import torch
import convoy
from convoy.pipeline.check import end_to_end
from convoy.pipeline.stored_plans.plan_store import FROM_DATABASE

end_to_end.is_faster = lambda *_: True
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True))
        self.second, self.last = torch.nn.Conv2d(8, 8, 1), torch.nn.Linear(8, 3)
        self.activations = torch.nn.Sequential(
            torch.nn.ReLU6(inplace=True), torch.nn.Hardswish(), torch.nn.SiLU(), torch.nn.Hardsigmoid()
        )
    def forward(self, x):
        y = self.first(x)
        y = self.activations(self.second(torch.cat([y, y + y], 1)))
        y = y * torch.sigmoid(y.mean((2, 3), keepdim=True))
        y = torch.nn.functional.max_pool2d(torch.nn.functional.avg_pool2d(y, 2), 2)
        y = torch.flatten(torch.nn.functional.adaptive_avg_pool2d(y, 1), 1)
        return self.last(torch.nn.functional.dropout(y, training=False))

net = Net().eval()
x = torch.randn(1, 3, 10, 10)
fast = convoy.optimize(net, (x,), settings=convoy.Settings(effort="none", deny_engines=("inductor",)))
print(json.dumps({
    "stored": any(note.startswith(FROM_DATABASE) for note in fast.plan.notes),
    "steps": [[step.config.engine, str(step.config.knobs), step.layout] for step in fast.plan.steps],
    "out": fast(x).flatten().tolist(),
    "imported": sorted({"torch._dynamo", "torch._inductor", "torchvision"} & sys.modules.keys()),
}))
"""


def run(database: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "CONVOY_DB": str(database)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_another_process_starts_from_the_plan_and_nothing_imports_dynamo(tmp_path: Path) -> None:
    """Importing Dynamo takes two seconds on two cores, as long as all the rest. Only Inductor's subgraphs need it."""
    first, second = run(tmp_path / "perf.db"), run(tmp_path / "perf.db")
    assert (first["stored"], second["stored"]) == (False, True)
    assert second["steps"] == first["steps"]
    assert second["out"] == first["out"]
    assert first["imported"] == second["imported"] == []
