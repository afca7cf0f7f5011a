"""Bad input, one case after the other: one clear line, exit code 2, and no file is written or changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from convoy.cli.output import files as output_files
from convoy.engines.manifest import MANIFEST
from convoy.pipeline.check import end_to_end
from convoy.target import Target
from tests.e2e.command import Command

MINE = {"--plan": "mine.plan.json", "--report": "mine.html", "--json": "mine.json"}
OUTPUTS = tuple(word for pair in MINE.items() for word in pair)
LINEAR = "linear:n1c2k3:fp32:as_torch:none"
SMALL = ("net.py:small", "--trust", "--size", "16")


@pytest.fixture(autouse=True)
def _things_that_are_wrong(folder: Path) -> None:
    (folder / "no_image.png").write_text("not an image", encoding="utf-8")
    (folder / "noise.pt2").write_bytes(b"noise")
    (folder / "noise.plan.json").write_bytes(b"\xff\x00 not JSON")
    (folder / "noise.safetensors").write_bytes(b"noise")
    (folder / "pickled.pth").write_bytes(b"noise")
    (folder / "raises.py").write_text("raise RuntimeError('a bad day')\n", encoding="utf-8")
    (folder / "empty").mkdir(exist_ok=True)
    save_file({"first.weight": torch.zeros(8, 3, 3, 3)}, folder / "few.safetensors")
    for file in MINE.values():
        (folder / file).write_text("mine", encoding="utf-8")


@pytest.fixture(autouse=True)
def _nothing_is_overwritten(folder: Path, _things_that_are_wrong: None) -> Iterator[None]:
    before = {path: path.read_bytes() for path in files(folder)}
    yield
    assert {path: path.read_bytes() for path in files(folder)} == before


def files(folder: Path) -> list[Path]:
    """All files but those that a working run leaves too: the database, peak rates beside it, and Python's caches."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc" and path.name != PLAN)
    return [p for p in found if not (p.name.startswith("perf.db") or p.name.endswith(".peaks.json"))]


PLAN = "good.plan.json"


