"""Ordinary uses on a GPU, with the engines that compete by default: every result is stock PyTorch's.

The plan is kept whatever the clock says (`keep_ours`), so that a program, and not PyTorch, gives the result.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import convoy
from convoy.program.runnable_program import eager_of
from convoy.torch_compile import dynamo_backend
from tests.gpu.program.branches import keep_ours

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TF32 = 2e-3
"""Relative error of two nets whose products have TF32's ten bits, summed over a few layers."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uses") / "perf.db"


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_ours(patch)
        yield


def settings(db: Path, **more: Any) -> convoy.Settings:
    return convoy.Settings(effort="none", db=db, isolate=False, **more)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
    ]
    layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)]
    return nn.Sequential(*layers).to(DEVICE).eval()


def example(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(scope="module")
def fast(db: Path) -> nn.Module:
    found = convoy.optimize(net(), (example(),), settings=settings(db))
    assert not found.plan.baseline, found.plan.notes
    return found


def in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def assigned(model: nn.Sequential) -> None:
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}, assign=True)


def another_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 3)


def other_data(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.detach() * 3


def another_layer(model: nn.Sequential) -> None:
    model[2] = nn.Sigmoid()


def hook(model: nn.Sequential) -> None:
    model[3].register_forward_hook(lambda module, inputs, output: output * 2)


def attribute(model: nn.Sequential) -> None:
    model[1].eps = 1.0


CHANGES = [in_place, assigned, another_parameter, other_data, another_layer, hook, attribute]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_gives_what_pytorch_gives(fast: nn.Module, change: Callable[[nn.Module], None]):
    own = copy.deepcopy(fast)
    x = example(2)
    with torch.no_grad():
        before = own(x)
        assert error(before, fast.model(x)) < TF32
        change(own.model)
        with pytest.warns(UserWarning, match="convoy"):
            changed = own(x)
        wanted = own.model(x)
    assert error(wanted, before) > 10 * TF32  # the change shows
    assert error(changed, wanted) < TF32
    with torch.no_grad():
        assert error(fast(x), fast.model(x)) < TF32  # the original is as it was


def test_new_weights_are_packed_by_refresh(fast: nn.Module):
    own = copy.deepcopy(fast)
    assigned(own.model)
    own.refresh()
    x = example(3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error(own(x), own.model(x)) < TF32


def test_a_pickle_gives_the_same_results(fast: nn.Module):
    file = io.BytesIO()
    pickle.dump(fast, file)
    file.seek(0)
    again = pickle.load(file)
    x = example(4)
    with torch.no_grad():
        assert error(again(x), fast.model(x)) < TF32


def test_autocast_around_the_call(fast: nn.Module):
    x = example(5)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = fast(x), fast.model(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert error(found, wanted) < 2e-2


@pytest.mark.parametrize("change", ["channels_last", "transposed", "expanded", "sliced"])
def test_strides_follow_the_call(fast: nn.Module, change: str):
    x = example(6)
    given = {
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(2, 3),
        "expanded": lambda: x[:1].expand(2, -1, -1, -1),
        "sliced": lambda: F.pad(x, (0, 3))[..., :32],
    }[change]()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = fast(given), fast.model(given)
    assert found.stride() == wanted.stride()
    assert error(found, wanted) < TF32


class PartOfABatch(nn.Module):
    """Convolutions of views that begin at odd addresses: images of 5 x 5 x 3 values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last images only."""
        return self.second(self.first(x[1:]).relu()[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_views_at_odd_addresses(db: Path, dtype: torch.dtype):
    model = PartOfABatch().to(DEVICE, dtype).eval()
    whole = torch.randn(6, 3, 5, 5, device=DEVICE).to(dtype)
    x = whole[1:]
    assert x.data_ptr() % 16
    fast = convoy.optimize(model, (x,), settings=settings(db))
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x.double())
        assert error(fast(x), wanted) < 2e-3
        assert error(eager_of(fast.programs[0].runnable)([x])[0], wanted) < 2e-3  # without a CUDA graph
        y = convoy.conv2d(x, model.first.weight[:, :, 1:], engine="cudnn", settings=settings(db))
    assert error(y, nn.functional.conv2d(x.double(), model.first.weight[:, :, 1:].double())) < 2e-3


def test_one_tensor_given_twice(db: Path):
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = net()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.trunk(a) - 2 * self.trunk(b)

    model, x, y = Siamese().eval(), example(7), example(8)
    fast = convoy.optimize(model, (x, x), settings=settings(db))
    with torch.no_grad():
        assert error(fast(x, y), model(x, y)) < TF32
        assert error(fast(x, x), model(x, x)) < TF32


def test_tuning_leaves_everything_as_it_was(db: Path):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = net()
            self.register_buffer("frames", torch.zeros((), device=DEVICE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.frames += 1
            return self.trunk(x)

    model, x = Counting(), example(9)
    model.trunk[1].eval()
    model.trunk[0].train()
    flags = [module.training for module in model.modules()]
    states = torch.get_rng_state(), torch.cuda.get_rng_state() if DEVICE == "cuda" else None, random.getstate()
    given, matmul = x.clone(), torch.backends.cuda.matmul.allow_tf32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = convoy.optimize(model, (x,), settings=settings(db))
    assert int(model.frames) == 0
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), states[0])
    assert states[1] is None or torch.equal(torch.cuda.get_rng_state(), states[1])
    assert random.getstate() == states[2]
    assert torch.equal(x, given)
    assert torch.backends.cuda.matmul.allow_tf32 == matmul
    with torch.no_grad():
        fast(x)
    assert int(model.frames) == 1


def test_threads_that_optimise_at_once(db: Path):
    found: list[float | BaseException] = []

    def run(seed: int) -> None:
        try:
            model = net(seed)
            fast = convoy.optimize(model, (example(),), settings=settings(db))
            with torch.no_grad():
                found.append(error(fast(example(seed)), model(example(seed))))
        except BaseException as failure:
            found.append(failure)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value for value in found if not (isinstance(value, float) and value < TF32)] == []
    assert len(found) == 4


def test_torch_compile_takes_the_weights_that_a_call_hands_over(db: Path):
    torch.compiler.reset()
    options = {"effort": "none", "db": db, "isolate": False}
    blocks = [net(seed) for seed in range(4)]
    compiled = [torch.compile(block, backend=dynamo_backend, options=options) for block in blocks]
    x = example(10)
    with torch.no_grad():
        assert [error(c(x), b(x)) < TF32 for c, b in zip(compiled, blocks, strict=True)] == [True] * 4
        another_parameter(blocks[1])
        in_place(blocks[2])
        assert [error(c(x), b(x)) < TF32 for c, b in zip(compiled, blocks, strict=True)] == [True] * 4


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The nearest values with the ten bits of mantissa that a TF32 product reads, in float64."""
    bits = tensor.detach().float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


def in_tf32(model: nn.Module) -> nn.Module:
    """A copy in float64 whose parameters are rounded to TF32, without gradients."""
    made = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.grad = None
            parameter.copy_(to_tf32(parameter))
    return made


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_torch_compile_in_training(db: Path, amp: torch.dtype | None):
    torch.compiler.reset()
    model = nn.Sequential(*net().train(), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).to(DEVICE)
    stock = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    options = {"effort": "none", "db": db, "isolate": False}
    compiled = torch.compile(model, backend=dynamo_backend, options=options)
    x = example(11)
    with torch.autocast(DEVICE, amp or torch.bfloat16, enabled=amp is not None):
        compiled(x).float().square().sum().backward()
        stock(x).float().square().sum().backward()
    exact(x.double()).square().sum().backward()
    rounded = in_tf32(exact)
    rounded(to_tf32(x)).square().sum().backward()
    wrong = []
    for ours, own, one, true in zip(*(m.parameters() for m in (model, stock, rounded, exact)), strict=True):
        allowed = error(own.grad, true.grad)
        if amp is None:  # stock may happen to run exact fp32 kernels where its flags allow TF32
            allowed = max(allowed, error(one.grad, true.grad))
        if (mine := error(ours.grad, true.grad)) > 4 * allowed + 1e-4 and float(true.grad.norm()) > 1e-6:
            wrong.append((tuple(ours.shape), mine, allowed))
    assert wrong == []


def classifier(seed: int = 0) -> nn.Sequential:
    return nn.Sequential(*net(seed), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).to(DEVICE).train()


def test_a_loss_with_class_weights_that_change(db: Path):
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device=DEVICE)
    x, y = example(12), torch.tensor([1, 3], device=DEVICE)
    model = classifier()
    stock = copy.deepcopy(model)
    loss = nn.CrossEntropyLoss(weight=weights)
    sgd, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (model, stock))
    step = convoy.training_step(model, loss, sgd, (x, y), settings=settings(db))
    assert not step.plan.baseline, "\n".join(step.notes)
    for index in range(5):
        ours = step(x, y)
        theirs.zero_grad()
        wanted = loss(stock(x), y)
        wanted.backward()
        theirs.step()
        assert error(ours, wanted) < 5e-3, index
        with torch.no_grad():
            weights[1] = 10.0 * (index + 1)


def test_a_layer_replaced_under_a_captured_step(db: Path):
    x, y = example(13), torch.tensor([1, 3], device=DEVICE)
    model = classifier(1)
    step = convoy.training_step(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.01), (x, y), settings=settings(db)
    )
    for _ in range(4):
        step(x, y)
    model[2] = nn.Sigmoid()
    wanted = F.cross_entropy(copy.deepcopy(model)(x), y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert error(step(x, y), wanted) < TF32
