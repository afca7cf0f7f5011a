"""The first screen of the results: each question, its answer in one line, the device, the commits, and the page with the rest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence

from bench.layers.gpu_layer_tables import fastest
from bench.shared.fair import Setting, before_replays, by_older_code, fair_cases, newest_cases, newest_commit
from bench.shared.rows import Row, gain_of, geometric_mean, preferred_first, rows_of, settings
from bench.shared.timed_code import is_stale

MOST_COMMITS = 2
"""Commits that are named in the table; the question's own page names all."""

Answer = Callable[[Sequence[Row]], tuple[str, Sequence[Row]] | None]
"""The rows of one device → the answer and the rows that it was taken from, or None where they say nothing."""


def answers_table() -> str:
    """A row a question: the answer on the device with most cases."""
    lines = ["| Question | Answer | Device | Commits |", "|---|---|---|---|"]
    for question, words, page, answer in QUESTIONS:
        for rows in preferred_first(rows_of(question)):
            found = answer(rows)
            if found is not None:
                text, used = found
                lines.append(f"| [{words}]({page}) | {text} | {rows[0]['device']} | {_commits(used)} |")
                break
    return "\n".join(lines)


def headline() -> str:
    """The README's one figure, with its device, and a footnote of commits and versions.

    It is replay with replay, of the newest code. Where the rows are from before the three figures, it is the older one.
    """
    rows = preferred_first(rows_of("inference"))[0]
    older = before_replays(rows)
    return _fair_headline(rows, older) or _older_headline(older)


def tuning_times() -> str:
    """How long a first answer, a start from a stored plan and a search take, with device, nets and commit of each."""
    answers, searches = preferred_first(rows_of("first-answer"))[0], preferred_first(rows_of("retuning"))[0]
    first, stored = _of_metric(answers, "first_s"), _of_metric(answers, "stored_s")
    search = _of_metric(searches, "tuning_s")
    return (
        f"At effort `none` a net's first answer takes {_span(first)} s, with nothing compiled before. The next process starts "
        f"from the stored plan in {_span(stored)} s ({_source(first)}).\n"
        f"A search at the default effort takes {_span(search)} s from an empty database ({_source(search)})."
    )


def _of_metric(rows: Sequence[Row], metric: str) -> list[Row]:
    return [row for row in rows if row["metric"] == metric]


def _span(rows: Sequence[Row]) -> str:
    times = [float(row["p50"]) for row in rows]
    return " to ".join(dict.fromkeys(f"{time:.2g}" for time in (min(times), max(times))))


def _source(rows: Sequence[Row]) -> str:
    nets = ", ".join(dict.fromkeys(row["subject"] for row in rows))
    return f"{rows[0]['device']}; {nets}; commit {_commits(rows)}"


FEW_NETS = 6
"""With fewer nets than these the headline also says what the older rows of more nets say."""


def _fair_headline(rows: Sequence[Row], older: Sequence[Row]) -> str:
    replays = [row for row in rows if row["metric"] == "replay_ms"]
    cases = newest_cases(replays, "replay_ms") if replays else {}
    if not cases:
        return ""
    own = [case.ours for case in cases.values()]
    gains = [case.gain for case in cases.values()]
    in_order = sorted({(dtype, int(batch)) for _, dtype, batch in cases})
    kinds = ", ".join(f"{dtype} at batch {batch}" for dtype, batch in in_order)
    nets = len({case[0] for case in cases})
    peers = _peers(rows, cases, {row["commit"] for row in own})
    figure = (
        f"**{geometric_mean(gains):.2f}x** as fast as the fastest of {peers}, on an {own[0]['device']}: the geometric "
        f"mean over {nets} nets ({kinds}; {len(gains)} cases, from {min(gains):.2f}x to {max(gains):.2f}x), "
        "device time with device time"
    )
    further = [case for part in by_older_code(replays) for case in fair_cases(part, "replay_ms").values()]
    if nets < FEW_NETS and further:
        gains = [case.gain for case in further]
        spread = f"{geometric_mean(gains):.2f}x, from {min(gains):.2f}x to {max(gains):.2f}x"
        figure += (
            f". By older code ({_commits([case.ours for case in further])}), in {len(gains)} further cases: {spread}"
        )
    elif nets < FEW_NETS and older:
        before = _gains(older)
        more = len({row["subject"] for row in older})
        figure += f". By older code, over {more} nets, {len(before)} cases: {geometric_mean(before):.2f}x"
    if is_stale(own[0]):
        figure = "Not measured since the last change of the code that runs a net; the [results](docs/results/index.md) are older"
    return f"{figure}.[^headline]\n\n[^headline]: Commit {_commits(own)}; {own[0]['versions']}."


