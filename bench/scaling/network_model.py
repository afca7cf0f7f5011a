"""Efficiency on eight GPUs and on 16 to 64 over a network: a model from what one host measured. Nothing was measured on more.

The model, for hosts of as many GPUs as were measured at most:

- Each GPU has B bytes of gradients (`gradient_bytes`). Inside a host they are reduced at the measured speed (`bound_ms`). Over
  the network a ring of H hosts sends 2 (H - 1) / H of B from each host, and each bucket waits for 2 (H - 1) hops. Both run at the
  same time, in a pipeline, so the slower one counts.
- The backward pass, two thirds of `compute_ms`, hides the all-reduce. What takes longer is added to the exposed communication
  that was measured on one host.
- Efficiency is the step of one GPU over that step. Nobody else uses the network, and no host is slower than the others.

More GPUs of one host: a ring of n of them sends 2 (n - 1) / n of B at the measured speed, and the backward pass hides nothing of
what is sent beyond the measured ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isnan

from bench.shared.rows import Row

from convoy.schedule.collectives import BUCKET_BYTES

HOST_GPUS = 8
"""GPUs of a larger host that the model predicts as well."""

GPUS = (16, 32, 64)
RATES_GB_S = (50.0, 200.0)
"""Of a host: one adapter of 400 Gbit/s, and four."""

HOP_US = 10.0
"""Latency of one hop of a ring over the network."""

BACKWARD_SHARE = 2 / 3
"""Of a step's computation: of each layer's three products, two are the backward pass's."""


PARTS = (
    "net and GPUs", "dtype", "batch a GPU", "provider", "step of one GPU", "step", "exposed", "of it: nothing else runs",
    "of it: other kernels are slower", "all-reduces run", "bound", "bound at GB/s",
)  # fmt: skip
"""Heads of `parts_table`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A provider's step on one host.

    Attributes:
        gpus: of the host.
        single_ms: step of one GPU.
        compute_ms: step without all-reduce.
        exposed_ms: communication that nothing hides.
        bound_ms: all-reduce inside the host.
        gradient_bytes: of a GPU and step.
    """

    gpus: int
    single_ms: float
    compute_ms: float
    exposed_ms: float
    bound_ms: float
    gradient_bytes: float


def network_ms(measured: Measured, gpus: int, gb_s: float) -> float:
    """Time of the all-reduce over the network, milliseconds."""
    hosts = gpus / measured.gpus
    sent = 2 * (hosts - 1) / hosts * measured.gradient_bytes
    buckets = ceil(measured.gradient_bytes / BUCKET_BYTES) + 1  # the last one is split
    return sent / gb_s / 1e6 + buckets * 2 * (hosts - 1) * HOP_US / 1e3


def efficiency(measured: Measured, gpus: int, gb_s: float) -> float:
    """The predicted efficiency."""
    taken = max(measured.bound_ms, network_ms(measured, gpus, gb_s))
    hidden = max(measured.bound_ms, BACKWARD_SHARE * measured.compute_ms)
    step = measured.compute_ms + max(0.0, measured.exposed_ms) + max(0.0, taken - hidden)
    return measured.single_ms / max(step, measured.single_ms)


def host_efficiency(measured: Measured, gpus: int) -> float:
    """The predicted efficiency of so many GPUs of one host, whose links are as fast as those that were measured."""
    longer = (gpus - 1) / gpus / ((measured.gpus - 1) / measured.gpus) - 1
    step = measured.compute_ms + max(0.0, measured.exposed_ms) + max(0.0, longer * measured.bound_ms)
    return measured.single_ms / max(step, measured.single_ms)


def by_case(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[int, dict[str, float]]]:
    """For each (net, dtype, batch, provider) of weak scaling and each number of GPUs: its metrics."""
    found: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}
    for row in rows:
        net, gpus, scaling = row["subject"].split(" ")
        if scaling == "weak" and not isnan(float(row["p50"])):
            case = found.setdefault((net, row["dtype"], row["batch"], row["provider"]), {})
            case.setdefault(int(gpus.removeprefix("x")), {})[row["metric"]] = float(row["p50"])
    return found


