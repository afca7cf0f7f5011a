"""Subgraphs for cuda.fusion: named ones as nets have them, and random ones by seed. Not a test module."""

import random
import re

import torch

from convoy.engines.torch_operators import DTYPES
from convoy.problem import SubgraphProblem

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def spec(shape, dtype):
    """A type as a graph's text has it."""
    return f"{dtype}[{','.join(map(str, shape))}]"


class Builder:
    """A subgraph's text, with each value's shape from PyTorch's own operators on tensors without data."""

    def __init__(self, dtype="fp16", layout="nhwc"):
        self.dtype, self.layout = dtype, layout
        self.lines, self.inputs, self.constants, self.values = [], [], [], {}

    def given(self, *shape, kind="input", dtype=None):
        """A new input or constant."""
        names = self.inputs if kind == "input" else self.constants
        name = f"{'x' if kind == 'input' else 'c'}{len(names)}"
        names.append(f"{kind} %{name}: {spec(shape, dtype or self.dtype)}")
        self.values[name] = torch.empty(shape, dtype=DTYPES[dtype or self.dtype], device="meta")
        return name

    def op(self, name, *args, **kwargs):
        """A new value: of an overload `relu.default`, with names of values and numbers as arguments."""
        packet, overload = name.split(".")
        packet_now = "reshape" if packet == "view" else packet
        made = getattr(getattr(torch.ops.aten, packet_now), overload)(*map(self.real, args), **kwargs)
        many = isinstance(made, (tuple, list))
        names = []
        for tensor in made if many else (made,):
            names.append(f"v{len(self.values)}")
            self.values[names[-1]] = tensor
        outputs = ", ".join(f"%{n}: {spec(self.values[n].shape, NAMES[self.values[n].dtype])}" for n in names)
        words = [self.text(arg) for arg in args] + [f"{key}={self.text(arg)}" for key, arg in kwargs.items()]
        self.lines.append(f"{outputs} = aten.{name}({', '.join(words)})")
        return names if many else names[0]

    def real(self, arg):
        """An argument as PyTorch takes it."""
        if isinstance(arg, tuple):
            return [self.real(item) for item in arg]
        return self.values.get(arg, arg) if isinstance(arg, str) else arg

    def text(self, arg):
        """An argument as a graph's text has it."""
        if isinstance(arg, tuple):
            return f"({', '.join(map(self.text, arg))}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, torch.dtype):
            return f"dtype.{NAMES[arg]}"
        return (f"%{arg}" if arg in self.values else f'"{arg}"') if isinstance(arg, str) else repr(arg)

    def problem(self, *results):
        """The subgraph."""
        returned = ", ".join(f"%{name}" for name in results)
        body = f"return {returned}"
        for line in reversed(self.lines):
            outputs = re.findall(r"%(v\d+):", line.split(" = ", 1)[0])
            if any(re.search(rf"%{name}\b", body) for name in outputs):
                body = f"{line}\n{body}"
        mentioned = [list(dict.fromkeys(re.findall(rf"%({kind}\d+)\b", body))) for kind in "xc"]
        heads = [self.inputs[int(name[1:])] for name in mentioned[0]] + [
            self.constants[int(name[1:])] for name in mentioned[1]
        ]
        return SubgraphProblem("\n".join(["graph 1", *heads, body]) + "\n", self.layout, 1000)

    def shape(self, name):
        """A value's shape."""
        return tuple(self.values[name].shape)


def mean(shape, dtype="fp16", layout="nhwc", before=""):
    """A global mean with the view behind it, and an activation before it whose result is returned too."""
    b = Builder(dtype, layout)
    x = b.given(*shape)
    y = b.op(before, x) if before else x
    m = b.op("adaptive_avg_pool2d.default", y, (1, 1))
    f = b.op("view.default", m, shape[:2])
    return b.problem(y, m, f) if before else b.problem(f)


def gate(shape, dtype="fp16", layout="nhwc", activation="sigmoid.default"):
    """A squeeze-and-excitation gate."""
    b = Builder(dtype, layout)
    s, x = b.given(*shape[:2], 1, 1), b.given(*shape)
    return b.problem(b.op("mul.Tensor", b.op(activation, s), x))


