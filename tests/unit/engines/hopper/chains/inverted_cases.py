"""Data and exact results of inverted residual blocks, with a last layer and without. Not a test module."""

import torch
import torch.nn.functional as F

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LIMITS = {"fp16": 1e-3, "bf16": 8e-3}
ACTIVATE = {"none": lambda v: v, "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish}


def exact(block, x, weights, biases):
    """The block in float64, each result rounded to the dtype as the layers' own kernels round it."""
    value, words = x, (*block.activations, "none")[: len(weights)]
    for index, (weight, bias, word) in enumerate(zip(weights, biases, words, strict=True)):
        added = None if bias is None else bias.double()
        stride, groups = (block.stride, block.mid) if index == 1 else (1, 1)
        made = F.conv2d(value.double(), weight.double(), added, stride, weight.shape[2] // 2, groups=groups)
        made = made + x.double() if index == 2 and block.residual else made
        value = ACTIVATE[word](made).to(x.dtype)
    return value


def drawn(block, kind, biased=True):
    """x, weights and biases: small integers of which few are not zero, or normal numbers."""
    generator, dtype = torch.Generator().manual_seed(7), DTYPES[block.dtype]
    shapes = [(block.mid, block.c, 1, 1), (block.mid, 1, block.taps, block.taps)]
    shapes += [(block.k, block.mid, 1, 1)] if block.projects else []

    def integers(shape, low, high, kept=1.0):
        values = torch.randint(low, high, shape, generator=generator)
        return (values * (torch.rand(shape, generator=generator) < kept)).to(dtype)

    def normal(shape):
        return (torch.randn(shape, generator=generator) / shape[1:].numel() ** 0.5).to(dtype)

    image = torch.Size((block.n, block.c, block.h, block.w))
    if kind == "integer":
        x = integers(image, -2, 3)
        weights = [integers(shape, -1, 2, kept) for shape, kept in zip(shapes, (0.2, 0.5, 0.1), strict=False)]
    else:
        x = torch.randn(image, generator=generator).to(dtype)
        weights = [normal(torch.Size(shape)) for shape in shapes]
    biases = [integers((shape[0],), -2, 3) if biased else None for shape in shapes]
    return x.contiguous(memory_format=torch.channels_last), weights, biases
