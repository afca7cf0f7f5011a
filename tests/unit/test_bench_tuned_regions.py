"""bench/regions/tuned_regions.py: subgraphs that an engine and a peer computed, and their table."""

from bench.regions.tuned_regions import best_rows, subject_of, tuned_regions_table

from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Knobs

TEXT = (
    "graph 1\ninput %v0: fp16[2,8,4,4]\ninput %v1: fp16[2,8,4,4]\n"
    "%v2: fp16[2,8,4,4] = aten.add.Tensor(%v0, %v1)\n%v3: fp16[2,8,4,4] = aten.relu.default(%v2)\nreturn %v3\n"
)


def row(problem: str, engine: str, median_us: float, samples: int = 9, status: Status = Status.OK) -> Measurement:
    config = EngineConfig(engine, 1, Knobs.of(k=int(median_us)))
    return Measurement(problem, config, "0" * 16, "v5:graph:cold:200us", status, samples, median_us, 0.0)


def test_the_fastest_rows_of_shared_subgraphs_count():
    a, b, c = (f"subgraph:nhwc:{letter * 24}" for letter in "abc")
    rows = [
        row(a, "cuda.fusion", 3.0), row(a, "cuda.fusion", 2.0), row(a, "aten", 4.0),
        row(a, "inductor", 9.0, samples=1),  # timed once: clearly slower
        row(b, "aten", 4.0), row(b, "inductor", 3.0),  # not the engine's
        row(c, "cuda.fusion", 1.0, status=Status.WRONG_RESULT), row(c, "aten", 1.0),
    ]  # fmt: skip
    found = best_rows(rows, "cuda.fusion")
    assert {key: {name: one.median_us for name, one in own.items()} for key, own in found.items()} == {
        a: {"cuda.fusion": 2.0, "aten": 4.0}
    }


def test_a_subject_names_operators_and_sides():
    assert subject_of(TEXT, "subgraph:nhwc:0123456789abcdef") == ("add+relu 8x4x4 abcdef", 2, "fp16")


def test_the_table_has_a_line_for_each_kind():
    def cell(subject: str, provider: str, p50: float) -> dict[str, str]:
        common = {"device": "GPU", "commit": "0123456", "protocol": "words"}
        return {"subject": subject, "provider": f"convoy.{provider}", "p50": str(p50), **common}

    rows = [
        cell("add+relu 8x4x4 a", "cuda.fusion", 1.0), cell("add+relu 8x4x4 a", "inductor", 2.0),
        cell("add+relu 8x8x8 b", "cuda.fusion", 4.0), cell("add+relu 8x8x8 b", "inductor", 8.0),
        cell("add+relu 8x8x8 b", "aten", 16.0), cell("cat 8x8x8 c", "cuda.fusion", 1.0), cell("cat 8x8x8 c", "aten", 1.0),
    ]  # fmt: skip
    table = tuned_regions_table(rows, "t")
    assert "| add + relu | 2 | 2.00 | 4.00 | 16.00 |" in table
    assert "| cat | 1 | 1.00 |  | 1.00 |" in table
    assert "2.00x as fast as inductor on 2 subgraphs" in table
    assert "2.00x as fast as aten on 2 subgraphs" in table
