"""Scratch: aligned, disjoint, typed pieces of one workspace."""

import torch

from convoy.engines.scratch import Scratch


def test_pieces_are_aligned_and_disjoint():
    scratch = Scratch()
    scratch.add((3, 5), torch.float32)
    scratch.add((0,), torch.float32)
    scratch.add((7,), torch.float16)
    scratch.add((2, 2, 2), torch.complex64)
    assert scratch.size_bytes == 3 * 256
    workspace = torch.zeros(scratch.size_bytes + 100, dtype=torch.uint8)
    pieces = scratch.views(workspace)
    assert [(tuple(p.shape), p.dtype) for p in pieces] == [
        ((3, 5), torch.float32), ((0,), torch.float32), ((7,), torch.float16), ((2, 2, 2), torch.complex64),
    ]  # fmt: skip
    offsets = [p.data_ptr() - workspace.data_ptr() for p in pieces if p.numel()]
    assert offsets == [0, 256, 512]
    for value, piece in enumerate(pieces, 1):
        piece.fill_(value)
    assert [p.flatten()[0].item() for p in pieces if p.numel()] == [1, 3, 4]


def test_a_layout_of_empty_pieces_needs_no_workspace():
    scratch = Scratch()
    scratch.add((0, 4), torch.float32)
    assert scratch.size_bytes == 0
    assert scratch.views(None)[0].shape == (0, 4)