def layer_norm(shape, dtype="fp16", layout="nhwc", add=True):
    """Over the channels of images, with a residual before it."""
    b = Builder(dtype, layout)
    x = b.given(*shape)
    y = b.op("add.Tensor", x, b.given(*shape)) if add else x
    weight, bias = (b.given(shape[1], kind="constant") for _ in range(2))
    p = b.op("permute.default", y, (0, 2, 3, 1))
    n = b.op("layer_norm.default", p, (shape[1],), weight, bias, 1e-6, False)
    q = b.op("permute.default", n, (0, 3, 1, 2))
    return b.problem(y, q) if add else b.problem(q)


def shuffle(channels, side, dtype="fp16", layout="nhwc"):
    """ShuffleNet's concatenation, shuffle and split."""
    b = Builder(dtype, layout)
    half = channels // 2
    x, z = b.given(1, half, side, side), b.given(1, half, side, side)
    c = b.op("cat.default", (x, b.op("relu.default", z)), 1)
    v = b.op("view.default", c, (1, 2, half, side, side))
    w = b.op("view.default", b.op("transpose.int", v, 1, 2), (1, channels, side, side))
    return b.problem(*b.op("split.Tensor", w, half, 1))


def norm_after_cat(parts, side, dtype="fp16", layout="nhwc"):
    """DenseNet's concatenation with a batch norm and ReLU."""
    b = Builder(dtype, layout)
    names = tuple(b.given(2, c, side, side) for c in parts)
    y = b.op("cat.default", names, 1)
    weight, bias, mean_, var = (b.given(sum(parts), kind="constant", dtype=dtype) for _ in range(4))
    var = b.op("abs.default", var)
    n = b.op("batch_norm.default", y, weight, bias, mean_, var, False, 0.1, 1e-2, False)
    return b.problem(b.op("relu.default", n))


def pool(kind, shape, *args, dtype="fp16", layout="nhwc"):
    """ReLU and a pooling."""
    b = Builder(dtype, layout)
    return b.problem(b.op(f"{kind}.default", b.op("relu.default", b.given(*shape)), *args))


def softmax(shape, dim, dtype="fp16", layout="nhwc"):
    """Scaled softmax."""
    b = Builder(dtype, layout)
    return b.problem(b.op("softmax.int", b.op("mul.Scalar", b.given(*shape), 0.5), dim))


def upsampled(shape, factor, dtype="fp16", layout="nhwc"):
    """A nearest upsampling beside a skip connection, concatenated, as U-Nets do."""
    b = Builder(dtype, layout)
    n, c, h, w = shape
    up = b.op("upsample_nearest2d.default", b.given(*shape), (h * factor, w * factor))
    return b.problem(b.op("cat.default", (up, b.given(n, c, h * factor, w * factor)), 1))


def gradients(shape, dtype="fp16", layout="nhwc"):
    """Gradients of activations, summed."""
    b = Builder(dtype, layout)
    dy, x, total = b.given(*shape), b.given(*shape), None
    numbers = {"threshold": (0.0,), "hardtanh": (-1.0, 0.5), "leaky_relu": (0.2, False)}
    for name in ["threshold", "hardtanh", "leaky_relu", "hardswish", "hardsigmoid", "silu", "sigmoid", "tanh", "gelu"]:
        made = b.op(f"{name}_backward.default", dy, x, *numbers.get(name, ()))
        total = made if total is None else b.op("add.Tensor", total, made)
    return b.problem(total)


def activations(shape, dtype="fp16", layout="nhwc"):
    """Activations with exponentials, each a result, and a softmax."""
    b = Builder(dtype, layout)
    x = b.given(*shape)
    made = [
        b.op(f"{name}.default", x)
        for name in ["sigmoid", "silu", "mish", "softplus", "gelu", "tanh", "elu", "hardswish"]
    ]
    return b.problem(*made, b.op("softmax.int", x, 1))


