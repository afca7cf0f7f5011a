"""Builds executables in several threads, for engines whose compilers run outside of Python (`Engine.builds_in_threads`).

NVRTC takes one to three seconds for a kernel. Threads need no start, unlike processes, so two kernels are enough to gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from convoy.engines.base import Engine, Executable
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.problem import EngineConfig, Problem
from convoy.target import Target, usable_cores
from convoy.tuning_profile import phase

Built = Executable | CompileError
"""An executable, or why it could not be built."""


def build_in_threads(
    wanted: Sequence[tuple[Problem, EngineConfig]], target: Target, extra_engines: tuple[str, ...]
) -> dict[int, Built]:
    """Build those that threads may build, each problem and config once; nothing where there is only one.

    Args:
        wanted: problems with their configs.
        target: the device.
        extra_engines: extra engines as `id=module:Class`.

    Returns:
        By index in `wanted`; the caller builds the others, of which some need only read what a thread compiled.
    """
    found: dict[tuple[Problem, EngineConfig], tuple[int, Engine]] = {}
    for index, (problem, config) in enumerate(wanted):
        engine = load_engine(config.engine, extra_engines)
        if engine.builds_in_threads:
            found.setdefault((problem, config), (index, engine))
    if len(found) < 2:
        return {}

    def one(problem: Problem, config: EngineConfig, engine: Engine) -> Built:
        try:
            return build(engine, problem, config.knobs, target)
        except CompileError as error:
            return error

    with phase("build", "in threads"), ThreadPoolExecutor(min(len(found), usable_cores())) as pool:
        jobs = {index: pool.submit(one, *key, engine) for key, (index, engine) in found.items()}
        return {index: job.result() for index, job in jobs.items()}
