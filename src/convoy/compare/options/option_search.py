"""The search for the best of PyTorch's options: each alone, step by step to the best setting, and the best setting without each.

Greedy forward selection: interactions of two options that help only together are found where one of them helps alone. Every
option that did not help is tried once more on top of the best setting, because some help there alone (channels_last under
autocast). At the end options that the best setting does as well without are left out again.

Compilers are slow to try: they come after the others, step by step only those that came near the best of their kind alone, and
once. What there was no time for is named.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from convoy.compare.case_run import Observer
from convoy.compare.child_session import ChildFailedError
from convoy.compare.options.option_advice import Headline, advice, gains
from convoy.compare.options.option_rows import option_row, timed_row
from convoy.compare.options.setting_bench import DEFAULTS, Setting, SettingBench
from convoy.compare.options.torch_options import OPTIONS, TorchOption, added, arithmetic_of, choose, words_of
from convoy.compare.runs.rows import Figure, Row
from convoy.compare.runs.runfile import Run, write

PASSES: Final = 2
"""How often the options that did not help are tried again."""

RIVAL: Final = 0.9
"""Share of the gain of the best alternative that a compiler must have alone to be tried step by step."""

WORKERS: Final = (0, 1, 2, 4, 8)


class OptionSearch:
    """The ablation of one case."""

    def __init__(
        self, run: Run, path: Path, bench: SettingBench, words: str, observer: Observer, deadline: float = math.inf
    ) -> None:
        self.run, self.path, self.bench, self.words, self.observer = run, path, bench, words, observer
        self.best: Setting = DEFAULTS
        self.worth: dict[str, float] = {}
        self.left: list[str] = []
        """Work for which no time was left."""
        self._deadline = bench.deadline = deadline

    @property
    def done(self) -> bool:
        """Whether an earlier run came to its end, and nothing failed in it that is to be tried again."""
        best = self.run.row(self._row("best", "").key)
        if best is None or best.detail.get("left"):
            return False
        return not any(row.passing for row in self.run.rows if row.question == best.question)

    def search(self) -> None:
        """All stages, each row kept as soon as it is there; where the defaults fail there is nothing to compare with."""
        case = self.bench.case
        words = case.label()
        self.observer(f"{words}: exact results and defaults", 0, 0)
        row = self._row("defaults", "defaults", option="defaults")
        try:
            self.bench.open()
            (defaults,) = self.bench.time(DEFAULTS)
        except ChildFailedError as error:
            self._failed(row, error, "defaults")
            self.observer(f"{words}: the defaults failed: {error.status}: {error.reason}", 0, 0)
            return
        self._keep(self._timed(row, defaults, DEFAULTS))
        tried, refused = choose(self.words, case.mode, case.device, lambda: self.bench.facts)
        for option, reason in refused:
            self._keep(self._row(option.id, "alone", "unsupported", reason, option=option.id))
        candidates = sorted((option for option in tried if not option.usual), key=lambda option: option.compiles)
        self._alone(candidates)
        self._forward(candidates)
        self._without()
        self._usual([option for option in tried if option.usual])
        if case.training:
            self._loader()
        self._conclude(candidates)

    def _late(self, what: str) -> bool:
        """Whether the time is up; work that is left out for that reason is remembered."""
        late = time.monotonic() > self._deadline
        if late:
            self.left.append(what)
        return late

    def _known(self, provider: str) -> bool:
        return self._earlier(self._row(provider, "")) is not None

    def _earlier(self, row: Row) -> Row | None:
        """The row of an interrupted run; None where there is none, or where a failure is tried again."""
        known = self.run.row(row.key)
        return None if known is None or known.passing else known

    def _failed(self, row: Row, error: ChildFailedError, what: str) -> Row:
        """The row that says how it failed; it is kept unless only the time was up, which is nobody's failure."""
        row = dataclasses.replace(row, status=error.status, reason=error.reason)
        if not (error.status == "timeout" and self._late(what)):
            self._keep(row)
        return row

    def _alone(self, candidates: Sequence[TorchOption]) -> None:
        for index, option in enumerate(candidates):
            if not self._known(f"alone: {option.id}") and self._late(f"{option.id} alone"):
                continue
            self.observer(f"alone: {option.id}", index, len(candidates))
            setting = added(DEFAULTS, option)
            row = self._trial(
                f"alone: {option.id}", "alone", option.id, (DEFAULTS, setting), lambda a, b: a.p50 / b.p50
            )
            if row.ok:
                self.worth[option.id] = float(row.detail["gain"])
            self.bench.keep(DEFAULTS)

    def _forward(self, candidates: Sequence[TorchOption]) -> None:
        """Add options that help, the most promising first; options that did not help are tried again on top of them."""
        order = sorted(candidates, key=lambda option: (option.compiles, -self.worth.get(option.id, 0.0)))
        for turn in range(PASSES):
            before = self.best
            for option in order:
                setting = added(self.best, option)
                if option.id in self.best or option.id not in self.worth or not self._may_win(option, candidates, turn):
                    continue
                name = f"step: {words_of(self.best)} -> {words_of(setting)}"
                if not self._known(name) and self._late(f"{option.id} step by step"):
                    continue
                self.observer(f"step by step: {words_of(setting)}", turn, PASSES)
                settings = (DEFAULTS, self.best, setting) if self.best else (DEFAULTS, setting)
                row = self._trial(name, "forward", f"+ {option.id}", settings, None)
                if row.ok and row.detail["kept"]:
                    self.best = setting
                self.bench.keep(DEFAULTS, self.best)
            if self.best == before:
                return

    def _may_win(self, option: TorchOption, candidates: Sequence[TorchOption], turn: int) -> bool:
        """Whether an option is worth a step: a compiler only once, and where it came near the best of its kind alone."""
        if not option.compiles:
            return True
        rivals = [self.worth.get(other.id, 0.0) for other in candidates if other.group == option.group]
        return turn == 0 and self.worth[option.id] >= RIVAL * max(rivals)

    def _without(self) -> None:
        """Time the best setting without each of its options, and remove the options that gain nothing."""
        for name in [option for option in OPTIONS if option in self.best and len(self.best) > 1]:
            if not self._known(f"without: {name}") and self._late(f"without {name}"):
                continue
            self.observer(f"without {name}", 0, 0)
            setting = self.best - {name}
            row = self._trial(
                f"without: {name}", "without", f"without {name}", (self.best, setting), lambda a, b: b.p50 / a.p50
            )
            if row.ok:
                self.worth[name] = float(row.detail["worth"])
                if not row.detail["kept"]:
                    self.best = setting
            self.bench.keep(DEFAULTS, self.best)

    def _usual(self, options: Sequence[TorchOption]) -> None:
        for option in options:
            if not self._known(f"without: {option.id}") and self._late(f"without {option.id}"):
                continue
            self.observer(f"without {option.id}", 0, 0)
            setting = self.best | {f"-{option.id}"}
            name = f"without: {option.id}"
            row = self._trial(name, "default", f"without {option.id}", (self.best, setting), lambda a, b: b.p50 / a.p50)
            if row.ok and option.changes:
                self._keep(dataclasses.replace(row, notes=("changes the computation: only its cost is shown",)))
            self.bench.keep(DEFAULTS, self.best)

    def _loader(self) -> None:
        case = self.bench.case
        for workers in [n for n in WORKERS if n <= max(1, case.threads)]:
            row = self._row(f"loader: {workers} workers", "loader", option=f"{workers} workers")
            if self._known(row.provider) or self._late(f"{workers} workers"):
                continue
            self.observer(f"data loader with {workers} workers", 0, 0)
            try:
                latency = self.bench.fed_by(self.best, workers)
            except ChildFailedError as error:
                self._keep(dataclasses.replace(row, status=error.status, reason=error.reason))
                continue
            self._keep(self._timed(row, latency, self.best))

    def _conclude(self, candidates: Sequence[TorchOption]) -> None:
        self.bench.deadline = math.inf  # the last check may exceed the time limit
        row = self._row("best", "best", option="the best setting")
        try:
            defaults, best = self.bench.time(DEFAULTS, self.best) if self.best else self.bench.time(DEFAULTS) * 2
        except ChildFailedError as error:
            detail = {**row.detail, "left": [*self.left, "the best setting"]}
            self._keep(dataclasses.replace(row, status=error.status, reason=error.reason, detail=detail))
            return
        # The row of the defaults too: the headline is the ratio of the two rows, timed in the same rounds.
        stock = self._timed(self._row("defaults", "defaults", option="defaults"), defaults, DEFAULTS)
        self._keep(stock)
        row = self._timed(row, best, self.best)
        names = [option for option in OPTIONS if option in self.best]
        headline = Headline(defaults.p50, best.p50, arithmetic_of(names, row.dtype))
        text = advice(
            headline,
            sorted(names, key=lambda name: -self.worth.get(name, 1.0)),
            {option.id: self.worth[option.id] for option in candidates if option.id in self.worth},
            self.bench.errors.get(self.best),
        )
        text += f"; no time was left for {', '.join(self.left)}" if self.left else ""
        gained = {"gain": headline.gain, "defaults_ms": defaults.p50}
        detail = {**row.detail, **gained, "options": names, "advice": text, "kept": True, "left": self.left}
        self._keep(dataclasses.replace(row, detail=detail))

    def _trial(
        self,
        provider: str,
        role: str,
        option: str,
        settings: tuple[Setting, ...],
        worth: Callable[[Figure, Figure], float] | None,
    ) -> Row:
        """Time the last setting beside the others, or take the row that an interrupted run left."""
        row = self._row(provider, role, option=option)
        known = self._earlier(row)
        if known is not None:
            return known
        try:
            found = self.bench.time(*settings)
        except ChildFailedError as error:
            return self._failed(row, error, option)
        before, after = found[-2], found[-1]
        row = self._timed(row, after, settings[-1])
        ratio = worth(before, after) if worth is not None else before.p50 / after.p50
        kept = gains(before, after) if role in ("alone", "forward") else gains(after, before)
        detail = {**row.detail, "worth": ratio, "kept": kept}
        if settings[0] == DEFAULTS and role in ("alone", "forward"):
            detail |= {"gain": found[0].p50 / after.p50, "defaults_ms": found[0].p50}
        if role == "forward" and kept:
            detail["option"] = f"{option}, kept"  # a table without colours shows which steps led on
        row = dataclasses.replace(row, detail=detail)
        self._keep(row)
        return row

    def _row(self, provider: str, role: str, status: str = "ok", reason: str = "", *, option: str = "") -> Row:
        return option_row(self.bench.case, provider, role, status, reason, option=option)

    def _timed(self, row: Row, latency: Figure, setting: Setting) -> Row:
        return timed_row(row, latency, setting, self.bench.errors.get(setting))

    def _keep(self, row: Row) -> None:
        self.run = self.run.with_row(row)
        write(self.run, self.path)
