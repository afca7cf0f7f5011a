"""The memory budget as rows of the integer program: the bytes in use at each place in time, linear in the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from convoy.selection.covering import CoverProgram
from convoy.selection.linear import LinearProgram, Terms, minus, plus
from convoy.selection.order import LaunchOrder


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use while the regions of one place run.

    They are `fixed_bytes` + `terms` (bytes by column), at most `most_bytes`.
    """

    fixed_bytes: int
    terms: Terms
    most_bytes: int


@dataclass(slots=True)
class _ValueUse:
    """The readers of one value over time, as `memory_usage` needs them.

    Attributes:
        made_at: the places where it may be made, with the columns that make it there.
        read_at: the places where it may be read, in order; the place after the last is the net's return.
        reads: columns that read it, by (layout, place).
        returned: the format in which the net returns it; empty if it does not.
        given: whether it is an input of the graph: it then exists all the time, and only copies count.
        used: by (layout, index in read_at): column that is 1 if it is read in that layout there or later.
        copied: likewise: column that is 1 if a copy in that layout was made there or earlier.
        native: column that is 1 if the value exists in the layout in which it was made, by (makers passed, index in read_at).
        copies: column that is 1 if a copy exists, by (layout, index in read_at, whether that place has come).
    """

    made_at: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    read_at: list[int] = field(default_factory=list[int])
    reads: dict[tuple[str, int], list[int]] = field(default_factory=dict[tuple[str, int], list[int]])
    returned: str = ""
    given: bool = False
    used: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    copied: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    native: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    copies: dict[tuple[str, int, bool], int] = field(default_factory=dict[tuple[str, int, bool], int])


