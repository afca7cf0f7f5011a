"""The measured rows of chains: the cost model agrees with them, and the page's tables are made from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.chains import fit_cost

PAGE = Path(__file__).parents[2] / "docs" / "kernels" / "chains.md"
RESULTS = fit_cost.read(fit_cost.RESULTS)


def test_the_estimate_is_near_the_measured_times() -> None:
    assert len(RESULTS) >= 10
    assert fit_cost.rms_error(RESULTS) < 0.08


@pytest.mark.parametrize("one", [one for one in RESULTS if one.settings], ids=lambda one: one.block.name)
def test_the_fastest_setting_is_nearly_reached_by_the_first_four(one: fit_cost.Results) -> None:
    """At effort `quick`, no more are tried."""
    ordered = sorted(one.settings, key=lambda timed: timed.estimate_us)
    fastest = min(timed.us for timed in ordered)
    assert min(timed.us for timed in ordered[:4]) < 1.08 * fastest
    assert max(timed.us for timed in ordered) > 1.08 * fastest  # which is no easy thing: some settings lose more


def test_the_pages_tables_are_made_from_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert fit_cost.times_table(RESULTS) in page
    assert fit_cost.errors_table(RESULTS) in page
