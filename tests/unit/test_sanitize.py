"""`make sanitize` without a GPU: which pairs run, what an outcome is called, and that every engine has something to launch."""

import importlib
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from convoy.engines.base import Executable, Knobs
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import CompileError
from convoy.target import Target

GPU = Path(__file__).parents[1] / "gpu"
SCRIPT = GPU / "sanitize.py"
H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
LAUNCHED = "7 launches over 5 shapes\n"
OURS = sorted(
    name
    for name in MANIFEST
    if name.startswith(("cuda.", "pruned.", "triton.", "zeroskip."))
    and name not in ("pruned.c", "pruned.channels", "zeroskip.cpu")
)
HALF_OR_FULL = {
    **dict.fromkeys(("pruned.cuda", "pruned.csr", "pruned.direct"), ("fp16", "fp32")),
    **dict.fromkeys(
        (
            "cuda.bottleneck",
            "cuda.depthwise_tile",
            "cuda.dgrad",
            "cuda.expand_depthwise",
            "cuda.first_layer",
            "cuda.fresh",
            "cuda.gated_1x1",
            "cuda.inverted_residual",
            "cuda.wgrad",
            "pruned.sparse24",
            "pruned.blocks",
            "triton.merged",
        ),
        ("bf16", "fp16"),
    ),
    **dict.fromkeys(
        ("cuda.first_layer_tf32", "cuda.split_fp32", "triton.split_fp32", "zeroskip.channels", "zeroskip.gather"),
        ("fp32",),
    ),
}
"""The dtypes of engines that do not take all three."""

CLEAN = LAUNCHED + "========= ERROR SUMMARY: 0 errors\n"
HAZARDS = LAUNCHED + "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"


@pytest.fixture
def load():
    return lambda name: importlib.import_module(f"tests.gpu.{name}")


@pytest.fixture
def jobs(load):
    return load("sanitize_jobs")


def test_every_engine_with_kernels_of_ours_is_watched(jobs):
    assert sorted(jobs.ENGINES) == OURS


def test_a_tool_that_sees_what_is_not_there_is_left_out_for_that_engine(jobs, monkeypatch):
    monkeypatch.setattr(jobs, "LEFT_OUT", {("racecheck", "b"): "sees what is not there"})
    assert jobs.tools_for("a", ["memcheck", "racecheck"]) == ["memcheck", "racecheck"]
    assert jobs.tools_for("b", ["memcheck", "racecheck"]) == ["memcheck"]


def test_what_is_left_out_is_known_and_has_a_reason(jobs):
    for (tool, engine), reason in jobs.LEFT_OUT.items():
        assert tool in jobs.TOOLS
        assert engine in jobs.ENGINES
        assert reason


def test_commands(jobs):
    plain, watched = (jobs.command(SCRIPT, tool, "triton.gemv") for tool in ("", "memcheck"))
    assert plain[1:] == [str(SCRIPT), "triton.gemv"]
    assert watched[:3] == ["compute-sanitizer", "--tool", "memcheck"]
    assert watched[-3:] == plain
    assert "--report-api-errors" in watched
    assert "--report-api-errors" not in jobs.command(SCRIPT, "initcheck", "triton.gemv")


@pytest.mark.parametrize(
    ("tool", "code", "text", "word"),
    [
        ("", 0, LAUNCHED, "clean"),
        ("", 1, "0 launches over 0 shapes", "failed"),
        ("memcheck", 0, CLEAN, "clean"),
        ("memcheck", 1, CLEAN.replace("0 errors", "34 errors"), "findings"),
        ("memcheck", 0, CLEAN.replace("0 errors", "1 error"), "findings"),
        ("racecheck", 0, HAZARDS.format(0), "clean"),
        ("racecheck", 0, HAZARDS.format(12), "findings"),
        ("initcheck", 1, CLEAN, "failed"),
        ("synccheck", -6, "Aborted", "failed"),
        ("synccheck", 0, LAUNCHED, "failed"),
    ],
)
def test_outcomes_are_told_apart(jobs, tool, code, text, word):
    assert jobs.verdict(tool, code, text) == word


def test_what_was_reported_first_is_told_beside_the_end(jobs):
    first = "========= Invalid __shared__ read of size 512 bytes"
    text = "\n".join([first, *["=========     Host Frame: main"] * 200, *["a traceback"] * 300, "the end"])
    assert jobs.told(text)[:2] == [first, "..."]
    assert jobs.told(text)[-1] == "the end"
    assert not any("Host Frame" in line for line in jobs.told(text))
    assert jobs.told("short\nenough") == ["short", "enough"]


