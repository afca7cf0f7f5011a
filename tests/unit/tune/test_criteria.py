"""Criteria as data: what they say, what they do not cover, and every way in which their file can be wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.perfdb.shipped import shipped_descriptions, shipped_folder
from convoy.problem import ConvProblem, LayoutProblem, LinearProblem, TensorSpec
from convoy.target import Target
from convoy.tune.criteria import (
    FEATURES,
    MAX_REGRET,
    Criteria,
    TreeLeaf,
    TreeSplit,
    features_of,
    kind_name,
    leaves,
    rules,
)
from convoy.tune.criteria_file import SUFFIX, criteria_json, find_criteria, read_criteria, user_file

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("torch", "2.11"),))
CONV = ConvProblem(1, 64, 28, 28, 128, 3, 3, 1, 1, layout="nhwc")
VERSIONS = {"aten": 1, "one": 3, "two": 1}
FEW = TreeLeaf(12, {"one": 0.0, "aten": 0.5})
MANY = TreeLeaf(20, {"two": 0.01, "one": 0.2, "aten": 0.4})
CRITERIA = Criteria(
    H100,
    "v",
    VERSIONS,
    (kind_name(CONV),),
    TreeSplit("gemm_n", 100.0, FEW, TreeSplit("nhwc", 0.5, FEW, MANY)),
    32,
    "today",
    "abc",
)


def test_the_questions_lead_to_a_ranking() -> None:
    assert CRITERIA.ranking(CONV, VERSIONS) == ["two", "one", "aten"]
    assert CRITERIA.ranking(replace(CONV, k=64), VERSIONS) == ["one", "aten", "two"]
    assert CRITERIA.regrets(replace(CONV, k=64), VERSIONS) == {"one": 0.0, "aten": 0.5, "two": MAX_REGRET}
    assert leaves(CRITERIA.root) == [FEW, FEW, MANY]


def test_an_engine_of_another_version_and_one_that_cannot_are_not_judged() -> None:
    assert CRITERIA.regrets(CONV, {"one": 2, "aten": 1, "three": 1}) == {"aten": 0.4}


@pytest.mark.parametrize(
    "problem",
    [
        CONV.with_layout("nchw"),
        replace(CONV, groups=64, k=64),
        replace(CONV, direction="wgrad"),
        replace(CONV, dynamic_weight=True),
        replace(CONV, weight_mask="0" * 16),
        LinearProblem(1, 64, 64),
        LayoutProblem(TensorSpec((1, 64, 8, 8), "fp32"), "nchw", "nhwc"),
    ],
)
def test_kinds_that_were_not_learned_are_not_covered(problem) -> None:
    assert CRITERIA.regrets(problem, VERSIONS) is None
    assert CRITERIA.ranking(problem, VERSIONS) == []


def test_features_are_in_natural_units() -> None:
    found = features_of(replace(CONV, groups=2, stride_h=2, stride_w=2, x_dtype="fp16"))
    assert set(found) == set(FEATURES)
    assert (found["gemm_m"], found["gemm_n"], found["gemm_k"]) == (14 * 14, 64, 32 * 9)
    assert (found["taps"], found["stride"], found["groups"], found["half"], found["nhwc"]) == (9, 2, 2, 1, 1)
    assert found["flops"] == 2 * 14 * 14 * 128 * 32 * 9
    linear = features_of(LinearProblem(4, 10, 20))
    assert (linear["gemm_m"], linear["gemm_n"], linear["gemm_k"], linear["taps"]) == (4, 20, 10, 1)


def test_a_person_can_read_them() -> None:
    lines = rules(CRITERIA)
    assert lines[0] == "gemm_n <= 100:"
    assert lines[1] == "  one (0 %), then aten (65 %) [12 layers]"
    assert "  not nhwc:" in lines


def test_the_file_is_read_back() -> None:
    text = criteria_json(CRITERIA)
    assert read_criteria(text, "file") == CRITERIA
    assert criteria_json(read_criteria(text, "file")) == text


def damaged(**changes):
    return {**json.loads(criteria_json(CRITERIA)), **changes}


def deep(depth):
    node = {"problems": 1, "regret": {"one": 0.0}}
    for _ in range(depth):
        node = {"feature": "taps", "at_most": 1.0, "yes": node, "no": {"problems": 1, "regret": {"one": 0.0}}}
    return node


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("{", "JSON"),
        ([], "an object"),
        (damaged(schema=2), "schema"),
        (damaged(extra=1), "an object with"),
        (damaged(target={"device": "cuda"}), "target"),
        (damaged(engines={"one": -1}), "engines.one"),
        (damaged(engines={"../one": 1}), "engines"),
        (damaged(kinds="conv"), "kinds"),
        (damaged(problems=True), "problems"),
        (damaged(root={"problems": 1, "regret": {}}), "root.regret"),
        (damaged(root={"problems": 1, "regret": {"nobody": 0.1}}), "root.regret"),
        (damaged(root={"problems": 1, "regret": {"one": -0.1}}), "root.regret.one"),
        (damaged(root={"problems": 0, "regret": {"one": 0.1}}), "root.problems"),
        (damaged(root={"feature": "os.system", "at_most": 1, "yes": {}, "no": {}}), "root.feature"),
        (damaged(root={"feature": "taps", "at_most": "1", "yes": {}, "no": {}}), "root.at_most"),
        (damaged(root={"feature": "taps", "at_most": 1, "yes": {}, "no": {}}), "root.yes"),
        (damaged(root=deep(17)), "at most 16 levels"),
        ('{"schema": NaN}', "NaN"),
        (" " * (1 << 20 | 1), "characters"),
    ],
)
def test_a_damaged_file_is_refused_by_the_name_of_its_field(data, named) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    with pytest.raises(InputError, match="file") as caught:
        read_criteria(text, "file")
    assert named in str(caught.value)


def put(path: Path, **changes) -> Criteria:
    criteria = replace(CRITERIA, **changes)
    path.write_text(criteria_json(criteria))
    return criteria


def test_the_best_fit_is_found(tmp_path: Path) -> None:
    shipped, database = tmp_path / "shipped", tmp_path / "user" / "perf.db"
    shipped.mkdir()
    database.parent.mkdir()
    h200 = replace(H100, name="NVIDIA H200")
    newer = replace(H100, versions=(("torch", "2.12"),))
    for target in (h200, newer, H100, Target("cpu", "CPU", "avx2", 2, 1, 1)):
        assert find_criteria(target, database, shipped) is None
    put(shipped / f"a{SUFFIX}", date="shipped, H100")
    for target, expected in ((H100, "shipped, H100"), (newer, "shipped, H100"), (h200, "shipped, H100")):
        found = find_criteria(target, database, shipped)
        assert found is not None
        assert found.date == expected
    assert find_criteria(replace(H100, arch="sm_80", name="NVIDIA A100"), database, shipped) is None
    put(user_file(newer, database), target=newer, date="user, newer")
    put(shipped / f"b{SUFFIX}", target=newer, date="shipped, newer")
    for target, expected in ((newer, "user, newer"), (H100, "shipped, H100"), (h200, "user, newer")):
        found = find_criteria(target, database, shipped)
        assert found is not None
        assert found.date == expected


def test_another_databases_criteria_are_not_its_own(tmp_path: Path) -> None:
    put(user_file(H100, tmp_path / "perf.db"))
    assert find_criteria(H100, tmp_path / "other.db", tmp_path) is not None  # as a shipped folder it is read
    assert find_criteria(H100, tmp_path / "other.db", tmp_path / "none") is None


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = user_file(H100, tmp_path / "perf.db")
    path.write_bytes(b"\xff{")
    with pytest.raises(InputError, match="convoy study") as caught:
        find_criteria(H100, tmp_path / "perf.db", tmp_path / "none")
    assert str(path) in str(caught.value)


def test_what_ships_can_be_read_and_fits_its_rows() -> None:
    learned = [entry.name.partition(".")[0] for entry in shipped_folder().iterdir() if entry.name.endswith(SUFFIX)]
    assert learned
    for digest, target in shipped_descriptions().items():
        criteria = find_criteria(target, Path("/nowhere/perf.db"))
        assert criteria is not None
        assert criteria.target == target if digest in learned else criteria.target.arch == target.arch
        assert criteria.ranking(CONV, criteria.engines)


def test_cpus_judge_for_one_another(tmp_path: Path) -> None:
    """As their rows predict for one another; the same device's come first."""
    here = Target("cpu", "here", "avx2", 2, 1, 1)
    there = replace(here, name="there", arch="avx512", units=64)
    put(tmp_path / f"a{SUFFIX}", target=there)
    for target, expected in ((here, there), (there, there), (H100, None)):
        found = find_criteria(target, tmp_path / "none" / "perf.db", tmp_path)
        assert (found and found.target) == expected
    put(tmp_path / f"b{SUFFIX}", target=replace(here, versions=(("torch", "2.12"),)))
    for name, arch, expected in (
        ("here", "avx2", "here"),
        ("new", "avx2", "here"),
        ("new", "avx512", "there"),
        ("new", "neon", "there"),
    ):
        found = find_criteria(replace(here, name=name, arch=arch), tmp_path / "none" / "perf.db", tmp_path)
        assert found is not None
        assert found.target.name == expected
