"""How often is an engine that skips zeros chosen where a dense one is faster? Question `zeroskip`, metric `wrong_share`.

What the tuner does for layers of GoogLeNet, ResNet-50 and VGG-19: engines that skip are timed at levels of what they leave
out, zeros in random places, and offered where they are faster than the best dense engine by the margin
(`convoy.engines.activation_sparsity`).
Then both are timed on inputs that the tuner has not seen: other values, shares between the levels, other arrangements, or with
--data what the layers of trained nets read for images beyond the one that was tuned with. A choice is wrong where it is slower
than the dense engine by over 3 %.

    python bench/zeroskip/zeroskip_choice.py [--device cuda|cpu] [--batch 1] [--layers 12] [--keep 4] [--seconds S] [--folder DIR]
                                    [--data FOLDER --nets resnet20_cifar10 ...] [--all]

--all counts the engines that are not offered too by default (`Engine.offered_by_default`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from convoy.engines.activation_sparsity import KINDS, MARGIN, SparsityBucket, SparsityShares, with_sparsity
from convoy.engines.base import Executable
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.measurement.count_zeros import image_shares
from convoy.measurement.data import make_data
from convoy.measurement.data_with_zeros import with_zeros
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Knobs
from convoy.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.layer_timing import device_facts
from bench.shared.record import Recorder
from bench.zeroskip import zeroskip_cases, zeroskip_contest
from bench.zeroskip.zeroskip_cases import Case, case_of, laid
from bench.zeroskip.zeroskip_contest import Timed, best, candidates, right_and_timed

HELD_OUT = (("channels", 0), ("channels", 4), ("channels", 14), ("channels", 27), ("channels", 55), ("channels", 97),
            ("random", 45), ("random", 93), ("patches", 75))  # fmt: skip
"""How zeros lie, and percent."""

WRONG = 1.03
NETS = ("googlenet", "resnet50", "vgg19")
HELD_OUT_IMAGE = 5
Found = tuple[str, Executable, float]
"""A config's name, the executable, microseconds."""


def shares_of(x: torch.Tensor) -> SparsityShares:
    """Of a batch, means over images."""
    images = [image_shares(image) for image in x.float().cpu()]
    return SparsityShares(*(statistics.fmean(getattr(image, kind) for image in images) for kind in KINDS))


def held_out(problem: ConvProblem, device: str) -> Iterator[Case]:
    """Inputs that the tuner does not time on."""
    for kind, percent in HELD_OUT:
        if kind != "patches":
            yield case_of(problem, percent, kind, device, seed=7)
            continue
        data = with_zeros(make_data(problem, 7, "normal", device), percent, 7, "dead_tiles")  # type: ignore[arg-type]
        yield Case.of(problem, percent, kind, data)


class Tuner:
    """What a tuner would know of layers: the best dense engine, and the best of each that skips at a level."""

    def __init__(self, target: Target, keep: int, skipping: Sequence[str], dense: Sequence[str]) -> None:
        self.target, self.keep, self.skipping, self.dense = target, keep, skipping, dense
        self._known: dict[tuple[ConvProblem, str, int], Found | None] = {}

    def best(self, problem: ConvProblem, ids: Sequence[str], kind: str, percent: int) -> Found | None:
        """The fastest of some engines on data with that share, zeros in random places."""
        key = (problem, " ".join(ids), percent)
        if key not in self._known:
            device = self.target.device
            data = with_zeros(make_data(problem, 1, "normal", device), percent, 2, kind)  # type: ignore[arg-type]
            case = Case.of(problem, percent, kind, data)
            won = best(case, self.target, self._built(case, ids, kind, percent))
            timed = right_and_timed(won[0], won[1], case, self.target) if won else None
            self._known[key] = (*won, statistics.median(timed.us() for _ in range(9))) if won and timed else None
        return self._known[key]

    def _built(
        self, case: Case, ids: Sequence[str], kind: str, percent: int
    ) -> Iterator[tuple[str, Knobs, Executable]]:
        """Configs; of an engine that skips zeros its cost model's favourites for that share, as in the search."""
        for engine_id in ids:
            engine = load_engine(engine_id)
            if not engine.skips_zeros:
                yield from candidates(case, self.target, [engine_id], self.keep)
            elif engine.supports(case.problem, self.target):
                space = engine.space(case.problem, self.target)
                guesses = {
                    knobs: engine.estimate_us(case.problem, with_sparsity(knobs, percent, kind), self.target) or 0.0
                    for knobs in space
                }
                for knobs in dict.fromkeys((space[0], *sorted(space, key=guesses.__getitem__)[: self.keep])):
                    yield engine_id, knobs, engine.build(case.problem, knobs, self.target)

    def choose(self, problem: ConvProblem, shares: SparsityShares) -> tuple[Found | None, Found | None]:
        """The best dense engine, and what skips where it is offered and faster."""
        levels = SparsityBucket.of(shares)
        dense = self.best(problem, self.dense, "zeros", 0)
        offered = []
        for engine in self.skipping:
            kind = load_engine(engine).zeros_kind
            if (found := self.best(problem, [engine], kind, levels.at(kind))) is not None:
                offered.append(found)
        fastest = min(offered, key=lambda found: found[2], default=None)
        clear = fastest is not None and dense is not None and fastest[2] < (1 - MARGIN) * dense[2]
        return dense, fastest if clear else None


