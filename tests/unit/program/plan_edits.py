"""Plans of small nets as selection makes them, with every engine that the machine has, and plans with one thing edited."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import torch
from torch import nn

from convoy.engines.manifest import MANIFEST, load_engine
from convoy.measurement.engine_space import query_engine
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.net import Net
from convoy.pipeline.select import Choice, make_plan
from convoy.pipeline.selection_input import distinct_problems, selection_problem
from convoy.plan import Plan
from convoy.schedule import parallel_steps
from convoy.selection import solve
from convoy.settings import Settings
from convoy.target import Target

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.13.0"),))

SLOW_TO_BUILD = ("reference", "inductor", "batches", "foreach")
KNOBS = ("m", "zeros", "images", "per_image", "weight", "transposed", "deterministic", "block_m", "stages")
KINDS = (
    *("args",) * 4, *("knobs",) * 3, *("engine",) * 2, "results", "nodes", "layout", "problem", "pattern", "kind", "waits",
    "stream", "drop", "twice", "shuffle", "border", "numerics", "engine_version", "digit",
)  # fmt: skip


class Branches(nn.Module):
    """Convolutions with a norm, a residual and activations, a concatenation, pooling and a linear layer; three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two, self.three = (nn.Conv2d(8, 8, size, padding=size // 2) for size in (1, 3, 3))
        self.norm, self.linear = nn.BatchNorm2d(8), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.relu(self.norm(self.a(x)))
        p = self.one(x)
        y = torch.cat([p, torch.relu(self.two(x)), self.three(x) + x], 1)
        y = nn.functional.max_pool2d(y, 2)
        return self.linear(y.mean((2, 3))), p, y


class Pair(nn.Module):
    """Two inputs of one shape, which an edited plan may confuse."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.e = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.d = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = self.c(x), self.d(y)
        c = torch.sigmoid(a) * b - y
        return c + self.e(c), a - b


def fabricated(net: Net, draw: random.Random) -> Plan:
    """A plan of engines by made-up times, on one to three streams."""
    rows: dict[str, list[Measurement]] = {}
    for problem in distinct_problems(net.regions, net.copies):
        own = rows.setdefault(problem.key, [])
        for name in MANIFEST:
            engine = load_engine(name)
            if name in SLOW_TO_BUILD or not engine.competes(problem):
                continue
            support, space = query_engine(engine, problem, net.target)
            for knobs in list(space)[:6] if support else ():
                config, time_us = engine.config(knobs), draw.uniform(1, 100)
                own.append(Measurement(problem.key, config, net.target.digest, "t", Status.OK, 9, time_us))
    offered = selection_problem(
        net.captured.graph, net.regions, net.copies, rows, layouts=net.layouts, border=net.border
    )
    plan = make_plan(net, Choice(offered, solve(offered, "greedy"), {}), Settings())
    return dataclasses.replace(plan, steps=parallel_steps(plan.steps, draw.choice((1, 2, 3))))


def edited(plan: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same plan as JSON's types with one thing in it changed, into a word that stands elsewhere or a likely one."""
    data = copy.deepcopy(plan)
    step = draw.choice(data["steps"])
    names = sorted({n for s in data["steps"] for n in (*s["args"], *s["results"], *s["nodes"])} | set(data["border"]))
    kind = draw.choice(KINDS)
    if kind in ("args", "results", "nodes"):
        if step[kind]:
            step[kind][draw.randrange(len(step[kind]))] = draw.choice(names)
    elif kind == "knobs":
        step["knobs"] = _other_knobs(step["knobs"], draw)
    elif kind == "drop":
        data["steps"].remove(step)
    elif kind == "twice":
        data["steps"].insert(draw.randrange(len(data["steps"])), copy.deepcopy(step))
    elif kind == "shuffle":
        draw.shuffle(data["steps"])
    elif kind == "border":
        data["border"][draw.choice(names)] = draw.choice(("nchw", "nhwc", "blocked"))
    elif kind == "numerics":
        data["numerics"] = draw.choice(("strict", "half"))
    elif kind == "digit":
        at = draw.choice([i for i, character in enumerate(step["problem"]) if character.isdigit()])
        step["problem"] = step["problem"][:at] + draw.choice("0123456789") + step["problem"][at + 1 :]
    else:
        step[kind] = {
            "engine": lambda: draw.choice([*MANIFEST, "nobody"]),
            "engine_version": lambda: draw.randrange(9),
            "layout": lambda: draw.choice(("nchw", "nhwc", "blocked", "any")),
            "problem": lambda: draw.choice(data["steps"])["problem"],
            "pattern": lambda: draw.choice(("conv", "op", "glue", "linear", "")),
            "kind": lambda: draw.choice(("region", "convert")),
            "waits": lambda: draw.sample(range(len(data["steps"])), draw.randrange(3)),
            "stream": lambda: draw.randrange(4),
        }[kind]()
    return data


def _other_knobs(text: str, draw: random.Random) -> str:
    parts = text.split(",") if text else []
    value = draw.choice((0, 1, 2, 3, 7, -1, 50, 64, 10**6, 10**19, "true", "x", "auto", "packed"))
    how = draw.randrange(4)
    if parts and how < 2:
        at = draw.randrange(len(parts))
        parts[at] = f"{parts[at].partition('=')[0]}={value}"
    elif parts and how == 2:
        parts.pop(draw.randrange(len(parts)))
    else:
        parts.append(f"{draw.choice(KNOBS)}={value}")
    return ",".join(sorted(parts))
