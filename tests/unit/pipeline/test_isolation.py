"""Isolation: copies that share memory where nothing writes it, and a process that is afterwards as it was."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from convoy.capture.copies import copied_arguments
from convoy.capture.user_hooks import user_hook
from convoy.errors import CaptureError
from convoy.pipeline.isolation import attributes_of, isolate, preserve_global_state


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


X = torch.ones(2, 3, 8, 8)


def test_parameters_are_shared_and_everything_else_is_the_copys_own() -> None:
    model = net()
    model[1].eval()  # frozen
    twin = isolate(model, (X,), {})
    assert twin.model[0].weight is not model[0].weight
    assert twin.model[0].weight.data_ptr() == model[0].weight.data_ptr()
    twin.model[1].running_mean.add_(1)
    twin.model[0].weight.grad = torch.ones_like(model[0].weight)
    twin.args[0].zero_()
    assert not model[1].running_mean.any()
    assert model[0].weight.grad is None
    assert X.all()
    assert [module.training for module in model] == [True, False, True]
    assert not any(module.training for module in twin.model.modules())


def test_a_tied_parameter_stays_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    twin = isolate(model, (torch.ones(1, 4),), {}).model
    assert twin[0].weight is twin[1].weight


class Merges(nn.Module):
    """Merges its weights when it is put in evaluation mode, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def train(self, mode: bool = True) -> Merges:
        if not mode and self.training:
            self.conv.weight.data.add_(1)
        return super().train(mode)


def test_a_model_that_merges_weights_in_evaluation_mode_keeps_its_own() -> None:
    model = Merges()
    before = model.conv.weight.detach().clone()
    twin = isolate(model, (X,), {}).model
    assert torch.equal(model.conv.weight, before)
    assert torch.equal(twin.conv.weight, before + 1)


def test_a_lock_becomes_a_new_lock() -> None:
    model = net()
    model.lock, model.reentrant, model.log = threading.Lock(), threading.RLock(), logging.getLogger("planted")
    with model.lock:
        twin = isolate(model, (X,), {}).model
        assert twin.lock.acquire(blocking=False)
    assert twin.reentrant is not model.reentrant
    assert twin.log is model.log


class Itself(nn.Module):
    def __deepcopy__(self, memo: object) -> Itself:
        return self


def closing(model: nn.Module) -> None:
    model.again = lambda x: model(x)  # noqa: PLW0108 - closes over it


def bound(model: nn.Module) -> None:
    call = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return call(x)

    model.forward = forward


def pointing(model: nn.Module) -> None:
    model.parent = weakref.ref(model)


def generating(model: nn.Module) -> None:
    model.source = (value for value in range(3))


def open_file(model: nn.Module) -> None:
    model.file = open(os.devnull)  # noqa: SIM115, PTH123


def copying_itself(model: nn.Module) -> None:
    model.add_module("itself", Itself())


@pytest.mark.parametrize("spoil", [closing, bound, pointing, generating, open_file, copying_itself])
def test_what_cannot_be_copied_is_said(spoil) -> None:
    model = net()
    spoil(model)
    with pytest.raises(CaptureError, match=r"cannot be copied|would use it"):
        isolate(model, (X,), {})


def test_a_tensor_given_twice_becomes_two() -> None:
    wide = torch.zeros(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    (first, second), named = copied_arguments((wide, wide), {"view": [wide[:1]], "scale": 2.0})
    places = {t.untyped_storage().data_ptr() for t in (first, second, named["view"][0], wide)}
    assert len(places) == 4
    assert first.stride() == wide.stride()
    assert named["scale"] == 2.0


def test_copied_arguments_have_gaps_where_slices_have_them() -> None:
    whole = torch.randn(2, 3, 8, 6)
    views = (whole[:, :, ::2], whole[..., 1:].transpose(1, 2), whole[:1].expand(4, 3, 8, 6), whole.unfold(3, 3, 1))
    copies, _ = copied_arguments(views, {})
    assert all(torch.equal(own, view) for own, view in zip(copies, views, strict=True))
    assert [own.stride() for own in copies[:2]] == [view.stride() for view in views[:2]]


def test_hooks_that_a_program_would_not_call_are_found() -> None:
    model = weight_norm(nn.Conv2d(3, 4, 3))
    prune.l1_unstructured(nn.Sequential(model)[0], "bias", amount=1)
    assert user_hook(model) == ""
    whole = nn.Sequential(model, nn.ReLU())
    handle = whole[1].register_forward_hook(lambda *_: None)
    assert user_hook(whole) == "1 (ReLU) has a forward hook"
    handle.remove()
    handle = whole.register_forward_pre_hook(partial(print))
    assert user_hook(whole) == "the model (Sequential) has a forward pre-hook"
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "all modules" in user_hook(whole)
    finally:
        handle.remove()
    assert user_hook(whole) == ""


def test_attributes_are_compared_by_what_they_hold() -> None:
    model = net()
    model.calls, model.seen = 1, [1, 2]
    before = attributes_of(model)
    model.seen[0] = 5
    assert {name for name, value in attributes_of(model).items() if before[name] != value} == {"seen"}


def disturb() -> None:
    torch.rand(3), random.random(), np.random.rand()
    os.environ["CONVOY_PLANTED"] = "1"
    del os.environ["CONVOY_PLANTED_BEFORE"]
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    sys.path.insert(0, "/planted")


def state() -> list[object]:
    numpy = np.random.get_state()
    return [
        torch.get_rng_state().tolist(), random.getstate(), (numpy[1].tolist(), numpy[2:]), dict(os.environ),
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark, torch.backends.mkldnn.conv.fp32_precision, torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"), list(warnings.filters), logging.root.manager.disable, list(sys.path),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_process_is_afterwards_as_it_was(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    monkeypatch.setenv("CONVOY_PLANTED_BEFORE", "1")
    before = state()
    try:
        with preserve_global_state():
            disturb()
            assert all(one != other for one, other in zip(before, state(), strict=True))
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert state() == before


def test_one_thread_at_a_time() -> None:
    inside: list[int] = []
    most: list[int] = []

    def enter() -> None:
        for _ in range(20):
            with preserve_global_state(), preserve_global_state():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) == 160


def test_deprecations_inside_pytorch_are_not_shown_and_others_are() -> None:
    """Inductor calls deprecated functions of PyTorch's; FutureWarnings are shown by default, and a user cannot act on these."""
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with preserve_global_state():
            for module in ("torch._inductor.lowering", "torch.jit._script", "net", "torchvision.ops"):
                for category in (FutureWarning, DeprecationWarning, UserWarning):
                    warnings.warn_explicit(module, category, f"{module}.py", 1, module=module)
        warnings.warn_explicit("later", FutureWarning, "lowering.py", 2, module="torch._inductor.lowering")
    shown = [(str(one.message), one.category) for one in told]
    torchs = [("torch._inductor.lowering", UserWarning), ("torch.jit._script", UserWarning)]
    others = [
        (module, category)
        for module in ("net", "torchvision.ops")
        for category in (FutureWarning, DeprecationWarning, UserWarning)
    ]
    assert shown == [*torchs, *others, ("later", FutureWarning)]
    assert list(warnings.filters) == before