def in_turn(first: Timed, second: Timed, rounds: int = 15) -> tuple[float, float]:
    """Both medians."""
    samples = [(first.us(), second.us()) for _ in range(rounds)]
    return statistics.median(a for a, _ in samples), statistics.median(b for _, b in samples)


def layers(count: int, batch: int) -> list[ConvProblem]:
    """So many distinct convolutions of the nets, spread evenly over their products, with enough channels to skip some."""
    every = [p for name in NETS for p in zeroskip_cases.net_layers(name) if p.c >= 32]
    problems = sorted(dict.fromkeys(laid(p, batch, "fp32", "strict") for p in every), key=lambda p: (-p.flops, p.key))
    return problems[:: max(1, len(problems) // count)][:count]


def real(folder: Path, name: str, batch: int, device: str) -> Iterator[tuple[SparsityShares, Case]]:
    """What each layer of a trained net reads: the shares on the images tuned with, and a case on others."""
    from convoy.zoo import load_dataset, load_model, preprocessing

    data = load_dataset(f"cifar10:{folder}", "test", preprocessing=preprocessing(name))
    model = load_model(name, weights=str(folder / f"{name}.safetensors")).eval()
    batches = [x for (x, _), _ in zip(data.batches(batch), range(HELD_OUT_IMAGE + 1), strict=False)]
    known, other = (zeroskip_cases.layer_inputs(model, batches[i]) for i in (0, HELD_OUT_IMAGE))
    for (layer, problem, x, _), (_, _, y, constants) in zip(known, other, strict=True):
        wanted = laid(problem, batch, "fp32", "strict")
        if wanted.groups == 1 and wanted.c >= 16:
            yield shares_of(x), zeroskip_cases.real_case(wanted, f"real {name} {layer}", y, constants, device)


def cases(options: argparse.Namespace) -> Iterator[tuple[SparsityShares, Callable[[], Case]]]:
    """What the tuner counted, and the input that is then given."""
    if options.data:
        for name in options.nets:
            for shares, case in real(options.data, name, options.batch, options.device):
                yield shares, lambda case=case: case
        return
    for problem in layers(options.layers, options.batch):
        for case in held_out(problem, options.device):
            yield shares_of(case.data.args[0]), lambda case=case: case


def main() -> None:
    """Tune, choose, time, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--nets", nargs="*", default=["resnet20_cifar10", "ai85nascifarnet_cifar10", "cifar10_quick"])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    target = device_facts()[0] if options.device == "cuda" else detect_target("cpu")
    skipping = [e for e in zeroskip_contest.engines(skipping=True) if options.all or load_engine(e).offered_by_default]
    tuner = Tuner(target, options.keep, skipping, zeroskip_contest.engines(skipping=False))
    if not options.data:
        problems = layers(options.layers, options.batch)
        building = zeroskip_contest.precompile(
            problems, target, options.keep, [] if options.all else unoffered_providers()
        )
        for futures in building.values():
            for future in futures:
                future.result()
    torch.backends.cudnn.allow_tf32 = False
    recorder = Recorder(
        "zeroskip", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol="two in turn, median of 15", folder=options.folder,
    )  # fmt: skip
    counted: dict[str, Any] = {"cases": 0, "skipping": 0, "wrong": 0, "worst": 1.0, "gain": []}
    for shares, make in cases(options):
        if time.monotonic() - began > options.seconds:
            print("out of time")
            break
        count(make(), shares, tuner, target, counted)
    if not counted["cases"]:
        parser.exit(1, "nothing was counted\n")
    wrong = counted["wrong"] / counted["cases"]
    gains = counted["gain"] or [1.0]
    said = (
        f"{counted['wrong']} wrong of {counted['cases']} inputs, skipping chosen on {counted['skipping']}, there "
        f"{statistics.geometric_mean(gains):.2f}x over dense, the worst {counted['worst']:.3f}x its time"
    )
    print(said)
    kind = "real" if options.data else "held out"
    recorder.add(
        subject=f"choices on {kind} inputs", provider="convoy", metric="wrong_share", unit="1", p50=wrong,
        batch=options.batch, numerics="strict", note=said,
    )  # fmt: skip
    print(recorder.write())


def unoffered_providers() -> list[str]:
    """The engines that are not offered, as `bench/zeroskip/zeroskip.py` names providers."""
    return [f"convoy.{name}" for name in MANIFEST if not load_engine(name).offered_by_default]


def count(case: Case, shares: SparsityShares, tuner: Tuner, target: Target, counted: dict[str, Any]) -> None:
    """One input: what is chosen, and whether that was wrong."""
    dense, skip = tuner.choose(case.problem, shares)
    if dense is None:
        return
    counted["cases"] += 1
    p = case.problem
    named = f"{p.c}>{p.k} {p.r}x{p.s} @{p.h} n{p.n} {case.zeros:g} % {case.kind}"
    if skip is None:
        print(f"{named}: dense", flush=True)
        return
    timed = [right_and_timed(found[0], found[1], case, target) for found in (dense, skip)]
    if timed[0] is None or timed[1] is None:
        counted["wrong"] += 1
        return
    dense_us, skip_us = in_turn(timed[0], timed[1])
    counted["skipping"] += 1
    counted["wrong"] += skip_us > WRONG * dense_us
    counted["worst"] = max(counted["worst"], skip_us / dense_us)
    counted["gain"].append(dense_us / skip_us)
    print(f"{named}: {skip[0]} {skip_us:.1f} us, dense {dense_us:.1f} us", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    with torch.no_grad():
        main()
