"""PlanStore: the stored plan of one net in a database: found if it still holds, and kept when a search is finished."""

from __future__ import annotations

import dataclasses
import datetime as dt
from contextlib import suppress
from typing import Final

from convoy.collection_pause import collection_paused
from convoy.errors import InputError, PlanError
from convoy.perfdb import Database
from convoy.pipeline.ceilings import BUSY
from convoy.pipeline.net import Net
from convoy.pipeline.selection_input import distinct_problems
from convoy.pipeline.stored_plans.plan_key import PlanKey, plan_key
from convoy.pipeline.stored_plans.plan_record import PlanRecord, pack
from convoy.plan import Plan
from convoy.report.summary import Summary
from convoy.settings import Effort, Settings
from convoy.tuning_profile import phase

NOT_USED: Final = "a stored plan was not used, and the net was tuned as if there were none"
"""Start of the note of a search that was made although there is a stored plan."""

FROM_DATABASE: Final = "the plan and its figures are those of an earlier search"
"""Start of the note of a plan that was not searched for in this call."""


class PlanStore:
    """The stored plan of one net under one set of settings.

    Args:
        database: where plans are stored.
        key: what the plan is for.
        net: the net.
        settings: effort; at `none` the plan rests on all rows, since predictions do.
    """

    def __init__(self, database: Database, key: PlanKey, net: Net, settings: Settings) -> None:
        self._database, self._key, self._net = database, key, net
        self._of_all_rows = settings.effort is Effort.NONE

    def find(self) -> PlanRecord | None:
        """The plan of a finished search, if Convoy, the engines and the rows are still those of that search."""
        with phase("stored plan"):
            text = self._database.plans.get(self._key.question)
            if text is None:
                return None
            try:
                found = PlanRecord.from_text(text)
            except (InputError, PlanError):  # of another version, which the next search replaces
                return None
            if found.means != self._key.means or found.plan.target.get("digest") != self._net.target.digest:
                return None
            return found if found.rows == self._database.plans.sum_of_rows(found.problems) else None

    def told(self, record: PlanRecord) -> Plan:
        """The plan of a record under the net's present name, with a note that says where it comes from."""
        note = f"{FROM_DATABASE}, which ended {record.date}: nothing was measured or timed in this call"
        notes = (*record.plan.notes, note, *self._database.warnings)
        return dataclasses.replace(record.plan, model=self._net.name, notes=notes)

    def keep(self, plan: Plan, baseline_error: float, summary: Summary | None = None, way: str = "") -> None:
        """Store the plan of a finished search.

        A plan that PyTorch replaces because a busy machine timed it as slower is not stored: the next call times it again.

        Args:
            plan: what runs.
            baseline_error: relative L2 error of PyTorch's own results.
            summary: what the search found out.
            way: how the plan runs.
        """
        if plan.baseline and BUSY in plan.notes:
            return
        with phase("stored plan"), collection_paused(), suppress(ValueError):  # a figure that is not finite
            problems = None if self._of_all_rows else _problem_keys(self._net)
            notes = tuple(note for note in plan.notes if not note.startswith(NOT_USED))
            record = PlanRecord(
                plan=dataclasses.replace(plan, notes=notes),
                means=self._key.means,
                problems=problems,
                rows=self._database.plans.sum_of_rows(problems),
                baseline_error=baseline_error,
                date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                way=way,
                report="" if summary is None else pack(summary.to_dict()),
            )
            self._database.plans.put(self._key.question, record.to_text())


def _problem_keys(net: Net) -> tuple[str, ...]:
    return tuple(sorted({problem.key for problem in distinct_problems(net.regions, net.copies)}))


def plan_store(
    kind: str, database: Database, net: Net, settings: Settings, more: dict[str, object] | None = None
) -> PlanStore:
    """The store of a net's plan; the arguments are those of `plan_key`."""
    with phase("stored plan"):
        return PlanStore(database, plan_key(kind, net, settings, more), net, settings)
