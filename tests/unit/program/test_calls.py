"""Calls of an optimised module in every form: by keyword, in other strides, inside torch's modes, with tensors of other kinds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing import assert_close

import convoy
from convoy.program import calls
from convoy.program.optimized_module import OptimizedModule
from convoy.program.runnable_program import Program
from tests.unit.program.fast_net import X, always_kept, classifier

SCALE = torch.rand(4, 1, 1, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("calls") / "perf.db")


@pytest.fixture(scope="module")
def tuned(settings: convoy.Settings) -> OptimizedModule:
    with always_kept():
        fast = convoy.optimize(classifier(), (X, SCALE), {"maps": True}, settings=settings)
        fast.tune((X,))
    assert not any(plan.baseline for plan in fast.plans)
    return fast


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.empty(1, device="meta"), "on the device meta"),
        (torch.zeros(1, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (torch.ones(1).to_sparse(), "sparse_coo"),
    ],
)
def test_a_tensor_that_a_kernel_cannot_read_is_named_by_its_kind(kind: torch.Tensor, says: str):
    reason = calls.why_not_plain([X, kind])
    assert reason is not None
    assert says in reason


@pytest.fixture
def fast(tuned: OptimizedModule) -> OptimizedModule:
    return copy.deepcopy(tuned)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows with every run of a program."""
    seen: list[int] = []
    run = Program.__call__

    def counted(self: Program, *args: object, flat: bool = False) -> object:
        seen.append(1)
        return run(self, *args, flat=flat)  # type: ignore[arg-type]

    monkeypatch.setattr(Program, "__call__", counted)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield seen


def test_arguments_by_position_and_by_keyword_are_one_call(fast: OptimizedModule, runs: list[int]):
    wanted = fast.model(X, SCALE, maps=True)
    for found in (
        fast(X, SCALE, maps=True),
        fast(X, scale=SCALE, maps=True),
        fast(maps=True, scale=SCALE, x=X),
    ):
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for found in (fast(X), fast(x=X), fast(X, None), fast(X, maps=False, scale=None)):
        assert_close(found, fast.model(X), rtol=1e-4, atol=1e-5)
    assert len(runs) == 7


def test_numbers_of_other_types_are_other_calls(fast: OptimizedModule):
    with torch.no_grad(), pytest.warns(UserWarning, match="no plan"):
        scores, _ = fast(X, SCALE, maps=1)
    assert torch.equal(scores, fast.model(X, SCALE, maps=1)[0])


STRIDES = {
    "channels_last": X.contiguous(memory_format=torch.channels_last),
    "transposed": X.transpose(2, 3).contiguous().transpose(2, 3),
    "batch inside": X.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "cropped": torch.nn.functional.pad(X, (1, 2, 3, 4))[..., 3:11, 1:9],
    "every other": X.repeat_interleave(2, dim=3)[..., ::2],
    "expanded": X[:1].expand(2, 3, 8, 8),
}


@pytest.mark.parametrize("name", STRIDES)
def test_outputs_follow_the_strides_of_inputs_as_pytorchs_do(fast: OptimizedModule, runs: list[int], name: str):
    x = STRIDES[name]
    wanted = fast.model(x, SCALE, maps=True)
    for _ in range(3):
        found = fast(x, SCALE, maps=True)
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in wanted]
    assert len(runs) == 2  # the first call asks the stock module
    assert fast(X, SCALE, maps=True)[1].stride() == fast.model(X, SCALE, maps=True)[1].stride()


class Normed(torch.nn.Module):
    """Layer norms give contiguous results, wherever they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(4, 4, 3, padding=1, groups=2), torch.nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.conv(x)
        return self.norm(y), y, x


@pytest.mark.parametrize("kind", ["contiguous", "channels_last", "sliced"])
def test_outputs_of_the_example_lie_as_pytorchs_do(settings: convoy.Settings, runs: list[int], kind: str):
    x = torch.randn(2, 4, 8, 6)
    x = {"contiguous": x, "channels_last": x.to(memory_format=torch.channels_last), "sliced": x[:, :, ::2]}[kind]
    model = Normed().eval()
    with always_kept():
        fast = convoy.optimize(model, (x,), settings=settings)
    runs.clear()
    found, wanted = fast(x), model(x)
    assert len(runs) == 1
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in wanted]
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_autocast_around_a_call_falls_back(fast: OptimizedModule):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = fast.model(X)
        with pytest.warns(UserWarning, match="autocast is torch.bfloat16 on cpu and was off") as said:
            found = fast(X)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted)
    assert [one.filename for one in said] == [__file__]


def test_a_program_made_under_autocast_serves_such_calls(settings: convoy.Settings, runs: list[int]):
    model = classifier()
    with torch.autocast("cpu", torch.bfloat16):
        with always_kept():
            fast = convoy.optimize(model, (X,), settings=settings)
        runs.clear()
        found, wanted = fast(X), model(X)
        assert found.dtype is wanted.dtype
        assert_close(found, wanted, rtol=0.05, atol=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(fast(X), model(X))


class Scaled(torch.nn.Module):
    """A tensor that the model makes in its code has the default dtype, and so has the output then."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = classifier()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x) * torch.tensor(0.5) + torch.arange(5) / 3


