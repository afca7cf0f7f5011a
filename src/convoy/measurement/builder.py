"""The building process: reads jobs from standard input, builds them, and answers a line each. Touches no device."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    hello = json.loads(sys.stdin.readline())

    from convoy.engines.manifest import load_engine
    from convoy.errors import CompileError
    from convoy.measurement.worker import die_with_parent
    from convoy.problem import Knobs, parse_problem
    from convoy.target import Target

    die_with_parent()
    target = Target.from_dict(hello["target"])
    for line in sys.stdin:
        job = json.loads(line)
        try:
            problem = parse_problem(job["problem"], job["text"])
            load_engine(job["engine"], tuple(hello["engines"])).build(problem, Knobs.parse(job["knobs"]), target)
            answers.write("ok\n")
        except (CompileError, RuntimeError, ValueError, TypeError, AssertionError):
            answers.write("failed\n")  # the measuring process meets it again, and records why


if __name__ == "__main__":
    main()
