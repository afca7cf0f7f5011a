"""Steps of random modules: each is a line of `forward`, and what `__init__` needs for it. Not a test module.

A step is drawn for the value that is there; whether PyTorch takes it is tried by whoever draws (`random_modules`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

Draw = random.Random


@dataclass(frozen=True, slots=True)
class Step:
    """One line of `forward`.

    Attributes:
        value: the name that the line gives its result.
        line: an expression; `{0}`, `{1}` are its inputs.
        uses: names of its inputs, the first of which stands for the result when the step is dropped.
        init: attributes of the module that it uses, by name: expressions.
    """

    value: str
    line: str
    uses: tuple[str, ...]
    init: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """A value of the forward pass: its name, its shape, and whether a gradient reaches parameters through it."""

    name: str
    shape: tuple[int, ...]
    learned: bool = False


Maker = Callable[[Draw, Held, list[Held], str], Step | None]
"""(numbers, current value, all values, the new one's name) → a step, or None where none fits."""

_POINTWISE = (
    "torch.relu({0})", "F.relu6({0})", "F.leaky_relu({0}, 0.1)", "F.elu({0})", "F.gelu({0})", "F.silu({0})",
    "F.gelu({0}, approximate='tanh')", "torch.sigmoid({0})", "torch.tanh({0})", "F.hardswish({0})", "F.hardsigmoid({0})",
    "F.mish({0})", "F.softplus({0})", "{0}.clamp(-1, 2)", "{0}.abs()", "{0} * 0.5 + 1", "1 - {0}", "{0} / 3",
    "{0}.square()", "torch.where({0} > 0, {0}, 0.1 * {0})", "({0} > 0).to({0}.dtype) * {0}", "{0}.exp().log1p()",
    "torch.softmax({0}, 1)", "F.normalize({0}, dim=1)", "{0} - {0}.mean()", "torch.maximum({0}, -{0})", "F.relu({0} + 3) / 6",
)  # fmt: skip
_IN_PLACE = (
    "{0}.relu_()", "F.relu({0}, inplace=True)", "{0}.add_(1)", "{0}.mul_(0.5)", "{0}.clamp_(min=0)", "{0}.sigmoid_()",
    "F.silu({0}, inplace=True)", "{0}.sub_({0}.mean())", "set_first({0})", "F.hardswish({0}, inplace=True)",
    "F.leaky_relu({0}, 0.2, inplace=True)", "{0}.add_({0}.detach())",
)  # fmt: skip
_CASTS = (
    "{0}.float()", "{0}.double()", "{0}.to(torch.float32)", "{0}.double().float()", "{0}.half().float()",
    "{0}.bfloat16().float()", "{0}.type(torch.float64)", "{0}.to({0}.dtype)", "{0}.contiguous()", "{0}.clone()",
    "{0}.detach() + {0}",
)  # fmt: skip
_CONSTANTS = (
    "{0} + torch.ones_like({0})", "{0} * torch.full((1,), 0.5)", "{0} + torch.arange({0}.shape[-1]) / 7",
    "{0} * torch.linspace(0.5, 1.5, {0}.shape[1]).view(-1, *[1] * ({0}.dim() - 2))", "{0} * torch.tensor(0.25)",
    "{0} + torch.zeros(1, dtype={0}.dtype)", "torch.cat([{0}, torch.zeros_like({0})], 1)", "{0} + {0}.new_ones({0}.shape[-1])",
    "{0} * torch.eye({0}.shape[-1])[0]",
)  # fmt: skip
_IMAGE_VIEWS = (
    "{0}[:, :, 1:]", "{0}[:, ::2]", "{0}[..., :-1]", "{0}.flip(3)", "{0}.transpose(2, 3)", "{0}.permute(0, 2, 3, 1)",
    "{0}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)", "{0}.flatten(1)", "{0}.flatten(2)",
    "{0}.reshape({0}.shape[0], -1, 2, 2)", "F.pixel_shuffle({0}, 2)", "F.pixel_unshuffle({0}, 2)", "torch.roll({0}, 1, 2)",
    "{0}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)", "torch.cat({0}.chunk(2, 1)[::-1], 1)", "{0}.narrow(1, 0, 1)",
    "{0}.contiguous(memory_format=torch.channels_last)", "{0}.mean((2, 3))", "{0}.mean((2, 3), keepdim=True).expand_as({0})",
    "{0}.amax((2, 3))", "{0}[:, [0, -1]]", "{0}.unsqueeze(1).squeeze(1)", "{0}.split([1, {0}.shape[1] - 1], 1)[1]",
    "F.unfold({0}, 2)", "torch.stack([{0}, {0}], 1).sum(1)", "{0}.sum(1, keepdim=True)", "{0}.view({0}.shape[0], -1)",
)  # fmt: skip
_MORE = (
    "F.interpolate({0}, scale_factor=2)", "F.interpolate({0}, size=(5, 7), mode='bilinear')",
    "F.interpolate({0}, scale_factor=1.5, mode='bilinear', align_corners=True)", "F.interpolate({0}, size=6, mode='bicubic')",
    "F.pad({0}, (1, 2, 0, 1))", "F.pad({0}, (1, 1, 1, 1), mode='reflect')", "F.pad({0}, (2, 0, 1, 0), mode='replicate')",
    "F.pad({0}, (-1, 0, 1, -1), value=0.5)", "F.local_response_norm({0}, 3)", "F.adaptive_avg_pool2d({0}, 3)",
    "F.adaptive_avg_pool2d({0}, (1, 2))", "F.adaptive_max_pool2d({0}, 2)", "F.avg_pool2d({0}, 2)", "F.max_pool2d({0}, 2)",
    "F.avg_pool2d({0}, 3, 2, 1, ceil_mode=True)", "F.avg_pool2d({0}, (2, 3), 1, (1, 1), count_include_pad=False)",
    "F.max_pool2d({0}, 3, 2, 1)", "F.max_pool2d({0}, 3, 2, 1, ceil_mode=True)", "F.max_pool2d({0}, 2, 1, dilation=2)",
    "F.max_pool2d({0}, (3, 2), (1, 2), (1, 0))", "F.lp_pool2d({0}, 2, 2)", "F.instance_norm({0})",
    "F.layer_norm({0}, {0}.shape[1:])",
    "{0}.flatten(2) @ {0}.flatten(2).transpose(1, 2)", "torch.einsum('nchw,ndhw->ncd', {0}, {0})",
    "F.grid_sample({0}, torch.linspace(-0.9, 0.9, 24).reshape(1, 3, 4, 2).expand({0}.shape[0], -1, -1, -1), align_corners=False)",
)  # fmt: skip
_VECTOR = ("{0}[:, :, None, None]", "{0}.reshape({0}.shape[0], -1, 1, 1)", "{0}.unsqueeze(1)", "F.log_softmax({0}, 1)")
_SEQUENCE = (
    "{0}.transpose(1, 2)",
    "{0}.mean(2)",
    "{0}.unsqueeze(2)",
    "{0}.flatten(1)",
    "{0}[:, :, ::2]",
    "{0}.amax(1)",
)


def one_of(lines: tuple[str, ...], *dims: int) -> Maker:
    """Any of some lines, for values of so many dimensions."""

    def make(draw: Draw, value: Held, values: list[Held], name: str) -> Step | None:
        if dims and len(value.shape) not in dims:
            return None
        return Step(name, draw.choice(lines), (value.name,))

    return make


def layer(name: str, value: Held, module: str) -> Step:
    """A layer of its own, on one value."""
    return Step(name, f"self.{name}_layer({{0}})", (value.name,), ((f"{name}_layer", module),))


def convolution(draw: Draw, value: Held, values: list[Held], name: str) -> Step | None:
    dims = len(value.shape) - 2
    if dims not in (1, 2, 3) or (dims == 1 and draw.random() < 0.5):
        return None
    c = value.shape[1]
    groups = draw.choice([1, 1, 1, c, *(g for g in (2, 3, 4) if c % g == 0)])
    out = groups * draw.randint(1, 8 if groups == 1 else 3)
    kernel = draw.choice(["1", "1", "3", "3", "3", "2", "5", "(3, 1)" if dims == 2 else "3"])
    words = [str(c), str(out), kernel]
    transposed = draw.random() < 0.15
    if draw.random() < 0.35:
        words.append("stride=2" if draw.random() < 0.8 or dims != 2 else "stride=(1, 3)")
    elif not transposed and draw.random() < 0.3:
        words.append("padding='same'")
    if not any("same" in word for word in words):
        words.append(f"padding={draw.choice([0, 1, 1, 2])}")
    if draw.random() < 0.2:
        words.append("dilation=2")
    if transposed and "stride=2" in words and draw.random() < 0.5:
        words.append("output_padding=1")
    if not transposed and draw.random() < 0.1:
        words.append(f"padding_mode={draw.choice(['reflect', 'circular', 'replicate'])!r}")
    words += [f"groups={groups}", f"bias={draw.random() < 0.6}"]
    return layer(name, value, f"nn.Conv{'Transpose' if transposed else ''}{dims}d({', '.join(words)})")


def made_weight(draw: Draw, value: Held, values: list[Held], name: str) -> Step | None:
    """A convolution whose weight is computed."""
    if len(value.shape) != 4:
        return None
    weight = draw.choice(
        [
            "self.{n} - self.{n}.mean((1, 2, 3), keepdim=True)",
            "torch.tanh(self.{n})",
            "self.{n} * (self.{n} > 0)",
            "self.{n}",
        ]
    )
    attribute = f"{name}_weight"
    made = f"nn.Parameter(0.3 * torch.randn({draw.randint(1, 6)}, {value.shape[1]}, 3, 3))"
    return Step(name, f"F.conv2d({{0}}, {weight.format(n=attribute)}, padding=1)", (value.name,), ((attribute, made),))


def norm(draw: Draw, value: Held, values: list[Held], name: str) -> Step | None:
    dims, c = len(value.shape) - 2, value.shape[1]
    affine = draw.random() < 0.7
    kinds = [f"nn.BatchNorm{max(dims, 1)}d({c}, affine={affine}, track_running_stats={draw.random() < 0.85})"]
    if (
        value.learned
    ):  # PyTorch 2.13's backward pass of a group norm on channels_last without a gradient of x is a segmentation fault
        kinds.append(f"nn.GroupNorm({draw.choice([g for g in (1, 2, 3, c) if c % g == 0])}, {c}, affine={affine})")
    if dims:
        kinds.append(f"nn.InstanceNorm{dims}d({c}, affine={affine}, track_running_stats={draw.random() < 0.3})")
    kinds.append(f"nn.LayerNorm({value.shape[-1]}, elementwise_affine={affine})")
    return layer(name, value, draw.choice(kinds)) if dims in (0, 1, 2, 3) else None


def linear(draw: Draw, value: Held, values: list[Held], name: str) -> Step | None:
    return layer(name, value, f"nn.Linear({value.shape[-1]}, {draw.randint(1, 9)}, bias={draw.random() < 0.7})")


def two(draw: Draw, value: Held, values: list[Held], name: str) -> Step | None:
    """Two values: of one shape, or of shapes that can be joined along the channels."""
    other = draw.choice(values)
    if other.shape == value.shape and other.name != value.name:
        lines = [
            "{0} + {1}",
            "{0} + {1}",
            "{0} * {1}",
            "{1} - {0}",
            "torch.relu({0} + {1})",
            "{0}.add_({1})",
            "torch.stack([{0}, {1}], 1).amax(1)",
        ]
        return Step(name, draw.choice(lines), (value.name, other.name))
    if len(other.shape) == len(value.shape) and other.shape[2:] == value.shape[2:] and other.shape[0] == value.shape[0]:
        return Step(
            name, draw.choice(["torch.cat([{0}, {1}], 1)", "torch.cat([{1}, {0}, {0}], 1)"]), (value.name, other.name)
        )
    return None


def block(draw: Draw, value: Held, values: list[Held], name: str) -> Step | None:
    """A block of a net: residual, squeeze and excitation, inverted residual or branches."""
    if len(value.shape) != 4:
        return None
    c = value.shape[1]
    act = draw.choice(
        ["nn.ReLU()", "nn.ReLU(inplace=True)", "nn.SiLU()", "nn.Hardswish()", "nn.GELU()", "nn.PReLU()", "nn.ReLU6()"]
    )
    conv = f"nn.Conv2d({c}, {c}, 3, padding=1, bias=False), nn.BatchNorm2d({c})"
    depthwise = f"nn.Conv2d({2 * c}, {2 * c}, 3, padding=1, groups={2 * c}, bias=False), nn.BatchNorm2d({2 * c})"
    wide, narrow = (
        f"nn.Conv2d({c}, {2 * c}, 1, bias=False), nn.BatchNorm2d({2 * c})",
        f"nn.Conv2d({2 * c}, {c}, 1, bias=False), nn.BatchNorm2d({c})",
    )
    line, made = draw.choice([
        ("torch.relu({0} + self.{n}({0}))", f"nn.Sequential({conv}, {act}, {conv})"),
        ("self.{n}({0})", f"nn.Sequential({conv}, {act})"),
        ("{0} + self.{n}({0})", f"nn.Sequential({wide}, {act}, {depthwise}, {act}, {narrow})"),
        ("{0} * self.{n}({0})",
         f"nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d({c}, 2, 1), {act}, nn.Conv2d(2, {c}, 1), nn.Sigmoid())"),
        ("torch.cat([self.{n}({0}), {0}], 1)", f"nn.Sequential(nn.BatchNorm2d({c}), {act}, nn.Conv2d({c}, 3, 3, padding=1))"),
        ("self.{n}(self.{n}({0}))", f"nn.Sequential(nn.Conv2d({c}, {c}, 3, padding=1), {act})"),  # shared weights
        ("self.{n}({0}) + self.{n}({0}.flip(2)).flip(2)", f"nn.Conv2d({c}, 2, (3, 1), padding=(1, 0))"),
        ("sum(layer({0}) for layer in self.{n})", f"nn.ModuleList([nn.Conv2d({c}, 4, k, padding=k // 2) for k in (1, 3, 5)])"),
    ])  # fmt: skip
    attribute = f"{name}_block"
    return Step(name, line.replace("{n}", attribute), (value.name,), ((attribute, made),))


MAKERS: list[tuple[int, Maker]] = [
    (22, convolution), (12, block), (9, norm), (9, one_of(_POINTWISE)), (5, one_of(_IN_PLACE)), (4, one_of(_CASTS)),
    (3, one_of(_CONSTANTS)), (8, one_of(_IMAGE_VIEWS, 4)), (8, one_of(_MORE, 4)), (8, two), (4, linear), (2, made_weight),
    (3, one_of(_VECTOR, 2)), (4, one_of(_SEQUENCE, 3)),
]  # fmt: skip
"""Each with its weight."""