def attention_heads(images, tokens, heads, size, dtype="fp16"):
    """Queries, keys and values of one product, by heads; the queries scaled."""
    b = Builder(dtype, "any")
    x = b.given(images, tokens, 3 * heads * size)
    v = b.op("permute.default", b.op("view.default", x, (images, tokens, 3, heads, size)), (2, 0, 3, 1, 4))
    q, k, w = b.op("unbind.int", v)
    return b.problem(b.op("mul.Scalar", q, 0.25), b.op("transpose.int", k, 2, 3), b.op("clone.default", w))


def bilinear(shape, size, align, dtype="fp16", layout="nhwc"):
    """Bilinear upsampling behind an activation, added to a skip connection."""
    b = Builder(dtype, layout)
    up = b.op("upsample_bilinear2d.default", b.op("relu.default", b.given(*shape)), size, align)
    return b.problem(b.op("add.Tensor", up, b.given(*shape[:2], *size)))


def pools(shape, dtype="fp16", layout="nhwc", count=2):
    """Spatial pyramid pooling of YOLO: each pooling reads the one before."""
    b = Builder(dtype, layout)
    names = [b.op("silu.default", b.given(*shape))]
    for _ in range(count):
        names.append(b.op("max_pool2d.default", names[-1], (5, 5), (1, 1), (2, 2)))
    return b.problem(b.op("cat.default", tuple(names), 1))


def head(shape, dtype="fp16", layout="nhwc"):
    """ConvNeXt's head: a global mean, a layer norm and a view."""
    b = Builder(dtype, layout)
    x = b.given(*shape)
    weight, bias = (b.given(shape[1], kind="constant") for _ in range(2))
    m = b.op("adaptive_avg_pool2d.default", b.op("add.Tensor", x, b.given(*shape)), (1, 1))
    p = b.op("permute.default", m, (0, 2, 3, 1))
    n = b.op("layer_norm.default", p, (shape[1],), weight, bias, 1e-6, False)
    return b.problem(b.op("view.default", b.op("permute.default", n, (0, 3, 1, 2)), shape[:2]))


def response_norm(shape, dtype="fp16", layout="nhwc"):
    """ConvNeXt V2's global response normalisation."""
    b = Builder(dtype, layout)
    x = b.given(*shape)
    weight = b.given(1, shape[1], 1, 1, kind="constant")
    size = b.op("linalg_vector_norm.default", x, 2, (2, 3), True)
    share = b.op("div.Tensor", size, b.op("add.Scalar", b.op("mean.dim", size, (1,), True), 1e-6))
    scaled = b.op("mul.Tensor", b.op("mul.Tensor", x, share), weight)
    return b.problem(b.op("add.Tensor", scaled, x))


def pixels(shape, factor, dtype="fp16", layout="nhwc"):
    """Pixel shuffle, and back."""
    b = Builder(dtype, layout)
    y = b.op("pixel_shuffle.default", b.given(*shape), factor)
    return b.problem(y, b.op("pixel_unshuffle.default", b.op("relu.default", y), factor))


def padded(shape, pads, dtype="fp16", layout="nhwc"):
    """Padding with a number behind an activation."""
    b = Builder(dtype, layout)
    return b.problem(b.op("constant_pad_nd.default", b.op("silu.default", b.given(*shape)), pads, 0.25))


def casts(shape):
    """fp32 in, fp16 between, fp32 and bf16 out."""
    b = Builder("fp32")
    x = b.given(*shape)
    y = b.op("_to_copy.default", x, dtype=torch.float16)
    z = b.op("mul.Scalar", y, 3.0)
    return b.problem(
        b.op("_to_copy.default", z, dtype=torch.float32), b.op("_to_copy.default", x, dtype=torch.bfloat16)
    )


