"""Plans as text: a table of the steps, the details of one layer, the difference of two plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.errors import InputError
from convoy.plan.plan import Plan, Step
from convoy.untrusted import escape_controls

PREDICTED: Final = "~"
"""Stands before every number that is, or is computed from, a predicted time."""

CUT: Final = "..."
"""Ends a name that is cut because a table is too narrow for it."""


def time_text(time_us: float, *, predicted: bool, digits: int = 1) -> str:
    """Microseconds as text, marked if they are predicted."""
    return f"{PREDICTED if predicted else ''}{time_us:.{digits}f}"


def total_text(time_us: float, *, predicted: bool) -> str:
    """Microseconds as milliseconds with their unit, marked if a part of them is predicted."""
    return f"{PREDICTED if predicted else ''}{time_us / 1e3:.3f} ms"


def speedup_text(time_us: float, baseline_us: float, *, predicted: bool) -> str:
    """How many times faster than PyTorch's time; empty if that is not known, or if one of the times is predicted."""
    return f"{baseline_us / time_us:.2f}x" if baseline_us and time_us and not predicted else ""


def explain(plan: Plan, layer: str | None = None) -> str:
    """The plan as text.

    Args:
        plan: any plan.
        layer: a step as `convoy optimize` names it (`conv1+relu`), or one of its nodes: the details of that step.

    Raises:
        InputError: no step has such a name.
    """
    if layer is not None:
        return _explain_layer(plan, layer)
    head = [
        _line(f"{plan.model}: {shapes(plan.inputs)} on {str(plan.target.get('name', 'unknown device'))[:200]}"),
        f"chosen by {_line(plan.solver)}: {sum_text(plan.total_us, plan.bound_us, predicted=plan.predicted)}",
    ]
    steps = plan.steps or plan.rejected_steps
    if plan.baseline:
        head.append("the plan is the baseline: the model runs as PyTorch runs it")
        head += ["these steps were selected, and do not run:"] if steps else []
    rows = [("step", "engine", "knobs", "layout", "us", "PyTorch us")]
    rows += [_step_row(step) for step in steps]
    return "\n".join([*head, "", *(_columns(rows) if steps else []), *(f"note: {_line(note)}" for note in plan.notes)])


def _step_row(step: Step) -> tuple[str, ...]:
    stock = time_text(step.baseline_us, predicted=step.baseline_predicted) if step.baseline_us else ""
    time = time_text(step.median_us, predicted=step.predicted)
    return title(step), step.config.engine, str(step.config.knobs) or "-", step.layout, time, stock


_WIDEST: Final = 48
"""Characters of a column; longer texts are cut."""


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of aligned columns."""
    widths = [min(_WIDEST, max(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    return [
        "  ".join(_cut(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - len(CUT)] + CUT


def sum_text(total_us: float, bound_us: float, *, predicted: bool) -> str:
    """A selection's total in words, with the bound that the solver proved. A bound on predicted times bounds nothing real."""
    total = f"the steps' times add up to {total_text(total_us, predicted=predicted)}"
    if predicted:
        return f"{total}, in part predicted ({PREDICTED})"
    return f"{total}; no other choice of the measured candidates can be under {total_text(bound_us, predicted=False)}"


def _line(text: str) -> str:
    """A text of a plan's file as one line without control characters, which a terminal would execute."""
    return escape_controls(text, one_line=True)


_SHOWN = 4
"""Inputs shown in a heading: a training step has a hundred, its parameters before the batch."""


def shapes(inputs: Sequence[str]) -> str:
    """Inputs for a heading: all of a few, the last of many."""
    if len(inputs) <= _SHOWN:
        return ", ".join(inputs)
    return f"{len(inputs)} inputs, the last {', '.join(inputs[-2:])}"


_MOST_NAMED = 12
"""Nodes up to which a step's title names each."""


def step_name(step: Step) -> str:
    """A step's name in reports: its nodes joined by `+`, or the value and the memory format that it is copied to."""
    return "+".join(step.nodes) if step.nodes else f"{step.args[0]} to {step.layout}"


def title(step: Step) -> str:
    """A step's name with its pattern, in a few characters."""
    if len(step.nodes) > _MOST_NAMED:
        return f"{step.pattern}({step.nodes[0]} to {step.nodes[-1]}, {len(step.nodes)} nodes)"
    return f"{step.pattern}({step_name(step)})" if step.nodes else step_name(step)


def _explain_layer(plan: Plan, layer: str) -> str:
    steps = plan.steps or plan.rejected_steps
    found = _named(steps, layer) if isinstance(layer, str) else []  # pyright: ignore[reportUnnecessaryIsInstance]
    if not found:
        known = ", ".join(step_name(step) for step in steps) or "none: no steps were selected"
        raise InputError("layer", layer, f"a layer of the plan ({known[:400]})")
    return "\n\n".join(_details(plan, steps, index, layer) for index in found)


