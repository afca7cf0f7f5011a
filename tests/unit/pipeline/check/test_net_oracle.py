"""The oracle: float64 by the graph or the module, else what rounding does; and wrong outputs of PyTorch's own are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convoy
from convoy.capture import capture_with_original
from convoy.engines.torch_flags import convolutions
from convoy.errors import CaptureError
from convoy.pipeline.check import end_to_end, float64, net_oracle
from convoy.pipeline.check.net_oracle import OracleResult, run_oracle

X = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Net(nn.Module):
    """A convolution, a function, a linear layer."""

    def __init__(
        self, between: Callable[[torch.Tensor], torch.Tensor], before: Callable[..., torch.Tensor] | None = None
    ):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)
        self.before, self.between = before, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x if self.before is None else self.before(x))
        return self.last(self.between(y.mean((2, 3))))


def look(model: nn.Module, x: torch.Tensor = X, *, flops: int = 1, stock: nn.Module | None = None) -> OracleResult:
    with torch.no_grad():
        _, original = capture_with_original(model.eval(), (x,))
        return run_oracle(original, stock or model, (x,), {}, flops=flops, cuda=False)


def warp(x: torch.Tensor) -> torch.Tensor:
    grid = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


CASTS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "float() before a linear layer": (Net(lambda y: y.float()), X),
    "bytes in": (Net(lambda y: y, lambda x: x.float() / 255), (X * 60).to(torch.uint8)),
    "a grid in fp32": (Net(lambda y: y, warp), X),
    "a tensor made in forward": (Net(lambda y: y * torch.tensor([0.5] * 8)), X),
    "a cast down and up": (Net(lambda y: y.to(torch.float32).type(torch.float32) + torch.zeros(8)), X),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_and_new_tensors_are_float64_in_the_graph(name: str) -> None:
    model, x = CASTS[name]
    found = look(model, x)
    (exact,) = found.exact
    assert exact.dtype == torch.float64
    assert (found.note, found.wrong) == ("", "")
    assert 0 < found.baseline.rel_l2_error < 1e-6, "float64 and not fp32 was compared with"


def test_of_a_large_batch_the_first_images_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = CASTS["float() before a linear layer"]
    found = look(model, flops=int(2 * float64.ORACLE_FLOPS))
    assert [tuple(exact.shape) for exact in found.exact] == [(1, 10)]
    assert found.baseline.rel_l2_error < 1e-6


def test_without_a_graph_in_float64_a_copy_of_the_module_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_oracle, "to_double", lambda _: 1 / 0)
    found = look(Net(lambda y: y))
    assert found.exact[0].dtype == torch.float64
    assert (found.note, found.baseline.rel_l2_error < 1e-6) == ("", True)


def test_without_any_float64_pytorchs_own_result_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_oracle, "to_double", lambda _: 1 / 0)
    model = Net(lambda y: y.float())  # in float64 the module itself does not run either
    found = look(model)
    with torch.no_grad():
        assert torch.equal(found.exact[0], model(X).double())
    assert "could not be run in float64" in found.note
    assert 0 < found.baseline.rel_l2_error < 1e-5, "what rounding does"


def test_a_net_that_draws_is_compared_with_the_same_draws() -> None:
    model = Net(lambda y: y + torch.rand_like(y))
    found = look(model)
    assert "draws random numbers" in found.note
    assert 0 < found.baseline.rel_l2_error < 1e-5


class Wrong(nn.Module):
    """A net whose convolution gives two wrong values, as a defective library would."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.model(x).clone()
        y[0, :2] += 1
        return y


def test_a_graph_that_computes_something_else_than_the_module_is_refused() -> None:
    model = Net(lambda y: y)
    with pytest.raises(CaptureError, match="does not compute what the model does"):
        look(model, stock=Wrong(model))


class WrongWithOnednn(Wrong):
    """A net whose library leaves values unwritten: wrong in this run, and right by chance in the graph's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.backends.mkldnn.enabled else self.model(x)


def test_a_graph_is_not_refused_where_the_module_is_right_without_onednn() -> None:
    model = Net(lambda y: y)
    found = look(model, stock=WrongWithOnednn(model))
    assert "PyTorch's own outputs are wrong" in found.wrong
    assert torch.backends.mkldnn.enabled
    with torch.no_grad():
        assert torch.allclose(found.exact[0].float(), model(X), rtol=1e-4, atol=1e-5)


def test_the_user_is_told_where_pytorchs_own_output_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With operators that are wrong in fp32 and right in float64, in the module as in its graph."""
    model = Net(lambda y: y)
    plain = net_oracle.captured_function

    def broken(captured):
        run = plain(captured)
        return (
            run
            if captured.double
            else lambda *args: Wrong(run)(*args) if isinstance(run, nn.Module) else spoilt(run(*args))
        )

    def spoilt(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[0, :2] += 1
        return y

    monkeypatch.setattr(net_oracle, "captured_function", broken)
    found = look(model, stock=Wrong(model))
    assert "PyTorch's own outputs are wrong here" in found.wrong
    assert found.baseline.rel_l2_error < 1e-5, "a program is not allowed as much"


def test_a_deep_ill_conditioned_net_is_not_called_wrong() -> None:
    """Its outputs are differences of large numbers: rounding alone moves them far."""
    model = Net(lambda y: (y + 1e4) - 1e4)
    found = look(model)
    assert found.baseline.rel_l2_error > 10 * net_oracle.MOST_ROUNDINGS * 2**-24, "it was looked into"
    assert found.wrong == ""


def test_deep_nets_may_be_off_by_a_random_walk_of_roundings_in_fp32_alone() -> None:
    assert net_oracle._plain_roundings(1, 2.0**-24) == net_oracle.MOST_ROUNDINGS
    assert net_oracle._plain_roundings(100, 2.0**-24) == 10 * net_oracle.MOST_ROUNDINGS
    assert net_oracle._plain_roundings(100, 2.0**-11) == net_oracle.MOST_ROUNDINGS


def test_the_warning_and_the_note(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(net_oracle, "_graph_errors", lambda *_: end_to_end.OutputErrors(1.0, 1.0))
    monkeypatch.setattr(net_oracle, "_run", lambda model, args, kwargs: [model(*args, **kwargs) + 1])
    with pytest.warns(UserWarning, match="convoy: PyTorch's own outputs are wrong here") as caught:
        fast = convoy.optimize(Net(lambda y: y), X, settings=convoy.Settings(effort="none", db=tmp_path / "perf.db"))
    assert [w.filename for w in caught if "convoy" in str(w.message)] == [__file__]
    assert any("PyTorch's own outputs are wrong here" in note for note in fast.plan.notes)


@pytest.mark.parametrize("fails", [False, True])
def test_cudnn_searches_for_a_float64_run_only_where_it_finds_nothing_else(*, fails: bool) -> None:
    seen: list[bool] = []

    def run() -> list[torch.Tensor]:
        seen.append(torch.backends.cudnn.benchmark)
        if fails and not torch.backends.cudnn.benchmark:
            raise RuntimeError("no deterministic plan")
        return [torch.ones(1)]

    cuda = torch.device("cuda")
    with convolutions("as_torch", cuda):
        found = net_oracle.searched_if_needed(run, cuda)()
    assert [*map(int, found)] == [1]
    assert seen == ([False, True] if fails else [False])
