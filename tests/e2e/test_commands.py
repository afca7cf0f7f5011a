"""The commands' output when all goes well, on one small net; and docs/reference/json.md against the output of `--json`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from convoy.engines.manifest import MANIFEST
from convoy.measurement import detect_target
from convoy.measurement.scenarios.load_test import BatchTime, LoadTest
from convoy.measurement.scenarios.scenarios import Latencies
from convoy.perfdb import Status
from convoy.pipeline.check import end_to_end
from convoy.plan import load as load_plan
from convoy.zoo import load_model
from tests.e2e.command import Command, summary

SMALL = ("net.py:small", "--trust", "--size", "16", "--device", "cpu")
ONE = ("--only-engines", "onednn")
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text(encoding="utf-8")


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that was chosen is kept, whatever the clock says."""
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)


# optimize


@pytest.mark.parametrize(("dtype", "most"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision(convoy_command: Command, folder: Path, always_faster: None, dtype: str, most: float) -> None:
    outputs = ("--plan", f"{dtype}.plan.json", "--json", f"{dtype}.json")
    convoy_command.works("optimize", *SMALL, *ONE, "--dtype", dtype, *outputs)
    found = summary(folder / f"{dtype}.json")
    assert found["dtype"] == dtype
    assert found["inputs"] == [f"{dtype}[1,3,16,16]"]
    assert found["rel_l2_error"] < most
    assert all(dtype in layer["problem"] for layer in found["layers"] if layer["problem"].startswith("conv"))
    ran = convoy_command.works("run", *SMALL, "--plan", f"{dtype}.plan.json")  # in the plan's dtype
    assert "largest output" in ran
    words = ("run", *SMALL, "--plan", f"{dtype}.plan.json", "--dtype", "fp32")
    assert f"--dtype: got 'fp32', expected the plan's, {dtype}" in convoy_command.refused(*words)


@pytest.mark.parametrize("numerics", ["strict", "as_torch", "half"])
def test_numerics_are_honoured_and_named(convoy_command: Command, folder: Path, numerics: str) -> None:
    convoy_command.works("optimize", *SMALL, *ONE, "--numerics", numerics, "--json", "numerics.json")
    found = summary(folder / "numerics.json")
    assert found["numerics"] == numerics
    assert any(f":{numerics}" in layer["problem"] for layer in found["layers"])
    assert found["rel_l2_error"] < (1e-2 if numerics == "half" else 1e-6)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_one_layout_alone(convoy_command: Command, folder: Path, layout: str) -> None:
    convoy_command.works("optimize", *SMALL, *ONE, "--layout", layout, "--json", "layout.json")
    layouts = {layer["layout"] for layer in summary(folder / "layout.json")["layers"]}
    assert layouts <= ({"nchw", "any"} if layout == "nchw" else {"nchw", "nhwc", "any"})


@pytest.mark.parametrize("solver", ["exact", "greedy", "single", "baseline"])
def test_solvers(convoy_command: Command, folder: Path, solver: str) -> None:
    out = convoy_command.works("optimize", *SMALL, *ONE, "--solver", solver, "--json", "solver.json")
    found = summary(folder / "solver.json")["selection"]
    name = {"single": "single:onednn"}.get(solver, solver)
    assert found["solver"] == name
    totals = {s["strategy"]: s["total_us"] for s in found["strategies"]}
    assert totals[name] == pytest.approx(found["total_us"])
    assert {"baseline", "greedy"} <= set(totals)
    assert f"chosen by {name}" in out


def test_effort_none_measures_nothing(convoy_command: Command, folder: Path) -> None:
    convoy_command.works("optimize", *SMALL, *ONE, "--json", "first.json")
    convoy_command.works("optimize", *SMALL, *ONE, "--effort", "none", "--json", "none.json")
    assert summary(folder / "none.json")["tuning"]["measured"] == 0


def test_the_profile_is_a_table_and_a_trace(convoy_command: Command, folder: Path) -> None:
    # In a database of its own: with a stored plan, nothing is chosen.
    arguments = ("--effort", "none", "--profile", "tuning.json", "--db", "profiled.db")
    done = convoy_command("optimize", *SMALL, *ONE, *arguments)
    assert done.code == 0
    assert re.search(r"^phase +seconds +share +runs$", done.err, re.MULTILINE)
    events = json.loads((folder / "tuning.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {"capture", "spaces", "select", "build", "check"} <= {event["name"] for event in spans}
    builds = [event["args"]["engine"] for event in spans if event["name"] == "build"]
    assert builds
    assert all(builds)


def test_a_budget_that_fits_is_kept(convoy_command: Command, folder: Path) -> None:
    convoy_command.works("optimize", *SMALL, *ONE, "--memory-budget-bytes", "1MiB", "--json", "budget.json")
    assert summary(folder / "budget.json")["memory"]["peak_bytes"] <= 1 << 20


def test_deterministic(convoy_command: Command, folder: Path) -> None:
    convoy_command.works("optimize", *SMALL, *ONE, "--deterministic", "--json", "deterministic.json")
    assert summary(folder / "deterministic.json")["rel_l2_error"] < 1e-6


def test_photographs_and_weights(convoy_command: Command, folder: Path, always_faster: None) -> None:
    (folder / "photographs").mkdir(exist_ok=True)
    for index in range(3):
        noise = np.random.default_rng(index).integers(0, 255, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "photographs" / f"{index}.png")
    state = load_model(f"{folder / 'net.py'}:small", trust=True).state_dict()
    save_file({name: t * 2 for name, t in state.items()}, folder / "double.safetensors")
    words = (*SMALL, "--input", "photographs", "--weights", "double.safetensors", "--plan", "photographs.plan.json")
    convoy_command.works("optimize", *words, *ONE, "--json", "photographs.json")
    assert summary(folder / "photographs.json")["batch"] == 3
    ran = convoy_command.works("run", *words).splitlines()
    assert [line.split("  ")[0] for line in ran[:3]] == [f"photographs/{index}.png" for index in range(3)]
    assert "accuracy" not in "".join(ran)
    assert ran[-1] == "PyTorch and Convoy give the same class for 3 of 3 images"
    page = documented("convoy run")
    found = json.loads(convoy_command.works("run", *words, "--json"))
    assert set(found) == page[""]
    assert fields(found["latencies"]) == page["latencies"]
    assert fields(found["images"]) == page["images"]
    assert (found["same_class"], found["labelled"], found["outputs"]) == (3, 0, [])
    found = json.loads(convoy_command.works("run", *SMALL, *words[-4:], "--json"))
    assert (fields(found["outputs"]), found["images"]) == (page["outputs"], [])


def test_a_saved_program_is_optimised(
    convoy_command: Command, folder: Path, always_faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(f"{folder / 'net.py'}:small", trust=True)
    torch.export.save(torch.export.export(model, (torch.randn(2, 3, 16, 16),)), str(folder / "net.pt2"))
    words = ("net.pt2", "--device", "cpu", "--plan", "program.plan.json")
    convoy_command.works("optimize", *words, *ONE, "--json", "program.json")
    found = summary(folder / "program.json")
    assert found["inputs"] == ["fp32[2,3,16,16]"]
    assert found["rel_l2_error"] < 1e-6
    assert convoy_command.works("run", *words).count("largest output") == 2
    line = convoy_command.refused("optimize", "net.pt2", "--size", "24")
    assert "--size: got '24x24', expected 16x16, as in the model's own example inputs" in line


def test_a_saved_program_keeps_its_dtype(convoy_command: Command, folder: Path) -> None:
    model = load_model(f"{folder / 'net.py'}:small", dtype="bf16", trust=True)
    example = torch.randn(1, 3, 16, 16, dtype=torch.bfloat16)
    torch.export.save(torch.export.export(model, (example,)), str(folder / "half.pt2"))
    assert "bf16[1,3,16,16]" in convoy_command.works("layers", "half.pt2")
    assert "random numbers" in convoy_command.works("sparsity", "half.pt2")
    line = convoy_command.refused("layers", "half.pt2", "--dtype", "fp32")
    assert "--dtype: got 'fp32', expected bf16" in line


def test_the_plan_of_a_sequential_model_can_be_loaded(convoy_command: Command, always_faster: None) -> None:
    words = ("net.py:fixed", "--trust", "--size", "16", "--device", "cpu", "--plan", "sequential.plan.json")
    convoy_command.works("optimize", *words, *ONE)
    assert "largest output" in convoy_command.works("run", *words)


# explain, layers, engines, doctor


@pytest.fixture
def plans(convoy_command: Command, folder: Path, always_faster: None) -> tuple[Path, Path]:
    """Two plans of one net: chosen, and what PyTorch does."""
    paths = folder / "chosen.plan.json", folder / "stock.plan.json"
    for path, words in zip(paths, (ONE, ("--solver", "baseline", *ONE)), strict=True):
        convoy_command.works("optimize", *SMALL, *words, "--plan", path)
    return paths


def test_explain(convoy_command: Command, plans: tuple[Path, Path]) -> None:
    text = convoy_command.works("explain", plans[0])
    for step in load_plan(plans[0]).steps:
        assert step.config.engine in text
    layer = convoy_command.works("explain", plans[0], "second")
    assert "conv:fprop:n1c8h16w16k6" in layer


def test_explain_compares(convoy_command: Command, plans: tuple[Path, Path]) -> None:
    assert convoy_command.works("explain", plans[0], "--compare", plans[0]) == "the plans run the same\n"
    text = convoy_command.works("explain", plans[0], "--compare", plans[1])
    chosen = {step.config.engine for step in load_plan(plans[0]).steps}
    assert ("onednn" in text) == ("onednn" in chosen)
    assert text != "the plans run the same\n"


def test_keys_of_layers_are_problems_of_engines(convoy_command: Command) -> None:
    keys = convoy_command.works("layers", "net.py:small", "--trust", "--size", "16", "--keys").split()
    assert len(keys) == 3
    for key in keys:
        lines = convoy_command.works("engines", "--problem", key, "--device", "cpu").splitlines()
        for engine in MANIFEST:
            (line,) = [line.split() for line in lines if line.split()[:1] == [engine]]
            assert line[1] in ("yes", "no")
            assert len(line) > 2, "a no without a reason, or a yes without settings"
    assert [line.split()[1] for line in lines if line.split()[:1] == ["aten"]] == ["yes"]


def test_layers_count_operations(convoy_command: Command) -> None:
    out = convoy_command.works("layers", "net.py:small", "--trust", "--size", "16", "--batch", "2")
    first = 2 * 2 * 16 * 16 * 8 * 3 * 9 / 1e6
    assert re.search(rf"first .* {first:.1f} ", out)
    assert "3 layers" in out


def test_engines_lists_all(convoy_command: Command) -> None:
    out = convoy_command.works("engines")
    assert all(re.search(rf"^ *{re.escape(engine)} ", out, re.MULTILINE) for engine in MANIFEST)


def test_doctor_names_packages_and_engines(convoy_command: Command) -> None:
    out = convoy_command.works("doctor")
    for word in ("torch", "C++ compiler", "oneDNN", detect_target("cpu").name.split()[0]):
        assert word in out
    assert "missing: " in out or "nothing is missing" in out
    assert "engines that work here" in out
    assert "engine aten" not in out
    assert "engine aten" in convoy_command.works("doctor", "--all")


def test_version(convoy_command: Command) -> None:
    assert re.fullmatch(r"\d+\.\d+\S*\n", convoy_command.works("--version"))


# docs/reference/json.md


def documented(command: str) -> dict[str, set[str]]:
    """By place (`` for the top, `layers[]`, ...): the fields that docs/reference/json.md lists there for a command."""
    found: dict[str, set[str]] = {"": set()}
    section = PAGE.partition(f"## {command}\n")[2].partition("\n## ")[0]
    for names, content in re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE):
        inner = re.findall(r"`(\w+)`", content)
        for path in re.findall(r"`([\w\[\].]+)`", names):
            place, _, name = path.rpartition(".")
            if not place:
                found[""].add(name)
            if place or "a list of" in content or inner:
                key = path if place else f"{name}"
                found[key] = set(inner)
    return found


def fields(data: list[Any] | dict[str, Any]) -> set[str]:
    """The fields of an object, or of every object of a list, which must all have the same."""
    if isinstance(data, dict):
        return set(data)
    (names,) = {frozenset(item) for item in data}
    return set(names)


def test_every_field_is_documented_and_every_documented_field_is_there(convoy_command: Command, folder: Path) -> None:
    convoy_command.works(
        "optimize", *SMALL, "--only-engines", "onednn", "--only-engines", "gemm", "--json", "fields.json"
    )
    found, page = summary(folder / "fields.json"), documented("convoy optimize")
    assert set(found) == page[""]
    for name in ("baseline", "optimized", "tuning", "memory"):
        assert fields(found[name]) == page[name]
    assert fields(found["selection"]) | fields(found["selection"]["strategies"]) == page["selection"]
    assert fields(found["layers"]) == page["layers"]
    candidates = [c for layer in found["layers"] for c in layer["candidates"]]
    assert fields(candidates) == page["layers[].candidates"]
    (target,) = re.findall(r"^\| `target` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(target.split(", ")) == set(found["target"])
    assert page["peaks"] <= set(found["peaks"]) | {"flops_DTYPE"}
    assert all(name == "bytes_per_s" or name.startswith("flops_") for name in found["peaks"])


def test_every_field_of_a_load_test_is_documented() -> None:
    page = documented("convoy bench")
    assert {field.name for field in dataclasses.fields(LoadTest)} == page[""]
    assert page["batches"] == {field.name for field in dataclasses.fields(BatchTime)}
    assert page["single_stream"] == {field.name for field in dataclasses.fields(Latencies)}


def test_the_values_are_what_the_page_says(convoy_command: Command, folder: Path) -> None:
    convoy_command.works("optimize", *SMALL, *ONE, "--json", "values.json")
    found = summary(folder / "values.json")
    assert found["schema"] == 1
    assert f"| `schema` | {found['schema']} |" in PAGE
    assert found["speedup"] == pytest.approx(found["baseline"]["median_ms"] / found["optimized"]["median_ms"])
    assert found["batch"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert {"convoy", "protocol", "torch"} <= set(found["versions"])
    assert found["selection"]["bound_us"] <= found["selection"]["total_us"] * (1 + 1e-9)
    words = {str(status) for status in Status}
    for layer in found["layers"]:
        assert layer["median_us"] > 0
        for candidate in layer["candidates"]:
            assert candidate["status"] in words
            assert (candidate["status"] == "ok") == (candidate["median_us"] > 0)
            assert candidate["status"] == "ok" or candidate["reason"]
    json.dumps(found, allow_nan=False)
