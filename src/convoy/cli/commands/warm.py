"""convoy warm: compile the usual kernels into the cache, before a net needs them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from convoy.cli import interrupt
from convoy.cli.command import MODEL
from convoy.cli.options import inputs, shared, values
from convoy.cli.output.lines import say
from convoy.errors import CompileError, InputError

if TYPE_CHECKING:
    from torch import nn

    from convoy.cli.output.progress import Bar
    from convoy.engines.base import Engine
    from convoy.problem import Problem
    from convoy.target import Target

USUAL: Final = ("resnet18", "mobilenet_v3_small", "googlenet")
"""Nets that have, between them, what most nets have: residuals, depthwise convolutions, gates, concatenations, poolings."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What was built for one net.

    Attributes:
        problems: different layers and subgraphs of the net.
        failed: why kernels could not be compiled, a line each.
    """

    problems: int
    failed: tuple[str, ...]


def warm(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help=f"Nets whose kernels are compiled; by default {', '.join(USUAL)}."),
    ] = None,
    batch: shared.Batch = None,
    size: shared.Size = None,
    dtype: shared.OwnDtype = None,
    device: shared.Device = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Allow files that MODEL names to run code.", rich_help_panel=MODEL)
    ] = False,
) -> None:
    """Compile the kernels that the MODELs can use, and keep them: a first answer then compiles nothing, or little.

    On a CPU these are all C kernels of their layers; on a GPU the kernels that effort none chooses. Nothing is measured. Kernels
    that are compiled already cost no time, so an interrupted call goes on where it stopped.
    """
    interrupt.unwinds()  # compilers are processes, which an exception ends
    interrupt.keeps(lambda: "what was compiled is kept")
    if batch is not None and batch < 1:
        raise InputError("--batch", batch, "an integer of at least 1")
    where, wanted = values.pick_device(device), values.image_size(size)
    check_compiler(where)

    from convoy.cli.output.progress import Bar
    from convoy.engines.compilers.clear_compiled import compiled_code

    before, begun = compiled_code(), time.perf_counter()
    known: set[tuple[str, str]] = set()
    with Bar() as bar:
        for name in models or USUAL:
            start = time.perf_counter()
            bar(f"{name}: capture", 0, 0)
            module = values.load(name, None, dtype, where, trust=trust)
            args = inputs.example(module, name, None, batch, wanted, dtype, where)
            with inputs.fitting(module, args):
                made = warmed_gpu(module, args, name) if where == "cuda" else warmed_cpu(module, args, name, known, bar)
            bar.say(f"{name}: {made.problems} different layers and subgraphs, {time.perf_counter() - start:.1f} s")
            for reason in made.failed:
                bar.tell(reason)
    after = compiled_code()
    files, added = after.files - before.files, (after.size_bytes - before.size_bytes) / (1 << 20)
    say(f"{files} files more ({added:.1f} MiB) in {after.path}, {time.perf_counter() - begun:.1f} s")


def check_compiler(device: str) -> None:
    """Refuse to begin on a CPU without a C compiler."""
    from convoy.engines.compilers.host_compiler import compiler_support

    support = compiler_support()
    if device == "cpu" and not support:
        raise CompileError("warm", support.reason)


def warmed_cpu(module: nn.Module, args: tuple[Any, ...], name: str, known: set[tuple[str, str]], bar: Bar) -> Warmed:
    """Build each problem's C kernels.

    Args:
        module: the net.
        args: example inputs.
        name: of the net.
        known: (engine, problem) that were built for nets before; those of this net are added.
        bar: shows the progress.
    """
    from convoy.engines.manifest import load_engine
    from convoy.measurement import detect_target
    from convoy.package.plan_choice import own_engines
    from convoy.pipeline.captured_net import captured_net
    from convoy.pipeline.isolation import isolate, preserve_global_state
    from convoy.pipeline.selection_input import distinct_problems
    from convoy.settings import Settings

    settings, target = Settings(effort="none"), detect_target("cpu")
    with preserve_global_state():
        net = captured_net(name, isolate(module, args, {}), settings, target)
        problems = list(distinct_problems(net.regions, net.copies))
        engines = [load_engine(engine) for engine in own_engines(settings, "cpu")]
        failed: dict[str, None] = {}
        for index, problem in enumerate(problems):
            bar(f"{name}: compile", index, len(problems))
            for engine in engines:
                if (engine.id, problem.key) not in known:
                    known.add((engine.id, problem.key))
                    failed.update(dict.fromkeys(built(engine, problem, target)))
    return Warmed(len(problems), tuple(failed))


def built(engine: Engine, problem: Problem, target: Target) -> list[str]:
    """Build one kernel with the engine's first choice of knobs; the reason if it cannot be compiled."""
    from convoy.engines.dynamic_weight import build

    if engine.skips_zeros or not engine.accepts(problem, target):
        return []
    try:
        build(engine, problem, engine.space(problem, target)[0], target)
    except CompileError as error:
        return [f"{engine.id}: {error.summary}"]
    return []


def warmed_gpu(module: nn.Module, args: tuple[Any, ...], name: str) -> Warmed:
    """Build the net's program as effort `none` chooses it."""
    from convoy.pipeline import optimize_model
    from convoy.settings import Settings

    plan = optimize_model(module, args, name=name, settings=Settings(effort="none")).plan
    return Warmed(len({step.problem for step in plan.steps}), ())
