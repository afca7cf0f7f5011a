"""copy_module: pruned modules are copied, and stay pruned."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from convoy.capture.copies import copy_module


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
