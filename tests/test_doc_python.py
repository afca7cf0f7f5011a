"""Every Python block of the pages runs, in the order of its page; tuning measures and times nothing."""

from __future__ import annotations

import dataclasses
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import convoy
import convoy.pipeline
import convoy.training
from convoy.settings import checked_settings
from convoy.zoo import import_torchvision
from tests.doc_blocks import BLOCKS, ROOT, Block, blocks_in
from tests.unit.pipeline.untimed import keep_plans

ELSEWHERE = {
    "README.md": "tests/test_docs.py",
    "CONTRIBUTING.md": "tests/test_contributing.py",
    "docs/how-to/c-runtime.md": "tests/unit/package/test_runtime.py",
    "docs/adding-an-engine.md": "tests/unit/engines/test_adding_an_engine.py",
    "docs/how-to/torch-compile.md": "tests/unit/torch_compile/test_docs_examples.py",
}
"""Pages whose blocks another test runs → that test."""


def small_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def reader() -> dict[str, Any]:
    """The names that a reader has before the first block: a model, its loss and optimizer, inputs and targets."""
    model, generator = small_net(), torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 3, 8, 8, generator=generator), torch.tensor([1, 3])
    return {
        "torch": torch, "nn": nn, "convoy": convoy, "model": model, "x": x, "y": y, "target": y,
        "loss_fn": nn.functional.cross_entropy, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [(x, y)] * 2,
    }  # fmt: skip


def plans_and_package(names: dict[str, Any]) -> None:
    fast = convoy.optimize(names["model"].eval(), (names["x"],))
    fast.tune((names["x"][:1],))
    assert len(fast.save("net.plan.json")) == 2
    convoy.export(fast, "resnet50.convoy")


def cifar10(names: dict[str, Any]) -> None:
    """CIFAR-10's binary version in little."""
    del names
    folder = Path("cifar-10-batches-bin")
    folder.mkdir()
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        rows = np.random.default_rng(0).integers(0, 10, (40, 3073), dtype=np.uint8)
        (folder / name).write_bytes(rows.tobytes())


BEFORE: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/getting-started.md": lambda _: import_torchvision(),  # its wheel may be for another build of PyTorch
    "docs/how-to/deploy.md": plans_and_package,
    "docs/how-to/datasets.md": cifar10,
}
"""What a page's text asks for before its blocks."""


def same(names: dict[str, Any]) -> None:
    fast, model, x = names["fast"], names["model"], names["x"]
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def served(names: dict[str, Any]) -> None:
    same(names)
    assert names["fast"].stale() is None
    assert names["y"].shape == (8, 10)
    assert len(names["fast"].plans) == 2


def called(names: dict[str, Any]) -> None:
    image, depth = names["image"], names["depth"]
    with torch.no_grad():
        wanted = names["model"](image, depth)
        for fast in (names["fast"], names["twice"], names["again"]):
            assert not fast.plan.baseline
            assert fast.stale() is None or fast is not names["fast"]
            torch.testing.assert_close(fast(image, depth=depth), wanted, rtol=1e-4, atol=1e-5)
    assert names["loss"].shape == ()


def pruned(names: dict[str, Any]) -> None:
    zeros = sum(int((p == 0).sum()) for p in names["model"].parameters())
    assert zeros > 0.4 * sum(p.numel() for p in names["model"].parameters())
    assert Path("pruned.safetensors").stat().st_size > 1000


AFTER: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/getting-started.md": same,
    "docs/how-to/serve.md": served,
    "docs/how-to/deploy.md": same,
    "docs/how-to/python.md": called,
    "docs/how-to/prune.md": pruned,
    "docs/how-to/datasets.md": lambda names: None if names["x"].shape == (128, 3, 32, 32) else pytest.fail("shape"),
    "docs/how-to/train.md": lambda names: None if names["loss"].isfinite() else pytest.fail("loss"),
}
"""What holds after a page's blocks."""


def python_blocks() -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in BLOCKS:
        if block.kind == "python" and block.page not in ELSEWHERE:
            found.setdefault(block.page, []).append(block)
    return found


@pytest.mark.parametrize("page", python_blocks())
def test_the_python_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unmeasured(settings: object) -> convoy.Settings:
        given = checked_settings(settings)
        # Engines of the reader's own, which a page names, are in no module here.
        return dataclasses.replace(given, effort=convoy.Effort.NONE, db=tmp_path / "perf.db", engines=())

    for name in (
        "pipeline.optimize",
        "pipeline.replay.load",
        "training.tune_step",
    ):  # these may be functions as attributes
        monkeypatch.setattr(sys.modules[f"convoy.{name}"], "checked_settings", unmeasured)
    keep_plans(monkeypatch)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")  # pickles look up its classes there
    monkeypatch.setitem(sys.modules, "page", module)
    names = vars(module)
    names.update(reader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convoy")
        BEFORE.get(page, lambda _: None)(names)
        for block in python_blocks()[page]:
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
        AFTER.get(page, lambda _: None)(names)


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_that_another_test_runs_is_named_there(page: str) -> None:
    assert any(block.page == page for block in BLOCKS if block.kind == "python")
    assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8").replace(
        "README = (ROOT", "README.md"
    )


PAGE = """a

    convoy db info   # rows

```python
x = 1
```

    y = f(x)

    z = 2

b

    a ──► b

c

    make test
"""


def test_blocks_are_found_by_their_kind() -> None:
    found = blocks_in(PAGE, "a.md")
    kinds = [("commands", 3), ("python", 6), ("python", 9), ("text", 15), ("shell", 19)]
    assert [(block.kind, block.line) for block in found] == kinds
    assert found[0].commands == ["convoy db info"]
    assert found[2].text == "y = f(x)\n\nz = 2"
    assert len([block for block in BLOCKS if block.kind == "python"]) > 30
