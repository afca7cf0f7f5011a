"""bench/scaling: which jobs come first, which run beside each other, what the time cuts off; and the model of a network."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from bench.scaling import job_queue, scaling
from bench.scaling.job_queue import LEAST_S, Clock, run_jobs
from bench.scaling.network_model import (
    Measured,
    efficiency,
    host_efficiency,
    measured_of,
    network_ms,
    network_table,
    parts_table,
)
from bench.scaling.scaling_tables import scaling_table

from convoy.compare import Run
from convoy.compare.runs.rows import Row
from convoy.compare.scaling import scaling_launch
from convoy.compare.scaling.scaling_jobs import ScalingJob
from convoy.compare.scaling.scaling_rows import result_row, with_efficiency


def options(*words: str):
    return scaling.parser().parse_args(["--device", "cuda", *words])


def test_every_efficiency_has_its_base_first_and_one_process_sends_nothing() -> None:
    found = list(scaling.jobs(options("--gpus", "1,2,4", "--batches", "128,32")))
    order = [(job.request.batch, job.processes, job.provider, job.request.model) for job in found]
    nets = ["alexnet", "resnet50", "googlenet"]
    assert order[:4] == [(128, 1, "convoy", net) for net in nets] + [(128, 1, "torch.ddp", "alexnet")]
    counts = [count for batch, count, *_ in order if batch == 128]
    assert counts == [1] * 9 + [4] * 13 + [2] * 13
    assert [batch for batch, *_ in order] == [128] * 35 + [32] * 35
    assert {net for _, _, provider, net in order if provider == "convoy+bf16"} == {"alexnet"}
    assert {count for _, count, provider, _ in order if provider == "convoy+bf16"} == {2, 4}


def jobs(count: int, processes: int, timeout_s: float = 300.0) -> list[ScalingJob]:
    request = scaling.request_of(options(), "alexnet", 8)
    return [
        ScalingJob(replace(request, model=f"net{number}", timeout_s=timeout_s), "convoy", processes, "weak")
        for number in range(count)
    ]


@pytest.mark.parametrize("beside", [True, False])
def test_jobs_beside_each_other_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    lock, used, seen, together = threading.Lock(), list[str](), list[Row](), [0]

    def run(job: ScalingJob, devices: list[str], turn: scaling_launch.Turn, prepare_first: bool = False) -> Row:
        with turn(lambda: True) as limit_s:
            with lock:
                assert limit_s == job.request.timeout_s
                assert not set(used) & set(devices)
                used.extend(devices)
                together[0] = max(together[0], len(used))
            time.sleep(0.05)
            with lock:
                for device in devices:
                    used.remove(device)
        return job.row(status="crashed", reason="x")

    monkeypatch.setattr(scaling_launch, "run", run)
    queued = [*jobs(3, 2), *jobs(2, 1), *jobs(1, 4), *jobs(2, 2)]
    run_jobs(queued, ["4", "5", "6", "7"], Clock(1000), seen.append, beside=beside)
    assert sorted(row.subject for row in seen) == sorted(job.request.model for job in queued)
    assert together == [4]


def test_the_next_jobs_processes_start_before_its_turn_and_jobs_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    second_is_there = threading.Event()

    def run(job: ScalingJob, devices: list[str], turn: scaling_launch.Turn, prepare_first: bool = False) -> Row:
        name = job.request.model
        events.append(f"{name} starts")
        if name == "net1":
            second_is_there.set()
        with turn(lambda: True):
            assert name != "net0" or second_is_there.wait(20)
            events.append(f"{name} runs")
        return job.row(status="crashed", reason="x")

    monkeypatch.setattr(scaling_launch, "run", run)
    run_jobs(jobs(3, 2), ["0", "1"], Clock(1000), lambda row: None, beside=True)
    assert [event for event in events if event.endswith("runs")] == ["net0 runs", "net1 runs", "net2 runs"]
    assert events.index("net1 starts") < events.index("net0 runs")


def test_a_job_that_fails_before_its_turn_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: ScalingJob, devices: list[str], turn: scaling_launch.Turn, prepare_first: bool = False) -> Row:
        if job.request.model != "net0":
            with turn(lambda: True):
                pass
        return job.row(status="launch_error", reason="port 1 is in use")

    monkeypatch.setattr(scaling_launch, "run", run)
    seen: list[Row] = []
    run_jobs(jobs(2, 2), ["0", "1"], Clock(1000), seen.append, beside=True)
    assert len(seen) == 2


def test_what_the_calls_end_cuts_off_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def run(job: ScalingJob, devices: list[str], turn: scaling_launch.Turn, prepare_first: bool = False) -> Row | None:
        with turn(lambda: True) as limit_s:
            limits.append(limit_s)
            return job.row(status="timeout", reason="no end") if limit_s else None

    monkeypatch.setattr(scaling_launch, "run", run)
    seen: list[Row] = []
    run_jobs(jobs(1, 1), ["0"], Clock(60), seen.append, beside=False)
    assert (seen, limits[0] < 60) == ([], True)
    run_jobs(jobs(1, 1, timeout_s=30), ["0"], Clock(60), seen.append, beside=False)
    assert [row.status for row in seen] == ["timeout"]  # the job's own limit
    run_jobs(jobs(1, 1), ["0"], Clock(LEAST_S - 1), seen.append, beside=False)
    assert (limits[-1], len(seen)) == (0, 1)  # not begun


def test_jobs_beside_each_other_use_all_gpus_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(scaling.torch.cuda, "device_count", lambda: 4)
    assert scaling.visible_devices(options("--gpus", "1", "--beside")) == ["0", "1", "2", "3"]
    assert scaling.visible_devices(options("--gpus", "1,2")) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7,3")
    assert scaling.visible_devices(options("--gpus", "1,2")) == ["6", "7"]


def test_jobs_of_a_group_prepare_beside_each_other_and_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, preparing, timed = threading.Lock(), set[str](), set[str]()
    most, groups = [0], list[frozenset[str]]()

    def run(job: ScalingJob, devices: list[str], turn: scaling_launch.Turn, prepare_first: bool) -> Row:
        assert prepare_first
        name, end = job.request.model, time.monotonic() + 0.05
        with lock:
            preparing.add(name)
            most[0] = max(most[0], len(preparing))
        with turn(lambda: time.monotonic() > end):
            with lock:
                groups.append(frozenset(preparing))
                assert not timed & set(devices)
                timed.update(devices)
            time.sleep(0.01)
            with lock:
                timed.difference_update(devices)
        return job.row(status="crashed", reason="x")

    monkeypatch.setattr(scaling_launch, "run", run)
    singles = [replace(job, provider="torch.ddp") for job in jobs(4, 1)]
    queued = [*singles, *(replace(job, request=replace(job.request, model="pair")) for job in jobs(1, 2))]
    seen: list[Row] = []
    run_jobs(queued, ["0", "1"], Clock(1000), seen.append, beside=True, together=2)
    four = {f"net{number}" for number in range(4)}
    assert most == [5]  # names of the first group stay in the set
    assert groups == [frozenset(four)] * 4 + [frozenset(four | {"pair"})]
    assert len(seen) == 5


def test_jobs_that_make_plans_are_alone_on_their_gpu() -> None:
    others = [replace(job, provider="torch.ddp") for job in jobs(3, 1)]
    placed = [(job, [str(number % 2)]) for number, job in enumerate([*jobs(3, 1), *others])]
    found = [[(job.provider, *own) for job, own in group] for group in job_queue._groups(placed, 5)]
    assert found == [
        [("convoy", "0"), ("convoy", "1")],
        [("convoy", "0")],
        [("torch.ddp", "1"), ("torch.ddp", "0"), ("torch.ddp", "1")],
    ]


@pytest.mark.parametrize("how", ["fails at once", "is late", "is cut off"])
def test_a_job_that_does_not_prepare_keeps_its_group_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def run(job: ScalingJob, devices: list[str], turn: scaling_launch.Turn, prepare_first: bool) -> Row | None:
        bad = job.request.model == "net0"
        if bad and how == "fails at once":
            return job.row(status="launch_error", reason="port 1 is in use")
        with turn(lambda: not bad) as limit_s:
            return job.row(status="crashed", reason="timed") if limit_s > 0 else None

    monkeypatch.setattr(scaling_launch, "run", run)
    monkeypatch.setattr(job_queue, "LEAST_S", 0.0)
    seen: list[Row] = []
    limit_s, clock = (0.3, Clock(1000)) if how == "is late" else (300.0, Clock(1.0))
    first, *others = [replace(job, provider="torch.ddp") for job in jobs(3, 1)]
    first = replace(first, request=replace(first.request, timeout_s=limit_s))
    run_jobs([first, *others], ["0", "1"], clock, seen.append, beside=True, together=2)
    reasons = {row.subject: (row.status, row.reason) for row in seen}
    expected = {
        "fails at once": ("launch_error", "port 1 is in use"),
        "is late": ("timeout", "not prepared after 0.3 s"),
    }
    assert reasons.get("net0") == expected.get(how)
    if how != "is cut off":
        assert reasons["net1"] == reasons["net2"] == ("crashed", "timed")


def rows(tmp_path: Path):
    """As the CSV has them: one and four GPUs, gradients in bf16 on four alone, and a failure."""

    def row(provider: str, count: int, step_s: float, compute_s: float, sent: float) -> Row:
        values = {"gradient_bytes": sent, "bare_ms": 0.5, "collective_ms": 1.2} | (
            {"link_gb_per_s": 300.0} if count > 1 else {}
        )
        result = {"rounds": {"step": [step_s] * 3, "compute": [compute_s] * 3}, "values": values}
        result |= {"setting": "words", "notes": [], "backend": "nccl"}
        return result_row(ScalingJob(jobs(1, 1)[0].request, provider, count, "weak"), result)

    failed = replace(jobs(1, 4)[0], request=jobs(1, 1)[0].request, provider="torch.ddp").row(
        status="crashed", reason="died"
    )
    found = [
        row("convoy", 1, 0.010, 0.010, 240e6),
        row("convoy", 4, 0.011, 0.010, 240e6),
        row("convoy+bf16", 4, 0.0105, 0.010, 120e6),
        failed,
    ]
    target = {"name": "GPU", "versions": {"torch": "2"}}
    manifest = {"target": target, "protocol": "words", "commit": "0123456", "date": "2026-01-01T00:00:00Z"}
    written = scaling.recorded(Run("scaling", manifest, tuple(with_efficiency(found))), tmp_path)
    written.write()
    return written.earlier()


def test_the_network_is_modelled_from_rows_alone(tmp_path: Path) -> None:
    found = measured_of(rows(tmp_path))
    plain, half = (found[("net0", "bf16", "8", provider)] for provider in ("convoy", "convoy+bf16"))
    assert plain == Measured(4, 10.0, 10.0, 1.0, 1.2, 240e6)
    assert (half.single_ms, half.gradient_bytes) == (10.0, 120e6)  # one GPU sends nothing: its step is the plain one's
    # 4 hosts, 50 GB/s: 1.5 * 240 MB, and 11 buckets of 6 hops of 10 us.
    assert network_ms(plain, 16, 50.0) == pytest.approx(7.2 + 0.66)
    taken, hidden = 7.86, 20 / 3
    assert efficiency(plain, 16, 50.0) == pytest.approx(10 / (10 + 1 + taken - hidden))
    assert efficiency(plain, 16, 1000.0) == pytest.approx(10 / 11)  # a fast network hides it: as on one host
    assert efficiency(half, 64, 50.0) > efficiency(plain, 64, 50.0)
    assert host_efficiency(plain, 4) == pytest.approx(10 / 11)  # as measured
    assert host_efficiency(plain, 8) == pytest.approx(10 / (11 + 1.2 / 6))  # 7/8 of the bytes twice, not 3/4
    assert network_table(rows(tmp_path), "t").count("\n| net0") == 2


def test_tables_show_parts_and_failures(tmp_path: Path) -> None:
    held = rows(tmp_path)
    parts = [line for line in parts_table(held, "t").splitlines() if line.startswith("| net0")]
    assert parts[0] == "| net0 x4 | bf16 | 8 | convoy | 10 | 11 | 1 | 0.5 | 0.5 | 1.2 | 1.2 | 300 |"
    assert len(parts) == 2
    shown = scaling_table(held, "t")
    assert "Failed: net0 x4 weak, batch 8, torch.ddp: crashed: died." in shown
    assert "nan" not in shown
    assert "95.2%" in shown  # 10 ms on one GPU of the plain provider, 10.5 on four with bf16
