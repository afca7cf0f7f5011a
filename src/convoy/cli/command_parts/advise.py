"""convoy prune --advise: from which sparsity and pattern each layer would be faster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convoy.cli.options import inputs, values
from convoy.cli.output import kept
from convoy.cli.output.lines import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.prune import Advice
    from convoy.prune.advise import LayerAdvice, PatternAdvice
    from convoy.settings import Settings


def refuse(words: Mapping[str, object]) -> None:
    """Refuse options that mean nothing here."""
    for option, value in words.items():
        if value is not None:
            raise InputError(option, str(value), "nothing with --advise, which measures and writes nothing")


def run(
    model: str,
    weights: str | None,
    pattern: str | None,
    settings: Settings,
    batch: int | None,
    size: str | None,
    dtype: str,
    device: str | None,
    *,
    trust: bool,
) -> Advice:
    """Measure the speed-up of pruning, for the patterns tried by default or for the given one."""
    from convoy.prune import PATTERNS, advise, parse_pattern

    patterns = PATTERNS if pattern is None else (str(parse_pattern(pattern)),)
    where = values.pick_device(device)
    module = values.load(model, weights, dtype, where, trust=trust)

    from convoy.zoo import read_info

    args = inputs.example(module, model, None, batch, values.image_size(size), dtype, where, read_info(weights))

    from convoy.capture import capture_inference
    from convoy.cli.output.progress import Bar
    from convoy.engines.competition import competing_engines
    from convoy.measurement import detect_target
    from convoy.perfdb import Database
    from convoy.pipeline.measure_net import make_runner

    target = detect_target(where)
    kept.measurements()
    with Bar() as bar, inputs.fitting(module, args), Database.open(settings.db) as database:
        captured = capture_inference(module, args)
        runner = make_runner(target, settings)
        try:
            return advise(
                model,
                captured,
                target=target,
                settings=settings,
                database=database,
                runner=runner,
                engine_ids=competing_engines(settings),
                patterns=patterns,
                observer=bar,
            )
        finally:
            runner.close()


def show(advice: Advice, as_json: bool) -> None:
    """A row for each layer and pattern; or all of it as JSON."""
    if as_json:
        say(json.dumps(advice.to_dict(), indent=1))
        return
    from convoy.report import print_table

    if advice.layers:
        heads = ("layer", "dense us", "pattern", "faster from", "at most", "us", "engine", "why not")
        rows = [_row(layer, found) for layer in advice.layers for found in layer.patterns]
        print_table(heads, rows, numbers=(1, 3, 4, 5))
        say(f"{advice.model} on {advice.target['name']}: sparsities from which a layer would be faster than its best")
        say("dense engine, including the operators fused with it; changes of memory format are not counted")
    for note in advice.notes:
        say(f"note: {note}")


def _row(layer: LayerAdvice, found: PatternAdvice) -> tuple[str, ...]:
    name = layer.names[0] + (f" and {len(layer.names) - 1} more" if len(layer.names) > 1 else "")
    dense = f"{layer.dense_us:.1f} {layer.dense_engine}"
    best = found.best
    if best is None:
        return (name, dense, found.pattern, "", "", "", "", found.reason)
    least = f"{found.break_even:.0%}" if found.break_even is not None else "never"
    if len(found.points) > 1 and found.break_even == found.points[0].sparsity:
        least += " or less"
    gain = f"{layer.dense_us / best.us:.2f}x at {best.sparsity:.0%}" if best.us and layer.dense_us else ""
    return (name, dense, found.pattern, least, gain, f"{best.us:.1f}", best.engine, found.reason)
