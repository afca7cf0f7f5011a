"""The study: what is swept, how rows come from measurements, and where the winner is said to change."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.cli.command_parts.study_session import StudySession
from convoy.compare import Figure, Row, Run, read, write
from convoy.compare.runs.runfile import from_dict, to_dict
from convoy.compare.study import study_energy
from convoy.compare.study.algorithm_study import LEAST_LAYERS, NOT_MEASURED, AlgorithmStudy, algorithm_of
from convoy.compare.study.learn_criteria import CriteriaCheck
from convoy.compare.study.study_criteria import check_line, leaf_rows
from convoy.compare.study.study_energy import launch_joules
from convoy.compare.study.study_lines import (
    charts,
    every_table,
    layer_table,
    strategy_bars,
    strategy_notes,
    strategy_table,
)
from convoy.compare.study.study_strategies import SOLVERS, strategy_rows
from convoy.compare.study.study_sweep import BASE, SWEEPS, parse_base, read_layers, sweep_points, swept
from convoy.compare.study.study_winners import curves, in_words, stretches
from convoy.engines.activation_sparsity import with_sparsity
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import InputError
from convoy.measurement import InProcessRunner, ReplayRunner, detect_target, protocol_for
from convoy.perfdb import Database, Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Knobs
from convoy.selection import Candidate, SelectionProblem
from convoy.selection.problem import RegionNodes
from convoy.settings import Settings
from convoy.tune import SearchResult

TINY = replace(BASE, c=4, k=4, h=6, w=6)


def test_strategies_are_drawn_net_by_net() -> None:
    def row(net: str, strategy: str, total_us: float) -> Row:
        return Row(net, strategy, figures=(Figure.once("total_us", "us", total_us),))

    rows = [
        row("a", "library", 400.0),
        row("a", "exact", 100.0),
        row("b", "exact", 7.0),
        Row("b", "library", "timeout"),
    ]
    bars = strategy_bars(rows)
    assert [line[1].bar[0].share for line in bars.rows] == [1.0, 0.25, 1.0]
    assert [line[2].text for line in bars.rows] == ["0.400", "0.100", "0.007"]


# --- what is swept ----------------------------------------------------------------------------------------------------------


def test_a_sweep_changes_one_size_and_keeps_the_output_where_a_filter_can() -> None:
    assert swept(BASE, "batch", 8) == replace(BASE, n=8)
    assert swept(BASE, "size", 14) == replace(BASE, h=14, w=14)
    assert swept(BASE, "stride", 2) == replace(BASE, stride_h=2, stride_w=2)
    assert {swept(BASE, "kernel", r).p for r in SWEEPS["kernel"]} == {BASE.p}
    points = sweep_points([name for name in SWEEPS if name != "sparsity"], BASE, "cuda")
    assert [p.axes for p in points if p.subject == "sweep:kernel"] == [{"kernel": r} for r in (1, 3, 5, 7, 11)]
    assert {p.problem.n for p in sweep_points(["batch"], BASE, "cpu")} < {p.problem.n for p in points}


def test_a_sweep_of_zeros_has_the_same_masks_in_every_run() -> None:
    dense, *pruned = [point.problem for point in sweep_points(["sparsity"], TINY, "cpu")]
    assert dense == TINY
    assert [p.mask.sparsity for p in pruned if p.mask] == pytest.approx([0.5, 0.75, 0.9, 0.95], abs=0.01)
    again = [point.problem.weight_mask for point in sweep_points(["sparsity"], TINY, "cpu")[1:]]
    assert [p.weight_mask for p in pruned] == again
    assert len(set(again)) == 4
    half = sweep_points(["sparsity"], TINY, "cpu")[1]
    assert [bool(p.weight_mask) for p in half.problems()] == [True, True, False, False]


def test_points_that_cannot_be_are_left_out() -> None:
    wide = replace(BASE, r=9, s=9, pad_h=0, pad_w=0)
    assert [p.axes for p in sweep_points(["size"], wide, "cuda")] == [{"size": size} for size in (14, 28, 56, 112)]


@pytest.mark.parametrize("names", [["width"], ["batch", "batch"], [""]])
def test_unknown_and_repeated_sweeps_are_refused(names) -> None:
    with pytest.raises(InputError, match="--sweep"):
        sweep_points(names, BASE, "cpu")


def test_the_base_is_read() -> None:
    assert parse_base("c=64, h=56,w=56") == replace(BASE, c=64, h=56, w=56)
    for text in ("c", "c=-1", "layout=nhwc", "c=1;h=2"):
        with pytest.raises(InputError, match="--base"):
            parse_base(text)
    with pytest.raises(InputError, match="groups"):
        parse_base("groups=3")


HEAD = "n,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w,dilation_h,dilation_w,groups,count\n"


def test_a_file_of_layers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "net.csv"
    path.write_text(HEAD + "1,3,32,32,8,5,5,2,2,1,1,1,1,1,4\n")
    (point,) = read_layers(path, replace(BASE, x_dtype="fp16"))
    assert point.problem == ConvProblem(1, 3, 32, 32, 8, 5, 5, 2, 2, x_dtype="fp16")
    assert (point.subject, point.axes) == ("net:2", {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "columns"),
        ("n,c\n1,2\n", "columns"),
        (HEAD, "1 to 2000"),
        (HEAD + "1,3,32,32,8,5,5,2,2,1,1,1,1,x,4\n", ":2, groups"),
        (HEAD + "1,3,32\n", ":2, w"),
        (HEAD + "1,3,2,2,8,5,5,0,0,1,1,1,1,1,4\n", ":2"),
        ("\x00" * 9, "columns"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text, named) -> None:
    path = tmp_path / "net.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_layers(path)
    assert named in str(caught.value)
    with pytest.raises(InputError, match="--layers"):
        read_layers(tmp_path / "absent.csv")


# --- where the winner changes -----------------------------------------------------------------------------------------------


def row(name, value, time_us, status="ok", axis="channels"):
    figures = (Figure.once("time_us", "us", time_us),) if status == "ok" else ()
    reason = "" if status == "ok" else "too large"
    return Row(f"sweep:{axis}", name, status, reason, mode="fprop", axes={axis: value}, figures=figures)


def rows(**times):
    values = (16, 32, 64, 128)
    return [
        row(name, v, t) if t else row(name, v, 0, "out_of_memory")
        for name, own in times.items()
        for v, t in zip(values, own, strict=True)
    ]


def test_crossover_points_are_found_and_said() -> None:
    (curve,) = curves(rows(gemm=[1.0, 2.0, 4.0, 8.0], winograd=[3.0, 3.0, 3.0, 4.0], fft=[None, None, 9.0, 2.0]))
    assert [(s.algorithm, s.first, s.last) for s in stretches(curve)] == [
        ("gemm", 16, 32),
        ("winograd", 64, 64),
        ("fft", 128, 128),
    ]
    assert in_words(curve) == (
        "channels, fprop, fp32: gemm from 16 to 32 (1.50x ahead of winograd at 32), "
        "then winograd at 64 (1.33x ahead of gemm at 64), then fft at 128 (2.00x ahead of winograd at 128)"
    )


def test_a_tie_does_not_change_the_winner() -> None:
    (curve,) = curves(rows(gemm=[1.0, 2.0, 4.0, 8.0], direct=[1.2, 1.95, 3.9, 7.7]))
    assert [s.algorithm for s in stretches(curve)] == ["gemm"]
    assert in_words(curve) == "channels, fprop, fp32: gemm everywhere (level with direct)"
    (curve,) = curves(rows(gemm=[1.0, 2.0, 4.0, 8.0], direct=[1.2, 1.8, 3.9, 7.7]))
    assert [s.algorithm for s in stretches(curve)] == ["gemm", "direct"]


def test_one_algorithm_and_none_at_all() -> None:
    assert in_words(curves(rows(gemm=[1.0, 2.0, 3.0, 4.0]))[0]).endswith("gemm everywhere")
    assert in_words(curves(rows(gemm=[None] * 4))[0]).endswith("nothing was measured")


def test_tables_and_charts_tell_failures_too() -> None:
    found = rows(gemm=[1.0, 2.0, 4.0, None], winograd=[3.0, 3.0, 3.0, None])
    lines = [[cell.text for cell in line] for line in layer_table(found).rows]
    assert lines[0][:3] == ["channels 16, fprop, fp32", "gemm", "1.00"]
    assert lines[-1][1] == "none"
    assert "out_of_memory" in lines[-1][-1]
    ((words, svg),) = charts(found)
    assert "then winograd at 64" in words
    assert "gemm: 4 at 64" in svg


def test_energy_is_a_column_where_it_was_taken_and_the_page_has_every_algorithm() -> None:
    found = rows(gemm=[1.0, 2.0, 4.0, 8.0], winograd=[3.0, 3.0, 3.0, None])
    assert "energy uJ" not in layer_table(found).heads
    energy = Figure.once("energy_uj", "uJ", 12.5)
    extra = Figure.once("workspace_bytes", "B", 2048.0)
    found[0] = replace(found[0], figures=(Figure("time_us", "us", 1.0, 0.9, 1.2), energy, extra))
    table = layer_table(found)
    assert table.rows[0][table.heads.index("energy uJ")].text == "12.5"
    assert table.rows[1][table.heads.index("energy uJ")].text == ""
    every = every_table(found)
    assert len(every.rows) == 8
    assert len(every.page_only) == len(every.heads) == len(every.rows[0])
    assert [cell.text for cell in every.rows[0]] == [
        "channels 16, fprop, fp32", "gemm", "1.00", "0.90", "1.20", "2 KiB", "12.5", "0e+00", "",
    ]  # fmt: skip
    assert every.rows[0][5].value == 2048.0
    assert [cell.text for cell in every.rows[-1]][1:3] == ["winograd", "out_of_memory"]
    assert every.rows[-1][-1].text == "too large"


# --- from measurements to rows ----------------------------------------------------------------------------------------------


def test_every_engine_has_an_algorithm() -> None:
    words = {algorithm_of(engine) for engine in MANIFEST}
    assert {"gemm", "implicit gemm", "direct", "fft", "tiled fft", "winograd", "library"} <= words


def test_an_engine_that_skips_zeros_runs_its_dense_path_where_there_are_none() -> None:
    assert algorithm_of("zeroskip.cpu", (), Knobs.of(zeros=50)) == "zero-skipping"
    assert algorithm_of("zeroskip.cpu", (), Knobs.of(zeros=0)) == "direct"
    assert algorithm_of("zeroskip.channels", (), Knobs.of(dead_channels=0)) == "implicit gemm"
    (point,) = sweep_points(["kernel"], TINY, "cpu")[1:2]

    def known(target):
        found = [measured(p, target, "aten", 9.0) for p in point.problems()]
        skipping = [measured(p, target, "zeroskip.cpu", 3.0) for p in point.problems()]
        dense = [replace(r, config=replace(r.config, knobs=with_sparsity(r.config.knobs, 0))) for r in skipping]
        return [*found, *dense]

    study, _ = study_of(known, ("aten", "zeroskip.cpu"))
    assert [r.provider for r in study.rows([point]) if r.ok] == ["direct", "library"]


def measured(problem, target, engine, time_us, status=Status.OK, **rest):
    found = load_engine(engine)
    able = found.supports(problem, target)
    config = found.config(found.space(problem, target)[0] if able else None)
    protocol = protocol_for("quick", "cpu")
    return Measurement(
        problem.key,
        config,
        target.digest,
        protocol.id,
        status,
        protocol.rounds if status is Status.OK else 0,
        time_us,
        **rest,
    )


class Knowing(ReplayRunner):
    """A replay without rows, whose answers are of the target."""

    def __init__(self, target):
        super().__init__([])
        self.target = target

    def measure(self, request, protocol):
        for found in super().measure(request, protocol):
            yield replace(found, target=self.target.digest)


def study_of(measurements, engines=("aten", "gemm", "winograd2")):
    target = detect_target("cpu")
    database = Database.memory()
    database.put(measurements(target), targets=[target])
    runner = Knowing(target)
    return AlgorithmStudy(target, Settings(effort="quick"), database, runner, engines), runner


def test_an_algorithm_is_the_fastest_of_its_engines_knobs_and_formats() -> None:
    (point,) = sweep_points(["kernel"], replace(TINY, r=1, s=1), "cpu")[1:2]
    nchw, nhwc = point.problems()

    def known(target):
        return [
            measured(nchw, target, "aten", 9.0, workspace_bytes=5),
            measured(nhwc, target, "aten", 7.0, spread_us=1.0, error=1e-7),
            measured(nchw, target, "gemm", 0.0, Status.WRONG_RESULT, reason="off by one"),
        ]

    study, runner = study_of(known, ("aten", "gemm", "pointwise"))
    found = {r.provider: r for r in study.rows([point])}
    library = found["library"]
    assert (library.figure("time_us"), library.setting) == (Figure("time_us", "us", 7.0, 6.0, 8.0), "aten [] nhwc")
    assert library.detail["problem"] == nhwc.key
    assert library.axes == {"kernel": 3}
    # What was not stored was asked for; a replay without rows knows nothing, which is a row too.
    assert not found["gemm"].ok
    assert runner.asked
    run = Run("study", {}, tuple(found.values()))
    assert from_dict(to_dict(run)).rows == run.rows


def test_a_second_run_takes_everything_from_the_database(tmp_path: Path) -> None:
    target = detect_target("cpu")
    points = sweep_points(["kernel"], TINY, "cpu")[:2]
    settings = Settings(effort="quick", only_engines=("gemm",))
    with Database.open(tmp_path / "perf.db") as database:
        first = AlgorithmStudy(target, settings, database, InProcessRunner(target), ("aten", "gemm"))
        before = first.rows(points)
        assert first.measured > 0
        replay = ReplayRunner([])
        second = AlgorithmStudy(target, settings, database, replay, ("aten", "gemm"))
        assert second.rows(points) == before
        assert (second.measured, second.from_database, replay.asked) == (0, first.measured, [])


def test_criteria_are_learned_from_the_database_and_checked_on_layers_not_swept() -> None:
    def time_of(problem, engine):
        wins = "winograd2" if problem.k > 32 else "gemm"
        return 1.0 if engine == wins else 3.0

    swept_points = sweep_points(["filters", "channels", "size"], BASE, "cpu")
    listed = sweep_points(["filters"], replace(BASE, c=48), "cpu")

    def known(target):
        problems = {p.key: p for point in (*swept_points, *listed) for p in point.problems()}
        return [measured(p, target, e, time_of(p, e)) for p in problems.values() for e in ("aten", "gemm", "winograd2")]

    study, runner = study_of(known)
    study.rows([*swept_points, *listed])
    assert not runner.asked
    criteria = study.learn("abc")
    assert criteria is not None
    assert criteria.ranking(replace(BASE, k=200), criteria.engines)[0] == "winograd2"
    checked = study.check(swept_points, listed)
    assert isinstance(checked, CriteriaCheck)
    assert checked.layers == 2 * len(SWEEPS["filters"])
    assert checked.within_5 == 1.0
    assert "none was measured with two engines that was not swept too" in str(study.check(swept_points, swept_points))
    few = study.check(listed[:1], swept_points)
    assert few == f"too few swept layers to check them: 2 were measured with two engines, {LEAST_LAYERS} are needed"
    assert "--layers" in str(study.check(swept_points, []))


def test_energy_is_what_the_counter_says_a_launch() -> None:
    target = detect_target("cpu")
    problem = replace(TINY, layout="nchw")
    joules = launch_joules(target, lambda: 5.0, seconds=0.01)
    assert joules(measured(problem, target, "aten", 1.0)) == 0.0
    assert joules(measured(problem, target, "triton.stem", 1.0)) is None  # cannot run here


def test_energy_on_a_gpu_is_that_of_a_graph_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one they would leave the device idle in between, and its idle power would count as theirs."""
    seen: list[int] = []

    class Graph:
        def replay(self) -> None:
            seen.append(0)

    def capture(launch: object, launches: int) -> Graph:
        seen.append(launches)
        return Graph()

    monkeypatch.setattr(study_energy, "captured", capture)
    gpu = replace(detect_target("cpu"), device="cuda")
    run, each = study_energy._in_a_row(lambda: pytest.fail("launched by the host"), gpu)
    run()
    assert seen == [each, 0]
    assert each == study_energy.GRAPH_LAUNCHES > 1


