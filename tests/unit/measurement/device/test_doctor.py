import compileall
import functools

import pytest
import torch
from torch import nn

from convoy.engines.cpu.bf16 import cpu_direct_bf16
from convoy.engines.cpu.bf16.bf16_units import UNITS
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.measurement import detect_target
from convoy.measurement.device import detect, doctor
from convoy.measurement.device.doctor import Finding, engine_findings, findings
from convoy.measurement.device.engine_availability import CAPABLE_GPU, EngineAvailability, engine_availability, summary
from convoy.measurement.device.sample_problems import sample_problems, samples_for
from convoy.measurement.engine_space import query_engine
from convoy.measurement.reference_data import ReferenceData
from convoy.pipeline.net import capture_net
from convoy.settings import Settings

ON_DEVICE_ALONE = {"cudnn"}
"""Engines that ask their library for its plans, which needs the device itself."""


def by_name():
    return {finding.what: finding for finding in findings()}


@functools.cache
def engines():
    return {finding.what: finding for finding in engine_findings(every=True)}


def test_devices_packages_and_every_engine_are_listed():
    found = by_name()
    assert found["CPU"].ok
    assert detect_target("cpu").digest in found["CPU"].means
    assert found["torch"] == Finding("torch", detect.installed("torch"), "needed for everything", ok=True)
    assert list(engines()) == [f"engine {engine}" for engine in MANIFEST]
    assert "works on cpu" in engines()["engine aten"].found
    assert all(finding.means and finding.found for finding in (*found.values(), *engines().values()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_engines_say_what_they_need():
    found = by_name()
    assert not found["GPU"].ok
    assert found["GPU"].found.startswith("none: torch ")
    kernel = engines()["engine triton.implicit_gemm"]
    assert not kernel.ok
    assert "CUDA" in kernel.means


def test_what_is_missing_is_missed_only_where_it_is_needed(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: "")
    monkeypatch.setattr(doctor, "compiler_version", lambda: "")
    found = by_name()
    assert not found["highspy"].ok
    assert found["highspy"].found == "not installed"
    assert not found["C++ compiler"].ok
    assert found["nvidia-cudnn-frontend"].ok is (not torch.cuda.is_available())


def test_an_engine_that_cannot_be_loaded_says_why(monkeypatch):
    monkeypatch.setitem(MANIFEST, "ghost", "convoy.engines.no_such_module")
    (ghost,) = (one for one in engine_availability([detect_target("cpu")]) if one.engine == "ghost")
    assert not ghost.devices
    assert "ModuleNotFoundError" in ghost.reason


def test_sample_problems_are_whole():
    problems = sample_problems()
    assert len({problem.key for problem in problems}) == len(problems)
    ReferenceData(problems[-1], detect_target("cpu")).fill()


@pytest.mark.parametrize("engine", [name for name in MANIFEST if name not in ON_DEVICE_ALONE])
def test_every_engine_is_asked_about_a_problem_that_it_supports(engine, monkeypatch):
    """On the machine at hand as if its CPU had AMX, or on a GPU that supports all engines for GPUs."""
    monkeypatch.setattr(cpu_direct_bf16, "bf16_units", lambda: (UNITS, ""))
    instance = load_engine(engine)
    targets = (detect_target("cpu"), CAPABLE_GPU)
    assert any(query_engine(instance, problem, target)[0] for target in targets for problem in samples_for(instance))


class _Kinds(nn.Module):
    """Every kind of region: convolutions dense, depthwise and pruned, pooling, concatenation, channel scale, linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.pruned = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(32, 5)
        with torch.no_grad():
            self.pruned.weight[:, 4:] = 0

    def forward(self, x):
        x = torch.relu(self.first(x))
        both = torch.cat([self.pruned(x), self.depthwise(x)], 1)
        both = both * both.mean((2, 3), keepdim=True).sigmoid()
        return self.last(nn.functional.max_pool2d(both, 2).mean((2, 3)))


def test_no_engine_that_a_plan_may_use_is_said_not_to_work():
    target, settings = detect_target("cpu"), Settings()
    net = capture_net("kinds", _Kinds().eval(), (torch.zeros(1, 3, 16, 16),), {}, settings, target)
    problems = {problem.key: problem for region in net.regions for problem in region.problems}.values()
    used = {name for name in MANIFEST if any(query_engine(load_engine(name), p, target)[0] for p in problems)}
    works = {one.engine for one in engine_availability([target]) if "cpu" in one.devices}
    assert {"cpu.pooling", "cpu.concat", "cpu.scale", "pruned.channels", "cpu.direct"} & works <= used, (
        "the net is too plain"
    )
    assert used <= works


def test_three_lines_say_how_many_engines_work_and_what_the_others_lack():
    found = [
        EngineAvailability("a", "direct", ("cpu",)),
        EngineAvailability("b", "direct", ("cpu", "cuda")),
        EngineAvailability("c", "direct", (), "needs an NVIDIA GPU, got cpu"),
        EngineAvailability("d", "direct", (), "needs a C compiler, got none"),
    ]
    works, gpu, lacking = summary(found)
    assert works == ("engines that work here", "2 of 4", "2 on cpu, 1 on cuda", True)
    assert gpu[1] == "1 of 4"
    assert lacking[1:] == ("1 of 4", "d: needs a C compiler, got none", False)
    assert len(engine_findings()) == 3


def test_instructions_that_the_cpu_lacks_are_no_part_that_could_be_installed():
    reason = "needs a CPU with AMX or AVX-512 BF16, which this one lacks"
    found = [EngineAvailability("a", "direct", ("cpu",)), EngineAvailability("b", "implicit_gemm", (), reason)]
    assert summary(found)[2] == ("engines that lack a part", "1 of 2", f"b: {reason}", True)


def test_an_engine_that_lacks_instructions_says_so(monkeypatch):
    monkeypatch.setattr(cpu_direct_bf16, "bf16_units", lambda: ((), "needs a CPU with AMX"))
    for targets in ([detect_target("cpu")], [detect_target("cpu"), CAPABLE_GPU]):
        (found,) = (one for one in engine_availability(targets) if one.engine == "cpu.direct_bf16")
        assert (found.devices, found.reason) == ((), "needs a CPU with AMX")


def test_an_installation_without_bytecode_is_named_with_what_mends_it(tmp_path):
    module = tmp_path / "torch" / "__init__.py"
    module.parent.mkdir()
    module.write_text("x = 1\n", encoding="utf-8")
    (finding,) = doctor._bytecode(module)
    assert not finding.ok
    assert f"python -m compileall -q {tmp_path}`" in finding.means
    compileall.compile_dir(tmp_path, quiet=2)
    assert doctor._bytecode(module) == []
