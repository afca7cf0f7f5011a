"""Scaling: jobs, rows and efficiency; what torchrun is started with, and every way in which a job can end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare import Figure, read
from convoy.compare.scaling import scaling_launch, scaling_measure, scaling_worker
from convoy.compare.scaling.scaling_clocks import collective_ms, union_us
from convoy.compare.scaling.scaling_jobs import ScaleRequest, ScalingJob, jobs
from convoy.compare.scaling.scaling_launch import command, explain, run
from convoy.compare.scaling.scaling_lines import (
    HEADS,
    LINK_HEADS,
    charts,
    failures,
    link_table,
    notes,
    section_of,
    settings,
    table,
)
from convoy.compare.scaling.scaling_measure import measure
from convoy.compare.scaling.scaling_rows import result_row, with_efficiency
from convoy.compare.scaling.scaling_setup import loss_of
from convoy.errors import InputError

REQUEST = ScaleRequest(model="resnet50", gpus=(1, 2, 4), batch=8, device="cuda", timeout_s=20.0)
JOB = ScalingJob(REQUEST, "torch.ddp", 2, "weak")

NET = """
from torch import nn

def net():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return nn.Sequential(*layers)
"""


# --- what is asked for ------------------------------------------------------------------------------------------------------


def test_jobs_rise_and_share_the_batch_where_scaling_is_strong() -> None:
    request = replace(REQUEST, gpus=(4, 1), scalings=("weak", "strong"))
    assert [(j.scaling, j.processes, j.provider, j.batch) for j in jobs(request)] == [
        ("weak", 1, "torch.ddp", 8), ("weak", 1, "convoy", 8), ("weak", 4, "torch.ddp", 8), ("weak", 4, "convoy", 8),
        ("strong", 1, "torch.ddp", 8), ("strong", 1, "convoy", 8), ("strong", 4, "torch.ddp", 2), ("strong", 4, "convoy", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpus": ()}, "--gpus"),
        ({"gpus": (1, 1)}, "--gpus"),
        ({"gpus": (0,)}, "--gpus"),
        ({"gpus": (8,)}, "at most the 4 GPUs"),
        ({"gpus": (64,), "device": "cpu"}, "processes"),
        ({"batch": 0}, "--batch"),
        ({"batch": 6, "scalings": ("strong",)}, "multiple of 4"),
        ({"providers": ("horovod",)}, "--providers"),
        ({"dtype": "fp8"}, "--dtype"),
        ({"nodes": 2}, "--endpoint"),
        ({"nodes": 2, "endpoint": "host"}, "--endpoint"),
        ({"nodes": 2, "endpoint": "host:99999"}, "--endpoint"),
        ({"node_rank": 1}, "--node-rank"),
        ({"timeout_s": 0.0}, "--timeout-s"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(changes, named) -> None:
    REQUEST.check(4)
    with pytest.raises(InputError) as caught:
        replace(REQUEST, **changes).check(4)
    assert named in str(caught.value)


def test_torchrun_is_started_by_a_list_of_arguments(tmp_path: Path) -> None:
    words = command(JOB, tmp_path)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--standalone" in words
    assert words[-3:] == ["-m", "convoy.compare.scaling.scaling_worker", str(tmp_path)]
    far = command(replace(JOB, request=replace(REQUEST, nodes=2, node_rank=1, endpoint="a; rm -rf /:29500")), tmp_path)
    assert "--master-addr=a; rm -rf /" in far  # one argument: no shell reads it
    assert {"--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--master-port=29500"} <= set(far)
    assert "--standalone" not in far


# --- rows -------------------------------------------------------------------------------------------------------------------


def result(step_s, compute_s=None, **values):
    rounds = {"step": [step_s] * 5} | ({"compute": [compute_s] * 5} if compute_s else {})
    return {"rounds": rounds, "values": values, "setting": "channels_last", "notes": [], "backend": "nccl"}


def test_a_row_says_where_the_time_goes() -> None:
    row = result_row(JOB, result(0.010, 0.008, gradient_bytes=1e8, link_gb_per_s=100.0, allreduce_ms=1.5))
    found = {f.metric: f.p50 for f in row.figures}
    assert found == pytest.approx(
        {"step_ms": 10, "compute_ms": 8, "exposed_ms": 2, "images_per_s": 1600, "gradient_bytes": 1e8, "link_gb_per_s": 100,
         "allreduce_ms": 1.5, "bound_ms": 1.0}
    )  # fmt: skip
    assert row.axes == {"gpus": 2, "nodes": 1, "scaling": "weak"}
    assert not row.noisy
    _, (_, times) = section_of([row])
    (line,) = times.tables[0].rows
    assert line[2].text == "kernels 8.00, exposed communication 2.00"
    assert [part.share for part in line[1].bar] == pytest.approx([0.8, 0, 0.2, 0, 0])
    jumpy = result(0.01)
    jumpy["rounds"]["step"] = [0.01, 0.01, 0.02, 0.02, 0.03]
    assert result_row(JOB, jumpy).noisy


def rounds_of(**kinds):
    return {**result(0.01), "rounds": kinds}


def test_exposed_communication_is_a_difference_round_by_round_with_its_spread() -> None:
    # The third round was slow for both: the difference of medians would be 3 ms, and 0 has no place in a clamp.
    row = result_row(
        JOB, rounds_of(step=[0.010, 0.011, 0.020], compute=[0.009, 0.008, 0.019], input=[0.009, 0.011, 0.020])
    )
    exposed = row.figure("exposed_ms")
    assert (exposed.p50, exposed.p20, exposed.p80) == pytest.approx((1.0, 1.0, 2.2))
    waiting = row.figure("input_ms")
    assert waiting.p20 < 0
    assert waiting.p50 == 0
    below = result_row(JOB, rounds_of(step=[0.010] * 3, compute=[0.011] * 3))
    assert below.figure("exposed_ms").p50 == pytest.approx(-1.0)
    _, (_, times) = section_of([below])
    assert "exposed communication -1.00" in times.tables[0].rows[0][2].text


def test_one_process_has_no_communication_but_a_process_group() -> None:
    alone = result_row(replace(JOB, processes=1), result(0.010, 0.008))
    assert alone.figure("exposed_ms") is None
    assert alone.figure("group_ms").p50 == pytest.approx(2.0)
    older = replace(alone, figures=(*alone.figures[:2], Figure.once("exposed_ms", "ms", 3.0)))
    for row, shown in ((alone, "2.00"), (older, "3.00")):
        (line,) = link_table([row])
        assert (line[LINK_HEADS.index("exposed")], line[LINK_HEADS.index("group")]) == ("", shown)
        assert table([row])[0][HEADS.index("exposed")] == ""
        _, (_, times) = section_of([row])
        assert times.tables[0].rows[0][2].text == f"kernels 8.00, process group {shown}"


def test_a_row_is_noisy_where_any_of_its_kinds_is() -> None:
    row = result_row(JOB, rounds_of(step=[0.010] * 5, compute=[0.004, 0.005, 0.008, 0.008, 0.009]))
    assert row.noisy
    assert table([row])[0][-1] == "noisy"
    assert notes([row]) == ["torch.ddp on 2 weak: rounds of these kinds are noisy: compute"]
    assert notes([replace(row, detail={})]) == []  # an older file


def test_the_terms_of_the_bound_are_shown() -> None:
    values = {
        "gradient_bytes": 1e8,
        "link_gb_per_s": 100.0,
        "allreduce_ms": 1.5,
        "host_ms": 0.25,
        "peak_memory_bytes": 2.0**30,
        "collective_ms": 3.0,
        "bare_ms": 0.75,
    }
    row = result_row(JOB, result(0.010, 0.008, **values))
    (line,) = link_table([row, JOB.row(status="crashed", reason="died")])
    assert dict(zip(LINK_HEADS[4:], line[4:], strict=True)) == {
        "MB": "100.0", "GB/s": "100.0", "all-reduce": "1.50", "bound": "1.00", "exposed": "2.00",
        "20 %": "2.00", "80 %": "2.00", "running": "3.00", "bare": "0.75", "group": "",
        "host": "0.25", "peak MiB": "1024",
    }  # fmt: skip
    _, sections = section_of([row])
    assert sections[0].tables[1].heads == LINK_HEADS
    assert "bound: 2 (n-1) / n" in sections[0].tables[1].caption


def test_settings_and_notes_say_of_which_rows_they_are() -> None:
    ours = replace(JOB, provider="convoy")
    kept = replace(result_row(ours, result(0.01)), setting="effort quick, baseline kept", notes=("not faster",))
    free = replace(result_row(replace(ours, processes=4), result(0.01)), setting="effort quick", notes=("both",))
    free = replace(free, notes=("a", "streams: 2 (measured)", "b"))
    rows = [result_row(JOB, result(0.01)), kept, free]
    assert settings(rows) == [
        "torch.ddp: channels_last",
        "convoy on 2 weak: effort quick, baseline kept",
        "convoy on 4 weak: effort quick",
    ]
    assert notes(rows) == ["convoy on 2 weak: not faster", "convoy on 4 weak: a", "convoy on 4 weak: b"]
    assert [line[-1] for line in table(rows)] == ["", "baseline kept", ""]


@pytest.mark.parametrize(("compute_ms", "expected"), [(12.0, 0.8), (8.0, 0.72)], ids=["slower plan", "faster plan"])
def test_a_faster_plan_is_no_efficiency(compute_ms: float, expected: float) -> None:
    """One GPU: 10 ms, 1 of them for the process group. Four send bf16 and take 12.5 ms, of which `compute_ms`."""
    one = result_row(ScalingJob(REQUEST, "convoy", 1, "weak"), result(0.010, 0.009))
    four = result_row(ScalingJob(REQUEST, "convoy+bf16", 4, "weak"), result(0.0125, compute_ms / 1e3))
    found = with_efficiency([one, four])[1].figure("efficiency")
    assert found is not None
    assert found.p50 == pytest.approx(expected)


def test_efficiency_is_against_the_fewest_gpus_of_the_same_line() -> None:
    def row(count, step_s, provider="torch.ddp", scaling="weak"):
        return result_row(ScalingJob(REQUEST, provider, count, scaling), result(step_s))

    rows = [row(4, 0.0125), row(1, 0.010), row(2, 0.010), row(2, 0.02, "convoy"), row(4, 0.02, "convoy"),
            row(1, 0.008, scaling="strong"), row(4, 0.004, scaling="strong"),
            JOB.row(status="crashed", reason="died")]  # fmt: skip
    shares = [f.p50 if (f := r.figure("efficiency")) else None for r in with_efficiency(rows)]
    assert shares == pytest.approx([0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, None])
    assert with_efficiency(with_efficiency(rows)) == with_efficiency(rows)
    assert [line[6] for line in table(with_efficiency(rows))[:2]] == ["80.0%", "100.0%"]
    weak, shares, strong, _ = charts(with_efficiency(rows))
    assert "convoy, perfect" in weak
    colours = [re.findall(r'<polyline[^>]*stroke="(#\w+)"', chart)[:2] for chart in (weak, shares)]
    assert colours[0] == colours[1]  # a provider's own in both
    assert "torch.ddp: 0.8 at 4" in shares
    assert "strong scaling" in strong
    assert charts(rows[:1]) == []
    cards, sections = section_of(with_efficiency(rows))
    assert [card.figure for card in cards] == ["80.0%", "100.0%", "50.0%"]
    assert "crashed: died" in sections[0].lines[-1]
    assert failures(rows) == ["torch.ddp on 2, weak: crashed: died"]


# --- how a job may end ------------------------------------------------------------------------------------------------------


def script(text: str):
    """The script that runs in torchrun's place: it finds the folder in `folder`."""
    head = "import json, os, signal, sys, time, pathlib\nfolder = pathlib.Path(sys.argv[1])\n"
    return lambda job, folder: [sys.executable, "-S", "-c", head + text, str(folder)]


