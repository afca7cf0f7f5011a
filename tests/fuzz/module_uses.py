"""Convoy's results for a random module, held against stock PyTorch and float64. Not a test module."""

import copy
import itertools
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import convoy
from convoy.pipeline.check import end_to_end, end_to_end_check
from convoy.pipeline.check.end_to_end import Latency
from tests.fuzz.random_modules import Sketch, smaller

USES = ("optimize", "compile", "compile_train", "training_step")

ALLOWANCE = 32.0
"""Errors may be so many times those of stock PyTorch, and of stock PyTorch on weights and inputs that are off by one rounding."""

SHRINKS = 60
"""Smaller modules tried after a failure."""

EVERY_ENGINE = os.environ.get("CONVOY_FUZZ_ENGINES") == "all"

_ROUNDING = {"half": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass
class Run:
    """The results of one run.

    Attributes:
        close: tensors that rounding may change, by name.
        equal: values that nothing may change, by name.
        fell_back: whether Convoy said that stock PyTorch runs.
    """

    close: dict[str, torch.Tensor | None] = field(default_factory=dict)
    equal: dict[str, Any] = field(default_factory=dict)
    fell_back: bool = False

    def keep(self, name: str, output: Any) -> None:
        """An output: its structure, and its tensors' numbers, dtypes, shapes and strides."""
        leaves, structure = pytree.tree_flatten(output)
        self.equal[f"structure of {name}"] = str(structure)
        for index, leaf in enumerate(leaves):
            self.close[f"{name}[{index}]"] = leaf.detach().clone()
            strides = [step for step, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1]
            self.equal[f"form of {name}[{index}]"] = (leaf.dtype, tuple(leaf.shape), strides, leaf.requires_grad)


Wrap = Callable[[nn.Module, tuple[torch.Tensor, ...]], Callable[..., Any]]


def words_of(sketch: Sketch) -> dict[str, Any]:
    """The defaults, but nothing is measured; and for three in four modules Inductor, which takes seconds a kernel, stays out."""
    if EVERY_ENGINE or sketch.seed % 4 == 0:
        return {"effort": "none"}
    return {"effort": "none", "deny_engines": ("inductor",)}


def inference(run: Run, module: nn.Module, batches: list[tuple[torch.Tensor, ...]], wrap: Wrap) -> None:
    """Two calls; the second one leaves the first one's outputs alone."""
    module.eval()
    call = wrap(module, batches[0])
    with torch.no_grad():
        outputs = [call(*batch) for batch in batches[:1]]
        run.keep("first output", outputs[0])
        run.keep("second output", call(*batches[1]))
        run.keep("first output, later", outputs[0])


def backward(run: Run, module: nn.Module, batches: list[tuple[torch.Tensor, ...]], wrap: Wrap) -> None:
    """Two forward and backward passes in training mode."""
    call = wrap(module.train(), batches[0])
    for index, batch in enumerate(batches):
        output = call(*batch)
        run.keep(f"output {index}", output)
        total = loss(output, None)
        if total.requires_grad:
            total.backward()
    run.close.update({f"gradient of {name}": copy.copy(p.grad) for name, p in module.named_parameters()})


def loss(output: Any, target: torch.Tensor | None) -> torch.Tensor:
    """One number, of every output."""
    leaves = pytree.tree_leaves(output)
    return sum((leaf if target is None else leaf - target.mean()).square().mean() for leaf in leaves)


def optimizer_of(module: nn.Module, seed: int) -> torch.optim.Optimizer:
    learned = [p for p in module.parameters() if p.requires_grad]
    kind = seed % 3
    if kind == 0:
        return torch.optim.SGD(learned, lr=0.05, momentum=0.9, weight_decay=1e-3)
    return torch.optim.Adam(learned, eps=0.01) if kind == 1 else torch.optim.AdamW(learned, eps=0.01)


def two_steps(
    run: Run, module: nn.Module, batches: list[tuple[torch.Tensor, ...]], sketch: Sketch, *, ours: bool
) -> None:
    """Two updates."""
    module.train()
    optimizer = optimizer_of(module, sketch.seed)
    target = torch.arange(3.0, dtype=next(module.parameters()).dtype)
    given = [(batch if len(batch) > 1 else batch[0], target) for batch in batches]
    if ours:
        step = convoy.training_step(module, loss, optimizer, given[0], settings=convoy.Settings(**words_of(sketch)))
    for index, (x, goal) in enumerate(given):
        if ours:
            run.close[f"loss {index}"] = step(x, goal).detach().clone()
            continue
        optimizer.zero_grad()
        found = loss(module(*batches[index]), goal)
        found.backward()
        optimizer.step()
        run.close[f"loss {index}"] = found.detach().clone()
    run.close.update({f"parameter {name}": p.detach().clone() for name, p in module.named_parameters()})


def run_of(use: str, sketch: Sketch, *, ours: bool, dtype: torch.dtype = torch.float32, shaken: bool = False) -> Run:
    """One use, by Convoy or by stock PyTorch."""
    run, module = Run(), sketch.module(dtype)
    batches = [sketch.arguments(), replaced(sketch.arguments(), sketch.seed)]
    batches = [tuple(a.to(dtype) if a.is_floating_point() else a for a in batch) for batch in batches]
    if shaken:
        shake(module, batches, sketch.seed)
    before, randomness = copy.deepcopy(module.state_dict()), random_states()
    if use == "optimize":
        inference(
            run,
            module,
            batches,
            lambda m, x: convoy.optimize(m, x, settings=convoy.Settings(**words_of(sketch))) if ours else m,
        )
    elif use == "compile":
        inference(run, module, batches, lambda m, _: compiled(m, words_of(sketch)) if ours else m)
    elif use == "compile_train":
        backward(run, module, batches, lambda m, _: compiled(m, words_of(sketch)) if ours else m)
    else:
        without_part(sketch, module)
        two_steps(run, module, batches, sketch, ours=ours)
    run.equal["random states"] = same_states(randomness, random_states())
    run.equal["training"] = [m.training for m in module.modules()]
    for name, value in module.state_dict().items():
        if use in ("optimize", "compile") or not value.is_floating_point():
            run.equal[name] = torch.equal(value, before[name]) if use in ("optimize", "compile") else value.tolist()
        else:
            run.close[name] = value.clone()
    for index, given in enumerate(itertools.chain(*batches)):
        run.close[f"input {index} afterwards"] = given.detach().clone()
    return run


def compiled(module: nn.Module, words: dict[str, Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module, backend="convoy", options=words)


def replaced(batch: tuple[torch.Tensor, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Other numbers in the same memory formats."""
    generator = torch.Generator().manual_seed(seed + 2)
    for given in batch:
        given.copy_(
            torch.rand(given.shape, generator=generator).sub(0.5).mul(200 if given.dtype == torch.uint8 else 3).abs_()
        )
    return batch


def shake(module: nn.Module, batches: list[tuple[torch.Tensor, ...]], seed: int) -> None:
    """Change every number by one rounding."""
    generator = torch.Generator().manual_seed(seed + 3)
    with torch.no_grad():
        for tensor in itertools.chain(module.parameters(), module.buffers(), *batches):
            if tensor.is_floating_point():
                tensor.mul_(1 + 2.0**-23 * (torch.randint(0, 2, tensor.shape, generator=generator) - 0.5))


def without_part(sketch: Sketch, module: nn.Module) -> None:
    """Parameters that have no part in the loss require no gradient: `training_step` refuses them."""
    probe = sketch.module().train()
    loss(probe(*sketch.arguments()), None).backward()
    unused = {name for name, p in probe.named_parameters() if p.grad is None}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in unused)


def random_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]


def same_states(before: list[Any], after: list[Any]) -> bool:
    return torch.equal(before[0], after[0]) and before[1:] == after[1:]


def differences(use: str, sketch: Sketch, ours: Run) -> list[str]:
    """The differences from the required results."""
    stock, shaken = (run_of(use, sketch, ours=False, shaken=shaken) for shaken in (False, True))
    exact = run_of(use, sketch, ours=False, dtype=torch.float64)
    found = [
        f"{name}: {ours.equal.get(name)}, stock {value}"
        for name, value in stock.equal.items()
        if ours.equal.get(name) != value
    ]
    rounding = max([u for word, u in _ROUNDING.items() if word in sketch.source], default=2.0**-24)
    for name, theirs in stock.close.items():
        mine, right = ours.close.get(name), exact.close[name]
        if mine is None or theirs is None or right is None:
            if mine is not theirs:
                found.append(f"{name}: {mine}, stock {theirs}")
            continue
        if mine.shape != theirs.shape:
            continue  # said above
        errors = [float((t.double() - right.double()).norm()) for t in (mine, theirs, shaken.close[name])]
        scale = max(float(right.double().norm()), rounding_scale(exact, name) * right.numel() ** 0.5)
        allowed = ALLOWANCE * max(*errors[1:], rounding * scale)
        if not errors[0] <= allowed:
            of_each = ", ".join(
                f"{who} {error:.3g}" for who, error in zip(("ours", "stock", "shaken"), errors, strict=True)
            )
            found.append(f"{name}: errors {of_each}; norm {float(right.double().norm()):.3g}")
    return found


def rounding_scale(exact: Run, name: str) -> float:
    """For gradients, whose true value may be 0: the largest one's root mean square."""
    if not name.startswith("gradient"):
        return 0.0
    squares = [
        float(t.double().square().mean())
        for other, t in exact.close.items()
        if other.startswith("gradient") and t is not None
    ]
    return max(squares) ** 0.5


def quick_times(runs: dict[str, Callable[[], object]], **_: object) -> dict[str, Latency]:
    """In place of a clock: everything runs once, and plans are faster than PyTorch, or most would be left to it."""
    for run in runs.values():
        run()
    return {name: Latency(name, (2.0 if name.startswith("torch") else 1.0,)) for name in runs}


@contextmanager
def plans_win() -> Iterator[list[str]]:
    """Plans are chosen whatever their speed; gives what was found wrong with the results of those that were not."""
    wrong: list[str] = []
    judge = end_to_end.why_wrong

    def why_wrong(what: str, errors: end_to_end.OutputErrors, *given: Any) -> str:
        far = judge(what, replace(errors, rel_l2_error=errors.rel_l2_error / ALLOWANCE), *given)
        wrong.extend([far] if far else [])
        return judge(what, errors, *given)

    with (
        mock.patch.object(end_to_end, "interleave", quick_times),
        mock.patch.object(end_to_end_check, "interleave", quick_times),
        mock.patch.object(end_to_end, "why_wrong", why_wrong),
    ):
        yield wrong


def fault(use: str, sketch: Sketch) -> tuple[str, bool]:
    """The fault of one use of a module, empty where there is none; and whether stock PyTorch ran."""
    with warnings.catch_warnings(record=True) as caught, plans_win() as wrong:
        warnings.simplefilter("always")
        try:
            ours = run_of(use, sketch, ours=True)
        except Exception:
            return traceback.format_exc(limit=-4), False
        fell_back = any(str(warning.message).startswith("convoy:") for warning in caught)
        if any(cast in sketch.source for cast in _ROUNDING):
            wrong.clear()  # one value that is rounded the other way is such a difference
        return "\n".join([*wrong, *differences(use, sketch, ours)]), fell_back


def usable(use: str, sketch: Sketch) -> bool:
    """Whether stock PyTorch can do it, and there is something to learn where something is to be learned."""
    try:
        run_of(use, sketch, ours=False)
        run_of(use, sketch, ours=False, dtype=torch.float64)
    except Exception:
        return False
    return use != "training_step" or any(p.requires_grad for p in sketch.module().parameters())


def shrunk(use: str, sketch: Sketch) -> Sketch:
    """The smallest module found that still fails."""
    tries, again = 0, True
    while again and tries < SHRINKS:
        again = False
        for less in smaller(sketch):
            tries += 1
            if usable(use, less) and fault(use, less)[0]:
                sketch, again = less, True
                break
    return sketch


_CALLS = {
    "optimize": "ours = convoy.optimize(net.eval(), inputs, settings=convoy.Settings(**words))\n"
    "print(ours(*inputs), net(*inputs))",
    "compile": "ours = torch.compile(net.eval(), backend='convoy', options=words)\n"
    "with torch.no_grad():\n    print(ours(*inputs), net(*inputs))",
    "compile_train": "ours = torch.compile(net, backend='convoy', options=words)\nprint(ours(*inputs), net(*inputs))",
    "training_step": "optimizer = torch.optim.SGD(net.parameters(), lr=0.05)\nbatch = (inputs, torch.ones(3))\n"
    "step = convoy.training_step(net, lambda o, _: o.square().mean(), optimizer, batch, settings=convoy.Settings(**words))\n"
    "print(step(*batch))",
}


def reproducer(use: str, sketch: Sketch) -> str:
    """A script that shows the module and its use."""
    inputs = "".join(f"{text}, " for _, text in sketch.inputs)
    head = f"import convoy\n\ntorch.manual_seed({sketch.seed})\nwords = {words_of(sketch)}\nnet, inputs = Net(), ({inputs})"
    return f"{sketch.source}\n\n{head}\n{_CALLS[use]}\n"