@pytest.fixture
def plan(convoy_command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan of net.py:small that has steps, whatever the clock says."""
    path = folder / PLAN
    if not path.exists():
        with monkeypatch.context() as patch:
            patch.setattr(end_to_end, "is_faster", lambda *_: True)
            convoy_command.works("optimize", *SMALL, "--only-engines", "onednn", "--plan", path)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nobody_net",), "MODEL: got 'nobody_net', expected a torchvision name"),
        (("alexnett",), "Did you mean alexnet?"),
        (("timm:nobody",), "MODEL: got 'timm:nobody'"),
        (("absent.py:small",), "MODEL: got 'absent.py', expected a Python file that is there"),
        (("net.py",), "path/to/file.py:factory"),
        (
            (
                "net.py:nobody",
                "--trust",
            ),
            "It has: Small, Other, small, other, fixed, fails, words.",
        ),
        (
            (
                "net.py:fails",
                "--trust",
            ),
            "RuntimeError: no such luck and a second line",
        ),
        (
            (
                "net.py:words",
                "--trust",
            ),
            "a factory of an nn.Module, not of a str",
        ),
        (
            (
                "raises.py:small",
                "--trust",
            ),
            "a bad day",
        ),
        (("absent.pt2",), "a .pt2 file that is there"),
        (("noise.pt2",), "torch.export.save"),
        (("net.py:small", "--trust", "--input", "no_image.png"), "--input: got 'no_image.png', expected an image"),
        (("net.py:small", "--trust", "--input", "absent.png"), "--input: got 'absent.png'"),
        (("net.py:small", "--trust", "--input", "empty"), "a folder with images in it"),
        ((*SMALL, "--batch", "0"), "--batch: got 0"),
        (("net.py:small", "--trust", "--size", "-3"), "--size: got '-3'"),
        ((*SMALL, "--dtype", "fp8"), "--dtype: got 'fp8', expected one of bf16, fp16, fp32"),
        ((*SMALL, "--device", "tpu"), "--device: got 'tpu', expected one of cpu, cuda"),
        (
            (*SMALL, "--memory-budget-bytes", "lots"),
            "--memory-budget-bytes: got 'lots', expected a size such as 256MiB",
        ),
        ((*SMALL, "--memory-budget-bytes", "-1"), "--memory-budget-bytes: got '-1'"),
        (
            (*SMALL, "--tuning-memory-bytes", "much"),
            "--tuning-memory-bytes: got 'much', expected a size such as 256MiB",
        ),
        ((*SMALL, "--only-engines", "nobody"), f"--only-engines: got 'nobody', expected one of {len(MANIFEST)} names"),
        ((*SMALL, "--numerics", "loose"), "--numerics: got 'loose', expected one of strict, as_torch, half"),
        ((*SMALL, "--effort", "heroic"), "--effort: got 'heroic', expected one of none, quick, full"),
        ((*SMALL, "--solver", "magic"), "--solver: got 'magic', expected one of exact, greedy, single, baseline"),
        ((*SMALL, "--layout", "blocked"), "--layout: got 'blocked', expected one of auto, nchw, nhwc"),
        ((*SMALL, "--weights", "absent.safetensors"), "--weights: got 'absent.safetensors'"),
        ((*SMALL, "--weights", "noise.safetensors"), "a whole .safetensors file"),
        ((*SMALL, "--weights", "pickled.pth"), "DEFAULT, a .safetensors file"),
        ((*SMALL, "--weights", "few.safetensors"), "5 missing: first.bias, second.weight, second.bias, ..."),
        ((*SMALL, "--weights", "DEFAULT"), "weights come from a .safetensors file"),
        ((*SMALL, "--db", "empty"), "--db: got 'empty', expected the path of a database file"),
    ],
)
def test_optimize_refuses(convoy_command: Command, words: tuple[str, ...], expected: str) -> None:
    assert expected in convoy_command.refused("optimize", *words, *OUTPUTS)


@pytest.mark.parametrize("option", MINE)
@pytest.mark.parametrize("path", ["absent/out", "empty", "mine.json/out"])
def test_optimize_refuses_an_output_that_has_no_folder_or_is_one(
    convoy_command: Command, option: str, path: str
) -> None:
    line = convoy_command.refused("optimize", *SMALL, option, path)
    assert f"{option}: got '{path}', expected a file in a folder that exists" in line


def test_optimize_refuses_one_file_for_two_outputs(convoy_command: Command) -> None:
    line = convoy_command.refused("optimize", *SMALL, "--plan", "mine.json", "--json", "./empty/../mine.json")
    assert "expected another file than --plan names" in line


def test_optimize_refuses_a_folder_that_may_not_be_written(
    convoy_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        output_files, "os", SimpleNamespace(access=lambda path, mode: False, W_OK=os.W_OK, path=os.path)
    )
    assert "may be written to" in convoy_command.refused("optimize", *SMALL, "--plan", "mine.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("command", ["optimize", "run", "engines"])
def test_cuda_where_there_is_none(convoy_command: Command, plan: Path, command: str) -> None:
    words = {"optimize": (*SMALL, *OUTPUTS), "run": (*SMALL, "--plan", plan), "engines": ("--problem", LINEAR)}
    line = convoy_command.refused(command, *words[command], "--device", "cuda")
    assert "cuda" in line.lower()
    if command != "engines":
        assert "--device: got 'cuda'" in line


def test_a_dtype_that_the_device_lacks(convoy_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Target("cuda", "NVIDIA T4", "sm_75", 40, 16 << 30, 4 << 20)
    monkeypatch.setattr("convoy.measurement.detect_target", lambda device: old)
    line = convoy_command.refused("optimize", *SMALL, "--device", "cuda", "--dtype", "bf16", *OUTPUTS)
    assert "--dtype: got 'bf16', expected a dtype that NVIDIA T4 (sm_75) has. Use fp16 or fp32." in line


def test_a_budget_too_small_says_what_would_do(convoy_command: Command, plan: Path) -> None:
    budget = ("--only-engines", "onednn", "--memory-budget-bytes", "1KiB")
    assert "at least" in convoy_command.refused("optimize", *SMALL, *budget, *OUTPUTS)


def test_a_single_engine_must_be_named(convoy_command: Command, plan: Path) -> None:
    line = convoy_command.refused("optimize", *SMALL, "--effort", "none", "--solver", "single", *OUTPUTS)
    assert "exactly one engine id" in line


@pytest.mark.parametrize("words", [("net.py:fixed", "--size", "20", "--trust"), ("alexnet", "--size", "16")])
@pytest.mark.parametrize("command", ["optimize", "layers", "run"])
def test_a_shape_that_does_not_fit(convoy_command: Command, plan: Path, command: str, words: tuple[str, ...]) -> None:
    more = {"optimize": OUTPUTS, "layers": (), "run": ("--plan", plan)}
    line = convoy_command.refused(command, *words, *more[command])
    size = words[2]
    assert (
        f"--size: got '1x3x{size}x{size}', expected a shape that the model takes. The model says: RuntimeError: "
        in line
    )


@pytest.mark.parametrize("model", ["alexnet", "timm:resnet18"])
def test_default_weights_without_a_network(
    convoy_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens on the discard port
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    line = convoy_command.refused("optimize", model, "--weights", "DEFAULT", *OUTPUTS)
    assert "--weights: got 'DEFAULT', expected weights that can be downloaded or are in the cache already" in line


# Plans


def changed(plan: Path, **fields: object) -> dict[str, object]:
    return {**json.loads(plan.read_text(encoding="utf-8")), **fields}


def test_a_plan_that_fits_runs(convoy_command: Command, plan: Path) -> None:
    assert json.loads(plan.read_text(encoding="utf-8"))["steps"]
    assert "largest output" in convoy_command.works("run", *SMALL, "--plan", plan)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("net.py:other", "--trust", "--size", "16"), "plan of this model"),
        (("net.py:small", "--trust", "--size", "24"), "--plan (inputs)"),
        ((*SMALL, "--batch", "3"), "--plan (inputs)"),
        ((*SMALL, "--dtype", "bf16"), "plan"),
        ((*SMALL, "--input", "no_image.png"), "--input: got 'no_image.png'"),
        ((*SMALL, "--weights", "few.safetensors"), "5 missing"),
    ],
)
def test_run_refuses_what_the_plan_was_not_made_for(
    convoy_command: Command, plan: Path, words: tuple[str, ...], expected: str
) -> None:
    done = convoy_command("run", *words, "--plan", plan)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err.splitlines()[-1]  # each image that cannot be read has a line of its own


def test_a_plan_of_another_target(convoy_command: Command, plan: Path, tmp_path: Path) -> None:
    target = {**json.loads(plan.read_text(encoding="utf-8"))["target"], "digest": "0" * 16}
    (tmp_path / "p.json").write_text(json.dumps(changed(plan, target=target)), encoding="utf-8")
    assert "--plan (target): got" in convoy_command.refused("run", *SMALL, "--plan", tmp_path / "p.json")


def test_a_plan_of_another_version(convoy_command: Command, plan: Path, tmp_path: Path) -> None:
    data = changed(plan)
    (field,) = [name for name in data if "version" in name]
    (tmp_path / "p.json").write_text(json.dumps({**data, field: 999}), encoding="utf-8")
    for command in (("run", *SMALL, "--plan"), ("explain",)):
        assert "999" in convoy_command.refused(*command, tmp_path / "p.json")


@pytest.mark.parametrize("file", ["noise.plan.json", "mine.plan.json", "absent.plan.json", "empty"])
def test_a_plan_that_is_none(convoy_command: Command, file: str) -> None:
    for command in (("run", *SMALL, "--plan"), ("explain",)):
        assert file in convoy_command.refused(*command, file)


def test_explain_names_the_layers_that_there_are(convoy_command: Command, plan: Path) -> None:
    assert "first" in convoy_command.refused("explain", plan, "nobody")
    assert "absent.json" in convoy_command.refused("explain", plan, "--compare", "absent.json")


# Engines of the user's own


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("x", "id=module:Class"),
        ("x=tests.e2e.planted", "id=module:Class"),
        ("=tests.e2e.planted:Wrong", "id=module:Class"),
        ("x=no_such_module:X", "No module named 'no_such_module'"),
        ("x=tests.e2e.planted:Absent", "has no attribute 'Absent'"),
        ("x=raises:X", "a bad day"),
        ("x=json:JSONDecoder", "an Engine at json:JSONDecoder, not a JSONDecoder"),
        ("x=json:loads", "an Engine at json:loads, not a function"),
        ("x=tests.e2e.planted:Wrong", "'planted.wrong'"),
        ("x=:", "CONVOY_ENGINES: got 'x=:', expected entries of the form id=module:Class"),
        ("x=json:loads,x=json:dumps", "expected each id once. Repeated: x."),
    ],
)
def test_a_bad_engine_in_the_environment(
    convoy_command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str, expected: str
) -> None:
    monkeypatch.setenv("CONVOY_ENGINES", entry)
    monkeypatch.syspath_prepend(str(folder))
    for words in (("engines",), ("optimize", *SMALL, *OUTPUTS)):
        assert expected in convoy_command.refused(*words)


def test_an_engine_of_the_users_own_is_listed(convoy_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_ENGINES", "planted.wrong=tests.e2e.planted:Wrong")
    assert "planted.wrong" in convoy_command.works("engines")
    assert "loaded from tests.e2e.planted:Wrong" in convoy_command.works("doctor")


def test_doctor_tells_of_an_engine_that_cannot_be_loaded(
    convoy_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVOY_ENGINES", "mine=no_such_module:X")
    assert "engine mine" in convoy_command.works("doctor")
    assert "no_such_module" in convoy_command.works("doctor")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("engines", "--problem", "conv:what"), "problem"),
        (("layers", "nobody_net"), "nobody_net"),
        (("layers", "net.py:small", "--trust", "--dtype", "fp8"), "dtype"),
    ],
)
def test_the_other_commands_refuse(convoy_command: Command, words: tuple[str, ...], expected: str) -> None:
    assert expected in convoy_command.refused(*words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("optimize",), "MODEL is missing: "),
        (("optimize", "alexnet", "--sise", "3"), "--sise: `convoy optimize` has no such option. Did you mean --size"),
        (("optimize", "alexnet", "vgg16"), "vgg16: `convoy optimize` takes no such word. "),
        (("optimize", "alexnet", "--batch"), "--batch: got nothing, expected an integer."),
        (("optimize", "alexnet", "--trust=yes"), "--trust: got 'yes', expected no value."),
        (("export", "alexnet"), "--out is missing: "),
        (("optimise", "alexnet"), "optimise: no command of `convoy`. Did you mean optimize? `convoy --help` lists "),
        (("db", "infos"), "infos: no command of `convoy db`. Did you mean info? "),
        (("--speed",), "--speed: `convoy` has no such option. "),
    ],
)
def test_a_slip_in_the_words_themselves(convoy_command: Command, words: tuple[str, ...], expected: str) -> None:
    done = convoy_command(*words)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    (line,) = done.err.splitlines()
    assert line.startswith(f"convoy: {expected}")


def test_a_folder_that_may_not_be_written_is_an_output_that_is_refused(
    convoy_command: Command, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes = Path.write_bytes

    def no_room_for_outputs(path: Path, data: bytes) -> int:
        if path.suffix == ".so":  # an engine's library on its way into the cache
            return write_bytes(path, data)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_room_for_outputs)
    done = convoy_command("optimize", *SMALL, "--effort", "none", *OUTPUTS)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "No space left on device" in line
