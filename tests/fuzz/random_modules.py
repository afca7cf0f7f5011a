"""Random small modules from a seed, as Python source that can be pasted. Not a test module."""

import os
import random
import textwrap
from dataclasses import dataclass, replace

import torch

from tests.fuzz.module_steps import MAKERS, Held, Step

SEED = int(os.environ.get("CONVOY_FUZZ_SEED", "20261125"))
MODULES = int(os.environ.get("CONVOY_FUZZ_MODULES", "100"))

MOST_VALUES = 6000
"""Numbers in a value: larger steps are not drawn."""

LEAST_SPREAD = 1e-3
"""Standard deviation of a value and its gradients below which nothing is compared but rounding."""

_SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F


def set_first(v):
    v[:, 0] = 0.5
    return v


class Net(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, {inputs}):
{lines}
        return {result}
"""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A module as data, and what it is called with.

    Attributes:
        seed: of weights and inputs.
        inputs: an expression for each input, by name.
        steps: lines of `forward`.
        result: what is returned: an expression.
        returned: the values in it.
    """

    seed: int
    inputs: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...] = ()
    result: str = "x"
    returned: tuple[str, ...] = ("x",)

    @property
    def source(self) -> str:
        """The module's Python source."""
        init = [f"self.{name} = {made}" for step in self.steps for name, made in step.init]
        lines = [f"{step.value} = {step.line.format(*step.uses)}" for step in self.steps]
        return _SOURCE.format(
            init=textwrap.indent("\n".join(init or ["pass"]), " " * 8),
            inputs=", ".join(name for name, _ in self.inputs),
            lines=textwrap.indent("\n".join(lines or ["pass"]), " " * 8),
            result=self.result,
        ).lstrip()

    def module(self, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """The module, with the weights of its seed; in float64 its casts to narrower types are none."""
        space: dict[str, object] = {"__name__": "random_module"}
        exec(
            compile(self.source if dtype == torch.float32 else widened(self.source), f"<module {self.seed}>", "exec"),
            space,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            made = space["Net"]()
            randomize_statistics(made)
        return made.to(dtype)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Inputs of its seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + 1)
            return tuple(eval(text, {"torch": torch}) for _, text in self.inputs)


def widened(source: str) -> str:
    """The source with every cast one to float64."""
    for cast in (".float()", ".half()", ".bfloat16()"):
        source = source.replace(cast, ".double()")
    return source.replace("torch.float32", "torch.float64").replace(
        "torch.linspace(-0.9, 0.9, 24)", "torch.linspace(-0.9, 0.9, 24).double()"
    )


def randomize_statistics(module: torch.nn.Module) -> None:
    """Running means and variances, weights and biases of norms away from 0 and 1."""
    for each in module.modules():
        if getattr(each, "running_mean", None) is not None:
            each.running_mean.normal_(std=0.2)
            each.running_var.uniform_(0.5, 1.5)
        if (
            isinstance(each, torch.nn.modules.batchnorm._NormBase | torch.nn.GroupNorm | torch.nn.LayerNorm)
            and each.weight is not None
        ):
            with torch.no_grad():
                each.weight.uniform_(0.5, 1.5)
                each.bias.normal_(std=0.2)


def random_sketch(seed: int, index: int) -> Sketch:
    """Module `index` of a seed: PyTorch runs it and its backward pass, and its values are finite and small."""
    draw = random.Random(f"{seed}:{index}")
    sketch = Sketch(draw.randrange(1 << 30), drawn_inputs(draw))
    sketch = replace(sketch, steps=())
    goal, tries = draw.randint(2, 9), 0
    values = [
        Held(name, tuple(value.shape)) for (name, _), value in zip(sketch.inputs, sketch.arguments(), strict=True)
    ]
    current = values[0]
    if "uint8" in sketch.inputs[0][1]:
        line = draw.choice(["{0} / 255", "{0}.float()", "({0}.float() - 120) / 60"])
        current, sketch = grown(sketch, values, Step("v0", line, ("x",)))
        assert current is not None
        values.append(current)
    while len(sketch.steps) < goal and tries < 60:
        tries += 1
        value = current if draw.random() < 0.85 else draw.choice(values)
        (maker,) = draw.choices([maker for _, maker in MAKERS], [weight for weight, _ in MAKERS])
        step = maker(draw, value, values, f"v{len(sketch.steps)}")
        if step is None:
            continue
        found, sketch = grown(sketch, values, step)
        if found is not None:
            current = found
            values.append(found)
    return with_result(draw, sketch, values)


def drawn_inputs(draw: random.Random) -> tuple[tuple[str, str], ...]:
    n, c, h, w = draw.choice([1, 2, 2, 3]), draw.randint(1, 8), draw.randint(4, 11), draw.randint(4, 11)
    x = f"torch.randn({n}, {c}, {h}, {w})"
    kind = draw.random()
    if kind < 0.12:
        x = f"torch.randint(0, 256, ({n}, {c}, {h}, {w}), dtype=torch.uint8)"
    elif kind < 0.3:
        x += ".contiguous(memory_format=torch.channels_last)"
    elif kind < 0.36:
        x = f"torch.randn({n}, {c}, {2 * h}, {w})[:, :, ::2]"
    elif kind < 0.4:
        x = f"torch.randn({n}, {c}, {w}, {h}).transpose(2, 3)"
    if draw.random() < 0.75:
        return (("x", x),)
    second = draw.choice([f"torch.randn({n}, {c}, {h}, {w})", f"torch.randn({n}, {c}, 1, 1)", f"torch.randn({n}, 5)"])
    return ("x", x), ("y", second)


def grown(sketch: Sketch, values: list[Held], step: Step) -> tuple[Held | None, Sketch]:
    """The sketch with one step more, where PyTorch takes it; and the new value."""
    tried = replace(sketch, steps=(*sketch.steps, step), result=step.value, returned=(step.value,))
    found = result_of(tried, step.value)
    return (found, tried) if found is not None else (None, sketch)


def result_of(sketch: Sketch, name: str) -> Held | None:
    """The result of a module; None where it fails, in either mode, or gives no numbers to compare."""
    try:
        module = sketch.module()
        with torch.no_grad():
            found = module.eval()(*sketch.arguments())
        exact = sketch.module(torch.float64).train()
        made = exact(*(a.double() if a.is_floating_point() else a for a in sketch.arguments()))
        trained = module.train()(*sketch.arguments())
        if trained.requires_grad:
            trained.double().square().sum().backward()
    except Exception:
        return None
    sound = all(
        bool(t.isfinite().all()) and float(t.detach().abs().max()) < 1e4 for t in (found, trained, made) if t.numel()
    )
    if (
        not sound
        or not found.is_floating_point()
        or found.dim() < 2
        or not 1 < found.numel() <= MOST_VALUES
        or trained.shape != found.shape
    ):
        return None
    return Held(name, tuple(found.shape), trained.requires_grad) if float(made.detach().std()) > LEAST_SPREAD else None


def with_result(draw: random.Random, sketch: Sketch, values: list[Held]) -> Sketch:
    """The module returns its last value, or several in a tuple, list or dict."""
    last, kind = values[-1].name, draw.random()
    others = [draw.choice(values).name for _ in range(2)]
    if kind < 0.7:
        return replace(sketch, result=last, returned=(last,))
    if kind < 0.8:
        return replace(sketch, result=f"({last}, {others[0]})", returned=(last, others[0]))
    if kind < 0.9:
        return replace(sketch, result=f"{{'out': {last}, 'aux': [{others[0]}, {others[1]}]}}", returned=(last, *others))
    return replace(sketch, result=f"[{last}, ({others[0]}.relu(),)]", returned=(last, others[0]))


def smaller(sketch: Sketch) -> list[Sketch]:
    """The sketch with a step less, in each way: what used its value uses the step's first input."""
    found = []
    for step in sketch.steps:
        own, instead = step.value, step.uses[0]
        kept = [
            replace(each, uses=tuple(instead if use == own else use for use in each.uses))
            for each in sketch.steps
            if each is not step
        ]
        returned = tuple(instead if name == own else name for name in sketch.returned)
        found.append(
            replace(
                sketch,
                steps=tuple(kept),
                result=f"({', '.join(returned)},)" if len(returned) > 1 else returned[0],
                returned=returned,
            )
        )
    if len(sketch.returned) > 1:
        found += [replace(sketch, result=name, returned=(name,)) for name in sketch.returned]
    return found