CASES = {
    "mean": mean((1, 512, 7, 7)),
    "mean, odd": mean((3, 13, 5, 3), "bf16"),
    "mean, large": mean((1, 16, 56, 56), before="hardswish.default"),
    "mean, nchw": mean((2, 24, 14, 14), "fp32", "nchw", before="relu.default"),
    "mean, nchw, one image": mean((1, 3, 40, 41), "fp16", "nchw"),
    "mean, a single pixel": mean((2, 24, 1, 1)),
    "gate": gate((2, 32, 9, 7)),
    "gate, nchw": gate((2, 30, 8, 6), "fp32", "nchw", "hardsigmoid.default"),
    "gate, odd": gate((1, 13, 5, 5), "bf16"),
    "layer norm": layer_norm((1, 96, 7, 5)),
    "layer norm, long": layer_norm((1, 768, 3, 2), "bf16"),
    "layer norm, odd": layer_norm((2, 37, 3, 3), "fp32"),
    "layer norm, nchw": layer_norm((2, 24, 4, 4), "fp16", "nchw", add=False),
    "shuffle": shuffle(116, 5),
    "shuffle, nchw": shuffle(24, 4, "fp32", "nchw"),
    "cat, norm": norm_after_cat((64, 32, 32), 5),
    "cat, norm, odd": norm_after_cat((3, 10, 5), 4, "bf16"),
    "cat, norm, nchw": norm_after_cat((6, 10), 4, "fp32", "nchw"),
    "max pooling": pool("max_pool2d", (1, 16, 9, 11), (3, 3), (2, 2), (1, 1)),
    "max pooling, ceil": pool("max_pool2d", (2, 3, 8, 8), (3, 3), (2, 2), (0, 0), (1, 1), True, layout="nchw"),
    "average pooling": pool("avg_pool2d", (1, 8, 7, 9), (3, 3), (2, 2), (1, 1), False, False),
    "max pooling of volumes": pool("max_pool3d", (1, 16, 5, 6, 7), (3, 2, 3), (2, 2, 1), (1, 0, 1), layout="ndhwc"),
    "max pooling of volumes, ceil": pool(
        "max_pool3d", (2, 3, 5, 6, 7), 2, (), 0, 1, True, dtype="fp32", layout="ncdhw"
    ),
    "average pooling of volumes": pool("avg_pool3d", (1, 8, 4, 7, 5), 3, 2, 1, True, False, layout="ndhwc"),
    "average pooling of volumes, counted": pool(
        "avg_pool3d", (2, 8, 5, 4, 5), (2, 3, 3), (2, 2, 2), (1, 1, 1), True, True, dtype="fp32", layout="ndhwc"
    ),
    "mean of volumes": pool("adaptive_avg_pool3d", (2, 16, 3, 4, 5), (1, 1, 1), layout="ndhwc"),
    "average pooling, counted": pool("avg_pool2d", (1, 8, 7, 8), (3, 2), (2, 2), (1, 1), True, True, dtype="fp32"),
    "softmax": softmax((2, 10, 3, 50), 3, layout="nchw"),
    "softmax, channels": softmax((2, 19, 3, 4), 1, "bf16"),
    "softmax, rows": softmax((5, 1000), 1, "fp32"),
    "upsampling": upsampled((2, 16, 3, 4), 2),
    "upsampling, nchw": upsampled((1, 5, 3, 3), 3, "fp32", "nchw"),
    "attention heads": attention_heads(2, 7, 3, 8),
    "gradients": gradients((2, 16, 3, 5)),
    "gradients, fp32": gradients((1, 5, 3, 3), "fp32", "nchw"),
    "activations": activations((2, 16, 3, 5)),
    "activations, fp32": activations((2, 16, 3, 5), "fp32"),
    "bilinear": bilinear((1, 16, 4, 5), (8, 10), False),
    "bilinear, corners": bilinear((2, 3, 4, 5), (9, 7), True, "fp32", "nchw"),
    "bilinear, one row": bilinear((1, 8, 1, 3), (4, 5), True, "bf16"),
    "poolings": pools((1, 16, 6, 5)),
    "poolings, nchw": pools((2, 3, 5, 4), "fp32", "nchw"),
    "head": head((1, 96, 5, 3)),
    "head, nchw": head((2, 40, 4, 3), "fp32", "nchw"),
    "response norm": response_norm((2, 24, 3, 4)),
    "response norm, nchw": response_norm((2, 24, 3, 4), "fp32", "nchw"),
    "mean in parts": mean((1, 16, 112, 20), before="silu.default"),
    "mean in parts, nchw": mean((1, 2, 112, 256), "bf16", "nchw"),
    "pixel shuffle": pixels((1, 48, 3, 2), 2),
    "pixel shuffle, nchw": pixels((2, 18, 2, 3), 3, "fp32", "nchw"),
    "padding": padded((1, 8, 5, 4), (1, 2, 0, 3)),
    "padding and cutting": padded((2, 3, 5, 6), (-1, 2, 1, -2), "fp32", "nchw"),
    "casts": casts((2, 24, 3, 3)),
}

