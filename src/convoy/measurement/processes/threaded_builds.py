"""Builds executables in several threads, for engines whose compilers run outside of Python (`Engine.builds_in_threads`).

NVRTC takes one to three seconds for a kernel. Threads need no start, unlike processes, so two kernels are enough to gain. The
caller builds other executables at the same time: NVRTC does not hold Python's lock.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from convoy.engines.base import Engine, Executable
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.problem import EngineConfig, Problem, SubgraphProblem
from convoy.target import Target, usable_cores

Built = Executable | CompileError
"""An executable, or why it could not be built."""


@contextmanager
def built_in_threads(
    wanted: Sequence[tuple[Problem, EngineConfig]], target: Target, extra_engines: tuple[str, ...]
) -> Generator[Mapping[int, Future[Built]]]:
    """Build those that threads may build during the block, each problem and config once; nothing where there is only one.

    Kernels of layers begin first: those of subgraphs take a fraction of a second, and should not end last.

    Args:
        wanted: problems with their configs.
        target: the device.
        extra_engines: extra engines as `id=module:Class`.

    Yields:
        By index in `wanted`, what will be built. The caller builds the others. A problem and config that is wanted again needs
        only what the thread leaves in the cache.
    """
    found: dict[tuple[Problem, EngineConfig], tuple[int, Engine]] = {}
    for index, (problem, config) in enumerate(wanted):
        engine = load_engine(config.engine, extra_engines)
        if engine.builds_in_threads:
            found.setdefault((problem, config), (index, engine))
    if len(found) < 2:
        yield {}
        return

    def one(problem: Problem, config: EngineConfig, engine: Engine) -> Built:
        try:
            return build(engine, problem, config.knobs, target)
        except CompileError as error:
            return error

    order = sorted(found.items(), key=lambda item: isinstance(item[0][0], SubgraphProblem))
    pool = ThreadPoolExecutor(min(len(found), usable_cores()))
    try:
        yield {index: pool.submit(one, *key, engine) for key, (index, engine) in order}
    finally:
        pool.shutdown(cancel_futures=True)