RULES = ["gemm_n <= 80:", "  not nhwc:", "    aten (1 %) [12 layers]", "  else:", "    gemm (0 %), then aten (3 %) [30 layers]",
         "else:", "  winograd2 (2 %) [11 layers]"]  # fmt: skip


def test_each_leaf_of_the_criteria_says_all_that_holds_there() -> None:
    assert leaf_rows(RULES) == [
        ("gemm_n <= 80, not nhwc", "aten (1 %)", 12),
        ("gemm_n <= 80, nhwc", "gemm (0 %), then aten (3 %)", 30),
        ("gemm_n > 80", "winograd2 (2 %)", 11),
    ]
    assert leaf_rows(["aten (1 %) [12 layers]"]) == [("anything", "aten (1 %)", 12)]
    for lines in (["    aten (1 %) [1 layers]"], ["else:"], ["words"]):
        with pytest.raises(ValueError, match="no rule"):
            leaf_rows(lines)


# --- strategies -------------------------------------------------------------------------------------------------------------


def chain() -> SelectionProblem:
    """Two layers: `one` is best at the first in nhwc, `two` at the second in nchw; changing between them costs more."""
    times = {"aten": (5.0, 5.0), "one": (1.0, 4.5), "two": (4.0, 1.0)}
    layouts = {"aten": "nchw", "one": "nhwc", "two": "nchw"}
    return SelectionProblem(
        nodes=("a", "b"),
        regions=(RegionNodes("conv(a)", ("a",), ("x",), ("y",)), RegionNodes("conv(b)", ("b",), ("y",), ("z",))),
        candidates=tuple(
            Candidate(
                region, f"p{region}", EngineConfig(engine), layouts[engine], own[region], baseline=engine == "aten"
            )
            for engine, own in times.items()
            for region in (0, 1)
        ),
        value_bytes={"x": 100, "y": 100, "z": 100},
        value_layouts=dict.fromkeys("xyz", ("nchw", "nhwc")),
        convert_us={(v, a, b): 2.0 for v in "xyz" for a, b in (("nchw", "nhwc"), ("nhwc", "nchw"))},
        border={"x": "nchw", "z": "nchw"},
        inputs=("x",),
        outputs=("z",),
    )