UNARY = (
    "relu", "relu6", "sigmoid", "silu", "hardswish", "hardsigmoid", "tanh", "mish", "neg", "abs", "erf", "gelu",
    "leaky_relu", "elu", "softplus", "hardtanh", "square",
)  # fmt: skip


def chain(seed):
    """A random subgraph: elementwise operators over full and broadcast values, movement, and perhaps a reduction."""
    draw = random.Random(seed)
    dtype = draw.choice(["fp16", "bf16", "fp32"])
    layout = draw.choice(["nhwc", "nhwc", "nchw"])
    b = Builder(dtype, layout)
    n, c = draw.choice([1, 1, 2, 3]), draw.choice([1, 3, 8, 12, 16, 24, 37, 64])
    h, w = draw.choice([(1, 1), (2, 3), (4, 4), (5, 7), (6, 1)])
    shape = (n, c, h, w)
    small = [(n, c, 1, 1), (1, c, 1, 1), (n, 1, h, w), (1, 1, 1, 1), (c, 1, 1), ()]
    live = [b.given(*shape), b.given(*shape)]
    side = [b.given(*draw.choice(small), kind=draw.choice(["input", "constant"])) for _ in range(2)]
    for _ in range(draw.randint(2, 9)):
        live.append(step(b, draw, live, side, shape))
    results = draw.sample(live[2:], min(len(live) - 2, draw.choice([1, 1, 2]))) + live[-1:]
    end = draw.choice(["", "", "mean", "layer_norm", "softmax", "pool", "cat", "split"])
    return b.problem(*dict.fromkeys([*finished(b, draw, live, end, shape), *results]))


def step(b, draw, live, side, shape):
    """One more value of the full shape."""
    kind, x = draw.random(), draw.choice(live)
    if kind < 0.4:
        name = draw.choice(UNARY)
        return b.op(f"{name}.default", x)
    if kind < 0.6:
        return b.op(draw.choice(["add.Tensor", "mul.Tensor", "sub.Tensor", "maximum.default"]), x, draw.choice(live))
    if kind < 0.8:
        pair = [x, draw.choice(side)]
        draw.shuffle(pair)
        made = b.op(draw.choice(["add.Tensor", "mul.Tensor", "sub.Tensor"]), *pair)
        return made if b.shape(made) == shape else b.op("expand.default", made, shape)
    if kind < 0.9:
        return b.op(draw.choice(["add.Scalar", "mul.Scalar"]), x, draw.choice([2, 0.5, -1.25]))
    condition = b.op("gt.Scalar", x, 0.1)
    return b.op("where.self", condition, x, draw.choice(live))


def finished(b, draw, live, end, shape):
    """Results behind the chain."""
    x = live[-1]
    if end == "mean":
        m = b.op("mean.dim", x, (2, 3), draw.random() < 0.5)
        return [b.op("sigmoid.default", m)]
    if end == "layer_norm":
        weight, bias = (b.given(shape[1], kind="constant") for _ in range(2))
        n = b.op("layer_norm.default", b.op("permute.default", x, (0, 2, 3, 1)), (shape[1],), weight, bias, 1e-2, False)
        return [b.op("permute.default", n, (0, 3, 1, 2))]
    if end == "softmax":
        return [b.op("softmax.int", x, draw.choice([1, 3]))]
    if end == "pool":
        return [b.op("max_pool2d.default", x, (3, 3), (1, 1), (1, 1))]
    if end == "cat":
        return [b.op("cat.default", tuple(live[:3]), draw.choice([0, 1, 2]))]
    if end == "split" and shape[1] > 2:
        first = draw.randint(1, shape[1] - 1)
        return b.op("split_with_sizes.default", x, (first, shape[1] - first), 1)
    return []
