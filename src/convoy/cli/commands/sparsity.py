"""convoy sparsity: the shares of zeros in a net's feature maps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import inputs, shared, values
from convoy.cli.output.files import check_outputs
from convoy.cli.output.lines import say
from convoy.errors import InputError


def sparsity(
    model: shared.Model,
    images: shared.Input = None,
    limit: Annotated[int | None, typer.Option("--images", help="Use the first so many images only.")] = None,
    size: shared.Size = None,
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    report: Annotated[Path | None, typer.Option("--report", help="Write a page with the plot to this file.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table to this file.")] = None,
) -> None:
    """Show the share of zeros in the input of each of MODEL's convolutions: mean and percentiles, dead channels and tiles."""
    if limit is not None and limit < 1:
        raise InputError("--images", limit, "an integer of at least 1")
    check_outputs({"--report": report, "--json": json_path})
    module = values.load(model, weights, None, "cpu", trust=trust)

    from convoy.zoo import read_info

    args = inputs.example(module, model, images, limit, values.image_size(size), None, "cpu", read_info(weights))

    from convoy.capture import capture_inference
    from convoy.measurement.count_zeros import convolution_inputs, layer_zeros
    from convoy.report import print_table
    from convoy.report.sparsity import HEADINGS, LayerSparsity, Sparsity, write_sparsity_html, write_sparsity_json

    one = tuple(arg[:1] for arg in args)
    with inputs.fitting(module, one):
        captured = capture_inference(module, one)
    graph = captured.graph
    calls = (tuple(arg[i : i + 1] for arg in args) for i in range(len(args[0])))
    given = (captured.flatten_inputs(call, {}) for call in calls)
    counted = layer_zeros(graph, captured.constants, given)
    read = convolution_inputs(graph)
    found = Sparsity(
        model,
        len(args[0]),
        tuple(LayerSparsity.of(name, graph.values[read[name]].spec.shape[1:], c) for name, c in counted.items()),
        _notes(images is not None, weights),
    )
    print_table(HEADINGS, found.rows(), numbers=tuple(range(2, len(HEADINGS))))
    for note in found.notes:
        say(f"note: {note}")
    if report is not None:
        write_sparsity_html(found, report)
    if json_path is not None:
        write_sparsity_json(found, json_path)


def _notes(has_images: bool, weights: str | None) -> tuple[str, ...]:
    """Reasons why the figures may differ from those of the user's trained net on real data."""
    notes = ()
    if not has_images:
        notes += ("no images were given: random numbers give other zeros than real images do",)
    if weights is None:
        notes += ("no weights were given: unless the model brings its own, they are random, and so are its zeros",)
    return notes
