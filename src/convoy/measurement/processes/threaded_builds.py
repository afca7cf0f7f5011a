"""Builds executables in several threads, for engines whose compilers run outside of Python (`Engine.builds_in_threads`).

NVRTC takes one to three seconds for a kernel. Threads need no start, unlike processes, so two kernels are enough to gain. The
caller builds other executables at the same time: NVRTC does not hold Python's lock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from convoy.engines.base import Engine, Executable
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.problem import EngineConfig, Problem, SubgraphProblem
from convoy.target import Target, usable_cores

WAITING: Final = 4
"""Threads for each core: some wait for another one that compiles the same kernel (`device_binaries.cached`)."""

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
    pool = ThreadPoolExecutor(min(len(found), WAITING * usable_cores()))
    try:
        yield {item: pool.submit(one, *item, engine) for item, engine in order}
    finally:
        pool.shutdown(cancel_futures=True)


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
