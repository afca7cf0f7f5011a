"""weight_masks: zeros are seen wherever they come from, and only where there are many."""

import math

import torch
from torch import nn
from torch.nn.utils import prune

from convoy.capture import capture_inference
from convoy.capture.weight_masks import LEAST_SPARSITY, mask_of, weight_masks


def net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 2, 1)
    ).eval()


def test_plain_zeros_and_masks_of_torch_are_found_behind_folded_norms():
    model = net()
    prune.random_unstructured(model[0], "weight", 0.5)
    with torch.no_grad():
        model[3].weight[1:] = 0
    captured = capture_inference(model, (torch.randn(1, 2, 6, 6),))
    found = weight_masks(captured)
    by_shape = {mask.shape: mask for mask in found.values()}
    assert set(by_shape) == {(4, 2, 3, 3), (6, 4, 1, 1)}
    assert by_shape[4, 2, 3, 3] == mask_of(model[0].weight_mask)
    assert by_shape[6, 4, 1, 1].nonzeros == 4


def test_few_zeros_are_no_mask():
    model = net()
    captured = capture_inference(model, (torch.randn(1, 2, 6, 6),))
    assert weight_masks(captured) == {}
    assert 0 < LEAST_SPARSITY < 0.5


def test_a_nan_is_a_value_and_minus_zero_is_none():
    weight = torch.tensor([0.0, -0.0, math.nan, math.inf, 1e-45, 0.0]).reshape(1, 6, 1, 1)
    mask = mask_of(weight)
    assert mask.bits == bytes([0b00111000])
    assert mask == mask_of(weight.double()) == mask_of(weight.to(memory_format=torch.channels_last))
