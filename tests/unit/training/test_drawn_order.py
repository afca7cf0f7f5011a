"""Random numbers of a training step are PyTorch's for a seed, in whichever order a tensor lies in memory when they are drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

import convoy
from convoy.capture import capture_training
from convoy.graph.randomness import MEMORY_ORDER
from convoy.training import tune_training_step

Draw = Callable[[torch.Tensor], torch.Tensor]


def of_tokens(y: torch.Tensor) -> torch.Tensor:
    """As vision transformers do behind their patches."""
    return dropout(y.flatten(2).transpose(1, 2), 0.3).transpose(1, 2).unflatten(2, y.shape[2:])


def of_one_head(y: torch.Tensor) -> torch.Tensor:
    """Attention with one head gives images in channels_last."""
    heads = y.flatten(2).transpose(1, 2).unsqueeze(1)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return dropout(attended.transpose(2, 3).reshape(y.shape).sigmoid(), 0.3)


def of_rows(y: torch.Tensor) -> torch.Tensor:
    """Of a transposed matrix."""
    return y + dropout(y.mean((2, 3)).t(), 0.3).t()[..., None, None]


DRAWS: dict[str, Draw] = {
    "images": lambda y: dropout(y, 0.3),
    "images in nchw": lambda y: dropout(y.contiguous(), 0.3),
    "images in nhwc": lambda y: dropout(y.contiguous(memory_format=torch.channels_last), 0.3),
    "channels last": lambda y: dropout(y.permute(0, 2, 3, 1).sigmoid(), 0.3).permute(0, 3, 1, 2),
    "tokens": of_tokens,
    "one head": of_one_head,
    "rows": of_rows,
    "uniform": lambda y: y * torch.rand_like(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "normal": lambda y: y + torch.randn_like(y.transpose(2, 3)).transpose(2, 3),
    "nothing for a dropout of everything": lambda y: dropout(y + dropout(y, 1.0), 0.3),
    "whole channels": lambda y: nn.functional.dropout2d(y, 0.3),
}


class Drawing(nn.Module):
    """Two convolutions, and numbers drawn between them."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.first, self.second, self.draw = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.draw(self.first(x)))


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("what", DRAWS)
def test_a_seed_gives_the_numbers_of_pytorch(what: str, memory_format: torch.memory_format, tmp_path: Path):
    torch.manual_seed(0)
    stock = Drawing(DRAWS[what]).to(memory_format=memory_format)
    x = torch.randn(2, 3, 6, 8).to(memory_format=memory_format)
    model = copy.deepcopy(stock)
    settings = convoy.Settings(
        isolate=False, effort="none", solver="baseline", only_engines=("aten",), db=tmp_path / "x.db"
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, stock)]
    result = tune_training_step(model, mean_square, optimizers[0], (x,), settings=settings)
    assert not result.plan.baseline, result.plan.notes
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss = result.step(x)
        torch.manual_seed(seed)
        optimizers[1].zero_grad()
        wanted = mean_square(stock(x))
        wanted.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss, wanted.detach())
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("what", "order"),
    [
        ("tokens", (0, 2, 1)),
        ("rows", (1, 0)),
        ("images in nhwc", (0, 2, 3, 1)),
        ("images", (0, 1, 2, 3)),
        ("whole channels", None),
    ],
)
def test_the_graph_says_in_which_order_numbers_are_drawn(what: str, order: tuple[int, ...] | None):
    capture = capture_training(Drawing(DRAWS[what]), mean_square, (torch.randn(2, 3, 6, 8),))
    said = [dict(node.kwargs).get(MEMORY_ORDER) for node in capture.captured.graph.nodes if "bernoulli" in node.op]
    said += [dict(node.kwargs).get(MEMORY_ORDER) for node in capture.captured.graph.nodes if "dropout." in node.op]
    assert said == [order]
