"""Take out of the shipped results the rows that no choice can use: of retired engines, and of engines where they do not compete.

    python bench/tuning/prune_shipped.py [--check]

An engine with `only_numerics` (such as `cuda.split_fp32`) competes under these numerics alone. Every session would read its rows
for other problems and never choose them. With `--check` nothing is written, and the exit status is 1 if a row is superfluous.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from convoy.engines.manifest import MANIFEST, RETIRED, load_engine
from convoy.perfdb import Measurement
from convoy.perfdb.shipped import read_shipped, shipped_folder, shipped_targets, write_shipped
from convoy.problem import ConvProblem, LinearProblem, is_subgraph_key, parse_problem


def is_superfluous(row: Measurement) -> bool:
    """Whether no search can choose a row's config."""
    engine_id = row.config.engine
    if engine_id in RETIRED:
        return True
    numerics = load_engine(engine_id).only_numerics if engine_id in MANIFEST else ()
    if not numerics or is_subgraph_key(row.problem):
        return False
    problem = parse_problem(row.problem, "")
    return isinstance(problem, (ConvProblem, LinearProblem)) and problem.numerics not in numerics


def main() -> None:
    """Rewrite each target's file, and say what left it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = 0
    for target in shipped_targets():
        rows = read_shipped(target)
        kept = [row for row in rows if not is_superfluous(row)]
        gone = Counter(row.config.engine for row in rows if is_superfluous(row))
        found += len(rows) - len(kept)
        print(f"{target}: {len(rows) - len(kept)} of {len(rows)} rows are superfluous: {dict(gone)}")
        if gone and not options.check:
            write_shipped(kept, Path(str(shipped_folder())))
    raise SystemExit(1 if found and options.check else 0)


if __name__ == "__main__":
    main()
