"""Concatenations whose pieces are written in place: right for any net, placed where they can be, and freed in time."""

import random
import sys
from dataclasses import replace

import pytest
import torch

from convoy.capture import Captured
from convoy.engines.interpret import compile_graph
from convoy.graph.text import digest, parse_graph
from convoy.plan.plan import Plan, Step
from convoy.problem import EngineConfig
from convoy.program.bind import bind
from convoy.program.bound_plan import ChannelSlice
from convoy.program.concat_in_place import InPlaceConcat
from convoy.program.eager import EagerProgram
from convoy.program.lifetimes import with_frees
from convoy.regions import propose
from convoy.schedule import parallel_steps
from convoy.target import Target

CPU = Target("cpu", "a CPU", "avx2", 1, 8 << 30, 1 << 20)


def captured(text):
    graph = parse_graph(text)
    generator = torch.Generator().manual_seed(3)
    constants = {v.name: torch.randint(-2, 3, v.spec.shape, generator=generator).float() for v in graph.constants()}
    return Captured(graph, constants, (), None, None)


def program(text, engines=None, layout="nhwc", ahead=None):
    """Every node a step of its own, convolutions by `reference` (or as `engines` say, by node), the rest by `aten`."""
    found = captured(text)
    graph = found.graph
    regions = {(r.pattern, r.nodes): r for r in propose(graph, layouts=("nchw", "nhwc"), numerics="strict")}
    steps = []
    for node in graph.nodes:
        pattern = "conv" if node.op == "conv2d" else "op"
        region = regions[pattern, (node.name,)]
        problem = next(p for p in region.problems if p.layout == layout)
        engine = (engines or {}).get(node.name, "reference" if pattern == "conv" else "aten")
        version = 2 if engine == "aten" else 1
        config = EngineConfig(engine, version)
        steps.append(Step("region", pattern, (node.name,), region.args, region.results, problem.key, config, layout))
    border = dict.fromkeys([*graph.inputs, *graph.outputs], layout)
    inputs = tuple(str(graph.values[name].spec) for name in graph.inputs)
    plan = Plan("net", digest(graph), inputs, CPU.to_dict(), "strict", tuple(steps), "test", border=border)
    return bind(plan, found, regions, CPU, ahead=ahead), found


def check(text, engines=None, layout="nhwc"):
    """Run twice and compare with the graph's own operators; returns the pieces that each `InPlaceConcat` still copies."""
    bound, found = program(text, engines, layout)
    graph = found.graph
    run = EagerProgram(bound, torch.device("cpu"))
    for seed in range(2):
        torch.manual_seed(seed)
        inputs = [torch.randint(-2, 3, graph.values[name].spec.shape).float() for name in graph.inputs]
        expected = compile_graph(graph)(inputs, [found.constants[v.name] for v in graph.constants()])
        for made, right in zip(run(inputs), expected, strict=True):
            assert torch.equal(made, right)
            assert made.is_contiguous(memory_format=torch.channels_last)
    gathered = [b.executable for b in bound.steps if isinstance(b.executable, InPlaceConcat)]
    return [one.copied_count for one in gathered]


LINES = {
    "a": "%a: fp32[2,8,3,3] = conv2d(%x, %wa, None, (1, 1), (0, 0), (1, 1), 1)",
    "b": "%b: fp32[2,3,3,3] = conv2d(%x, %wb, None, (1, 1), (1, 1), (1, 1), 1)",
    "d": "%d: fp32[2,8,3,3] = conv2d(%x, %wa, None, (1, 1), (0, 0), (1, 1), 1)",
    "r": "%r: fp32[2,8,3,3] = aten.relu.default(%a)",
    "ab": "%c: fp32[2,11,3,3] = aten.cat.default((%a, %b), 1)",
    "abx": "%c: fp32[2,15,3,3] = aten.cat.default((%a, %b, %x), -3)",
    "aa": "%c: fp32[2,16,3,3] = aten.cat.default((%a, %a), 1)",
    "images": "%c: fp32[4,8,3,3] = aten.cat.default((%a, %d), 0)",
    "rows": "%c: fp32[2,8,6,3] = aten.cat.default((%a, %d), 2)",
    "columns": "%c: fp32[2,8,3,6] = aten.cat.default((%a, %d), -1)",
    "z": "%z: fp32[2,2,3,3] = conv2d(%c, %wz, None, (1, 1), (0, 0), (1, 1), 1)",
    "y": "%y: fp32[2,2,3,3] = aten.relu.default(%z)",
}
WEIGHTS = {"wa": "fp32[8,4,1,1]", "wb": "fp32[3,4,3,3]", "wz": "fp32[2,11,1,1]"}