def _peers(rows: Sequence[Row], cases: Collection[Setting], commits: Collection[str]) -> str:
    """The providers that were timed beside Convoy in cases of commits."""
    of_cases = (
        row for row in rows if (row["subject"], row["dtype"], row["batch"]) in cases and row["commit"] in commits
    )
    return ", ".join(sorted({row["provider"] for row in of_cases} - {"convoy"}))


def _older_headline(rows: Sequence[Row]) -> str:
    gains = _gains(rows)
    nets = len({row["subject"] for row in rows})
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    versions = "; ".join(dict.fromkeys(row["versions"] for row in rows))
    return (
        f"**{geometric_mean(gains):.2f}x** as fast as the fastest other provider, on an {rows[0]['device']}: the geometric mean "
        f"over {nets} nets in fp16 and fp32 at batch 1 and 32 ({len(gains)} cases, from {min(gains):.2f}x to "
        f"{max(gains):.2f}x). The rows are older than the present code and are to be measured again.[^headline]\n\n"
        f"[^headline]: Commits {commits}; {versions}."
    )


def _commits(rows: Sequence[Row]) -> str:
    found = list(dict.fromkeys(row["commit"] for row in rows))
    more = f" and {len(found) - MOST_COMMITS} more" if len(found) > MOST_COMMITS else ""
    return ", ".join(found[:MOST_COMMITS]) + more


def _gains(rows: Sequence[Row]) -> list[float]:
    found = (gain_of(by_provider) for by_provider in settings(rows).values())
    return [gain for gain in found if gain is not None]


