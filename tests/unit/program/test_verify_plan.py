"""Plans from elsewhere: what is edited gives the right numbers, on the baseline in part, or is refused."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch
from torch import nn

from convoy import plan as plans
from convoy.engines.manifest import load_engine
from convoy.engines.subgraph import torch_format
from convoy.errors import PlanError
from convoy.pipeline.net import Net, capture_net, make_net
from convoy.pipeline.plan_target import target_for
from convoy.plan import Plan
from convoy.problem import ConvProblem, EngineConfig, Knobs
from convoy.program import build_program
from convoy.program.verification.usable_config import why_not
from convoy.program.verification.verify_plan import verify_plan
from convoy.settings import Settings
from convoy.target import Target
from tests.unit.program.plan_edits import H100, Branches, Pair, edited, fabricated

EDITS = 300


Case = tuple[Net, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], list[Plan]]
"""A net, its right results, its inputs and plans of it."""


def cases(model: nn.Module, sizes: tuple[tuple[int, ...], ...], target: Target, dtype: torch.dtype) -> list[Case]:
    """A small net in both memory formats, each with plans of its own; captured once."""
    torch.manual_seed(0)
    draw = random.Random(11)
    model = model.eval().to(dtype)
    given = tuple(torch.randn(size).to(dtype) for size in sizes)
    first = capture_net("net", model, given, {}, Settings(), target)
    right = model(*given)
    found: list[Case] = []
    for layout in ("nchw", "nhwc"):
        border = dict.fromkeys(first.border, layout)
        net = make_net("net", first.captured, border, layout, Settings(), target)
        inputs = tuple(tensor.contiguous(memory_format=torch_format(layout, tensor.dim())) for tensor in given)
        found.append((net, right, inputs, [fabricated(net, draw) for _ in range(3)]))
    return found


@pytest.fixture(scope="module")
def on_cpu() -> list[Case]:
    cpu = target_for("cpu")
    return [
        *cases(Branches(), ((2, 3, 16, 16),), cpu, torch.float32),
        *cases(Pair(), ((1, 4, 12, 12),) * 2, cpu, torch.float32),
    ]


def run(net, plan, given):
    program = build_program(plan, net.captured, net.regions_by_nodes, net.target, Settings())
    with torch.no_grad():
        return program(given, {}), program.plan


def assert_right(made, right):
    for one, other in zip(made, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_plans_as_they_were_made_run_as_they_were_made(on_cpu):
    engines = set()
    for net, right, given, made in on_cpu:
        for plan in made:
            results, ran = run(net, plan, given)
            assert_right(results, right)
            assert ran is plan
            engines.update(step.config.engine for step in plan.steps)
    assert "aten" in engines
    assert any(engine.startswith("cpu.") for engine in engines)
    assert any(step.stream for _, _, _, made in on_cpu for plan in made for step in plan.steps)


def test_an_edited_plan_gives_the_right_numbers_or_is_refused(on_cpu):
    draw = random.Random(5)
    seen = Counter()
    bases = [(net, right, given, plans.to_dict(plan)) for net, right, given, made in on_cpu for plan in made]
    for index in range(EDITS):
        net, right, given, data = bases[index % len(bases)]
        try:
            results, ran = run(net, plans.from_dict(edited(data, draw)), given)
        except PlanError:
            seen["refused"] += 1
            continue
        assert_right(results, right)
        seen["baseline" if any(note.startswith("PyTorch runs ") for note in ran.notes) else "right"] += 1
    assert min(seen["refused"], seen["baseline"], seen["right"]) > 20


def assert_computes(plan: Plan, net: Net) -> None:
    """Every step reads what its region reads, in the memory format of its problem, after it was made; all outputs are made."""
    values = net.captured.graph.values
    formats = {name: net.border.get(name, "any") for name in net.captured.graph.inputs}
    for step in plan.steps:
        read = [name.partition("@")[0] for name in step.args]
        for name, value in zip(step.args, read, strict=True):
            assert name in formats
            if step.kind == "region" and len(values[value].spec.shape) == 4:
                assert formats[name] == step.layout
        if step.kind == "region":
            region = net.regions_by_nodes[step.pattern, step.nodes]
            assert (tuple(read), step.results) == (region.args, region.results)
            assert step.problem in {problem.key for problem in region.problems if problem.layout == step.layout}
        for name in step.results:
            formats[name] = step.layout
    assert set(net.captured.graph.outputs) <= {name.partition("@")[0] for name in formats}


def test_an_edited_plan_for_a_gpu_computes_the_graph_or_is_refused():
    draw = random.Random(7)
    seen = Counter()
    engines = set()
    for net, _, _, made in cases(Branches(), ((2, 3, 16, 16),), H100, torch.float16):
        graph, regions = net.captured.graph, net.regions_by_nodes
        for plan in made:
            assert verify_plan(plan, graph, regions, H100).plan is plan
            assert_computes(plan, net)
            engines.update(step.config.engine.partition(".")[0] for step in plan.steps)
            data = plans.to_dict(plan)
            for _ in range(50):
                try:
                    found = verify_plan(plans.from_dict(edited(data, draw)), graph, regions, H100)
                except PlanError:
                    seen["refused"] += 1
                    continue
                assert_computes(found.plan, net)
                for step, problem in zip(found.plan.steps, found.problems, strict=True):
                    assert not why_not(step.config, problem, H100)
                seen["taken"] += 1
    assert {"cuda", "triton"} <= engines
    assert min(seen["refused"], seen["taken"]) > 20


def with_step(plan, index, **changes):
    steps = list(plan.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    return dataclasses.replace(plan, steps=tuple(steps))


def test_what_does_not_hold_is_the_baseline_with_a_note(on_cpu):
    net, right, given, (plan, *_) = on_cpu[0]
    index = next(i for i, step in enumerate(plan.steps) if step.pattern == "conv")
    direct = load_engine("cpu.direct").config()
    for config, reason in (
        (EngineConfig("nobody"), "no such engine"),
        (dataclasses.replace(direct, version=99), "version 99"),
        (dataclasses.replace(direct, knobs=Knobs.of(tile=7)), "does not offer the knobs"),
        (load_engine("cuda.wgrad").config(), "cannot"),
    ):
        results, ran = run(net, with_step(plan, index, config=config), given)
        assert_right(results, right)
        assert ran.steps[index].config.engine == "aten"
        (note,) = set(ran.notes) - set(plan.notes)
        assert config.engine in note
        assert reason in note


def test_a_seldom_used_tile_is_offered_on_any_number_of_threads(on_cpu):
    engine = load_engine("cpu.winograd")
    problem = next(p for r in on_cpu[0][0].regions for p in r.problems if engine.accepts(p, target_for("cpu")))
    for m in (2, 4):
        assert engine.has_knobs(problem, Knobs.of(m=m, band_kib=4096), target_for("cpu"))
    for knobs in (Knobs.of(m=3, band_kib=384), Knobs.of(m=4), Knobs.of(m=4, band_kib=384, x=1)):
        assert not engine.has_knobs(problem, knobs, target_for("cpu"))


def test_one_and_true_are_different_knobs():
    engine = load_engine("pointwise")
    problem = ConvProblem(2, 3, 8, 8, 4, 1, 1)
    assert engine.has_knobs(problem, Knobs.of(per_image=True), target_for("cpu"))
    assert not engine.has_knobs(problem, Knobs.of(per_image=1), target_for("cpu"))
    assert not why_not(engine.config(Knobs.of(per_image=True)), problem, target_for("cpu"))
    assert "per_image=1" in why_not(engine.config(Knobs.of(per_image=1)), problem, target_for("cpu"))


def pruned_net(zeros: int) -> Net:
    """A net of one convolution whose weight has so many zeros."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3).eval()
    with torch.no_grad():
        conv.weight.view(-1)[:zeros] = 0
    return capture_net("net", nn.Sequential(conv), (torch.randn(1, 4, 8, 8),), {}, Settings(), target_for("cpu"))