FAILS = """
error = dict(status="out_of_memory", reason="process 1: much")
(folder / "error-1.json").write_text(json.dumps(error))
raise SystemExit(1)
"""


def write_result(text: dict) -> str:
    return f"(folder / 'result.json').write_text({json.dumps(text)!r})\n"


def test_a_result_is_read() -> None:
    reads = "job = json.loads((folder / 'job.json').read_text())\nassert job['batch'] == 8\n"
    row = run(JOB, script(reads + write_result(result(0.01))))
    assert row is not None
    assert row.ok
    assert row.figure("images_per_s").p50 == pytest.approx(1600)


def test_another_host_has_no_result() -> None:
    assert run(replace(JOB, request=replace(REQUEST, nodes=2, node_rank=1)), script("")) is None


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("raise SystemExit(3)", "crashed", "code 3: it said nothing"),
        ("print('ValueError: 7'); print('===='); raise SystemExit(1)", "crashed", "ValueError: 7"),
        (write_result(result(0.01)) + "raise SystemExit(1)", "crashed", "code 1"),  # a result of a job that then failed
        ("", "crashed", "code 0"),
        ("print('rank      : 1 (local)\\n Signal 9 (SIGKILL) received by PID 7'); raise SystemExit(1)", "crashed",
         "process 1 was ended by SIGKILL, as the system does when memory is short"),
        ("print('terminate called\\n  what():  peer is gone\\nrank : 0 (local)\\n Signal 6 (SIGABRT)'); raise SystemExit(1)",
         "crashed", "process 0 was ended by SIGABRT: terminate called what():  peer is gone"),
        ("print('Signal 11 (SIGSEGV) received by PID 7'); raise SystemExit(1)", "crashed", "ended by SIGSEGV"),
        ("print('The server socket has failed to listen on port: 29500. EADDRINUSE'); raise SystemExit(1)", "crashed",
         "port 29500 is in use"),
        ("print('torch.distributed.DistStoreError\\nRendezvousTimeoutError'); raise SystemExit(1)", "crashed",
         "did not find each other"),
        (FAILS, "out_of_memory", "process 1: much"),
    ],
)  # fmt: skip
def test_any_other_end_is_a_status_and_a_clear_line(text, status, words) -> None:
    row = run(JOB, script(text))
    assert row is not None
    assert row.status == status
    assert words in row.reason
    assert not row.figures


