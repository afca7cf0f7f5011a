"""The effect of PyTorch's options on some cases, written to a run file; an interrupted run continues from it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from convoy.compare.case import Case
from convoy.compare.case_run import Observer
from convoy.compare.limits import Limits
from convoy.compare.options.option_advice import LEAST_GAIN
from convoy.compare.options.option_search import OptionSearch
from convoy.compare.options.setting_bench import ROUNDS, SettingBench
from convoy.compare.options.torch_options import choose
from convoy.compare.runs.device_lock import claim, noted
from convoy.compare.runs.manifest import make_manifest
from convoy.compare.runs.runfile import Run, resumed, write
from convoy.measurement import detect_target

PROTOCOL: Final = (
    f"one process; defaults, best and tried setting in up to {ROUNDS} interleaved rounds of at least 20 ms; outputs checked; "
    f"kept where the gain is above {LEAST_GAIN - 1:.0%} and above the spread; noisy rounds are taken again"
)


def search_options(
    cases: Sequence[Case],
    words: str,
    path: Path,
    *,
    request: Mapping[str, Any],
    limits: Limits,
    again: bool,
    observer: Observer,
) -> Run:
    """Measure the options for each case. The run file is written after each row, and a later run continues from it.

    Args:
        cases: to run; fp32, because types are options.
        words: `all`, or options' names separated by commas.
        path: the run file.
        request: the command and its options.
        limits: time and memory of the process.
        again: measure anew although rows are there.
        observer: told about progress and warnings.

    Raises:
        InputError: an unknown option, a model that cannot be used, or a file of another run.
    """
    choose(words, cases[0].mode, cases[0].device, dict)  # refuse a wrong name before anything is run
    target = detect_target(cases[0].device)
    with claim(target, lambda warning: observer(warning, 0, 0)) as notes:
        manifest = make_manifest(
            device=target.device, protocol=PROTOCOL, request={**request, "options": words}, notes=notes
        )
        run = resumed(path, Run("options", manifest), again=again)
        deadline = time.monotonic() + limits.seconds if limits.seconds else math.inf
        for case in cases:
            with tempfile.TemporaryDirectory(prefix="convoy-options-") as folder:
                bench = SettingBench(case, Path(folder), limits)
                try:
                    search = OptionSearch(run, path, bench, words, observer, deadline)
                    if not search.done:
                        search.search()
                    run = search.run
                    if search.left:
                        observer(f"no time was left for {', '.join(search.left)}: the same command goes on", 0, 0)
                finally:
                    bench.close()
        notes.look()
        run = noted(run, notes)
        write(run, path)
        return run