def net(names, *returned):
    """A graph of some of the lines."""
    lines = [LINES[name] for name in names.split()]
    weights = [f"constant %{name}: {kind}" for name, kind in WEIGHTS.items() if any(f"%{name}," in x for x in lines)]
    last = "return " + ", ".join(f"%{name}" for name in returned)
    return "\n".join(["graph 1", "input %x: fp32[2,4,3,3]", *weights, *lines, last]) + "\n"


def test_pieces_of_convolutions_are_written_in_place():
    assert check(net("a b ab", "c")) == [0]
    assert check(net("a b ab z", "z")) == [0]


def test_a_piece_that_somebody_else_reads_or_gets_is_copied():
    assert check(net("a b r ab", "c", "r")) == [1]
    assert check(net("a b ab", "c", "a")) == [1]


def test_an_input_is_copied():
    assert check(net("a b abx", "c")) == [1]


def test_with_two_pieces_to_copy_the_concatenation_stays():
    assert check(net("a b abx", "c", "b")) == []
    assert check(net("a b ab", "c"), {"a": "aten", "b": "aten"}) == []


def test_another_layout_keeps_the_concatenation():
    assert not any(isinstance(b.executable, InPlaceConcat) for b in program(net("a b ab", "c"), layout="nchw")[0].steps)


@pytest.mark.parametrize("axis", ["images", "rows", "columns"])
def test_other_axes_stay(axis):
    assert check(net(f"a d {axis}", "c")) == []


def test_a_value_twice_in_one_concatenation_keeps_it():
    assert check(net("a aa", "c")) == []


def test_the_whole_is_freed_after_its_last_reader_and_not_before():
    bound, _ = program(net("a b ab z", "z"))
    slot = bound.slot_names.index("c")
    assert [slot in b.frees for b in bound.steps] == [False, False, False, True]
    assert [bool(b.slices) for b in bound.steps] == [True, True, True, False]


def spread(bound, order):
    """The slot of the concatenation, and the steps on these streams."""
    steps = [
        replace(b, step=replace(b.step, stream=stream, waits=waits))
        for b, (stream, waits) in zip(bound.steps, order, strict=True)
    ]
    return bound.slot_names.index("c"), with_frees(steps, bound.outputs)


def opened(steps):
    """The slots that are opened before each step."""
    return [[part.slot for part in b.opens] for b in steps]


def test_with_several_streams_the_whole_is_freed_before_a_later_step_of_the_first():
    bound, _ = program(net("a b ab z", "z"))
    slot, steps = spread(bound, [(0, ()), (1, ()), (0, (1,)), (0, ())])
    assert opened(steps) == [[slot], [], [], []]  # the other stream begins with the first: there is nothing to wait for
    assert not any(slot in b.frees for b in steps)  # no step of stream 0 follows its reader
    bound, _ = program(net("a b ab z y", "y"))
    slot, steps = spread(bound, [(0, ()), (1, ()), (0, (1,)), (0, ()), (0, ())])
    assert [slot in b.frees for b in steps] == [False, False, False, True, False]


def test_the_whole_is_there_only_once_all_its_writers_come_after_what_stream_0_has_begun():
    """Its memory may be what stream 0 was about to use: a writer that does not wait for that would spoil it."""
    bound, _ = program(net("d a b ab", "c", "d"))
    slot, steps = spread(bound, [(0, ()), (0, ()), (1, (0,)), (0, (2,))])
    assert opened(steps) == [[], [slot], [], []]
    slot, steps = spread(bound, [(0, ()), (0, ()), (1, ()), (0, (2,))])
    assert opened(steps) == [[slot], [], [], []]
    slot, steps = spread(bound, [(0, ()), (1, (0,)), (1, ()), (0, (2,))])
    assert opened(steps) == [[], [slot], [], []]