def measured_of(rows: Sequence[Row]) -> dict[tuple[str, ...], Measured]:
    """What the most GPUs measured, of each case that one GPU measured as well. One GPU sends nothing, whatever the gradients.

    Gathered factors are left out: each GPU sends its own to all others, so their bytes grow with the number of GPUs.
    """
    cases = by_case(rows)
    found: dict[tuple[str, ...], Measured] = {}
    for key, counts in cases.items():
        if key[3].endswith("+factors"):
            continue
        most = max(counts)
        single = counts.get(1) or cases.get((*key[:3], key[3].partition("+")[0]), {}).get(1, {})
        values = counts[most]
        wanted = ("compute_ms", "exposed_ms", "bound_ms", "gradient_bytes")
        if most > 1 and "step_ms" in single and all(name in values for name in wanted):
            found[key] = Measured(most, single["step_ms"], *(values[name] for name in wanted))
    return found


def network_table(rows: Sequence[Row], title: str) -> str:
    """The model's efficiencies."""
    found = measured_of(rows)
    if not found:
        return ""
    cells = [(gb_s, gpus) for gb_s in RATES_GB_S for gpus in GPUS]
    rates = " or ".join(f"{rate:g}" for rate in RATES_GB_S)
    assumed = f"a ring over {rates} GB/s a host, {HOP_US:g} us a hop, {BACKWARD_SHARE:.2f} of the computation hides it"
    heads = [f"{gpus} GPUs, {gb_s:g} GB/s" for gb_s, gpus in cells]
    first = f"net | dtype | batch a GPU | provider | GPUs a host | {HOST_GPUS} GPUs of one host | MB sent"
    first += " | ms over the network (64 GPUs, 50 GB/s)"
    lines = [
        f"{title}, from {rows[0]['device']}; a model, not measured: {assumed}",
        "",
        f"| {first} | {' | '.join(heads)} |",
        "|" + "---|" * (8 + len(cells)),
    ]
    for key, one in found.items():
        shown = [str(one.gpus), f"{host_efficiency(one, HOST_GPUS):.1%}", f"{one.gradient_bytes / 1e6:.0f}"]
        shown.append(f"{network_ms(one, GPUS[-1], RATES_GB_S[0]):.2f}")
        shown += [f"{efficiency(one, gpus, gb_s):.0%}" for gb_s, gpus in cells]
        lines.append(f"| {' | '.join((*key, *shown))} |")
    return "\n".join(lines)


def parts_table(rows: Sequence[Row], title: str) -> str:
    """Where the time goes that several GPUs add to a step of one: as the profiler and the rounds say."""
    lines = [
        f"{title}, {rows[0]['device']}, milliseconds",
        "",
        f"| {' | '.join(PARTS)} |",
        "|" + "---|" * len(PARTS),
    ]
    before = len(lines)
    for (net, dtype, batch, provider), counts in by_case(rows).items():
        plain = by_case(rows).get((net, dtype, batch, provider.partition("+")[0]), {})
        single = (counts.get(1) or plain.get(1) or {}).get("step_ms")
        for gpus, values in sorted(counts.items()):
            if gpus == 1 or "exposed_ms" not in values:
                continue
            bare = values.get("bare_ms")
            exposed = values["exposed_ms"]
            shown = [single, values["step_ms"], exposed, None if bare is None else min(bare, exposed)]
            shown += [
                None if bare is None else max(0.0, exposed - bare),
                values.get("collective_ms"),
                values.get("bound_ms"),
            ]
            cells = ["" if value is None else f"{value:.3g}" for value in shown]
            rate = values.get("link_gb_per_s")
            cells.append("" if rate is None else f"{rate:.0f}")
            lines.append(f"| {' | '.join((f'{net} x{gpus}', dtype, batch, provider, *cells))} |")
    return "\n".join(lines) if len(lines) > before else ""
