"""convoy layers: list the layers of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli.options import inputs, shared, values
from convoy.cli.output.lines import say


def layers(
    model: shared.Model,
    batch: shared.Batch = None,
    size: shared.Size = None,
    dtype: shared.OwnDtype = None,
    trust: shared.Trust = False,
    keys: Annotated[bool, typer.Option("--keys", help="Print problem keys, for `convoy engines --problem`.")] = False,
) -> None:
    """List MODEL's convolutions (transposed ones too) and linear layers: shapes, operations, least bytes."""
    module = values.load(model, None, dtype, "cpu", trust=trust)
    args = inputs.example(module, model, None, batch, values.image_size(size), dtype, "cpu")

    from convoy.capture import capture_inference
    from convoy.graph.ir import LAYERS
    from convoy.graph.layers import layer_problem
    from convoy.report import print_table

    with inputs.fitting(module, args):
        graph = capture_inference(module, args).graph
    rows: list[tuple[str, ...]] = []
    total = 0
    for node in graph.nodes:
        if node.op not in LAYERS:
            continue
        problem = layer_problem(graph, node)
        total += problem.flops
        if keys:
            say(problem.key)
            continue
        shape = "x".join(map(str, problem.weight_spec.shape))
        moved, work = f"{problem.bytes_min / 1e6:.2f}", f"{problem.flops / 1e6:.1f}"
        # A transposed convolution is the gradient of one with respect to its input: it reads y and makes x.
        ends = (problem.x_spec, problem.y_spec)
        first, last = reversed(ends) if node.op.endswith("_dgrad") else ends
        rows.append((node.name, str(first), shape, str(last), work, moved))
    if not keys:
        print_table(("layer", "x", "weight", "y", "MFLOP", "MB"), rows, numbers=(4, 5))
        say(f"{len(rows)} layers, {total / 1e9:.2f} GFLOP")