class MemoryModel:
    """Memory use as linear expressions over the columns of a covering program.

    Time has one place for each set of regions that exclude each other (`LaunchOrder.places`) and one for the net's return.
    The use at a place is what `finalize.memory_profile` counts: the caller's inputs; every value made before and needed there
    or later, once as it was made and once for each copy; the results and the workspace of the candidate that runs there; the
    packed constants of all chosen candidates.

    Columns, 0 or 1, made only where a place needs them, with the rows that force them up:

    - `used[v, l, k]`: v is read in format l at its k-th place or later;
    - `copied[v, l, k]`: v has been copied to l by its k-th place: 1 once it is both converted and read there, and no sooner;
    - native form there: `native >= used[v, l, k] - copied[v, l, k - 1]` for every l (there is no copy in the format it was
      made in), and less 1 - made if some of the candidates that could make it come later;
    - copy there: `copies >= used + copied - 1`.

    If proposals depend on each other in a cycle, some covers are launched in another order than the places say, and the
    expressions do not hold for them. A column for each such pair of regions (`contradiction`), 1 only if both are chosen,
    lets these covers pass; the solver's caller checks their true peak.

    Args:
        model: the covering program, which is added to.
        order: the problem's launch order.

    Attributes:
        contradictions: the `contradiction` columns.
    """

    def __init__(self, model: CoverProgram, order: LaunchOrder) -> None:
        self._model = model
        self._problem = model.problem
        self._program: LinearProgram = model.program
        used = sorted({order.places[c.region] for c in model.pool})
        compact = {place: index for index, place in enumerate(used)}
        self._place = [compact[order.places[c.region]] for c in model.pool]
        self._end = len(used)
        self._lives = self._collect()
        self._resident_terms: Terms = []
        self.contradictions = [self._contradiction(*pair) for pair in order.contradictions]
        self._inputs_bytes = sum(self._problem.value_bytes[v] for v in dict.fromkeys(self._problem.inputs))

    def least_bytes(self) -> int:
        """Bytes that every choice needs at some place: the inputs, and the smallest way to compute the largest node."""
        least: dict[str, int] = {}
        for column, candidate in enumerate(self._model.pool):
            wanted = self._running_bytes(column)
            for node in self._problem.regions[candidate.region].nodes:
                least[node] = min(least.get(node, wanted), wanted)
        return self._inputs_bytes + max(least.values(), default=0)

    def over_limit(self, columns: Sequence[int], profile: Sequence[int], limit_bytes: float) -> list[int]:
        """The places at which a choice uses more than `limit_bytes`, the fullest first.

        Args:
            columns: the choice, in launch order.
            profile: bytes in use during each launch and, last, when the net returns (`finalize.memory_profile`).
            limit_bytes: the limit.
        """
        places = [*(self._place[column] for column in columns), self._end]
        found = [(used, place) for place, used in zip(places, profile, strict=True) if used > limit_bytes]
        return [place for _, place in sorted(found, reverse=True)]

    def usage(self, place: int) -> MemoryUse:
        """The use at a place, as an expression over the choice."""
        own = {c: self._running_bytes(c) for c, at in enumerate(self._place) if at == place}
        alive = [(v, life) for v, life in self._lives.items() if self._may_be_alive(life, place)]
        most = self._inputs_bytes + self._most_resident() + max(own.values(), default=0)
        most += sum(self._problem.value_bytes[v] * self._most_forms(v, life) for v, life in alive)
        terms: Terms = [*self._resident(), *((c, float(size)) for c, size in own.items() if size)]
        for value, life in alive:
            terms += plus(self._forms(value, life, place), float(self._problem.value_bytes[value]))
        return MemoryUse(self._inputs_bytes, terms, most)

    def _resident(self) -> Terms:
        """The packed constants of the whole choice: one column, because every place counts them."""
        sizes = [(i, float(c.resident_bytes)) for i, c in enumerate(self._model.pool) if c.resident_bytes]
        if not self._resident_terms and sizes:
            unit = max(size for _, size in sizes)
            column = self._program.continuous()
            self._program.at_least([(column, 1.0), *((i, -size / unit) for i, size in sizes)], 0.0)
            self._resident_terms = [(column, unit)]
        return self._resident_terms

    def _contradiction(self, maker: int, reader: int) -> int:
        column = self._program.binary()
        for region in (maker, reader):
            chosen = [i for i, c in enumerate(self._model.pool) if c.region == region]
            self._program.at_most([(column, 1.0), *minus(chosen)], 0.0)
        return column

    def _collect(self) -> dict[str, _ValueUse]:
        lives: dict[str, _ValueUse] = {}
        for (value, layout), columns in self._model.readers.items():
            life = lives.setdefault(value, _ValueUse())
            for column in columns:
                life.reads.setdefault((layout, self._place[column]), []).append(column)
        for value in self._problem.outputs:
            life = lives.setdefault(value, _ValueUse())
            life.returned = self._problem.border_layout(value)
        for (value, _), columns in self._model.makers.items():
            for column in columns:
                if value in lives:
                    lives[value].made_at.setdefault(self._place[column], []).append(column)
        for value, life in lives.items():
            places = {place for _, place in life.reads}
            life.read_at = sorted(places | ({self._end} if life.returned else set()))
            life.given = value in self._problem.inputs
        return lives

    def _running_bytes(self, column: int) -> int:
        candidate = self._model.pool[column]
        results = self._problem.regions[candidate.region].results
        return candidate.workspace_bytes + sum(self._problem.value_bytes[v] for v in results)

    def _most_resident(self) -> int:
        most: dict[str, int] = {}
        for candidate in self._model.pool:
            for node in self._problem.regions[candidate.region].nodes:
                most[node] = max(most.get(node, 0), candidate.resident_bytes)
        return sum(most.values())

    def _most_forms(self, value: str, life: _ValueUse) -> int:
        return len(self._model.layouts(value)) - (1 if life.given else 0)

    def _may_be_alive(self, life: _ValueUse, place: int) -> bool:
        made = life.given or any(at < place for at in life.made_at)
        return made and bool(life.read_at) and life.read_at[-1] >= place

    def _forms(self, value: str, life: _ValueUse, place: int) -> list[int]:
        """Columns that count the existing forms of a value, made before a place, while that place runs."""
        k = next(i for i, at in enumerate(life.read_at) if at >= place)
        layouts = self._model.layouts(value)
        found: list[int] = []
        if not life.given:
            found.append(self._native(value, life, layouts, sum(at < place for at in life.made_at), k))
        copied = [layout for layout in layouts if self._model.converted(value, layout)]
        return found + [self._copy(value, life, layout, k, come=life.read_at[k] == place) for layout in copied]

    def _native(self, value: str, life: _ValueUse, layouts: Sequence[str], passed: int, k: int) -> int:
        if (passed, k) in life.native:
            return life.native[passed, k]
        column = life.native[passed, k] = self._program.binary()
        makers = [c for at in sorted(life.made_at)[:passed] for c in life.made_at[at]]
        certain = passed == len(life.made_at)  # then every reader implies that it was made
        for layout in layouts:
            used = self._used(life, layout, k)
            terms: Terms = [(column, 1.0), *minus(used)]
            if k > 0 and self._model.converted(value, layout):
                terms += plus([self._copied(value, life, layout, k - 1)])
            if not certain:
                terms += minus(makers)
            self._program.at_least(terms, 0.0 if certain else -1.0)
        return column

    def _copy(self, value: str, life: _ValueUse, layout: str, k: int, *, come: bool) -> int:
        if (layout, k, come) in life.copies:
            return life.copies[layout, k, come]
        column = life.copies[layout, k, come] = self._program.binary()
        last = k if come else k - 1
        if last >= 0:
            copied = self._copied(value, life, layout, last)
            used = self._used(life, layout, k)
            self._program.at_least([(column, 1.0), (copied, -1.0), *minus(used)], -1.0)
        return column

    def _reads(self, life: _ValueUse, layout: str, k: int) -> tuple[list[int], bool]:
        """Columns that read at the k-th place in a format, and whether the net returns it there."""
        place = life.read_at[k]
        return life.reads.get((layout, place), []), place == self._end and layout == life.returned

    def _used(self, life: _ValueUse, layout: str, k: int) -> list[int]:
        """Column that is 1 if the value is read in a format at its k-th place or later (a list, for `plus`)."""
        for index in range(len(life.read_at) - 1, k - 1, -1):
            if (layout, index) in life.used:
                continue
            column = life.used[layout, index] = self._program.binary()
            reads, returned = self._reads(life, layout, index)
            self._program.at_least([(column, 1.0), *minus(reads)], 1.0 if returned else 0.0)
            if index + 1 < len(life.read_at):
                self._program.at_least([(column, 1.0), (life.used[layout, index + 1], -1.0)], 0.0)
        return [life.used[layout, k]]

    def _copied(self, value: str, life: _ValueUse, layout: str, k: int) -> int:
        converted = self._model.converted(value, layout)
        for index in range(k + 1):
            if (layout, index) in life.copied:
                continue
            column = life.copied[layout, index] = self._program.binary()
            reads, returned = self._reads(life, layout, index)
            self._program.at_most([(column, 1.0), *minus(converted)], 0.0)
            least = 0.0 if returned else -1.0
            self._program.at_least([(column, 1.0), *minus(converted), *minus(reads)], least)
            before = [life.copied[layout, index - 1]] if index else []
            self._program.at_least([(column, 1.0), *minus(before)], 0.0)
            self._program.at_most([(column, 1.0), *minus(before), *minus(reads)], 1.0 if returned else 0.0)
        return life.copied[layout, k]