def _named(steps: Sequence[Step], layer: str) -> list[int]:
    """The indices of the steps that a name means: whole names first, then nodes, then a name that a table has cut."""
    names = [{step_name(step), title(step)} for step in steps]
    whole = [index for index, own in enumerate(names) if layer in own]
    nodes = set(layer.split("+"))
    inside = [index for index, step in enumerate(steps) if nodes <= set(step.nodes)]
    start = layer.removesuffix(CUT)
    cut = [i for i, own in enumerate(names) if start != layer and start and any(n.startswith(start) for n in own)]
    return whole or inside or cut


def _details(plan: Plan, steps: Sequence[Step], index: int, layer: str) -> str:
    step = steps[index]
    share = f" ({step.median_us / plan.total_us:.1%} of the net)" if plan.total_us and not plan.predicted else ""
    ratio = speedup_text(step.median_us, step.baseline_us, predicted=step.predicted or step.baseline_predicted)
    stock = time_text(step.baseline_us, predicted=step.baseline_predicted, digits=2)
    lines = [
        f"{layer}: step {index + 1} of {len(steps)}, {title(step)}",
        *(["selected, and does not run: the plan is the baseline"] if plan.baseline else []),
        f"problem    {step.problem}",
        f"engine     {step.config}",
        *_holds_for(step),
        f"layout     {step.layout}",
        f"time       {time_text(step.median_us, predicted=step.predicted, digits=2)} us{share}",
        *([f"PyTorch    {stock} us{ratio and f', {ratio} as long'}"] if step.baseline_us else []),
        f"workspace  {step.workspace_bytes} bytes",
        f"reads      {', '.join(step.args)}",
        f"makes      {', '.join(step.results)}",
    ]
    return "\n".join([*lines, *_candidates(step)])


def _candidates(step: Step) -> list[str]:
    """A table of what could compute the step, the chosen one marked."""
    if not step.candidates:
        return []
    rows = [("candidate", "knobs", "layout", "us", "")]
    chosen = step.config.engine, str(step.config.knobs), step.layout
    for one in step.candidates:
        ok = one.status == "ok"
        own = (one.engine, one.knobs, one.layout) == chosen
        time = time_text(one.median_us, predicted=one.predicted, digits=2) if ok else ""
        said = "chosen" if own else "" if ok else f"{one.status}: {one.reason}"
        rows.append((one.engine, _line(one.knobs) or "-", one.layout, time, said))
    table = _columns([row[:-1] for row in rows])
    return ["", *(f"{line}  {_line(row[-1])}".rstrip() for line, row in zip(_padded(table), rows, strict=True))]


def _padded(lines: Sequence[str]) -> list[str]:
    width = max(map(len, lines))
    return [line.ljust(width) for line in lines]


ZEROS = {
    "zeros": "values",
    "dead_channels": "channels",
    "dead_tiles": "tiles of a channel",
    "dead_blocks": "blocks of channels",
}
"""What the knobs of engines that skip zeros count (`convoy.engines.activation_sparsity.KINDS`)."""


def _holds_for(step: Step) -> list[str]:
    """For which inputs a choice holds, if its time depends on their zeros."""
    knobs = step.config.knobs
    return [
        f"holds for  inputs of whose {what} {knobs[kind]} % or more are zero; with fewer it is slower"
        for kind, what in ZEROS.items()
        if kind in knobs
    ]


def compare(first: Plan, second: Plan) -> list[str]:
    """The differences of two plans, one line each; empty if they run the same."""
    lines: list[str] = []
    for name in ("model", "graph_digest", "inputs", "numerics", "solver", "baseline"):
        before, after = getattr(first, name), getattr(second, name)
        if before != after:
            lines.append(_line(f"{name}: {before} -> {after}"))
    ours = {node: step for step in first.steps for node in step.nodes}
    theirs = {node: step for step in second.steps for node in step.nodes}
    for node in dict.fromkeys((*ours, *theirs)):
        before, after = ours.get(node), theirs.get(node)
        if before is None or after is None:
            lines.append(f"{node}: only in the {'second' if before is None else 'first'} plan")
        elif (before.config, before.layout, before.nodes) != (after.config, after.layout, after.nodes):
            lines.append(f"{node}: {_choice(before)} -> {_choice(after)}")
    return lines


def _choice(step: Step) -> str:
    return f"{step.config} {step.layout} {time_text(step.median_us, predicted=step.predicted)} us"
