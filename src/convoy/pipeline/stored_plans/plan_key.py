"""PlanKey: everything that the result of a search depends on, as two digests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from convoy._version import __version__
from convoy.engines.competition import competing_engines, load_competitor
from convoy.graph.text import digest
from convoy.measurement import protocol_for
from convoy.pipeline.net import Net
from convoy.pipeline.selection_input import zeros_by_problem
from convoy.plan import PLAN_VERSION
from convoy.problem import ConvProblem
from convoy.settings import Settings
from convoy.tune.criteria_file import user_criteria

WITHOUT_INFLUENCE: Final = frozenset({"time_s", "isolate", "db", "progress", "keep_freed_memory", "profile", "check"})
"""Settings that change nothing in the plan of a search that was not cut short."""

RECORD_VERSION: Final = 1
"""Version of the data that are stored with a plan."""


@dataclass(frozen=True, slots=True)
class PlanKey:
    """The question that a search answers, and the means that it uses.

    Attributes:
        question: digest of the net, the target and the settings. The database has one plan for each.
        means: digest of Convoy's own code, the engines and PyTorch's flags. With other means the search may end otherwise.
    """

    question: str
    means: str


def plan_key(kind: str, net: Net, settings: Settings, more: Mapping[str, object] | None = None) -> PlanKey:
    """The key of a net's plan.

    Args:
        kind: `inference`, `training`, or the name of a pass of `torch.compile`.
        net: the net, with its zeros counted if engines that skip them compete.
        settings: what is allowed.
        more: what the plan depends on besides, as JSON.
    """
    question = {
        "kind": kind,
        "graph": digest(net.captured.graph),
        "stock": digest(net.captured.as_pytorch) if net.captured.traced is not None else "",
        "border": sorted(net.border.items()),
        "layouts": net.layouts,
        "masks": _masks(net),
        "zeros": _zeros(net),
        "target": net.target.digest,
        "settings": _settings(settings),
        "more": dict(more or {}),
    }
    means = {
        "code": code_digest(),
        "record": (RECORD_VERSION, PLAN_VERSION),
        "engines": _engines(settings),
        "protocol": protocol_for(settings.effort, net.target.device).id,
        "flags": _flags(),
        "criteria": _criteria(settings),
    }
    return PlanKey(_digest(question), _digest(means))


def _digest(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _masks(net: Net) -> list[tuple[str, str]]:
    """Where the weights of convolutions are zero: the last problems of a region name the masks (`convoy.regions.mask`).

    The graph's text says nothing of them.
    """
    masked = {
        (region.id, problem.weight_mask)
        for region in net.regions
        for problem in region.problems
        if isinstance(problem, ConvProblem) and problem.weight_mask
    }
    return sorted(masked)


def _zeros(net: Net) -> list[object]:
    """The levels of zeros that layers were, or would be, measured for."""
    found = zeros_by_problem(net.regions, net.zeros) if net.zeros else {}
    return [net.zeros_uncounted, sorted((key, sorted(map(str, buckets))) for key, buckets in found.items())]


def _settings(settings: Settings) -> dict[str, str]:
    names = (field.name for field in dataclasses.fields(settings) if field.name not in WITHOUT_INFLUENCE)
    return {name: str(getattr(settings, name)) for name in names}


def _engines(settings: Settings) -> list[tuple[str, int]]:
    """Ids and versions: engines of the user's own are not part of Convoy's code."""
    return [(name, load_competitor(name, settings.engines).version) for name in competing_engines(settings)]


def _flags() -> list[object]:
    """PyTorch's switches that decide what its own operators do; those of precision are part of the target."""
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    switches = [cudnn.enabled, cudnn.deterministic, mkldnn.enabled, bool(mkldnn.deterministic)]
    return [torch.get_deterministic_debug_mode(), *switches]


def _criteria(settings: Settings) -> list[object]:
    """The criteria that `convoy study` wrote beside the database: they steer what is measured and predicted."""
    found: list[object] = []
    for path in user_criteria(settings.db):
        state = path.stat()
        found.append((path.name, state.st_size, state.st_mtime_ns))
    return found


@cache
def code_digest() -> str:
    """Digest of the installed package: its version, its files' contents, and the sizes of the measurements that it ships.

    It stands for the versions of engines, passes, solvers and predictions together: whatever changes there, a search may end
    otherwise. Reading the package takes 0.04 s on a slow CPU.
    """
    found = hashlib.sha256(__version__.encode())
    for name, path in sorted(_files(str(Path(__file__).parents[2]), "")):
        found.update(name.encode())
        if name.endswith(".gz"):
            found.update(str(os.stat(path).st_size).encode())  # noqa: PTH116 - a Path for each of 900 files takes as long again
        else:
            found.update(Path(path).read_bytes())
    return found.hexdigest()


def _files(folder: str, name: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files(entry.path, f"{name}{entry.name}/")
            else:
                yield f"{name}{entry.name}", entry.path
