"""What is it worth that the kernel which makes the zeros says where they are? Question `zeroskip`, metric `kernel_us`.

`zeroskip.channels` over 95 % dead channels, and over none, as it is timed alone (it looks at its input first) and as in a net
whose producer marked the input (`convoy.program.zero_marks`); and `triton.split_fp32`, which looks for the largest value, without
marks, with those of its input, and marking its result.

    python bench/zeroskip/zeroskip_marks.py [--keep 4] [--folder DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.manifest import load_engine
from convoy.problem import ConvProblem
from convoy.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.layer_timing import captured, device_facts, replay_us
from bench.shared.record import Recorder
from bench.zeroskip import zeroskip_cases, zeroskip_contest

ROUNDS = 15


def launcher(
    executable: Executable, case: zeroskip_cases.Case, args: tuple[torch.Tensor, ...], marks: list[torch.Tensor]
):
    """A launch on cold weights, as in a net."""
    data, spec = case.data, case.problem.y_spec
    size = executable.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    y = torch.empty(spec.shape, device="cuda").contiguous(memory_format=torch.channels_last)
    packs = [executable.pack(data.constants) for _ in range(8)]

    def launch(index: int) -> None:
        executable.launch(Buffers(args, [y, *marks], packs[index % 8]), workspace)

    launch(0)
    return launch, y


def in_turn(launches: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Medians in microseconds."""
    graphs = {name: captured(launch) for name, launch in launches.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            samples[name] += replay_us(graph, 1)
    return {name: statistics.median(values) for name, values in samples.items()}


def measure(problem: ConvProblem, dead: int, target: Target, keep: int, recorder: Recorder) -> None:
    """One layer that reads what a layer like it has made."""
    case = zeroskip_cases.case_of(problem, dead, "channels", "cuda")
    x = case.data.args[0]
    reader = zeroskip_contest.best(case, target, zeroskip_contest.candidates(case, target, ["zeroskip.channels"], keep))
    maker = zeroskip_contest.best(case, target, zeroskip_contest.candidates(case, target, ["triton.split_fp32"], keep))
    assert reader is not None
    assert maker is not None
    spec = maker[1].marks_written()
    assert spec is not None
    assert reader[1].accept_marks(spec)
    of_x = torch.empty(spec.shape, dtype=torch.int32, device="cuda")
    seen = torch.empty_like(of_x)
    # Marks of x itself: what a producer that makes x would write, made by torch.
    words, lines = spec.shape[2], spec.shape[1] // problem.n
    flat = x.permute(0, 2, 3, 1).reshape(problem.n, -1, words, 32).abs()
    alive = ((flat > 0).any(1).int() << torch.arange(32, device="cuda", dtype=torch.int32)).sum(2, dtype=torch.int32)
    of_x[0] = flat.amax((1, 3)).repeat_interleave(lines, 0).view(torch.int32)
    of_x[1] = alive.repeat_interleave(lines, 0)
    looks, y = launcher(reader[1], case, (x,), [])
    reads, given = launcher(reader[1], case, (x, of_x), [])
    assert torch.equal(y, given)
    plain, y = launcher(maker[1], case, (x,), [])
    marks, given = launcher(maker[1], case, (x,), [seen])
    assert torch.allclose(y, given, rtol=1e-5, atol=1e-5)
    assert maker[1].accept_marks(spec)
    told, given = launcher(maker[1], case, (x, of_x), [])
    assert torch.equal(y, given)
    launches = {"looks": looks, "is told": reads, "dense": plain, "dense is told": told, "dense and marks": marks}
    times = in_turn(launches)
    providers = {"looks": "zeroskip.channels", "is told": "zeroskip.channels"}
    for what, us in times.items():
        recorder.add(
            subject=problem.key, provider=f"convoy.{providers.get(what, 'triton.split_fp32')}", metric="kernel_us",
            unit="us", p50=us, batch=problem.n, numerics="strict", note=f"zeros {dead} % marks {what}",
        )  # fmt: skip
    shown = ", ".join(f"{what} {us:.1f}" for what, us in times.items())
    print(f"{problem.c}>{problem.k} @{problem.h} {dead} % dead channels: {shown}", flush=True)


def main() -> None:
    """Both deep layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    target = device_facts()[0]
    problems = [
        zeroskip_cases.laid(ConvProblem(1, c, h, h, k, 3, 3, 1, 1), 1, "fp32", "strict")
        for c, k, h in zeroskip_cases.DEEP
    ]
    assert all(load_engine("zeroskip.channels").supports(problem, target) for problem in problems)
    recorder = Recorder(
        "zeroskip", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol=f"graph of 40, median of {ROUNDS} in turn", folder=options.folder,
    )  # fmt: skip
    for problem in problems:
        for dead in (0, 95):
            measure(problem, dead, target, options.keep, recorder)
    print(recorder.write())


if __name__ == "__main__":
    with torch.no_grad():
        main()
