"""Where a library has a known defect, its engine refuses, the baseline is right without it, and the user is told."""

import itertools

import pytest
import torch
from torch import nn

import convoy
from convoy.engines import known_defects
from convoy.engines.compilers.instruction_sets import ONEDNN_LEVELS
from convoy.engines.known_defects import KNOWN_DEFECTS, defect_of, defects_here, stock_is_wrong
from convoy.engines.manifest import load_engine
from convoy.engines.support_checks import effective_dilation
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device import doctor
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue
from convoy.target import Target

BF16 = {"x_dtype": "bf16", "weight_dtype": "bf16", "y_dtype": "bf16", "numerics": "half"}
CPU = detect_target("cpu")
LEVELS = tuple(name for name, _ in ONEDNN_LEVELS)
BEFORE_AMX = LEVELS[: LEVELS.index("avx512_core_amx")]

ANYWHERE = [
    (ConvProblem(1, 1, 9, 2, 4, 3, 2, 4, 4, 3, 3, 1, 3), "onednn-dilated-filter-in-padding"),
    (ConvProblem(1, 1, 5, 3, 4, 3, 3, 2, 1, 1, 5), "onednn-one-channel-groups-one-output-column"),
    (
        ConvProblem(1, 2, 9, 1, 6, 3, 3, 1, 1, 5, 5, direction="wgrad", **BF16),
        "onednn-bf16-wgrad-columns-in-padding",
    ),
    (
        ConvProblem(1, 39, 11, 2, 21, 7, 3, 2, 1, 2, 5, direction="wgrad", **BF16),
        "onednn-bf16-wgrad-columns-in-padding",
    ),
]
WITH_AMX = [
    ConvProblem(1, 2, 2, 7, 1, 4, 7, 3, 3, 1, 2, 1, 2, **BF16),
    ConvProblem(1, 2, 7, 1, 1, 3, 4, 0, 2, 1, 2, **BF16),
    ConvProblem(1, 9, 9, 1, 1, 1, 4, 0, 2, 2, 2, **BF16),
]
"""Seen to be wrong with oneDNN 3.12 on an Intel CPU with AMX."""


@pytest.fixture
def amx(monkeypatch):
    """As if oneDNN used AMX here."""
    monkeypatch.setattr(known_defects, "onednn_in_force", lambda: LEVELS)


@pytest.fixture
def no_amx(monkeypatch):
    """As if oneDNN were limited to what came before AMX."""
    monkeypatch.setattr(known_defects, "onednn_in_force", lambda: BEFORE_AMX)


def is_exact_by_the_baseline(problem):
    baseline = load_engine("aten")
    executable = baseline.build(problem, baseline.space(problem, CPU)[0], CPU)
    for seed in range(3):
        verdict = judge(executable, "library", problem, make_data(problem, seed, "integer"), "integer")
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("problem", "name"), ANYWHERE, ids=[str(p) for p, _ in ANYWHERE])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_where_onednn_is_wrong_it_is_refused_and_the_baseline_does_without(problem, name, layout, no_amx):
    problem = problem.with_layout(layout)
    defect = defect_of(problem, CPU)
    assert defect is not None
    assert defect.name == name
    assert not load_engine("onednn").supports(problem, CPU)
    is_exact_by_the_baseline(problem)