@pytest.mark.parametrize("seed", range(40))
def test_on_any_streams_a_whole_is_opened_in_time_and_where_its_memory_is_free(seed):
    """Whoever writes to it starts after every step of stream 0 that had begun by then: by all paths of order and waits."""
    text, engines = random_net(seed)
    bound, _ = program(text, engines)
    made = {b.step.results: b for b in bound.steps}
    placed = parallel_steps([replace(b.step, median_us=1.0 + index % 3) for index, b in enumerate(bound.steps)], 3)
    steps = with_frees([replace(made[one.results], step=one) for one in placed], bound.outputs)
    ended: list[set[int]] = []  # what has certainly ended when a step starts
    for at, b in enumerate(steps):
        before = [*b.step.waits, *(i for i in range(at) if steps[i].step.stream == b.step.stream)]
        ended.append(set(before).union(*(ended[i] for i in before)))
    first_use = {part.slot: at for at, b in enumerate(steps) for part in b.opens}
    several = any(b.step.stream for b in steps)
    assert first_use.keys() == ({p.slot for b in steps for p in b.slices if p is not None} if several else set())
    for slot, at in first_use.items():
        users = [i for i, b in enumerate(steps) if slot in b.touched()]
        assert at <= users[0]
        first = {i for i in range(at) if steps[i].step.stream == 0}
        assert all(first <= ended[user] for user in users)


def test_a_planted_fault_is_seen(monkeypatch):
    """A place one channel further on must show: that the check can fail."""
    monkeypatch.setattr(
        ChannelSlice, "of", lambda place, whole: whole.narrow(1, max(0, place.offset - 1), place.channels)
    )
    with pytest.raises(AssertionError):
        check(net("a b ab", "c"))


def random_net(seed):
    """Convolutions, relus and concatenations of what came before, some values returned."""
    draw = random.Random(seed)
    values, lines, weights = {"x": 4}, [], []
    for index in range(draw.randint(4, 14)):
        kind = draw.choice(("conv", "conv", "relu", "cat"))
        name, recent = f"n{index}", list(values)[-5:]
        if kind == "cat":
            pieces = draw.sample(recent, min(len(recent), draw.randint(1, 4)))
            c = sum(values[p] for p in pieces)
            if c > 40:
                continue
            listed = ", ".join(f"%{p}" for p in pieces) + ("," if len(pieces) == 1 else "")
            lines.append(f"%{name}: fp32[1,{c},2,3] = aten.cat.default(({listed}), 1)")
        else:
            source = draw.choice(recent)
            c = values[source] if kind == "relu" else draw.choice((1, 3, 4, 8))
            if kind == "relu":
                lines.append(f"%{name}: fp32[1,{c},2,3] = aten.relu.default(%{source})")
            else:
                weights.append(f"constant %w{index}: fp32[{c},{values[source]},1,1]")
                lines.append(
                    f"%{name}: fp32[1,{c},2,3] = conv2d(%{source}, %w{index}, None, (1, 1), (0, 0), (1, 1), 1)"
                )
        values[name] = c
    read = "\n".join(line.partition(" = ")[2] for line in lines)
    made = [name for name in values if name != "x"]
    outputs = [n for n in made if f"%{n}," not in read and f"%{n})" not in read] or made[-1:]
    outputs = list(dict.fromkeys([*outputs, *draw.sample(made, draw.randint(0, 1))]))
    engines = {name: "aten" for name in made if draw.random() < 0.2}
    returned = "return " + ", ".join(f"%{o}" for o in outputs)
    return "\n".join(["graph 1", "input %x: fp32[1,4,2,3]", *weights, *lines, returned]) + "\n", engines


def test_random_nets_are_right():
    placed = 0
    for seed in range(150):
        text, engines = random_net(seed)
        placed += len(check(text, engines))
    assert placed > 20


class Asked:
    """Stands for the compilation ahead: notes each request, and the time of one build."""

    def __init__(self, worth_s):
        self.worth_s, self.asked, self.begun = worth_s, [], {}

    def build(self, wanted, each_s):
        self.asked.append((len(wanted), each_s))
        return each_s >= self.worth_s


@pytest.mark.parametrize(
    ("each_s", "asked"),
    [
        ((1, 1, 1, 1, 1), [(2, 1)]),  # cold caches: the rest is compiled elsewhere, once
        ((9, 0, 0, 0, 0), [(2, 0), (1, 0)]),  # an import and full caches: never worth it
        ((9, 0, 5, 5, 5), [(2, 5)]),
        ((0.5, 0.5, 0.5, 0.1, 0.1), []),  # patience does not end
    ],
)
def test_what_is_still_to_be_built_is_compiled_elsewhere_where_builds_take_long(monkeypatch, each_s, asked):
    module = sys.modules[bind.__module__]
    now, took, build = [100.0], iter(each_s), module.build

    def slow(*args):
        now[0] += next(took)
        return build(*args)

    monkeypatch.setattr(module, "build", slow)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    ahead = Asked(worth_s=1)
    bound, _ = program(net("a b d r ab z", "r", "z"), ahead=ahead)
    assert len(bound.steps) == 6  # a and d are one problem, built once
    assert ahead.asked == asked
