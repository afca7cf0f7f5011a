"""copy_module: pruned modules are copied, and stay pruned."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from convoy.capture.copies import copy_module, separate_copy


def test_pruned_modules_are_copied_and_work_in_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1))
    prune.l1_unstructured(model[0], "weight", 0.5)
    x = torch.randn(1, 2, 5, 5)
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    before = model[0].weight
    twin = copy_module(model).double()
    assert model[0].weight is before
    torch.testing.assert_close(twin(x.double()).float(), model(x))
    twin[0].weight_orig.data.zero_()
    assert not twin(x.double())[0].equal(model(x)[0].double())
    assert model[0].weight_orig.abs().sum() > 0


class Full(nn.Parameter):
    """On a device that has no room for another of it."""

    def __deepcopy__(self, memo):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def clone(self, **_):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_copy_elsewhere_takes_no_room_beside_the_original():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model[0].weight = model[2].weight = Full(torch.ones(3, 3), requires_grad=False)
    prune.identity(model[1], "weight")
    with pytest.raises(torch.OutOfMemoryError):
        copy_module(model)
    twin = copy_module(model, torch.device("meta"))
    assert {t.device.type for t in (*twin.parameters(), *twin.buffers(), twin[1].weight)} == {"meta"}
    assert {t.device.type for t in (*model.parameters(), *model.buffers(), model[1].weight)} == {"cpu"}
    assert twin[0].weight is twin[2].weight
    assert not twin[0].weight.requires_grad
    assert twin[1].bias.requires_grad


def test_a_copy_on_the_same_device_shares_nothing():
    model = nn.Conv2d(2, 3, 1)
    twin = copy_module(model, torch.device("cpu"))
    twin.weight.data.zero_()
    assert model.weight.abs().sum() > 0


def test_a_copy_of_an_exported_program_checks_its_inputs_as_the_original_does():
    program = torch.export.export(nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8),)).module(check_guards=False)
    calls = []
    program.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    twin = separate_copy(program)
    twin(torch.randn(2, 3, 8, 8))
    assert calls == [(2, 3, 8, 8)]
    assert len(twin._forward_pre_hooks) == len(program._forward_pre_hooks)


def test_empty_dicts_of_a_copy_are_its_own_and_shared_ones_stay_shared():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    model[0].seen = model[1].seen = {}
    model[1].marked = OrderedDict()
    model[1].marked.mark = 1
    twin = separate_copy(model)
    assert type(twin[0]._forward_hooks) is OrderedDict
    assert twin[0]._forward_hooks is not model[0]._forward_hooks
    assert twin[0].seen is twin[1].seen
    assert twin[0].seen is not model[0].seen
    assert (twin[1].marked.mark, twin[1].marked is model[1].marked) == (1, False)
    twin[0].register_forward_hook(lambda *_: None)
    assert not model[0]._forward_hooks
    assert not twin[1]._forward_hooks


@pytest.mark.parametrize("training", [False, True])
def test_a_copy_has_the_training_flags_of_its_original(training):
    """A copy of torchvision's `DualGraphModule` is in training mode."""

    class Anew(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def __deepcopy__(self, memo):
            return memo.setdefault(id(self), Anew())

    model = Anew().train(training)
    model.norm.train(not training)
    assert [module.training for module in separate_copy(model).modules()] == [training, not training]