def _speedup(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    fair = [row for row in rows if row["metric"] in ("replay_ms", "call_ms")]
    if fair:
        metric = "replay_ms" if any(row["metric"] == "replay_ms" for row in newest_commit(fair)) else "call_ms"
        cases = newest_cases(fair, metric).values()
        gains, rows = [case.gain for case in cases], [case.ours for case in cases]
    else:
        gains = _gains(rows)
    if not gains:
        return None
    span = f"{min(gains):.2f}x to {max(gains):.2f}x" if len(gains) > 1 else "one case"
    return f"**{geometric_mean(gains):.2f}x** (geometric mean of {len(gains)} cases; {span})", rows


def _layers(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    pairs = [sides for sides in fastest(rows).values() if len(sides) == 2]
    gains = [float(sides[False]["p50"]) / float(sides[True]["p50"]) for sides in pairs]
    behind = sum(gain < 1 for gain in gains)
    return f"**{geometric_mean(gains):.2f}x** (geometric mean of {len(gains)} layers; {behind} slower)", rows


def _scaling(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    own = [
        row
        for row in rows
        if row["metric"] == "efficiency" and row["provider"] == "convoy" and "resnet50" in row["subject"]
    ]
    most = max(own, key=lambda row: int(row["subject"].split(" x")[1].split()[0]))
    return f"**{float(most['p50']):.1%}** efficiency, {most['subject']}", [most]


def _options(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    times = {
        (row["subject"], row["batch"], row["commit"], row["provider"]): float(row["p50"])
        for row in rows
        if row["metric"] == "latency_ms"
    }
    gains = {
        key[:3]: time / times[(*key[:3], "torch.best")]
        for key, time in times.items()
        if key[3] == "torch.defaults" and (*key[:3], "torch.best") in times
    }
    (subject, batch, _), gain = max(gains.items(), key=lambda item: item[1])
    return f"up to **{gain:.1f}x** over PyTorch's defaults ({subject}, batch {batch})", rows


def _strategies(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    own = [row for row in rows if row["metric"] == "total_us"]
    times = {(row["subject"], row["dtype"], row["batch"], row["provider"]): float(row["p50"]) for row in own}
    ratios = [time / times[(*key[:3], "convoy.exact")] for key, time in times.items() if key[3] == "convoy.per_layer"]
    text = f"**{geometric_mean(ratios):.2f}x** over the fastest candidate of each layer (up to {max(ratios):.2f}x)"
    return text, own


def _prediction(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    own = [row for row in rows if row["provider"] == "convoy" and row["metric"] == "fraction_of_best"]
    shares = [float(row["p50"]) for row in own]
    return f"**{statistics.mean(shares):.0%}** of the best measured speed (mean of {len(shares)} layers)", own


def _tuning(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    own = [row for row in rows if row["metric"] in ("tuning_s", "start_s")]
    found = {(row["subject"], row["dtype"], row["batch"], row["metric"]): float(row["p50"]) for row in own}
    parts = [
        f"{net} {dtype} batch {batch}: **{seconds:.0f} s**, {found[net, dtype, batch, 'start_s']:.0f} s from the database"
        for (net, dtype, batch, metric), seconds in found.items()
        if metric == "tuning_s"
    ]
    return "; ".join(parts), own


def _solver(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    seconds = {row["metric"]: float(row["p50"]) for row in rows}
    nets = ", ".join(dict.fromkeys(row["subject"] for row in rows))
    text = f"**{seconds['solve_s']:.1f} s** ({nets}); {seconds['solve_budget_s']:.0f} s under a memory budget"
    return text, rows


def _pruned(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    times = {row["subject"]: float(row["p50"]) for row in rows if row["provider"] == "convoy"}
    dense = {name: time for name, time in times.items() if " " not in name}
    gains = {name: dense[name.split()[0]] / time for name, time in times.items() if " " in name}
    name, gain = max(gains.items(), key=lambda item: item[1])
    return f"**{gain:.2f}x** over dense ({name} zeros, strict fp32)", rows


def _zeros(rows: Sequence[Row]) -> tuple[str, Sequence[Row]] | None:
    own = [row for row in rows if row["metric"] == "latency_ms"]
    times = {(row["subject"], row["provider"]): float(row["p50"]) for row in own}
    gains = [time / times[net, "convoy"] for (net, provider), time in times.items() if provider == "convoy.dense"]
    if len(gains) < 2:
        return None
    return (
        f"**{geometric_mean(gains):.2f}x** over dense engines (geometric mean of {len(gains)} small nets on real images)",
        own,
    )


QUESTIONS: tuple[tuple[str, str, str, Answer], ...] = (
    ("inference", "How much faster is inference on a GPU?", "inference-gpu.md", _speedup),
    ("cpu-inference", "How much faster is inference on a CPU?", "inference-cpu.md", _speedup),
    ("training", "How much faster is a training step?", "training.md", _speedup),
    ("scaling", "How does training scale over GPUs?", "scaling.md", _scaling),
    ("layers", "How fast are Convoy's kernels against cuDNN and PyTorch, layer by layer?", "layers-gpu.md", _layers),
    ("compare", "How does Convoy compare with other frameworks?", "frameworks.md", _speedup),
    ("options", "How much do PyTorch's own options give?", "pytorch-options.md", _options),
    ("study", "What does choosing for the whole net give?", "algorithms.md", _strategies),
    ("prediction", "How good is a choice without measuring?", "prediction.md", _prediction),
    ("retuning", "How long does tuning take?", "tuning.md", _tuning),
    ("selection", "How long does the exact solver take?", "selection.md", _solver),
    ("pruned-net", "What do pruned weights give?", "pruned-weights.md", _pruned),
    ("zeroskip", "What do zeros in feature maps give?", "feature-map-zeros.md", _zeros),
)
"""Question of the result files, its words, its page, and what answers it."""