def replaced(step: plans.Step, keys: list[str]) -> plans.Step:
    """The step on pruned weights, where there is such a problem."""
    return dataclasses.replace(step, problem=next((k for k in keys if k.startswith(step.problem)), step.problem))


@pytest.mark.parametrize(("tuned", "given"), [(200, 220), (200, 0)])
@pytest.mark.parametrize("weights", ["pruned.safetensors", ""])
def test_a_plan_of_other_pruned_weights_names_the_weights(tuned: int, given: int, weights: str) -> None:
    net = pruned_net(tuned)
    plan = fabricated(net, random.Random(1))
    keys = [problem.key for region in net.regions for problem in region.problems if ":mask=" in problem.key]
    steps = [replaced(step, keys) for step in plan.steps]
    assert any(":mask=" in step.problem for step in steps)
    plan = dataclasses.replace(plan, steps=tuple(steps), weights=weights)
    plan = plans.from_dict(plans.to_dict(plan))
    assert plan.weights == weights
    # PyTorch runs the steps of engines that do not take pruned weights.
    own = build_program(plan, net.captured, net.regions_by_nodes, net.target, Settings())
    assert not any(":mask=" in step.problem for step in own.plan.steps if step.config.engine == "aten")
    other = pruned_net(given)
    with pytest.raises(PlanError) as caught:
        build_program(plan, other.captured, other.regions_by_nodes, other.target, Settings())
    said = str(caught.value)
    assert said.startswith("weights: got 'other zeros in ")
    assert "expected the pruned weights that the plan was tuned for" in said
    if weights:
        assert "for: pruned.safetensors. Give those (--weights pruned.safetensors), or tune again." in said