def test_a_run_ends_with_one_where_anything_is_not_clean(jobs, monkeypatch, capsys):
    def run(command, **_):
        engine, tool = command[-1], command[2] if command[0] == "compute-sanitizer" else ""
        ran.append((tool, engine))
        if (tool, engine) == ("racecheck", "slow"):
            raise subprocess.TimeoutExpired(command, 1, output=b"as far as this")
        text = HAZARDS.format(0) if tool == "racecheck" else CLEAN if tool else LAUNCHED
        broken = engine == "broken"
        return subprocess.CompletedProcess(command, int(broken), "planted" if broken else text)

    ran = []
    monkeypatch.setattr(jobs.shutil, "which", lambda name: name)
    monkeypatch.setattr(jobs.subprocess, "run", run)
    assert jobs.run_all(SCRIPT, ["good"], ["memcheck", "racecheck"], 2) == 0
    assert sorted(ran) == [("", "good"), ("memcheck", "good"), ("racecheck", "good")]
    assert "2 clean, 0 not" in capsys.readouterr().out
    ran.clear()
    assert jobs.run_all(SCRIPT, ["good", "broken", "slow", "pruned.sparse24"], ["racecheck"], 2) == 1
    assert sorted(ran) == [*(("", name) for name in ("broken", "good", "pruned.sparse24", "slow")), ("racecheck", "good"),
                           ("racecheck", "slow")]  # fmt: skip
    printed = capsys.readouterr().out
    assert "planted" in printed
    assert "as far as this" in printed
    assert "left out" in printed
    assert "1 clean, 2 not" in printed


def test_without_the_sanitizer_nothing_is_clean(jobs, monkeypatch, capsys):
    monkeypatch.setattr(jobs.shutil, "which", lambda name: None)
    assert jobs.run_all(SCRIPT, ["triton.gemv"], ["memcheck"], 2) == 2
    assert "CUDA toolkit" in capsys.readouterr().out


def dtype_of(problem):
    """The narrowest dtype of a problem's values."""
    text = getattr(problem, "text", problem.key)
    return next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in text)


@pytest.mark.parametrize("name", OURS)
def test_an_engine_is_launched_over_many_shapes_in_every_dtype_and_kind_of_setting(load, name):
    found, engine = load("sanitize_problems"), load_engine(name)
    launches = list(found.launches_of(engine, H100))
    problems = dict.fromkeys(problem for problem, _ in launches)
    assert len({found.shape_of(problem) for problem, _ in launches}) >= 30
    assert len({(found.shape_of(problem), dtype_of(problem), knobs) for problem, knobs in launches}) >= 30
    assert len(launches) <= 120  # under the sanitizer each takes a second
    assert all(problem.flops <= 1e8 for problem in problems)
    assert tuple(sorted(set(map(dtype_of, problems)))) == HALF_OR_FULL.get(name, ("bf16", "fp16", "fp32"))
    spaces = {problem: list(engine.space(problem, H100)) for problem in problems}
    assert {(problem, space[0]) for problem, space in spaces.items()} <= set(launches)
    assert sum((problem, space[-1]) in launches for problem, space in spaces.items()) >= 10
    kinds = set().union(*(found.traits(knobs) for space in spaces.values() for knobs in space))
    assert kinds <= set().union(*(found.traits(knobs) for _, knobs in launches))


def test_launches_are_the_same_every_time(load):
    found, engine = load("sanitize_problems"), load_engine("triton.swapped")
    assert list(found.launches_of(engine, H100)) == list(found.launches_of(engine, H100))


def test_cooperation_is_told_apart(load):
    traits = load("sanitize_problems").traits
    plain, split = Knobs.of(block_k=64, split=1, turns=False), Knobs.of(block_k=128, split=6, turns=True)
    assert traits(plain) == {"split=1", "turns=False"}
    assert traits(split) == traits(Knobs.of(split=3, turns=True)) == {"split=2", "turns=True"}


def test_only_a_first_setting_has_to_compile(load, capsys):
    def failing(problem, knobs, target):
        raise CompileError("triton.swapped", "too many registers", "")

    sanitize, engine = load("sanitize"), load_engine("triton.swapped")
    problem = next(p for p in load("sanitize_problems").problems_of(engine, H100))
    first, *_, last = engine.space(problem, H100)
    planted = SimpleNamespace(id=engine.id, build=failing, space=engine.space)
    assert sanitize.build(planted, problem, last, H100) is None
    assert "too many registers" in capsys.readouterr().out
    with pytest.raises(CompileError):
        sanitize.build(planted, problem, first, H100)


class Planted(Executable):
    """Writes all of its result but for the last of it."""

    def __init__(self, left_out):
        self.left_out = left_out

    def launch(self, buffers, workspace):
        result = buffers.results[0]
        result[: len(result) - self.left_out] = 1


def test_a_result_that_is_not_all_written_is_seen(load, monkeypatch):
    sanitize = load("sanitize")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sanitize.launch("triton.gemv", Planted(0), [], [torch.full((4,), torch.nan)])
    with pytest.raises(ValueError, match=r"triton\.gemv"):
        sanitize.launch("triton.gemv", Planted(1), [], [torch.full((4,), torch.nan)])
    assert set(load("sanitize_jobs").ENGINES) >= sanitize.STORED_BY_TMA
