"""Committed results: every CSV is what bench/shared/record.py would write, and the pages and pictures are what the CSVs say."""

from __future__ import annotations

import csv
import datetime as dt
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.inference import latency_figure, latency_tables
from bench.layers import gpu_layer_tables, layer_floor
from bench.serving import UNITS as SERVING_UNITS
from bench.shared import fair, record, svg
from bench.shared import rows as shared_rows

from convoy.compare.scaling.scaling_jobs import PROVIDER_NAMES as SCALING_PROVIDERS
from convoy.compare.scaling.scaling_rows import DIFFERENCES
from convoy.compare.scaling.scaling_rows import UNITS as SCALING_UNITS
from convoy.compare.study.study_strategies import SOLVERS
from convoy.engines.manifest import MANIFEST, RETIRED
from convoy.problem import DTYPE_BYTES

ADDED = ("processes", *record.MACHINE, "code")
ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
FILES = sorted((BENCH / "results").glob("*.csv"))
UNITS = {
    "latency_ms": "ms",
    "step_ms": "ms",
    "kernel_us": "us",
    "fraction_of_best": "1",
    "solve_s": "s",
    "solve_budget_s": "s",
    "tuning_s": "s",
    "retuning_s": "s",
    "start_s": "s",
    "comparison_s": "s",
    "tests_s": "s",
    "tuning_memory_bytes": "B",
    "running_memory_bytes": "B",
    "tuning_limit_bytes": "B",
}
UNITS |= {"images_per_s": "1/s", "peak_memory_bytes": "B", "startup_s": "s", "compile_s": "s", "energy_j": "J"}
UNITS |= dict.fromkeys(("within_5", "within_10", "mean_fraction", "loss_distance", "accuracy", "break_even"), "1")
UNITS |= SCALING_UNITS | {"total_us": "us", "energy_uj": "uJ", "region_us": "us", "workspace_bytes": "B"}
UNITS |= {"correlation": "1", "slope_us": "us/%", "dense_cost": "1", "share_of_dense": "1", "wrong_share": "1"}
UNITS |= {f"{start}{kind}_s": "s" for start in ("first", "again", "stored") for kind in ("", "_cpu")}
UNITS |= {"growth_bytes": "B", "package_bytes": "B"}
UNITS |= dict.fromkeys(("open_s", "open_cpu_s", "runtime_s", "runtime_cpu_s"), "s")
UNITS |= {"training_first_s": "s"} | SERVING_UNITS
UNITS |= dict.fromkeys(("error", "training_error", "speedup", "own_share"), "1")
UNITS |= {f"{mode}overrun_{time_s}s": "1" for mode in ("", "training_") for time_s in (10, 30, 60)}
UNITS |= {f"share_{moment}": "1" for moment in ("none", "10s", "30s", "60s", "120s")}
UNITS |= dict.fromkeys(("replay_ms", "call_ms", "latency_p99_ms"), "ms")
UNITS |= dict.fromkeys(("check_us", "host_us", "call_us"), "us")
SIGNED = {"correlation", "slope_us", "growth_bytes", *DIFFERENCES}
"""Metrics that may be below zero."""
JOINED = {"convoy.dense", "convoy.fused", "convoy.dense+pool", "convoy.dense+convoy.pool", "cudnn.best+pool"}
"""The best of several engines, and convolutions with a pooling behind them, in `bench/zeroskip/zeroskip.py`."""
JOINED |= {"libconvoy"}
"""The C runtime, in `bench/package.py`."""
JOINED |= {"all"}
"""Who took a comparison's time in `bench/compare/compare.py`."""
JOINED |= set(SCALING_PROVIDERS)
"""Data-parallel training in `bench/scaling/scaling.py`."""
WAYS = {f"convoy.{way}" for way in ("criteria", "neighbours", "models", "config")}
"""Ways to choose that `bench/tuning/criteria.py` compares."""
WAYS |= {f"convoy.{strategy.replace(' ', '_')}" for strategy in SOLVERS}
"""Strategies for whole nets that `bench/study/study.py` compares."""
WAYS |= {f"convoy.{stage}" for stage in ("serial", "streams", "admission", "late_update")}
"""Stages of Convoy in `bench/inference/inference.py` and `bench/training/training.py`."""
WAYS |= {"convoy.limited"}
"""Tuned under a limit of memory, in `bench/tuning/tuning_memory.py`."""
WAYS |= {f"convoy.{part}" for part in ("check", "unchecked", "replay")}
"""Parts of a call in `bench/guard_cost/guard_cost.py`."""
WAYS |= {"convoy.marked", "convoy.unmarked"}
"""One plan with and without marks of last reads, in `bench/inference/last_reads.py`."""
WAYS |= {"convoy.before", "convoy.after"}
"""Two versions in `bench/tuning/versions.py`."""
NUMERICS = {"strict", "as_torch", "half"}