def test_a_job_that_hangs_is_ended_and_says_where_it_was() -> None:
    start = time.perf_counter()
    text = "(folder / 'stage-0.txt').write_text('round 3')\ntime.sleep(60)"
    row = run(replace(JOB, request=replace(REQUEST, timeout_s=0.5)), script(text))
    assert time.perf_counter() - start < 30
    assert row is not None
    assert (row.status, row.reason) == ("timeout", "no end after 0.5 s (last at: process 0: round 3)")


def test_who_was_killed_is_told_and_not_who_missed_it() -> None:
    says = "(folder / 'error-0.json').write_text(json.dumps(dict(status='launch_error', reason='peer is gone')))\n"
    killed = says + "print('rank : 1 (local_rank: 1)\\n Signal 9 (SIGKILL) received by PID 7'); raise SystemExit(1)"
    row = run(JOB, script(killed))
    assert row is not None
    assert row.reason.startswith("process 1 was ended by SIGKILL")
    row = run(JOB, script(says + "print('Signal 15 (SIGTERM) received by PID 7'); raise SystemExit(1)"))
    assert row is not None
    assert row.reason == "peer is gone"


def test_a_port_in_use_is_a_clear_line_and_no_wait() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        far = replace(JOB, request=replace(REQUEST, nodes=2, endpoint=f"localhost:{port}"))
        row = run(far, lambda job, folder: pytest.fail("started"))
    assert row is not None
    assert (row.status, f"port {port}" in row.reason) == ("launch_error", True)
    lonely = replace(far, request=replace(far.request, timeout_s=0.3))
    row = run(lonely, script("time.sleep(60)"))
    assert row is not None
    assert "other hosts" in row.reason


