"""Builds executables in several threads, for engines whose compilers run outside of Python (`Engine.builds_in_threads`).

NVRTC takes one to three seconds for a kernel. Threads need no start, unlike processes, so two kernels are enough to gain. The
caller builds other executables at the same time: NVRTC does not hold Python's lock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from convoy.engines.base import Engine, Executable
from convoy.engines.compilers.host_compiler import compilers_at_work
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.problem import EngineConfig, Problem, SubgraphProblem
from convoy.target import Target, usable_cores

WAITING: Final = 4
"""Threads for each core: some wait for another one that compiles the same kernel (`device_binaries.cached`)."""

START_S: Final = 0.005
STARTS: Final = 10
"""Seconds between two looks at whether a C compiler has started, and their number: builds that find all compiled end sooner."""

Built = Executable | CompileError
"""An executable, or why it could not be built."""


BuildItem = tuple[Problem, EngineConfig]
"""One build: a problem's config."""

BegunBuilds = dict[BuildItem, Future[Built]]
"""Builds that threads have begun. Who wants one takes it out."""


@contextmanager
def builds_begun(wanted: Iterable[BuildItem], target: Target, extra_engines: tuple[str, ...]) -> Generator[BegunBuilds]:
    """Build those that threads may build during the block, each problem and config once; nothing where there is only one.

    Kernels of layers begin first: those of subgraphs take a fraction of a second, and should not end last. Of each engine one
    begins before all others: a C source is compiled once for all problems of its engine.

    Args:
        wanted: problems with their configs.
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
    """
    found: dict[BuildItem, Engine] = {}
    for problem, config in wanted:
        engine = load_engine(config.engine, extra_engines)
        if engine.builds_in_threads:
            found.setdefault((problem, config), engine)
    if len(found) < 2:
        yield {}
        return

    def one(problem: Problem, config: EngineConfig, engine: Engine) -> Built:
        try:
            return build(engine, problem, config.knobs, target)
        except CompileError as error:
            return error

    first = {engine.id: item for item, engine in reversed(found.items())}
    order = sorted(
        found.items(), key=lambda entry: (first[entry[1].id] != entry[0], isinstance(entry[0][0], SubgraphProblem))
    )
    threads = partial(_set_own_threads, torch.get_num_threads()) if target.device == "cpu" else None
    pool = ThreadPoolExecutor(min(len(found), WAITING * usable_cores()), initializer=threads)
    try:
        yield {item: pool.submit(one, *item, engine) for item, engine in order}
    finally:
        pool.shutdown(cancel_futures=True)


def _set_own_threads(threads: int) -> None:
    """C kernels use as many threads as the caller has now; `cores_shared` may lower the number while they are built."""
    torch.get_num_threads()  # a thread's first question sets its number to that which any thread set last
    torch.set_num_threads(threads)


@contextmanager
def cores_shared(begun: BegunBuilds, target: Target) -> Generator[None]:
    """PyTorch's operators leave cores to the C compilers that builds have started, for the block; one thread is always left.

    Threads of an operator wait for each other. Where compilers keep all cores busy, they wait spinning for a thread that is not
    running: a float64 run of ResNet-18 took two to five times the processor time of a run on one thread (two cores).

    Args:
        begun: the builds.
        target: on a GPU nothing is done.
    """
    threads = torch.get_num_threads()
    for _ in range(STARTS if target.device == "cpu" and threads > 1 else 0):
        if compilers_at_work() or not wait(begun.values(), START_S).not_done:
            break
    fewer = max(1, threads - compilers_at_work()) if target.device == "cpu" else threads
    if fewer == threads:
        yield
        return
    torch.set_num_threads(fewer)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def built_in_threads(
    wanted: Sequence[BuildItem],
    target: Target,
    extra_engines: tuple[str, ...],
    begun: BegunBuilds | None = None,
) -> Generator[Mapping[int, Future[Built]]]:
    """`builds_begun` for a caller that builds the others meanwhile.

    Args:
        wanted: problems with their configs.
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
        begun: what was begun before; those that are wanted are taken out.

    Yields:
        By index in `wanted`, what will be built. A problem and config that is wanted again needs only what the thread leaves in
        the cache.
    """
    first: dict[BuildItem, int] = {}
    for index, item in enumerate(wanted):
        first.setdefault(item, index)
    before = {first[item]: begun.pop(item) for item in first if item in begun} if begun else {}
    with builds_begun((item for item, index in first.items() if index not in before), target, extra_engines) as now:
        yield {**before, **{first[item]: future for item, future in now.items()}}
