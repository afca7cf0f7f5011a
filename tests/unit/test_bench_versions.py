"""bench/tuning/versions.py: the table of two versions."""

from bench.tuning.versions import versions_table


def row(provider: str, metric: str, p50: float, least: float, most: float) -> dict[str, str]:
    return {
        "subject": "resnet50", "batch": "1", "dtype": "fp16", "provider": f"convoy.{provider}", "metric": metric,
        "p50": str(p50), "p20": str(least), "p80": str(most), "device": "GPU", "commit": "0123456", "versions": "torch=2",
        "protocol": "words",
    }  # fmt: skip


def test_each_version_has_a_line():
    rows = [
        row("before", "tuning_s", 30.04, 30.04, 30.04), row("before", "start_s", 15.0, 15.0, 15.0),
        row("before", "call_us", 187.4, 180.0, 200.6), row("after", "tuning_s", 12.0, 12.0, 12.0),
        row("after", "start_s", 2.04, 2.04, 2.04), row("after", "call_us", 185.0, 177.0, 190.0),
    ]  # fmt: skip
    lines = [line for line in versions_table(rows, "t").splitlines() if line.startswith("| resnet50")]
    assert lines == [
        "| resnet50 | fp16 | 1 | before | 30.0 | 15.0 | 187 / 180 / 201 |",
        "| resnet50 | fp16 | 1 | after | 12.0 | 2.0 | 185 / 177 / 190 |",
    ]
