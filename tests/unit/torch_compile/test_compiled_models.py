"""torch.compile(..., backend="convoy") in uses beside the plain one, with every engine: PyTorch's values, and no warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.unit.pipeline.untimed import keep_plans

Compile = Callable[[Any], Any]
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uses") / "perf.db"


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def gradients(module: nn.Module, made: torch.Tensor) -> list[torch.Tensor]:
    made.float().square().sum().backward()
    return [made, *(p.grad for p in module.parameters() if p.grad is not None)]


def weights_by_functional_call(compiled: Compile) -> tuple[Any, Any]:
    module = small().eval()
    other = {name: value.detach() * 2 for name, value in module.named_parameters()}

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, other, (x,))

    with torch.no_grad():
        return compiled(call)(X), call(X)


def vmap(compiled: Compile) -> tuple[Any, Any]:
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.T)

    with torch.no_grad():
        return compiled(torch.vmap(call))(X[:, 0]), torch.vmap(call)(X[:, 0])


def gradient_of_an_input_alone(compiled: Compile) -> tuple[Any, Any]:
    found = []
    for use in (compiled, lambda module: module):
        x = X.clone().requires_grad_()
        use(small().requires_grad_(False))(x).square().sum().backward()
        found.append(x.grad)
    return found[0], found[1]


def checkpointed(compiled: Compile) -> tuple[Any, Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    module = Checkpointed()
    stock = copy.deepcopy(module)
    return gradients(module, compiled(module)(X)), gradients(stock, stock(X))


def dropout(compiled: Compile) -> tuple[Any, Any]:
    found = []
    for use in (compiled, lambda module: module):
        module = nn.Sequential(small(), nn.Dropout(0.5))
        torch.manual_seed(2)
        found.append([*gradients(module, use(module)(X)), torch.get_rng_state()])
    return found[0], found[1]


def double_precision(compiled: Compile) -> tuple[Any, Any]:
    module = small().double().eval()
    with torch.no_grad():
        return compiled(module)(X.double()), module(X.double())


def parameters_in_half_precision(compiled: Compile) -> tuple[Any, Any]:
    module = small().bfloat16()
    compiled(module)(X.bfloat16()).sum().backward()
    module.eval()
    with torch.no_grad():
        return compiled(module)(X.bfloat16()), module(X.bfloat16())


def weights_of_inference_mode(compiled: Compile) -> tuple[Any, Any]:
    with torch.inference_mode():
        module = small().eval()
        return compiled(module)(X), module(X)


def empty_batch(compiled: Compile) -> tuple[Any, Any]:
    module = small().eval()
    with torch.no_grad():
        return compiled(module)(X[:0]), module(X[:0])


def fake_tensors(compiled: Compile) -> tuple[Any, Any]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = small()
        made = compiled(module)(torch.empty(2, 3, 8, 8))
        made.sum().backward()
    return torch.tensor(made.shape), torch.tensor((2, 4, 6, 6))


USES = (
    weights_by_functional_call,
    vmap,
    gradient_of_an_input_alone,
    checkpointed,
    dropout,
    double_precision,
    parameters_in_half_precision,
    weights_of_inference_mode,
    empty_batch,
    fake_tensors,
)


@pytest.mark.parametrize("use", USES)
def test_a_use(use: Callable[[Compile], tuple[Any, Any]], db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_plans(monkeypatch)
    torch.compiler.reset()
    with warnings.catch_warnings():
        if use is not checkpointed:
            warnings.filterwarnings("error", message="convoy")
        found, wanted = use(lambda what: torch.compile(what, backend="convoy", options={"effort": "none", "db": db}))
    loose = use is parameters_in_half_precision
    torch.testing.assert_close(found, wanted, rtol=0.05 if loose else 1e-3, atol=0.03 if loose else 1e-3)
    torch.compiler.reset()