def test_an_interruption_ends_what_was_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    text = f"pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"

    def interrupt() -> None:
        while not (told.exists() and told.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(JOB, script(text))
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_a_job_begins_at_its_turn_and_not_at_all_without_time() -> None:
    """Its processes are there before."""
    seen: list[bool] = []
    text = "(folder / 'here').touch()\nwhile not (folder / 'turn').exists(): time.sleep(0.01)\n" + write_result(
        result(0.01)
    )
    folders: list[Path] = []

    def make(job: ScalingJob, folder: Path) -> list[str]:
        folders.append(folder)
        return script(text)(job, folder)

    @contextmanager
    def turn(limit_s: float) -> Iterator[float]:
        while not (folders[-1] / "here").exists():
            time.sleep(0.01)
        seen.append((folders[-1] / "turn").exists())
        yield limit_s

    row = run(JOB, make, turn=lambda prepared: turn(20.0))
    assert (row is not None and row.ok, seen) == (True, [False])
    assert run(JOB, make, turn=lambda prepared: turn(0.0)) is None
    assert run(JOB, script("time.sleep(60)"), turn=lambda prepared: nullcontext(0.3)).status == "timeout"


def test_processes_that_prepare_first_say_so_and_time_in_their_turn() -> None:
    said: list[bool] = []

    @contextmanager
    def turn(prepared: Callable[[], bool]) -> Iterator[float]:
        said.append(prepared())
        while not prepared():
            time.sleep(0.02)
        said.append(True)
        yield 100.0

    small = replace(REQUEST, device="cpu", dtype="fp32", size=64, batch=2, gpus=(2,), rounds=1, round_s=0.01)
    job = ScalingJob(replace(small, model="squeezenet1_1"), "torch.ddp", 2, "weak")
    row = run(job, turn=turn, prepare_first=True)
    assert row is not None
    assert (row.ok, said) == (True, [False, True]), row.reason
    ended = run(JOB, script("raise SystemExit(3)"), turn=turn, prepare_first=True)
    assert ended is not None
    assert ended.status == "crashed"  # a process that ended is not waited for


@pytest.mark.parametrize("reaped", [True, False])
def test_a_worker_ends_when_who_started_its_torchrun_was_killed(reaped: bool) -> None:
    """It would keep its GPU busy until its work is done, and nobody would read the result."""
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    module = "from convoy.compare.scaling import scaling_worker as w"
    program = f"import time; {module}; w._end_with_parents(); print(1); time.sleep(90)"
    worker = subprocess.Popen(
        [sys.executable, "-uc", program],
        env={**scaling_launch._environment(), scaling_launch.LAUNCHER: str(launcher.pid)},
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline().strip() == b"1"
    time.sleep(1.0)
    assert worker.poll() is None
    launcher.kill()
    if reaped:
        launcher.wait()
    assert worker.wait(timeout=30) == 1
    launcher.wait()
    worker.stdout.close()


def test_torchruns_own_words_are_not_needed() -> None:
    assert explain("", 2) == "torchrun ended with code 2: it said nothing"


# --- measuring --------------------------------------------------------------------------------------------------------------


def test_busy_time_is_the_union_of_the_kernels() -> None:
    assert union_us([]) == 0
    assert union_us([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4


def test_a_collective_is_bare_where_nothing_else_runs() -> None:
    kernels = [
        ("ncclDevKernel_AllReduce", 1.0, 3.0),
        ("conv", 0.0, 2.0),
        ("ncclDevKernel_AllReduce", 6.0, 9.0),
        ("add", 8.0, 8.5),
    ]
    assert collective_ms(kernels) == {"collective_ms": 0.005, "bare_ms": pytest.approx(0.0035)}
    assert collective_ms([("conv", 0.0, 2.0)]) == {}


def test_noisy_rounds_are_taken_again_and_the_quietest_kept() -> None:
    given = iter([1.0, 2.0, 4.0] + [3.0, 3.1, 3.0] + [9.0] * 9)
    found = scaling_measure._quiet_rounds(lambda _: {"step": next(given), "input": 1.0}, 3)
    assert found == {"step": [3.0, 3.1, 3.0], "input": [1.0, 1.0, 1.0]}
    # Each repeat has one noisy kind; kinds of two repeats are never put together.
    steps, computes = iter([1.0, 1.0, 1.0] + [2.0, 2.0, 3.0] * 2), iter([1.0, 2.0, 4.0] + [2.0, 2.0, 2.0] * 2)
    found = scaling_measure._quiet_rounds(lambda _: {"step": next(steps), "compute": next(computes)}, 3)
    assert found == {"step": [2.0, 2.0, 3.0], "compute": [2.0, 2.0, 2.0]}
    noise = iter([1.0, 2.0, 4.0] * 2 + [1.0, 1.5, 2.5] + [7.0])
    assert scaling_measure._quiet_rounds(lambda _: {"step": next(noise)}, 3)["step"] in (
        [1.0, 2.0, 4.0],
        [1.0, 1.5, 2.5],
    )
    assert next(noise) == 7.0  # three times and no more


def test_auxiliary_outputs_are_part_of_the_loss() -> None:
    logits, target = torch.zeros(2, 4), torch.tensor([0, 1])
    plain = loss_of(logits, target)
    assert loss_of((logits, logits, None), target) == pytest.approx(1.3 * float(plain))


@pytest.fixture
def alone(tmp_path: Path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_process_measures_every_part_and_leaves_the_parameters(alone: Path, dtype, monkeypatch) -> None:
    (alone / "net.py").write_text(NET)
    request = replace(
        REQUEST,
        model=f"{alone / 'net.py'}:net",
        trust=True,
        gpus=(1,),
        batch=2,
        size=8,
        device="cpu",
        dtype=dtype,
        rounds=3,
        round_s=0.001,
    )
    stages: list[str] = []
    job = ScalingJob(request, "torch.ddp", 1, "weak")
    found = measure(job.to_dict(), torch.device("cpu"), stages.append)
    assert {name: len(own) for name, own in found["rounds"].items()} == {"step": 3, "compute": 3, "input": 3}
    assert found["values"]["gradient_bytes"] == 4 * (3 * 4 * 9 + 4 + 4 + 4 + 4 * 5 + 5)
    assert ("autocast" in found["setting"]) == (dtype == "bf16")
    assert "round 2" in stages
    row = result_row(job, found)
    assert row.ok
    assert json.loads(json.dumps(found)) == found


def test_a_step_that_stayed_pytorchs_own_says_so(alone: Path, monkeypatch) -> None:
    (alone / "net.py").write_text(NET)

    class Plan:
        baseline = True

    class Step:
        plan = Plan()
        work = SimpleNamespace(factored=None)

        def __init__(self):
            self.notes = ["so the plan is the baseline"]

        def save(self, path):
            path.write_text("")

        def __call__(self, *batch):
            if len(self.notes) == 1:
                self.notes.append("could not be captured")

    monkeypatch.setattr("convoy.training_step", lambda *_, **__: Step())
    request = replace(
        REQUEST, model=f"{alone / 'net.py'}:net", trust=True, batch=2, size=8, device="cpu", rounds=3, round_s=0.001
    )
    job = ScalingJob(request, "convoy", 1, "weak")
    found = measure(job.to_dict(), torch.device("cpu"), lambda _: None)
    assert found["setting"].endswith("effort quick, baseline kept")
    assert found["notes"] == ["so the plan is the baseline", "could not be captured"]


@pytest.mark.parametrize("is_left", [False, True])
def test_a_process_ends_without_taking_itself_apart(monkeypatch, tmp_path: Path, is_left: bool) -> None:
    """Of a process whose result is written nothing may fail any more, in no thread and no destructor."""
    order: list[object] = []

    def leave(code: int) -> None:
        order.append(code)
        raise SystemExit(code)

    (tmp_path / "job.json").write_text(json.dumps(JOB.to_dict()))
    (tmp_path / scaling_launch.TURN).touch()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path)])
    monkeypatch.setattr(scaling_worker, "_end_with_parents", lambda: None)
    monkeypatch.setattr(scaling_worker, "_join", lambda job: torch.device("cpu"))
    monkeypatch.setattr(scaling_worker, "measure", lambda job, device, stage, before_timing: {"rounds": {}})

    def wait() -> None:
        order.append((tmp_path / "result.json").exists())
        if is_left:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(scaling_worker.dist, "barrier", wait)
    monkeypatch.setattr(scaling_worker.os, "_exit", leave)
    with pytest.raises(SystemExit):
        scaling_worker.main()
    assert order == [True, 0]


@pytest.mark.parametrize(
    ("visible", "own"), [("", "1,2,0"), ("4,6,7", "6,7,4"), ("GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c,GPU-a")]
)
def test_each_process_numbers_its_own_gpu_first(monkeypatch: pytest.MonkeyPatch, visible: str, own: str) -> None:
    """So that all share the entries of a compiler's cache."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    scaling_worker._number_own_gpu_first()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def scaled(monkeypatch, tmp_path: Path, *words: str, row=lambda job: result_row(job, result(0.01))):
    """`convoy scale` in a folder, with rows from here; the jobs that were started, and what it said."""
    started: list[ScalingJob] = []

    def start(job: ScalingJob):
        started.append(job)
        return row(job)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.setattr(scaling_launch, "run", start)
    done = CliRunner().invoke(
        app, ["scale", "net.py:net", "--trust", "--gpus", "1,2", "--batch", "4", "--device", "cpu", *words]
    )
    assert done.exception is None, done.output
    return started, done.output if "--node-rank" in words else done.stdout


def test_every_host_starts_every_job_although_the_first_has_a_file(monkeypatch, tmp_path: Path) -> None:
    hosts = ("--nodes", "2", "--endpoint", "first:29500")
    for _ in range(2):
        started, _ = scaled(monkeypatch, tmp_path, *hosts)
        assert [(job.processes, job.provider) for job in started] == [
            (1, "torch.ddp"), (1, "convoy"), (2, "torch.ddp"), (2, "convoy"),
        ]  # fmt: skip
    run = read(tmp_path / "scale-net-py-net.json")
    before = (tmp_path / "scale-net-py-net.json").read_bytes()
    assert len(run.rows) == 4
    failed = ("--node-rank", "1")
    started, said = scaled(
        monkeypatch, tmp_path, *hosts, *failed, row=lambda job: job.row(status="crashed", reason="no such host")
    )
    assert len(started) == 4
    assert "no such host" in said
    assert (tmp_path / "scale-net-py-net.json").read_bytes() == before  # on a shared disk it is the first host's


def test_one_host_goes_on_from_its_default_file_and_says_what_was_kept(monkeypatch, tmp_path: Path) -> None:
    def row(job: ScalingJob):
        note = {"convoy": ("not faster: the plan is the baseline",)}.get(job.provider, ())
        kept = ", baseline kept" if note else ""
        return replace(result_row(job, result(0.01, gradient_bytes=1e6)), setting=f"words{kept}", notes=note)

    started, said = scaled(monkeypatch, tmp_path, row=row)
    assert len(started) == 4
    assert "run: scale-net-py-net.json" in said
    assert "convoy: words, baseline kept" in said
    assert "convoy on 1 weak, 2 weak: not faster: the plan is the baseline" in said
    assert "gradients" in said
    started, again = scaled(monkeypatch, tmp_path, row=row)
    assert started == []
    assert again == said


@pytest.mark.slow
def test_two_processes_train_by_gloo_and_resume(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    out = tmp_path / "run.json"
    words = [
        "scale",
        f"{tmp_path / 'net.py'}:net",
        "--trust",
        "--gpus",
        "2",
        "--batch",
        "2",
        "--size",
        "8",
        "--device",
        "cpu",
    ]
    words += ["--providers", "torch.ddp", "--timeout-s", "120", "--round-s", "0.01", "-o", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (row,) = read(out).rows
    assert row.axes["processes"] == 2
    found = {f.metric for f in row.figures}
    assert {"step_ms", "compute_ms", "exposed_ms", "allreduce_ms", "bound_ms", "images_per_s", "efficiency"} <= found
    assert row.detail["backend"] == "gloo"
    start = time.perf_counter()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert time.perf_counter() - start < 3  # from the file: no process is started
    words += ["--report", str(tmp_path / "page.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "Where a step" in (tmp_path / "page.html").read_text()
    assert read(out).rows == (row,)
    words[words.index("--gpus") + 1] = "1"  # the same file goes on with another number of processes
    assert CliRunner().invoke(app, words).exit_code == 0
    rows = {found.axes["processes"]: found for found in read(out).rows}
    assert set(rows) == {1, 2}
    assert rows[1].figure("efficiency").p50 == 1.0
    assert rows[2].figure("efficiency").p50 != 1.0


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--gpus", "two"], "--gpus"), (["--gpus", "1,,2"], "--gpus"), (["--batch", "3", "--strong"], "--batch"),
     (["--nodes", "2"], "--endpoint"), (["--providers", "ddp"], "--providers"), (["-o", "/nowhere/x.json"], "-o: got")],
)  # fmt: skip
def test_bad_words_are_one_clear_error(words, named) -> None:
    done = CliRunner().invoke(app, ["scale", "alexnet", "--device", "cpu", *words])
    assert isinstance(done.exception, InputError)
    assert named in str(done.exception)


def test_a_model_that_is_none_is_the_users_error() -> None:
    done = CliRunner().invoke(app, ["scale", "alexnett", "--device", "cpu", "--gpus", "1"])
    assert isinstance(done.exception, InputError)


def test_on_a_cpu_a_row_counts_processes() -> None:
    row = result_row(replace(JOB, request=replace(REQUEST, device="cpu")), rounds_of(step=[0.010] * 5))
    assert row.axes == {"processes": 2, "nodes": 1, "scaling": "weak"}
    assert "gpu" not in row.label()
    older = replace(row, axes={"gpus": 2, "nodes": 1, "scaling": "weak"})
    assert table([row]) == table([older])
    assert link_table([row]) == link_table([older])
