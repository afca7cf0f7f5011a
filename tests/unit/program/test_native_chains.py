"""Chains of launches on a CPU: the same bits as one by one, for several threads at once, with nothing else between them."""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu.native_launch import NativeExecutable
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.measurement import detect_target
from convoy.perfdb import Database
from convoy.pipeline.measure_net import measure
from convoy.pipeline.net import capture_net
from convoy.pipeline.select import make_plan, select
from convoy.program import native_chains
from convoy.program.eager import EagerProgram
from convoy.program.native_chains import ChainedProgram
from convoy.program.runnable_program import build_program

pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")


class Branches(nn.Module):
    """Convolutions with a residual and a pooling, a tanh that no kernel in C does, and more behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 80, 3, padding=1), nn.Conv2d(80, 80, 1)
        self.third, self.fourth = nn.Conv2d(80, 16, 3, stride=2), nn.Conv2d(16, 40, 1)
        self.last = nn.Conv2d(40, 8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two outputs, one from the middle of a chain."""
        y = torch.relu(self.first(x))
        y = torch.relu(self.second(y) + y)
        z = torch.relu(self.third(y))
        middle = torch.tanh(self.fourth(z))
        return torch.relu(self.last(middle)), z


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ChainedProgram:
    """Of that net, by kernels in C where there are any."""
    torch.manual_seed(0)
    model = Branches().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 20, 18).contiguous(memory_format=torch.channels_last)
    settings = convoy.Settings(
        db=tmp_path_factory.mktemp("db") / "perf.db", isolate=False, layout="nhwc", solver="single",
        only_engines=("cpu.direct",),
    )  # fmt: skip
    with torch.no_grad(), Database.open(settings.db) as database:
        net = capture_net("branches", model, (x,), {}, settings, detect_target("cpu"))
        found = measure(net, settings, database, lambda *_: None)
        plan = make_plan(net, select(net, found, settings), settings)
        built = build_program(plan, net.captured, net.regions_by_nodes, net.target, settings)
    assert isinstance(built.runnable, ChainedProgram)
    return built.runnable


class Dense(nn.Module):
    """The operators of a dense block, its stem, its transition and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(24, 8, 1)
        self.norm_one, self.norm_two = nn.BatchNorm2d(16), nn.BatchNorm2d(24)
        self.last, self.out = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norms before convolutions, of one value and of two."""
        x = nn.functional.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        made = self.one(torch.relu(self.norm_one(x)))
        y = self.two(torch.relu(self.norm_two(torch.cat((x, made), 1))))
        y = torch.relu(self.last(nn.functional.avg_pool2d(y, 2)))
        return self.out(torch.flatten(nn.functional.adaptive_avg_pool2d(y, 1), 1))


def test_a_net_of_dense_blocks_can_be_one_chain() -> None:
    model, x = Dense().eval(), torch.randn(1, 3, 20, 20).contiguous(memory_format=torch.channels_last)
    target = detect_target("cpu")
    with torch.no_grad():
        net = capture_net("dense", model, (x,), {}, convoy.Settings(layout="nhwc"), target)
    engines = [engine for engine in map(load_engine, MANIFEST) if engine.native]
    native = [r for r in net.regions if any(e.accepts(p, target) for p in r.problems for e in engines)]
    covered: list[str] = []
    for region in sorted(native, key=lambda region: -len(region.nodes)):
        if not set(covered) & set(region.nodes):
            covered += region.nodes
    assert sorted(covered) == sorted(node.name for node in net.captured.graph.nodes)


def inputs(seed: int) -> list[torch.Tensor]:
    x = torch.randn(2, 8, 20, 18, generator=torch.Generator().manual_seed(seed))
    return [x.contiguous(memory_format=torch.channels_last)]


def test_what_follows_each_other_is_one_call(program: ChainedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [chain.count for chain in program.chains] == [4]
    (chain,) = program.chains
    assert len(chain.inner) == 2
    assert len(chain.results) == 2
    called: list[int] = []
    driver = native_chains._driver()

    def watched(launches: object, count: int, pointers: object) -> None:
        called.append(count)
        driver(launches, count, pointers)

    monkeypatch.setattr(program, "_runner", watched)
    program(inputs(0))
    assert called == [4]


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_gives_the_bits_of_its_launches(program: ChainedProgram, seed: int) -> None:
    alone = EagerProgram(program.bound, program.device)(inputs(seed))
    for expected, found in zip(alone, program(inputs(seed)), strict=True):
        assert torch.equal(expected, found)
        assert expected.stride() == found.stride()


def test_outputs_are_not_written_by_the_next_call(program: ChainedProgram) -> None:
    first = program(inputs(1))
    kept = [tensor.clone() for tensor in first]
    program(inputs(2))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_threads_do_not_share_a_buffer(program: ChainedProgram) -> None:
    expected = [program(inputs(seed)) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda seed: program(inputs(seed)), range(8)))
            for one, other in zip(expected, found, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_follower_is_told_of_every_launch(program: ChainedProgram) -> None:
    class Told:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def after(self, index: int, slots: object) -> None:
            del slots
            self.seen.append(index)

        def end(self) -> None:
            self.seen.append(-1)

    told = Told()
    program(inputs(0), told)
    assert told.seen == [*range(len(program.bound.steps)), -1]


def test_values_that_live_together_do_not_overlap(program: ChainedProgram) -> None:
    """With all inner values at one place the result is another: the check above can fail."""
    (chain,) = program.chains
    memory = program.thread_memory()
    places = [memory.pointers[0][place] for place, _ in chain.inner]
    assert len(set(places)) == len(places)
    expected = [tensor.clone() for tensor in program(inputs(0))]
    for place, _ in chain.inner:
        memory.pointers[0][place] = memory.buffer.data_ptr()
    try:
        assert not all(torch.equal(a, b) for a, b in zip(expected, program(inputs(0)), strict=True))
    finally:
        for (place, _), pointer in zip(chain.inner, places, strict=True):
            memory.pointers[0][place] = pointer


def test_native_engines_are_those_whose_executables_are(program: ChainedProgram) -> None:
    used = {step.step.config.engine for step in program.bound.steps if isinstance(step.executable, NativeExecutable)}
    assert used == {"cpu.direct"}
    assert all(load_engine(name).native for name in used)


def test_the_structures_are_those_of_the_source() -> None:
    text = native_chains.SOURCE.read_text(encoding="utf-8")
    assert f"#define MOST_TENSORS {native_chains.MOST_TENSORS}\n" in text
    operand, launch = re.findall(r"typedef struct \{(.*?)\} \w+;", text, re.DOTALL)
    assert [name for name, _ in native_chains._Operand._fields_] == re.findall(r"(\w+);", operand)
    assert re.findall(r"(call|settings|operands|count)[);]", launch) == [
        name for name, _ in native_chains._Launch._fields_
    ]
    assert ctypes.sizeof(native_chains._Launch) == 4 * 8
