"""Measuring a net: all candidates of its regions and layout changes, from the database or by the clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from convoy.deadline import Deadline
from convoy.engines.competition import competing_engines, load_competitor
from convoy.measurement import ChildRunner, InProcessRunner, Runner, zero_shares
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import is_out_of_memory
from convoy.perfdb import Database
from convoy.pipeline.ceilings import ceilings_of, problem_floor
from convoy.pipeline.net import Net
from convoy.pipeline.observer import Observer
from convoy.pipeline.search_pruning import nchw_to_skip, prefer_measured, share_of_problems, subsumed_problems
from convoy.pipeline.selection_input import distinct_problems, whole_problems, zeros_by_problem
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune import SearchResult, search
from convoy.tuning_profile import phase


def make_runner(target: Target, settings: Settings, deadline: Deadline | None = None) -> Runner:
    """The runner for these settings. It starts no process before the first measurement.

    Args:
        target: the device.
        settings: time limit of a candidate, memory, extra engines.
        deadline: when a child process is given up amid a request; None: never.
    """
    engines, limit_s, limit = settings.engines, settings.timeout_s, settings.tuning_memory_bytes
    if not settings.isolate:
        return InProcessRunner(target, extra_engines=engines, timeout_s=limit_s, memory_bytes=limit)
    return ChildRunner(target, extra_engines=engines, timeout_s=limit_s, memory_bytes=limit, deadline=deadline)


def measure(
    net: Net,
    settings: Settings,
    database: Database,
    observer: Observer,
    share: tuple[int, int] = (0, 1),
    deadline: Deadline | None = None,
) -> SearchResult:
    """Find the times of all candidates of the net's regions and layout changes, in the database or by measuring.

    Args:
        net: the net, with its zeros counted (`with_counted_zeros`) if engines that skip zeros compete.
        settings: engines that compete, effort and limits.
        database: where rows are read and stored.
        observer: called with the progress.
        share: (index, count): the part of the problems that this process measures.
        deadline: when measuring must end; None: after `settings.time_s`.
    """
    engines = competing_engines(settings)
    loaded = [load_competitor(engine, settings.engines) for engine in engines]
    deadline = deadline or Deadline(settings.time_s)
    runner = make_runner(net.target, settings, deadline)
    try:
        found = search(
            share_of_problems(distinct_problems(net.regions, net.copies), *share),
            engine_ids=engines,
            target=net.target,
            settings=settings,
            database=database,
            runner=runner,
            baseline_only=subsumed_problems(net.regions) | nchw_to_skip(net.regions, loaded, settings, net.target),
            zeros=zeros_by_problem(net.regions, net.zeros),
            whole=whole_problems(net.regions),
            deadline=deadline,
            floor_of=lambda: problem_floor(net, net.ceilings or ceilings_of(net.target, settings, deadline)),
            on_progress=lambda done, total, message: observer(message, done, total),
        )
    finally:
        runner.close()
    refresh_memory_limit()
    found = replace(found, zeros_uncounted=net.zeros_uncounted)
    return prefer_measured(net.regions, found) if found.predicted else found


def with_counted_zeros(net: Net, settings: Settings, observer: Observer) -> Net:
    """The net with the zeros in its values counted on its inputs, if an engine that skips zeros competes.

    If the run that counts does not fit in memory, no zeros are known (`Net.zeros_uncounted`). Its memory is freed in any case:
    the process that measures may need it.
    """
    engines = (load_competitor(engine, settings.engines) for engine in competing_engines(settings))
    device = net.target.device
    if not net.inputs or net.zeros or not any(e.skips_zeros and device in e.devices for e in engines):
        return net
    observer("counting zeros", 0, 0)
    try:
        with phase("count zeros"):
            counted = replace(net, zeros=zero_shares(net.captured.graph, net.captured.constants, net.inputs))
    except Exception as error:  # everything: out of memory has several types; any other error is raised again
        if not is_out_of_memory(error):
            raise
        counted = replace(net, zeros_uncounted=True)
    torch.cuda.empty_cache()
    return counted


CUT: Final = "measuring ended"
"""Start of the note that a search ran out of time."""

NOTHING_KNOWN: Final = "nothing was ever measured on this device"
"""Start of the note that predictions rest on no measurement."""


def prediction_notes(found: SearchResult, why_first: str = "") -> list[str]:
    """Notes of a plan that was chosen from predicted times, or without counted zeros.

    Args:
        found: the times.
        why_first: why the plan, a first answer that nothing was measured for, was kept; empty if it is none.
    """
    notes: list[str] = []
    if found.wrong_predictions:
        notes.append(
            f"{found.wrong_predictions} predicted candidates gave wrong results, in the whole net and alone, and were replaced"
        )
    if found.zeros_uncounted:
        notes.append(
            "zeros could not be counted for lack of memory, so engines that skip zeros are timed without zeros"
        )
    if not found.predicted:
        return [f"{CUT} {found.cut}", *notes] if found.cut else notes
    never = "never"
    if why_first:
        never, why, remedy = (
            "not",
            f"this is the first answer: {why_first}",
            "give it more time (`time_s`, `--time-s`)",
        )
    elif found.cut:
        why, remedy = f"{CUT} {found.cut}", "give it more time (`time_s`, `--time-s`)"
    elif found.baseline_out_of_memory:
        why, remedy = f"PyTorch ran out of memory on {found.baseline_out_of_memory} of them", "tune a smaller batch"
    else:
        why, remedy = "effort none measures nothing", "measure once, at effort quick (`effort`, `--effort quick`)"
    some = f"{found.predicted} of the net's {len(found.rows)} different layers and subgraphs"
    unmeasured = f"{some} were {never} measured on this device, because {why}"
    if not found.predicted_from:
        limits = (
            f"{NOTHING_KNOWN}: times marked ~ are the least that its FLOP/s and memory bandwidth allow, not estimates"
        )
        return [f"{limits}; {remedy}", unmeasured, *notes]
    how = f"times marked ~ are predicted from {found.predicted_from} measurements of other layers on this device or ones like it"
    return [f"{unmeasured}: {how}; {remedy}", *notes]
