"""Every command, every option, a wrong value: exit code 2, and one line that begins with the name that was typed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from convoy.cli.app import app
from convoy.cli.command import RENAMED
from convoy.cli.flag_names import FlagNames
from convoy.compare.runs.rows import Row
from convoy.compare.runs.runfile import Run, write
from convoy.errors import InputError, PlanError
from tests.e2e import command as commands

pytestmark = pytest.mark.xdist_group("wrong_values")

SMALL = ("net.py:small", "--trust", "--size", "16")
RIGHT = {
    "optimize": (*SMALL, "--effort", "none"),
    "run": (*SMALL, "--plan", "good.plan.json"),
    "bench": ("net.py:small", "--trust", "--plan", "good.plan.json"),
    "warm": SMALL,
    "train": (*SMALL, "--data", "synthetic:8", "--batch", "4"),
    "prune": (*SMALL, "--sparsity", "0.5"),
    "sparsity": SMALL,
    "explain": ("good.plan.json",),
    "layers": SMALL,
    "export": (*SMALL, "--out", "net.convoy"),
    "runtime": ("folder",),
    "engines": ("--problem", "linear:n1c2k3:fp32:as_torch:none"),
    "db info": (),
    "db list": (),
    "db export": ("out.csv",),
    "db import": ("rows.csv",),
    "db merge": ("other.db",),
    "db clear": ("--yes",),
    "compare": (*SMALL, "--frameworks", "torch"),
    "study": (),
    "scale": (*SMALL, "--effort", "none"),
    "report": ("run.json",),
    "doctor": (),
}
"""Words that each command takes; what is wrong is added to them."""

NUMBERS = {
    "--accumulate": "0",
    "--batch": "0",
    "--checkpoint-every": "-1",
    "--clip-grad-norm": "-1",
    "--epochs": "-1",
    "--images": "0",
    "--jobs": "-1",
    "--limit": "-1",
    "--lr": "-1",
    "--memory-tolerance": "-1",
    "--momentum": "-1",
    "--node-rank": "7",
    "--nodes": "0",
    "--p99": "0",
    "--round-s": "0",
    "--rounds": "1",
    "--seconds": "-1",
    "--seed": "1.5",
    "--sparsity": "2",
    "--stream-memory": "0",
    "--streams": "0",
    "--threads": "0",
    "--timeout-s": "0",
    "--tolerance": "-1",
    "--time-s": "-1",
    "--weight-decay": "-1",
}
"""For options that take a number, one that they refuse."""

TEXTS = {
    "--amp": "fp15",
    "--base": "c=many",
    "--batches": "1,0",
    "--checkpoint": "absent/state",
    "--compare": "absent.json",
    "--data": "nowhere",
    "--db": ".",
    "--deny-engines": "onedn",
    "--device": "tpu",
    "--direction": "forward",
    "--dtype": "fp8",
    "--effort": "heroic",
    "--endpoint": "nowhere",
    "--engine": "atenn",
    "--evaluate": "nowhere",
    "--finetune": "nowhere",
    "--frameworks": "torhc",
    "--gpus": "two",
    "--head": "hat",
    "--input": "absent.png",
    "--json": "absent/out",
    "--layers": "absent.csv",
    "--layout": "blocked",
    "--memory-budget-bytes": "lots",
    "--memory-limit": "lots",
    "--numerics": "loose",
    "--only-engines": "onedn",
    "--options": "cudnnn",
    "--out": "absent/out",
    "--pattern": "2:9:4",
    "--plan": "absent/p.json",
    "--plans": "absent/plans",
    "--problem": "conv:what",
    "--profile": "absent/out",
    "--providers": "torch.dpp",
    "--report": "absent/out",
    "--run": "absent/out",
    "--save-plan": "absent/out",
    "--scope": "globe",
    "--signers": "absent/signers",
    "--size": "12x",
    "--skip": "nobody",
    "--solver": "magic",
    "--split": "half",
    "--status": "okk",
    "--strategies": "nobody_net",
    "--sweep": "colour",
    "--target": "zz",
    "--timeline": "absent/out",
    "--triton": "triton",
    "--tuning-memory-bytes": "lots",
    "--weights": "absent.safetensors",
}
"""For options that take a text, one that they refuse."""

BESIDE = {
    ("optimize", "--amp"): ("--train",),
    ("prune", "--epochs"): ("--finetune", "synthetic:8"),
    ("prune", "--lr"): ("--finetune", "synthetic:8"),
    ("prune", "--seed"): ("--finetune", "synthetic:8"),
    ("prune", "--images"): ("--finetune", "synthetic:8"),
    ("run", "--split"): ("--data", "synthetic:8"),
    ("run", "--images"): ("--data", "synthetic:8"),
    ("scale", "--endpoint"): ("--nodes", "2"),
    ("study", "--batch"): ("--strategies", "net.py:small"),
    ("report", "--tolerance"): ("run.json", "--diff"),
    ("report", "--memory-tolerance"): ("run.json", "--diff"),
}
"""Options that mean nothing without others."""

ADVICE = ("--dtype", "--effort", "--numerics", "--db")
"""Options of `convoy prune` that need --advise, which refuses --sparsity."""

ANY_TEXT = {("db list", "--problem"), ("db export", "--problem")}
"""A part of a key: a text that no key contains gives no rows."""


def leaves(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))
    if not getattr(command, "commands", {}):
        yield " ".join(path), command


COMMANDS = dict(leaves())


def cases() -> Iterator[tuple[str, str, str]]:
    """Command, option, wrong value."""
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.param_type_name != "option":
                continue
            flag = next(word for word in parameter.opts if word.startswith("--"))
            if parameter.is_flag:
                yield name, flag, "maybe"
                continue
            if flag in NUMBERS:
                yield name, flag, NUMBERS[flag]
                yield name, flag, "x"
            elif (name, flag) not in ANY_TEXT:
                yield name, flag, TEXTS.get(flag, "")


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a net, a plan of it, a run file, an export and a database."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "net.py").write_text(commands.NET, encoding="utf-8")
    (folder / "triton" / "net").mkdir(parents=True)
    write(
        Run("compare", {"target": {"name": "CPU"}}, (Row("net", "torch", "absent", "not there"),)), folder / "run.json"
    )
    return folder


@pytest.fixture
def convoy_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, things: Path
) -> commands.Command:
    monkeypatch.chdir(things)
    monkeypatch.setenv("CONVOY_DB", str(things / "perf.db"))
    run = commands.Command(capsys, monkeypatch)
    (things / "out.csv").unlink(missing_ok=True)
    if not (things / "good.plan.json").exists():
        run.works("optimize", *SMALL, "--effort", "none", "--device", "cpu", "--plan", "good.plan.json")
        run.works("db", "export", "rows.csv")
        run.works("db", "import", "rows.csv", "--db", "other.db")
    return run


def test_the_walk_knows_a_wrong_value_of_every_option() -> None:
    assert set(RIGHT) == set(COMMANDS)
    assert [(name, flag) for name, flag, value in cases() if not value] == []


@pytest.mark.parametrize(("name", "flag", "value"), list(cases()))
def test_a_wrong_value_is_refused_and_the_flag_is_named(
    convoy_command: commands.Command, name: str, flag: str, value: str
) -> None:
    right = (*SMALL, "--advise") if name == "prune" and flag in ADVICE else RIGHT[name]
    words = [*name.split(), *right, *BESIDE.get((name, flag), ())]
    line = convoy_command.refused(*words, f"{flag}={value}")
    assert line.startswith(f"convoy: {flag}"), line
    assert line.removeprefix(f"convoy: {flag}")[0] in ": ", line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", *RIGHT["run"], "--dtype", "fp16"), "--dtype: got 'fp16', expected the plan's, fp32"),
        (("train", *RIGHT["train"], "--stock", "--plan", "good.plan.json"), "expected nothing with --stock"),
        (("train", *RIGHT["train"], "--stock", "--save-plan", "new.plan.json"), "expected nothing with --stock"),
    ],
)
def test_options_that_contradict_each_other(
    convoy_command: commands.Command, words: tuple[str, ...], says: str
) -> None:
    assert says in convoy_command.refused(*words)


FORMER = [(name, former, new) for name, renamed in RENAMED.items() for former, new in renamed.items()]


@pytest.mark.parametrize(("name", "former", "new"), FORMER)
def test_a_former_name_is_named_as_typed(convoy_command: commands.Command, name: str, former: str, new: str) -> None:
    done = convoy_command(*name.split(), *RIGHT[name], former, NUMBERS.get(new) or TEXTS[new])
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith(f"convoy: {former}: got ")


@pytest.mark.parametrize("words", [("-oabsent/out",), ("-o", "absent/out")])
def test_a_short_name_is_named_as_typed(convoy_command: commands.Command, words: tuple[str, ...]) -> None:
    assert convoy_command.refused("report", "run.json", *words).startswith("convoy: -o: got 'absent/out'")


@pytest.mark.parametrize("words", [("layers", *SMALL), ("optimize", *SMALL, "--effort", "none"), ("db", "info")])
def test_the_variable_is_named_where_it_gave_the_value(
    convoy_command: commands.Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CONVOY_DB", ".")
    if words[0] == "layers":  # it has no database
        assert convoy_command(*words).code == 0
    else:
        assert convoy_command.refused(*words).startswith("convoy: CONVOY_DB: got '.'")


@pytest.mark.parametrize("name", ["", "db", *COMMANDS])
def test_every_command_has_a_short_option_for_help(convoy_command: commands.Command, name: str) -> None:
    short = convoy_command.works(*name.split(), "-h")
    assert short.startswith(" ".join(["Usage: convoy", *name.split()]))
    assert short == convoy_command.works(*name.split(), "--help")
    assert "..." not in short.partition("Commands:")[2], "a line of the list of commands is cut"


def error(argument: str, value: object = "v", kind: type[InputError] = InputError) -> InputError:
    return kind(argument, value, "another")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (error("images"), "--images"),  # a flag's name goes before a parameter's: `images` is --input there
        (error("input"), "--input"),
        (error("model"), "MODEL"),
        (error("plan.target", kind=PlanError), "plan.target"),  # the command has no plan
        (error("weights.safetensors: head", 3), "--weights weights.safetensors: head"),
        (error("file weights.safetensors", 3), "--weights weights.safetensors"),
        (error("report other.json", 3), "report other.json"),  # of another file
        (error("file", "weights.safetensors"), "--weights"),
        (error("nothing of it", "nor this"), "nothing of it"),
    ],
)
def test_what_an_error_names_is_found_among_the_options(given: InputError, named: str) -> None:
    names = FlagNames(COMMANDS["sparsity"].params, ["net", "--weights", "weights.safetensors"], {})
    found = names.renamed(given, {"model": "net", "weights": "weights.safetensors", "limit": None})
    assert found.argument == named
    assert (found.value, found.expected) == (given.value, given.expected)


def test_a_field_of_a_plan_is_named_behind_the_option_that_gave_the_plan() -> None:
    names = FlagNames(COMMANDS["run"].params, ["net", "--plan", "p.json"], {})
    for argument, named in (("plan.target", "--plan (target)"), ("steps[0].problem", "--plan (steps[0].problem)")):
        assert names.renamed(error(argument, kind=PlanError), {"plan": Path("p.json")}).argument == named


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory_budget_bytes: 9 bytes are too few", "--memory-budget: 9 bytes are too few"),  # as it was typed
        ("Leave `deterministic` out, or `only_engines`.", "Leave `--deterministic` out, or `--only-engines`."),
        ("the best candidates need 9 bytes", "the best candidates need 9 bytes"),
        ("`nothing`: of this", "`nothing`: of this"),
    ],
)
def test_settings_that_a_message_names_are_options(text: str, expected: str) -> None:
    names = FlagNames(COMMANDS["optimize"].params, ["net", "--memory-budget", "9"], RENAMED["optimize"])
    assert names.in_text(text) == expected


def test_a_budget_that_no_choice_keeps_names_its_option(convoy_command: commands.Command) -> None:
    words = (*SMALL, "--device", "cpu", "--effort", "none", "--memory-budget-bytes", "1KiB")
    assert convoy_command.refused("optimize", *words).startswith(
        "convoy: --memory-budget-bytes: 1024 bytes are too few"
    )


def test_a_value_that_is_not_there_reads_nothing() -> None:
    names = FlagNames(COMMANDS["prune"].params, ["net"], {})
    assert str(names.renamed(error("sparsity", None), {})) == "--sparsity: got nothing, expected another."