def test_strategies_pay_for_copies_and_exact_is_the_least() -> None:
    found = {r.provider: r for r in strategy_rows(chain(), {"subject": "net", "batch": 1})}
    assert tuple(found) == tuple(SOLVERS)
    totals = {name: r.figure("total_us").p50 for name, r in found.items()}
    assert totals == {"library": 10.0, "one algorithm": 5.0, "per layer": 6.0, "exact": 5.0}
    assert found["one algorithm"].setting == "single:two"
    assert found["per layer"].detail["copies"] == 2
    lines = strategy_table(list(found.values()))
    assert [line[3] for line in lines] == ["2.00x", "1.00x", "1.20x", "1.00x"]


def test_strategies_say_what_is_predicted() -> None:
    found = SearchResult(rows={"a": [], "b": [], "c": []}, predicted=2, predicted_from=7)
    candidates = tuple(replace(c, predicted=c.config.engine == "two") for c in chain().candidates)
    predicted = strategy_rows(replace(chain(), candidates=candidates), {"subject": "net", "batch": 1}, found)
    lines = {line[1]: line for line in strategy_table(predicted)}
    assert lines["exact"][2:4] == ("~0.005", "")
    assert lines["exact"][5] == "exact, 2 of 2 times predicted"
    assert lines["library"][2:4] == ("0.010", "")  # measured, but the time to compare it with is not
    assert lines["library"][5] == "baseline"
    bars = strategy_bars(predicted)
    assert bars.heads[1] == "sum of times"
    assert {row[2].text for row in bars.rows} == {"~0.005", "~0.006", "0.010"}
    old = [replace(r, detail={"predicted": 2, "problems": 3}) for r in predicted]
    assert {line[5] for line in strategy_table(old)} >= {"exact, 2 of 3 problems predicted"}
    (note,) = strategy_notes(predicted)
    assert note.startswith("net: 2 of the net's 3 different layers and subgraphs were never measured on this device")
    measured_all = strategy_rows(chain(), {"subject": "net", "batch": 1}, SearchResult(rows=found.rows))
    assert strategy_notes(measured_all) == []
    assert strategy_table(measured_all)[-1][5] == "exact"
    assert strategy_bars(measured_all).heads[1] == "sum of measured times"


