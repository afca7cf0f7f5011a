"""Providers of `convoy scale`: how they send gradients, by name; several models in one file; plans that serve other jobs."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare import read
from convoy.compare.scaling import scaling_ddp, scaling_launch
from convoy.compare.scaling.scaling_jobs import GRADIENTS, PROVIDER_NAMES, ScaleRequest, ScalingJob, parts_of
from convoy.compare.scaling.scaling_measure import measure
from convoy.compare.scaling.scaling_providers import PROVIDERS
from convoy.compare.scaling.scaling_rows import result_row, with_efficiency
from convoy.training.allreduce import sent_gradients

NET = """
from torch import nn

def net():
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return nn.Sequential(*layers)

def other():
    return net()
"""


def test_names_say_who_trains_and_how_gradients_are_sent() -> None:
    assert GRADIENTS["convoy"] == sent_gradients.GRADIENTS
    assert {parts_of(name)[0] for name in PROVIDER_NAMES} == set(PROVIDERS)
    assert parts_of("convoy+bf16_error_feedback") == ("convoy", "bf16_error_feedback")
    assert parts_of("torch.ddp.compiled") == ("torch.ddp.compiled", None)


def result(step_s: float):
    rounds = {"step": [step_s] * 3}
    return {"rounds": rounds, "values": {}, "setting": "words", "notes": [], "backend": "nccl"}


def test_bf16_gradients_are_compared_with_the_plain_providers_single_gpu() -> None:
    request = ScaleRequest(model="alexnet", gpus=(1, 2, 4), batch=8)

    def row(provider: str, count: int, step_s: float):
        return result_row(ScalingJob(request, provider, count, "weak"), result(step_s))

    rows = [
        row("convoy", 1, 0.010),
        row("convoy", 4, 0.020),
        row("convoy+bf16", 2, 0.016),
        row("convoy+bf16", 4, 0.0125),
    ]
    assert [r.figure("efficiency").p50 for r in with_efficiency(rows)] == pytest.approx([1, 0.5, 0.625, 0.8])
    # Without one GPU, each refers to its own fewest.
    assert [r.figure("efficiency").p50 for r in with_efficiency(rows[1:])] == pytest.approx([1, 1, 1.28])


def test_a_compiled_provider_runs_without_nccls_watchdog() -> None:
    job = ScalingJob(ScaleRequest(model="alexnet", gpus=(1,), batch=8), "torch.ddp.compiled", 1, "weak")
    words = scaling_launch._environment(job, ["2", "3"])
    assert (words["TORCH_NCCL_ASYNC_ERROR_HANDLING"], words["CUDA_VISIBLE_DEVICES"]) == ("0", "2,3")
    plain = scaling_launch._environment(replace(job, provider="torch.ddp"))
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in plain


def test_a_captured_step_keeps_what_its_graph_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds addresses alone: momentum and buckets belong to the optimizer and the model that the step holds."""
    replays: list[int] = []
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(scaling_ddp, "recording", lambda graph, stream: nullcontext())
    held = nn.Linear(1, 1)
    alive = weakref.ref(held)

    def step(model: nn.Module = held) -> None:
        model(torch.zeros(1))

    setup = SimpleNamespace(refill=lambda: None)
    captured, reason = scaling_ddp._captured(setup, {"step": step, "compute": step}, SimpleNamespace(device="cpu"))
    del held, step
    gc.collect()
    assert reason == ""
    captured["input"]()
    captured["compute"]()
    assert (len(replays), alive() is not None) == (2, True)

    def fails() -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(scaling_ddp, "wait", lambda device: None)
    broken = scaling_ddp._captured(setup, {"step": fails, "compute": fails}, SimpleNamespace(device="cpu"))
    assert broken == ({}, "RuntimeError: operation not permitted")


def test_several_models_are_one_command_and_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    started: list[ScalingJob] = []

    def run(job: ScalingJob):
        started.append(job)
        if job.processes == 2 and job.request.model == "net.py:net":
            return job.row(status="crashed", reason="died")
        return result_row(job, result(0.01))

    monkeypatch.setattr(scaling_launch, "run", run)
    words = ["scale", "net.py:net,net.py:other", "--trust", "--gpus", "1,2", "--batch", "4", "--device", "cpu"]
    words += ["--providers", "torch.ddp"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert [(job.request.model, job.processes) for job in started] == [
        ("net.py:net", 1), ("net.py:net", 2), ("net.py:other", 1), ("net.py:other", 2),
    ]  # fmt: skip
    found = read(tmp_path / "scale-net-py-net-net-py-other.json")
    assert [(row.subject, row.ok) for row in found.rows] == [
        ("net.py:net", True), ("net.py:net", False), ("net.py:other", True), ("net.py:other", True),
    ]  # fmt: skip
    assert "net.py:net: torch.ddp on 2, weak: crashed: died" in done.output
    started.clear()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert [(job.request.model, job.processes) for job in started] == [("net.py:net", 2)]  # only what failed
    assert "MODEL: got ','" in str(CliRunner().invoke(app, [*words[:1], ",", *words[2:]]).exception)


@pytest.fixture
def alone(tmp_path: Path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


def test_a_job_leaves_its_plan_to_the_next(alone: Path) -> None:
    (alone / "net.py").write_text(NET)
    (alone / "plans").mkdir()
    request = ScaleRequest(
        model=f"{alone / 'net.py'}:net", gpus=(1,), batch=2, size=8, device="cpu", rounds=3, round_s=0.001, trust=True,
        effort="none", plans=str(alone / "plans"), db=str(alone / "perf.db"),
    )  # fmt: skip
    first = measure(ScalingJob(request, "convoy", 1, "weak").to_dict(), torch.device("cpu"), lambda _: None)
    assert first["setting"].startswith("channels_last, training_step, effort none")
    (plan,) = (alone / "plans").iterdir()
    before = plan.read_bytes()
    second = measure(ScalingJob(request, "convoy+bf16", 1, "weak").to_dict(), torch.device("cpu"), lambda _: None)
    assert second["setting"].startswith("channels_last, training_step, a plan from a file, gradients=bf16")
    assert second["values"]["gradient_bytes"] == first["values"]["gradient_bytes"] / 2
    assert plan.read_bytes() == before
    plan.write_text(before.decode().replace('"nodes"', '"noes"', 1))
    third = measure(ScalingJob(request, "convoy", 1, "weak").to_dict(), torch.device("cpu"), lambda _: None)
    assert third["setting"].startswith("channels_last, training_step, effort none")  # a damaged plan is made anew
    assert any("cannot be replayed" in note for note in third["notes"])
