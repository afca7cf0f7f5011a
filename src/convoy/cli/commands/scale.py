"""convoy scale: data-parallel training on 1, 2, 4, ... GPUs, and where the time goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from convoy.cli import interrupt
from convoy.cli.options import inputs, shared, values
from convoy.cli.options import scale as given
from convoy.cli.output import kept
from convoy.cli.output.files import check_outputs, file_word, write_report
from convoy.cli.output.lines import say, tell
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.compare import Run
    from convoy.compare.runs.device_lock import RunWarnings
    from convoy.compare.scaling.scaling_jobs import ScaleRequest, ScalingJob

USUAL_BATCH: Final = 128
"""Images in a step of one GPU where none are asked for."""


def scale(
    model: given.Models,
    batch: given.Batch = None,
    size: shared.Size = None,
    dtype: given.Dtype = "fp32",
    device: shared.Device = None,
    trust: shared.Trust = False,
    providers: given.Providers = "torch.ddp,convoy",
    weak: given.Weak = False,
    strong: given.Strong = False,
    gpus: given.Gpus = None,
    nodes: given.Nodes = 1,
    node_rank: given.NodeRank = 0,
    endpoint: given.Endpoint = "",
    effort: given.Effort = "quick",
    db: shared.Db = None,
    plans: given.Plans = None,
    timeout_s: given.TimeoutS = 900.0,
    round_s: given.RoundS = 0.3,
    output: given.Output = None,
    report: shared.Report = None,
    again: given.Again = False,
) -> None:
    """Train each MODEL on several GPUs, or CPU processes: throughput, efficiency, time of computation and communication."""
    settings = values.settings_from(effort=effort, db=db)
    if not values.words_of(model):
        raise InputError("MODEL", model, "models, separated by commas")
    if plans is not None and not plans.is_dir():
        raise InputError("--plans", str(plans), "a folder that exists")
    # Other hosts have no figures, and on a shared disk their file would be the first one's.
    models = list(dict.fromkeys(values.words_of(model)))
    path = (output or Path(f"scale-{'-'.join(map(file_word, models))}.json")) if node_rank <= 0 else None
    check_outputs({"--out": path, "--report": report})
    where = values.pick_device(device)

    from convoy.compare.scaling.scaling_jobs import ScaleRequest

    request = ScaleRequest(
        model=models[0], gpus=_counts(gpus, where), batch=USUAL_BATCH if batch is None else batch,
        scalings=_scalings(weak, strong), providers=tuple(values.words_of(providers)), dtype=dtype,
        device=where, size=values.image_size(size) or 0, nodes=nodes, node_rank=node_rank, endpoint=endpoint,
        timeout_s=timeout_s, round_s=round_s,
        effort=str(settings.effort), db=str(db or ""), trust=trust, plans=str(plans or ""),
    )  # fmt: skip
    request.check(_available(where))
    requests = [_checked(dataclasses.replace(request, model=name), own_batch=batch is None) for name in models]

    from convoy.compare.runs.device_lock import claim
    from convoy.measurement import detect_target

    kept.run_file(path)
    interrupt.unwinds()  # ends torchrun
    with claim(detect_target(where), tell, count=max(request.gpus)) as notes:
        _measure(requests, _start(requests, path, notes, again=again), path, report, notes)


def _checked(request: ScaleRequest, *, own_batch: bool) -> ScaleRequest:
    """The request of one model, which is made once: an error of the user's is reported once, and not by each process.

    Args:
        request: of the model.
        own_batch: no batch was asked for: an exported program's own is taken.
    """
    from convoy.compare.scaling.scaling_jobs import jobs
    from convoy.zoo import example_batch
    from convoy.zoo.model_names import is_exported

    module = values.load_fp32(request.model, None, "cpu", trust=request.trust)
    if not is_exported(request.model):
        return request
    if own_batch:
        request = dataclasses.replace(request, batch=example_batch(module) or request.batch)
        request.check(_available(request.device))
    for batch in {job.batch for job in jobs(request)}:
        args = inputs.example(module, request.model, None, batch, request.size or None, "fp32", "cpu")
        inputs.check_shape(module, args)
    return request


def _scalings(weak: bool, strong: bool) -> tuple[str, ...]:
    return (*(("weak",) if weak or not strong else ()), *(("strong",) if strong else ()))


def _available(device: str) -> int:
    import os

    import torch

    return torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1


def _counts(text: str | None, device: str) -> tuple[int, ...]:
    """The requested numbers; by default powers of two up to the number available."""
    if text is None:
        most = _available(device) if device == "cuda" else 2
        return tuple(1 << power for power in range(most.bit_length()) if 1 << power <= most)
    return tuple(values.positive_integers("--gpus", text, "numbers of at least 1, separated by commas: 1,2,4"))


def _start(requests: Sequence[ScaleRequest], output: Path | None, notes: Sequence[str], *, again: bool) -> Run:
    from convoy.compare import Run
    from convoy.compare.runs.manifest import make_manifest
    from convoy.compare.runs.runfile import resumed

    request = requests[0]
    # Numbers of GPUs and providers are no part of the request: a run goes on with others, and those that are there stay.
    size = list(request.size) if isinstance(request.size, tuple) else request.size  # as JSON gives it back
    asked = {
        "command": "scale", "model": ",".join(one.model for one in requests), "batch": _batches(requests), "dtype": request.dtype,
        "size": size, "nodes": request.nodes, "effort": request.effort, "seconds": request.round_s,
    }  # fmt: skip
    protocol = (
        f"torchrun, {request.rounds} rounds in turn of at least {request.round_s:g} s, the slowest process counts"
    )
    manifest = make_manifest(device=request.device, protocol=protocol, request=asked, notes=notes)
    fresh = Run("scaling", manifest)
    return resumed(output, fresh, again=again) if output is not None else fresh


def _batches(requests: Sequence[ScaleRequest]) -> int | list[int]:
    """The batch of all models, or that of each where exported programs have their own."""
    found = [request.batch for request in requests]
    return found[0] if len(set(found)) == 1 else found


def _measure(
    requests: Sequence[ScaleRequest], run: Run, output: Path | None, report: Path | None, notes: RunWarnings
) -> None:
    """Run job by job; finished rows are in the file when a later job fails or is interrupted."""
    from dataclasses import replace

    from convoy.cli.output.progress import Bar
    from convoy.compare import write
    from convoy.compare.runs.device_lock import noted
    from convoy.compare.scaling.scaling_jobs import jobs
    from convoy.compare.scaling.scaling_launch import run as run_job
    from convoy.compare.scaling.scaling_rows import with_efficiency

    found = [job for request in requests for job in jobs(request)]
    with Bar() as bar:
        for number, job in enumerate(found):
            bar(f"{job.request.model}: {job.provider} on {job.world}, {job.scaling}", number, len(found))
            if _is_known(job, run):
                continue
            row = run_job(job)
            if row is None:
                continue
            run = run.with_row(row)
            run = replace(run, rows=tuple(with_efficiency(run.rows)))
            if output is not None:
                write(run, output)
    notes.look()
    run = noted(run, notes)
    if output is not None and run.rows:
        write(run, output)
    request = requests[0]
    _tell(request, run)
    if request.node_rank > 0:
        return
    say(f"run: {output}")
    write_report(run, report)
    if not any(row.ok for row in run.rows):
        raise typer.Exit(1)


def _is_known(job: ScalingJob, run: Run) -> bool:
    """Whether a job need not be started. With several hosts each must: the file is on one, and others would wait for it there."""
    known = run.row(job.row().key)
    return job.request.nodes == 1 and known is not None and known.ok


def _tell(request: ScaleRequest, run: Run) -> None:
    """Tables and lines; on a host that is not the first there are failures alone."""
    from convoy.compare.scaling.scaling_lines import (
        HEADS,
        LINK_CAPTION,
        LINK_HEADS,
        LINK_NUMBERS,
        NUMBERS,
        counted,
        failures,
        heads_of,
        link_table,
        notes,
        settings,
        table,
    )
    from convoy.report import print_table

    for line in failures(run.rows):
        say(line, err=True)
    if request.node_rank > 0:
        say("the first host has the figures")
        return
    unit = counted(request.device)
    print_table(heads_of(HEADS, unit), table(run.rows), numbers=NUMBERS)
    if any(row.ok for row in run.rows):
        say(LINK_CAPTION)
        print_table(heads_of(LINK_HEADS, unit), link_table(run.rows), numbers=LINK_NUMBERS)
    for line in (*settings(run.rows), *notes(run.rows)):
        say(line)
