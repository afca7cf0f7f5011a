"""Plans as text: a table of the steps, the details of one layer, the difference of two plans."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.errors import InputError
from convoy.plan.plan import Plan, Step
from convoy.untrusted import escape_controls


def explain(plan: Plan, layer: str | None = None) -> str:
    """The plan as text.

    Args:
        plan: any plan.
        layer: a node's name: the details of the step that covers it.

    Raises:
        InputError: no step covers such a node.
    """
    if layer is not None:
        return _explain_layer(plan, layer)
    head = [
        _line(f"{plan.model}: {shapes(plan.inputs)} on {str(plan.target.get('name', 'unknown device'))[:200]}"),
        f"solver {_line(plan.solver)}, {_predicted(plan)}",
    ]
    if plan.baseline:
        head.append("the plan is the baseline: the model runs as PyTorch runs it")
    rows = [("step", "engine", "knobs", "layout", "us")]
    rows += [
        (title(s), s.config.engine, str(s.config.knobs) or "-", s.layout, f"{s.median_us:.1f}") for s in plan.steps
    ]
    widths = [min(48, max(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell[:48].ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*head, "", *(lines if plan.steps else []), *(f"note: {_line(note)}" for note in plan.notes)])


def _predicted(plan: Plan) -> str:
    return f"predicted {plan.total_us / 1e3:.3f} ms, no choice can be under {plan.bound_us / 1e3:.3f} ms"


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


def title(step: Step) -> str:
    """What a step computes, in a few characters."""
    if step.kind == "convert":
        return f"{step.args[0]} to {step.layout}"
    return f"{step.pattern}({'+'.join(step.nodes)})"


def _explain_layer(plan: Plan, layer: str) -> str:
    for index, step in enumerate(plan.steps):
        if layer in step.nodes or layer == title(step):
            share = f" ({step.median_us / plan.total_us:.1%} of the net)" if plan.total_us else ""
            return "\n".join(
                [
                    f"{layer}: step {index + 1} of {len(plan.steps)}, {title(step)}",
                    f"problem    {step.problem}",
                    f"engine     {step.config}",
                    *_holds_for(step),
                    f"layout     {step.layout}",
                    f"time       {step.median_us:.2f} us{share}",
                    f"workspace  {step.workspace_bytes} bytes",
                    f"reads      {', '.join(step.args)}",
                    f"makes      {', '.join(step.results)}",
                ]
            )
    known = ", ".join(node for step in plan.steps for node in step.nodes[:1]) or "none: the plan is the baseline"
    raise InputError("layer", layer, f"a node of the plan ({known[:400]})")


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
            change = f"{before.config} {before.layout} {before.median_us:.1f} us"
            lines.append(f"{node}: {change} -> {after.config} {after.layout} {after.median_us:.1f} us")
    return lines