def test_another_default_dtype_falls_back(settings: convoy.Settings, runs: list[int]):
    model = Scaled().eval()
    with always_kept():
        fast = convoy.optimize(model, (X,), settings=settings)
    runs.clear()
    assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)
    assert len(runs) == 1
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.warns(UserWarning, match=r"the default dtype is torch\.float64 and was torch\.float32 when"):
            found = fast(X)
        wanted = model(X)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype is wanted.dtype is torch.float64
    assert torch.equal(found, wanted)
    fast(X)
    assert len(runs) == 2


def test_symbolic_tracing_of_a_module_around_it_traces_the_stock_module(fast: OptimizedModule, runs: list[int]):
    around = torch.nn.Sequential(fast, torch.nn.ReLU()).eval()
    traced = torch.fx.symbolic_trace(around)
    assert torch.equal(traced(X), torch.relu(fast.model(X)))
    assert runs == []


def test_transforms_run_the_stock_module(fast: OptimizedModule):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradient = torch.func.grad(lambda x: fast(x).sum())(X)
        wanted = torch.func.grad(lambda x: fast.model(x).sum())(X)
        assert torch.equal(gradient, wanted)
        pairs = torch.stack([X, X + 1])
        assert_close(torch.vmap(fast)(pairs), torch.vmap(fast.model)(pairs))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(X, torch.ones_like(X))
            found, right = (forward_ad.unpack_dual(f(dual)).tangent for f in (fast, fast.model))
        assert torch.equal(found, right)


def test_tracing_sees_the_stock_module(fast: OptimizedModule):
    exported = torch.export.export(fast, (X,)).module()
    assert_close(exported(X), fast.model(X))
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    assert_close(compiled(X), fast.model(X))


def test_tensors_of_other_kinds_do_as_in_pytorch(fast: OptimizedModule):
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    strange = {
        "fake": fake,
        "half": X.half(),
        "double": X.double(),
        "meta": X.to("meta"),
        "sparse": X.to_sparse(),
        "nested": torch.nested.nested_tensor([X[0], X[1]]),
        "negative": torch._neg_view(X),
    }

    def outcome(module: torch.nn.Module, x: torch.Tensor) -> object:
        try:
            made = module(x)
        except Exception as error:  # PyTorch's own, whatever it is
            return type(error)
        return made.dtype, made.device, made.shape, type(made)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, x in strange.items():
            assert outcome(fast, x) == outcome(fast.model, x), name
        assert torch.equal(fast(torch._neg_view(X)), fast.model(-X))


@pytest.mark.parametrize("change", ["half", "double", "meta"])
def test_a_cast_module_computes_as_pytorchs(fast: OptimizedModule, change: str):
    cast, stock = {
        "half": lambda m: m.half(), "double": lambda m: m.double(), "meta": lambda m: m.to("meta")
    }[change], classifier()  # fmt: skip
    cast(fast)
    cast(stock)
    dtype, device = stock.conv.weight.dtype, stock.conv.weight.device
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = (module(X.to(device, dtype)) for module in (fast, stock))
        assert (found.dtype, found.device, found.shape) == (wanted.dtype, wanted.device, wanted.shape)
        if change != "meta":
            assert torch.equal(found, wanted)
        with pytest.raises((RuntimeError, NotImplementedError)):
            fast(X)  # weights of another dtype or device, as PyTorch says


def test_a_default_device_does_not_move_a_program(fast: OptimizedModule, runs: list[int]):
    wanted = fast.model(X)
    with torch.device("meta"):
        assert_close(fast(X), wanted, rtol=1e-4, atol=1e-5)
    assert runs
