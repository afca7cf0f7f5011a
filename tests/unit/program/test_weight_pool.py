"""Equal packed weights are held once; what differs in a bit, a stride or its alignment is not."""

from __future__ import annotations

import gc
import weakref

import torch

from convoy.program.shared_memory import SharedMemory, present_memory, sharing
from convoy.program.weight_pool import WeightPool

WEIGHT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def shared(pool: WeightPool, tensor: torch.Tensor) -> torch.Tensor:
    return pool.shared((tensor,))[0]


def test_equal_bits_are_held_once_and_others_are_not() -> None:
    pool = WeightPool()
    first = shared(pool, WEIGHT.clone())
    assert shared(pool, WEIGHT.clone()) is first
    assert shared(pool, first) is first
    other = WEIGHT.clone()
    other[63, 31] = torch.nextafter(other[63, 31], torch.tensor(9.0))
    assert shared(pool, other) is other
    exchanged = WEIGHT.clone()
    exchanged[[0, 1]] = exchanged[[1, 0]]
    assert shared(pool, exchanged) is exchanged
    turned = WEIGHT.t().contiguous().t()
    assert shared(pool, turned) is turned
    half = WEIGHT.half()
    assert shared(pool, half) is half
    assert shared(pool, WEIGHT.half()) is half


def test_zeros_of_both_signs_differ_and_nans_are_equal_to_themselves() -> None:
    pool = WeightPool()
    plus, minus, nan = torch.zeros(2048), -torch.zeros(2048), torch.full((2048,), torch.nan)
    for one in (plus, minus, nan):
        assert shared(pool, one) is one
    assert shared(pool, plus.clone()) is plus
    assert shared(pool, minus.clone()) is minus
    assert shared(pool, nan.clone()) is nan


def test_a_weight_at_an_odd_address_does_not_stand_for_an_aligned_one() -> None:
    pool = WeightPool()
    odd = torch.zeros(WEIGHT.numel() + 1)[1:].view_as(WEIGHT).copy_(WEIGHT)
    assert shared(pool, odd) is odd
    aligned = WEIGHT.clone()
    assert shared(pool, aligned) is aligned
    assert shared(pool, WEIGHT.clone()) is not odd


def test_small_and_odd_constants_are_left_alone() -> None:
    pool = WeightPool()
    small = torch.zeros(4)
    assert shared(pool, small) is small
    assert shared(pool, torch.zeros(4)) is not small
    assert pool.shared((None, 7, "text")) == (None, 7, "text")


def test_packed_weights_of_onednn_are_held_once_where_their_layout_is_equal() -> None:
    if not torch.backends.mkldnn.is_available():
        return
    pool, weight = WeightPool(), torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0))

    def packed(given: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_convolution_weight(given, [1, 1], [1, 1], [1, 1], 1, [1, 32, 8, 8])

    first = shared(pool, packed(weight))
    assert hasattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md") is (shared(pool, packed(weight)) is first)
    other = packed(weight * 2)
    assert shared(pool, other) is other


def test_the_pool_keeps_no_weight_alive() -> None:
    pool = WeightPool()
    held = WEIGHT.clone()
    ref = weakref.ref(held)
    shared(pool, held)
    del held
    gc.collect()
    assert ref() is None
    again = WEIGHT.clone()
    assert shared(pool, again) is again


def test_scratch_memory_grows_and_is_each_threads_own() -> None:
    memory = SharedMemory()
    device = torch.device("cpu")
    small = memory.scratch(10, device)
    assert memory.scratch(5, device) is small
    large = memory.scratch(100, device)
    assert large.numel() >= 100
    assert memory.scratch(10, device) is large


def test_programs_share_only_while_they_are_asked_to() -> None:
    memory = SharedMemory()
    assert present_memory() is None
    with sharing(memory):
        assert present_memory() is memory
        with sharing(None):
            assert present_memory() is None
    assert present_memory() is None


def test_input_buffers_are_parts_of_the_largest() -> None:
    memory, cpu = SharedMemory(), torch.device("cpu")
    large = memory.input_buffer(0, torch.empty(8, 3, 4, 4, device="meta"), cpu)
    like = torch.empty(2, 3, 4, 4, device="meta").contiguous(memory_format=torch.channels_last)
    small = memory.input_buffer(0, like, cpu)
    assert small.data_ptr() == large.data_ptr()
    assert small.stride() == like.stride()
    assert not small.any()
    assert memory.input_buffer(1, like, cpu).data_ptr() != large.data_ptr()