def test_an_algorithm_that_is_only_predicted_has_no_time_and_says_what_to_do(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    command = ["study", "--sweep", "stride", "--base", "c=4,k=4,h=6,w=6", "--effort", "none", "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, "--no-criteria", "--db", str(tmp_path / "empty.db"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = read(out).rows
    assert not any(row.ok for row in rows)
    first = {row.subject: row for row in reversed(rows)}
    assert {row.reason for row in first.values()} == {NOT_MEASURED}
    assert "not measured: effort none" in " ".join(done.output.split())


# --- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(
        "convoy.pipeline.measure_net.make_runner",
        lambda target, settings: InProcessRunner(target, extra_engines=settings.engines),
    )


def test_the_command_measures_says_and_keeps(tmp_path: Path, in_process) -> None:
    out, db = tmp_path / "run.json", tmp_path / "perf.db"
    command = ["study", "--sweep", "kernel", "--base", "c=4,k=4,h=6,w=6", "--only-engines", "gemm", "-o", str(out)]
    command += ["--db", str(db), "--device", "cpu", "--report", str(tmp_path / "page.html")]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert "kernel, fprop, fp32:" in first.output
    assert "criteria: too few layers" in first.output
    assert "kernel, fprop, fp32:" in (tmp_path / "page.html").read_text()
    run = read(out)
    assert run.manifest["criteria"]["rules"] == []
    assert check_line(run.manifest["criteria"]) in first.output
    assert "too few layers" in (tmp_path / "page.html").read_text()
    assert {r.axes["kernel"] for r in run.rows} == {1, 3, 5, 7, 11}
    assert run.manifest["request"]["base"] == "c=4,k=4,h=6,w=6"
    again = CliRunner().invoke(app, command)
    # On a busy machine the best of the first run may have lacked a sample; all else is taken from the database.
    before, now = (int(re.search(r"(\d+) candidates measured", r.output)[1]) for r in (first, again))
    assert now <= before / 10
    if not now:
        assert read(out).rows == run.rows


def test_a_study_ends_in_time_and_says_what_is_left(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    command = ["study", "--sweep", "stride,kernel", "--base", "c=4,k=4,h=6,w=6", "--device", "cpu", "--no-criteria"]
    command += ["--db", str(tmp_path / "perf.db"), "-o", str(out), "--strategies", "alexnet", "--seconds", "1e-9"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert (
        "no time was left for sweep:stride, fprop; sweep:kernel, fprop; alexnet: the same command goes on"
        in " ".join(done.output.split())
    )
    assert not out.exists()


SMALL = ["study", "--base", "c=4,k=4,h=6,w=6", "--only-engines", "gemm", "--device", "cpu", "--no-criteria"]


def test_a_file_of_another_kind_or_request_is_refused_and_left_as_it_is(
    tmp_path: Path, in_process, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run.json"
    words = [*SMALL, "--db", str(tmp_path / "perf.db"), "-o", str(out)]
    write(Run("compare", {"request": {"command": "compare"}}, (Row("alexnet", "torch"),)), out)
    before = out.read_bytes()
    done = CliRunner().invoke(app, [*words, "--sweep", "stride"])
    assert isinstance(done.exception, InputError)
    assert "--again" in str(done.exception)
    assert out.read_bytes() == before
    assert CliRunner().invoke(app, [*words, "--sweep", "stride", "--again"]).exit_code == 0
    before = out.read_bytes()
    assert read(out).kind == "study"
    done = CliRunner().invoke(app, [*words, "--sweep", "kernel"])
    assert isinstance(done.exception, InputError)
    assert out.read_bytes() == before


def test_curves_that_were_not_reached_keep_their_rows(tmp_path: Path, in_process, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--sweep", "kernel,stride", "--db", str(tmp_path / "perf.db")]
    assert CliRunner().invoke(app, words).exit_code == 0
    out = tmp_path / "study.json"  # where no -o says otherwise
    before = read(out)
    gone = replace(before.rows[0], provider="an algorithm of old")
    write(replace(before, rows=(*before.rows, gone)), out)
    real = StudySession._late
    monkeypatch.setattr(StudySession, "_late", lambda self, what: "stride" in what or real(self, what))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    after = read(out)
    assert [r for r in after.rows if r.subject == "sweep:stride"] == [
        r for r in before.rows if r.subject == "sweep:stride"
    ]
    assert {r.key for r in after.rows} == {
        r.key for r in before.rows
    }  # and what a curve had before it was measured anew is gone
    assert "run: study.json" in done.output


def test_strategies_of_a_batch_at_effort_none_say_what_is_predicted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    words = ["study", "--strategies", "net.py:net", "--trust", "--batch", "3", "--effort", "none", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--db", str(tmp_path / "perf.db"), "--report", "page.html"])
    assert done.exit_code == 0, done.output
    (rows,) = [read(tmp_path / "study.json").rows]
    assert {row.batch for row in rows} == {3}
    assert re.search(r"0 candidates measured, 0 from the database, (\d+) of \1 problems predicted", done.output)
    assert "layers and subgraphs were never measured on this device" in done.output
    assert "layers and subgraphs were never measured on this device" in (tmp_path / "page.html").read_text()


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
"""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--sweep", "width"], "--sweep"),
        (["--batch", "2", "--sweep", "kernel"], "--strategies"),
        (["--batch", "0", "--strategies", "alexnet"], "--batch"),
        (["--direction", "back"], "--direction"),
        (["--direction", ""], "--direction"),
        (["--base", "c"], "--base"),
        (["--only-engines", "nobody"], "--only-engines"),
        (["--layers", "absent.csv"], "--layers"),
        (["--out", "/nowhere/run.json"], "--out"),
        (["--energy", "--sweep", "kernel"], "--energy"),
    ],
)
def test_bad_words_are_one_clear_error(words, named, tmp_path: Path, in_process) -> None:
    result = CliRunner().invoke(app, ["study", "--db", str(tmp_path / "perf.db"), "--device", "cpu", *words])
    assert isinstance(result.exception, InputError)
    assert named in str(result.exception)
