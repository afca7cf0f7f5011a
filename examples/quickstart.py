"""The Python interface in a few lines: a faster ResNet-18, saved as a plan and loaded again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import convoy
from convoy.zoo import load_model

model = load_model("resnet18")
x = torch.randn(1, 3, 64, 64)

fast = convoy.optimize(model, (x,))
print(fast.explain())

with torch.no_grad():
    difference = float((fast(x) - model(x)).abs().max())
print(f"largest difference to the stock model: {difference:.1e}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "resnet18.plan.json"
    fast.save(path)
    again = convoy.load(model, path, (x,))
    print("the same bits after loading:", torch.equal(fast(x), again(x)))