@pytest.mark.parametrize("problem", WITH_AMX, ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_with_amx_bf16_with_one_output_column_is_not_left_to_onednn(problem, layout, amx, monkeypatch):
    problem = problem.with_layout(layout)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    support = load_engine("onednn").supports(problem, CPU)
    assert "AMX" in support.reason
    is_exact_by_the_baseline(problem)
    seen = []
    plain_conv2d = torch.conv2d

    def watched(*args):
        seen.append(torch.backends.mkldnn.enabled)
        return plain_conv2d(*args)

    monkeypatch.setattr(torch, "conv2d", watched)
    is_exact_by_the_baseline(problem)
    assert seen == [False] * 3
    assert torch.backends.mkldnn.enabled


def test_the_baseline_is_exact_on_all_kinds_of_padded_problems_with_one_output_column(amx):
    """Of groups, dilations, strides and layouts: each is another of ATen's own convolutions."""
    count = 0
    for groups, dilation, stride, pad, layout in itertools.product((1, 2, 4), (1, 2), (1, 3), (1, 2), ("nchw", "nhwc")):
        least = max(1, 2 * dilation + 1 - 2 * pad)
        problem = ConvProblem(
            2, 4, 6, least, 4, 3, 3, 1, pad, 1, stride, 1, dilation, groups, layout, **BF16,
            epilogue=Epilogue(bias=True),
        )  # fmt: skip
        if problem.q != 1:
            continue
        assert defect_of(problem, CPU) is not None
        is_exact_by_the_baseline(problem)
        count += 1
    assert count >= 24


@pytest.mark.parametrize("problem", WITH_AMX, ids=str)
def test_without_amx_the_same_problems_are_ordinary(problem, no_amx):
    assert defect_of(problem, CPU) is None


def test_a_masked_problem_asks_of_the_convolution_that_is_left(amx):
    channels = load_engine("pruned.channels")
    for name in channels.inner:
        inner = load_engine(name)
        assert bool(inner.accepts(WITH_AMX[0], CPU)) == (name == "aten")


def test_fp32_that_torch_may_round_to_bf16_counts_as_bf16(amx, monkeypatch):
    problem = ConvProblem(1, 2, 7, 1, 1, 3, 4, 0, 2, 1, 2)
    assert defect_of(problem, CPU) is None
    before = torch.backends.mkldnn.conv.fp32_precision
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        assert defect_of(problem, CPU) is not None
        assert defect_of(ConvProblem(1, 2, 7, 1, 1, 3, 4, 0, 2, 1, 2, numerics="strict"), CPU) is None
    finally:
        torch.backends.mkldnn.conv.fp32_precision = before


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(1, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2),
        ConvProblem(8, 64, 56, 56, 64, 3, 3, 1, 1, direction="wgrad", **BF16),
        ConvProblem(8, 64, 56, 56, 64, 3, 3, 2, 2, 1, 1, 2, 2),
        ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1, groups=512),
        ConvProblem(1, 512, 7, 7, 512, 3, 3, 1, 1, **BF16),
        ConvProblem(1, 512, 1, 1, 512, 1, 1, **BF16),
        ConvProblem(1, 1, 28, 28, 8, 5, 5),
    ],
    ids=str,
)
def test_layers_of_real_nets_are_not_refused(problem, amx):
    assert defect_of(problem, CPU) is None


def test_a_dilation_of_a_single_row_means_nothing():
    assert effective_dilation(ConvProblem(1, 1, 9, 9, 1, 1, 3, dilation_h=5, dilation_w=2)) == (1, 2)


def with_onednn(version):
    return Target("cpu", "a CPU", "avx512", 2, 1 << 30, 1 << 20, (("onednn", version),) if version else ())


@pytest.mark.parametrize(
    ("version", "is_here"), [("3.10.1", True), ("3.12", True), ("", True), ("4.0", False), ("4.1.2", False)]
)
def test_a_defect_holds_until_the_version_in_which_it_is_mended(version, is_here, amx):
    from dataclasses import replace

    unmended = next(defect for defect in KNOWN_DEFECTS if defect.instruction_sets)
    defect = replace(unmended, mended_in="4.0")
    assert defect.is_here(with_onednn(version)) is is_here
    assert unmended.is_here(with_onednn(version))


def test_defects_of_a_cpu_are_none_of_a_gpu():
    gpu = Target("cuda", "a GPU", "sm_90", 132, 1 << 30, 1 << 20, ())
    assert defects_here(gpu) == ()
    assert defect_of(ANYWHERE[0][0], gpu) is None


def test_names_are_unique_and_every_row_has_its_evidence():
    assert len({defect.name for defect in KNOWN_DEFECTS}) == len(KNOWN_DEFECTS)
    assert all(defect.seen_in and defect.source and defect.effect for defect in KNOWN_DEFECTS)


def test_the_doctor_lists_the_defects_of_this_machine(amx):
    found = {finding.what: finding for finding in doctor.findings()}
    for defect in KNOWN_DEFECTS:
        finding = found[f"known defect {defect.name}"]
        assert defect.words in finding.found
        assert "stock PyTorch is wrong there" in finding.means


def test_the_doctor_lists_no_defect_that_the_machine_has_not(no_amx):
    names = {finding.what for finding in doctor.findings()}
    assert "known defect onednn-amx-bf16-one-output-column" not in names


def test_notes_name_each_defect_once_with_its_first_layer(amx):
    notes = stock_is_wrong([*WITH_AMX, ConvProblem(1, 8, 9, 9, 8, 3, 3, 1, 1, **BF16)], CPU)
    assert len(notes) == 1
    assert notes[0].startswith("stock PyTorch may be wrong in 3 convolutions: oneDNN is wrong in bf16 with AMX")
    assert WITH_AMX[0].key in notes[0]


def test_a_plan_tells_where_stock_pytorch_is_wrong(amx, tmp_path):
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, (3, 4), (1, 2), (0, 2))).bfloat16()
    x = torch.randn(1, 2, 7, 1).bfloat16()
    fast = convoy.optimize(net.eval(), (x,), settings=convoy.Settings(effort="none", db=tmp_path / "db"))
    assert any("stock PyTorch may be wrong" in note for note in fast.plan.notes)
