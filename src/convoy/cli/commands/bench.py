"""convoy bench: latency, throughput, and the load that a bound on the 99th percentile allows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from convoy.cli.command_parts import bench_net
from convoy.cli.options import bench as given
from convoy.cli.options import shared, values
from convoy.cli.output.lines import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.measurement.scenarios.load_test import LoadTest
    from convoy.measurement.scenarios.scenarios import Latencies


def bench(
    model: shared.Model,
    plan: given.Plan = None,
    device: shared.Device = None,
    weights: shared.Weights = None,
    trust: shared.Trust = False,
    signers: shared.Signers = None,
    p99: given.P99 = None,
    seconds: given.Seconds = 30.0,
    seed: given.Seed = 0,
    as_json: given.Json = False,
) -> None:
    """Measure MODEL, a .convoy file or a model with its plans, as a service, in MLPerf's scenarios.

    Single stream: one sample at a time. Offline: all samples are there at the beginning. Server: samples arrive at random, and
    those that wait are answered together, in batches of the sizes that there is a program for.
    """
    check_positive("--seconds", seconds)
    if p99 is not None:
        check_positive("--p99", p99)
    if model.endswith(".convoy"):
        others = {"--plan": plan, "--weights": weights, "--device": device}
        net = bench_net.packaged_net(model, others, trust=trust, signers=signers)
    else:
        values.check_no_signers(signers)
        net = bench_net.planned_net(model, plan or (), device, weights, trust=trust)

    from convoy.cli.output.progress import Bar
    from convoy.measurement.scenarios.clock import WallClock
    from convoy.measurement.scenarios.load_test import run_load_test

    with Bar() as bar:
        found = run_load_test(net, net.sizes, WallClock(), seconds=seconds, bound_ms=p99, seed=seed, say=bar)
    show(found, as_json)


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not above 0, or not finite."""
    if not (value > 0 and math.isfinite(value)):
        raise InputError(name, value, "a number above 0")


def show(found: LoadTest, as_json: bool) -> None:
    """Print the figures."""
    import dataclasses
    import json

    from convoy.measurement.scenarios.scenarios import LEAST_QUERIES
    from convoy.report import print_table

    if as_json:
        say(json.dumps(dataclasses.asdict(found), indent=1))
        return
    print_table(
        ("batch", "batch ms", "samples/s"),
        [(str(one.batch), f"{one.batch_ms:.3f}", f"{one.samples_per_s:.1f}") for one in found.batches],
        numbers=(0, 1, 2),
    )
    server, allowed = found.server, found.allowed
    bound = f"p99 at most {found.bound_ms:.4g} ms"
    rows = [
        _row("single stream", "", found.single_stream),
        ("offline", f"{found.offline_samples_per_s:.1f}", "", "", "", ""),
        _row(f"server, {found.share:.0%} of offline", f"{server.rate:.1f}", server.latencies),
    ]
    if allowed is not None:
        rows.append(_row(f"server, {bound}", f"{allowed.rate:.1f}", allowed.latencies))
    print_table(
        ("scenario", "samples/s", "queries", "p50 ms", "p90 ms", "p99 ms"), rows, numbers=(1, 2, 3, 4, 5), least=(2, 3)
    )
    if not found.tried:
        say(f"no load keeps {bound}: one sample alone takes {found.single_stream.p50_ms:.4g} ms")
    elif allowed is None:
        lowest = min(load.rate for load in found.tried)
        say(f"no load that was tried keeps {bound}; the lowest was {lowest:.4g} arrivals a second")
    say(f"at {found.share:.0%} of offline p99 is {found.batch_multiple:.2f} times the largest batch's time")
    if found.fewest_queries < LEAST_QUERIES:
        say(f"{found.fewest_queries} queries are few for a 99th percentile: more --seconds give more")


def _row(scenario: str, rate: str, latencies: Latencies) -> tuple[str, ...]:
    percentiles = (latencies.p50_ms, latencies.p90_ms, latencies.p99_ms)
    return (scenario, rate, str(latencies.queries), *(f"{value:.3f}" for value in percentiles))