def defects(row: dict[str, str], file: Path, peers: set[str]) -> list[str]:
    """The defects of a row."""
    ours = {"convoy", *(f"convoy.{engine}" for engine in (*MANIFEST, *RETIRED)), *WAYS}
    word = re.sub(r"[^a-z0-9]+", "-", row["device"].lower()).strip("-")
    p20, p50, p80 = (float(row[name]) for name in ("p20", "p50", "p80"))
    rules = {
        "question": file.name == f"{row['question']}-{word}.csv",
        "subject": bool(row["subject"]),
        "batch": int(row["batch"]) > 0,
        "dtype": row["dtype"] in DTYPE_BYTES,
        "numerics": row["numerics"] in NUMERICS,
        "provider": row["provider"] in ours | peers | JOINED,
        "unit": UNITS.get(row["metric"]) == row["unit"],
        "p50": math.isnan(p50) or (p20 <= p50 <= p80 < math.inf and (p20 >= 0 or row["metric"] in SIGNED)),
        "ok": row["ok"] in ("true", "false"),
        "versions": bool(row["versions"]),
        "protocol": bool(row["protocol"]),
        "commit": re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]) is not None,
        "date": dt.datetime.fromisoformat(row["date"]).tzinfo is not None,
    }
    return [name for name, holds in rules.items() if not holds]


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_there_are_results() -> None:
    assert {"inference", "layers"} <= {read(file)[0]["question"] for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_holds_the_columns_and_known_names(file: Path) -> None:
    heads = file.read_text(encoding="utf-8").splitlines()[0].split(",")
    assert tuple(heads) in (record.COLUMNS, record.COLUMNS[: -len(ADDED)])  # a file that was written before has fewer
    rows = read(file)
    assert rows
    for number, row in enumerate(rows, start=2):
        assert not defects(row, file, set(svg.PEERS)), f"{file.name}, line {number}"
    # Which hold the share of zeros, the option, and the kernel's setting.
    notes = [row["note"] if row["question"] in ("chains", "options", "zeroskip") else "" for row in rows]
    keys = [(*record.setting(row), row["provider"], note) for row, note in zip(rows, notes, strict=True)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("column", "planted", "named"),
    [
        ("question", "layers", "question"),
        ("subject", "", "subject"),
        ("batch", "0", "batch"),
        ("dtype", "float16", "dtype"),
        ("numerics", "fast", "numerics"),
        ("provider", "pytorch", "provider"),
        ("provider", "convoy.nobody", "provider"),
        ("unit", "s", "unit"),
        ("metric", "latency", "unit"),
        ("p50", "1e9", "p50"),
        ("ok", "yes", "ok"),
        ("commit", "unknown", "commit"),
        ("versions", "", "versions"),
        ("protocol", "", "protocol"),
        ("date", "2026-11-21T03:59:40", "date"),
        ("device", "NVIDIA A100", "question"),
    ],
)
def test_a_planted_defect_is_named(column: str, planted: str, named: str) -> None:
    file = next(file for file in FILES if file.name.startswith("inference-"))
    assert defects({**read(file)[0], column: planted}, file, set(svg.PEERS)) == [named]


def check(root: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "bench" / "pages" / script), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("script", ["draw_figures.py", "write_tables.py"])
def test_pages_and_pictures_are_what_the_files_say(script: str) -> None:
    done = check(ROOT, script)
    assert done.returncode == 0, f"run python bench/pages/{script}: {done.stdout}{done.stderr}"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of what the scripts read and write."""
    shutil.copytree(BENCH, tmp_path / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs" / "figures", tmp_path / "docs" / "figures")
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_a_figure_that_changed_makes_pages_and_pictures_stale(copied: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = next(
        file.name for file in FILES if file.name.startswith("inference-") and read(file)[0]["device"] in readme
    )
    file = copied / "bench" / "results" / drawn
    question = read(file)[0]["question"]
    before = file.read_text(encoding="utf-8")
    row = next(row for row in read(file) if row["provider"] == "convoy")
    file.write_text(before.replace(row["p50"], f"{float(row['p50']) * 1.5:.6g}"), encoding="utf-8")
    for script, stale in (("draw_figures.py", f"{question}.svg"), ("write_tables.py", "README.md")):
        done = check(copied, script)
        assert done.returncode == 1
        assert stale in done.stdout


def test_a_new_device_gets_its_own_picture_and_an_old_picture_goes(copied: Path) -> None:
    file = next((copied / "bench" / "results").glob("inference-nvidia-h200.csv"))
    other = file.with_name("inference-nvidia-b200.csv")
    head, *lines = file.read_text(encoding="utf-8").replace("NVIDIA H200", "NVIDIA B200").splitlines()
    few = [line for line in lines if line.startswith(",".join(lines[0].split(",")[:4]))]  # fewer cases than an H100's
    other.write_text("\n".join([head, *few, ""]), encoding="utf-8")
    file.unlink()
    script = copied / "bench" / "pages" / "draw_figures.py"
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=120)
    drawn = {path.name for path in (copied / "docs" / "figures").glob("inference*.svg")}
    assert "inference-nvidia-b200.svg" in drawn
    assert "inference-nvidia-h200.svg" not in drawn
    assert "NVIDIA B200" not in (copied / "docs" / "figures" / "inference.svg").read_text(encoding="utf-8")


def test_a_wrong_result_is_drawn_as_such_and_counts_for_nobody() -> None:
    rows = next(found for found in shared_rows.rows_of("inference") if "H100" in found[0]["device"])
    net = [row for row in rows if all(row[name] == rows[0][name] for name in ("subject", "dtype", "batch"))]
    best = min((row for row in net if row["provider"] != "convoy"), key=lambda row: float(row["p50"]))
    spoilt = [{**row, "ok": "false"} if row is best else row for row in net]
    right, wrong = ({row["provider"]: row for row in some} for some in (net, spoilt))
    assert best["provider"].startswith("inductor")
    assert shared_rows.gain_of(right) > 1
    assert shared_rows.gain_of(wrong) is None  # what is left has no compiler, and would flatter
    another = {**best, "provider": "inductor.default", "p50": str(2 * float(best["p50"]))}
    assert shared_rows.gain_of({**wrong, "inductor.default": another}) > shared_rows.gain_of(right)
    assert "wrong" in latency_figure.latency_figure(spoilt, "t")
    assert "wrong" not in latency_figure.latency_figure(net, "t")
    ours = [{**row, "ok": "false"} if row["provider"] == "convoy" else row for row in net]
    assert shared_rows.gain_of({row["provider"]: row for row in ours}) is None


def test_a_headline_has_room_for_four_commits() -> None:
    rows = [{"device": "NVIDIA H100", "commit": f"commit{i}"} for i in (0, 0, 1, 2, 3, 4, 5)]
    assert "commit2, commit3, commit4, commit5 and 2 others" in svg.headline("t", rows)
    assert "others" not in svg.headline("t", rows[:5])
    assert svg.source(rows).endswith(", ".join(f"commit{i}" for i in range(6)))


def test_a_provider_that_failed_is_named_and_not_drawn() -> None:
    found = next(found for found in shared_rows.rows_of("inference") if "H100" in found[0]["device"])
    rows = fair.before_replays(found)
    late = {
        **rows[0],
        "provider": "inductor.default",
        "ok": "false",
        "note": "TimeoutError: took longer than 300 s",
    }
    late |= dict.fromkeys(("p20", "p50", "p80"), "nan")
    page, picture = latency_tables.latency_table([*rows, late], "t"), latency_figure.latency_figure([*rows, late], "t")
    assert "| failed |" in page
    assert "nan" not in picture
    assert "inductor.default" not in picture


def test_rows_of_commits_without_replays_stand_apart() -> None:
    def row(commit: str, metric: str) -> shared_rows.Row:
        return {"commit": commit, "metric": metric}

    rows = [
        row("a", "latency_ms"),
        row("b", "latency_ms"),
        row("b", "replay_ms"),
        row("c", "latency_ms"),
        row("d", "call_ms"),
    ]
    assert [found["commit"] for found in fair.before_replays(rows)] == ["a", "c"]


def test_the_floor_is_bytes_or_operations_whichever_takes_longer() -> None:
    linear = "linear:n1c4096k1000:fp16:half:none"
    wide = "conv:fprop:n64c256h56w56k256r3s3:p1x1:s1x1:d1x1:g1:nhwc:fp16.fp16.fp16.fp32:half:none"
    moved = 2 * (4096 + 4096 * 1000 + 1000)
    assert layer_floor.floor(linear, "half", "NVIDIA H100") == pytest.approx(moved / 3.1e6)
    assert layer_floor.floor(wide, "half", "NVIDIA H100") == pytest.approx(2 * 64 * 256 * 256 * 9 * 56 * 56 / 8e8)
    with pytest.raises(ValueError, match=r"device 'NVIDIA A100'.*H100, H200"):
        layer_floor.floor(wide, "half", "NVIDIA A100")
    with pytest.raises(ValueError, match="provider 'nobody'"):
        svg.colour("nobody")


LAYERS = ("n1c64h8w8k64r3s3:p1x1", "n1c64h8w8k128r1s1:p0x0")


@pytest.fixture
def layer_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, tuple[float, float]]], list[str]]:
    """Gives lines of the table of single layers, for a list of two layers, the first of which occurs three times.

    Times are given by layer: the peer's, and ours.
    """
    columns = "n,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w,dilation_h,dilation_w,groups,count"
    listed = "1,64,8,8,64,3,3,1,1,1,1,1,1,1,3", "1,64,8,8,128,1,1,0,0,1,1,1,1,1,1"
    (tmp_path / "targets.csv").write_text("\n".join((columns, *listed)), encoding="utf-8")
    monkeypatch.setattr(gpu_layer_tables, "LISTS", tmp_path)

    def lines(times: dict[str, tuple[float, float]]) -> list[str]:
        rows: list[dict[str, str]] = []
        for layer, pair in times.items():
            subject = f"conv:fprop:{layer}:s1x1:d1x1:g1:nhwc:fp16.fp16.fp16.fp32:half:none"
            common = {"subject": subject, "batch": "1", "dtype": "fp16", "numerics": "half", "metric": "kernel_us"}
            common |= {"ok": "true", "device": "NVIDIA H100", "commit": "c", "versions": "v"}
            for provider, us in zip(("cudnn.best", "convoy.triton.swapped"), pair, strict=True):
                rows.append({**common, "provider": provider, "p50": str(us)})
                rows.append({**common, "provider": provider, "p50": str(us * 2)})
                rows.append({**common, "provider": provider, "p50": str(us / 2), "ok": "false"})
        return gpu_layer_tables.gpu_layers_table(rows, "t").splitlines()

    return lines


def test_layers_count_as_often_as_they_occur(
    layer_table: Callable[[dict[str, tuple[float, float]]], list[str]],
) -> None:
    lines = layer_table({LAYERS[0]: (8.0, 4.0), LAYERS[1]: (8.0, 16.0)})
    wanted = "| targets | fp16 | fprop | 1 | 4 | cuDNN, all plans | 1.41x | 0.50x | 1 |"  # (2 * 2 * 2 / 2) ** (1 / 4)
    assert wanted in lines
    assert any("| 64→128 1x1 @8 | fp16 | 1 |" in line and line.endswith("triton.swapped | 0.50x |") for line in lines)


def test_the_gradient_of_images_is_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    sizes = "n,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w,dilation_h,dilation_w,groups,count"
    path.write_text(f"{sizes}\n1,3,8,8,64,3,3,1,1,1,1,1,1,1,1\n1,64,8,8,64,3,3,1,1,1,1,1,1,1,3\n", encoding="utf-8")
    numbers = {
        direction: len(gpu_layer_tables._layers(path, "bf16", "half", 32, direction))
        for direction in ("dgrad", "wgrad")
    }
    assert numbers == {"dgrad": 1, "wgrad": 2}


def test_a_list_without_all_of_its_layers_is_not_shown(
    layer_table: Callable[[dict[str, tuple[float, float]]], list[str]],
) -> None:
    assert not any("targets" in line for line in layer_table({LAYERS[0]: (8.0, 4.0)}))
