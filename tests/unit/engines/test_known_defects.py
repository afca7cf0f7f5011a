"""Where a library has a known defect, its engine refuses, the baseline is right without it, and the user is told."""

import itertools

import pytest
import torch
from torch import nn

import convoy
from convoy.engines import known_defects
from convoy.engines.compilers.instruction_sets import ONEDNN_LEVELS, onednn_in_force
from convoy.engines.known_defects import KNOWN_DEFECTS, defect_of, defects_here, stock_is_wrong
from convoy.engines.manifest import load_engine
from convoy.engines.support_checks import effective_dilation, torch_sizes
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device import doctor
from convoy.measurement.device.detect import detect_target
from convoy.measurement.oracle import oracle
from convoy.problem import Conv3dProblem, ConvProblem, Epilogue, parse_problem
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

VOLUMES = {
    "onednn-amx-bf16-volumes-one-output-column": (
        "conv3d:fprop:n1c3d3h16w9k1t1r5s5:p0x0x0:s1x3x2:d1x3x2:g1:ndhwc:bf16:half:none",
        "conv3d:fprop:n3c2d3h6w8k16t3r4s5:p1x1x4:s1x1x5:d1x1x3:g1:ndhwc:bf16:half:none",
        "conv3d:fprop:n1c32d9h15w3k64t4r3s3:p0x1x1:s3x3x3:d2x1x1:g1:ncdhw:bf16:half:none",
    ),
    "onednn-bf16-volumes-of-depth-one": (
        "conv3d:fprop:n1c3d1h11w5k1t4r3s3:p2x2x1:s3x1x1:d1x3x1:g1:ndhwc:bf16:half:none",
        "conv3d:fprop:n3c4d1h7w11k32t4r3s2:p3x2x1:s1x1x2:d1x2x1:g4:ncdhw:bf16:half:none",
    ),
    "onednn-volumes-wgrad-much-padding": (
        "conv3d:wgrad:n2c33d3h5w4k40t4r1s4:p3x0x0:s2x1x1:d1x1x1:g1:ndhwc:fp32:as_torch:none",
        "conv3d:wgrad:n1c4d3h5w16k4t4r4s3:p3x1x0:s3x2x1:d1x1x2:g4:ndhwc:bf16:half:none",
    ),
    "onednn-bf16-volumes-dgrad-unseen-slices": (
        "conv3d:dgrad:n1c9d8h5w24k1t4r3s4:p0x0x0:s3x3x1:d1x1x1:g1:ndhwc:bf16:half:none",
        "conv3d:dgrad:n3c9d8h5w22k1t4r7s4:p0x3x1:s3x3x1:d1x1x1:g1:ncdhw:bf16:half:none",
    ),
    "onednn-bf16-wgrad-columns-in-padding": (
        "conv3d:wgrad:n3c2d4h2w1k40t2r2s5:p0x1x3:s3x2x5:d1x1x1:g1:ndhwc:bf16:half:none",
    ),
}
"""Seen to be wrong with oneDNN 3.12 on an Intel CPU with AMX; sums of small integers."""

CRASHING = (
    "conv3d:fprop:n1c1d1h10w10k1t2r7s5:p1x2x3:s2x3x1:d2x1x1:g1:ncdhw:bf16:half:none",
    "conv3d:fprop:n1c4d1h1w2k16t3r5s3:p1x8x3:s3x5x2:d1x3x1:g1:ncdhw:bf16:half:none",
    "conv3d:dgrad:n3c33d3h2w6k2t1r2s5:p0x1x4:s1x1x1:d2x3x1:g1:ndhwc:bf16:half:none",
)
UNWRITTEN = ("onednn-bf16-volumes-dgrad-unseen-slices", "onednn-bf16-wgrad-columns-in-padding")
"""Where memory that is not written may hold the right values by chance."""

WRONG_VOLUMES = [(key, name) for name, keys in VOLUMES.items() for key in keys]


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


@pytest.mark.parametrize(
    ("key", "name"), [*WRONG_VOLUMES, *((key, "onednn-volumes-dilated-filter-in-padding") for key in CRASHING)]
)
def test_volumes_that_onednn_gets_wrong_are_refused_and_the_baseline_does_without(key, name, amx, monkeypatch):
    problem = parse_problem(key)
    defect = defect_of(problem, CPU)
    assert defect is not None
    assert defect.name == name
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert not load_engine("onednn").supports(problem, CPU)
    if problem.direction == "fprop":
        assert name in load_engine("onednn").supports(problem, CPU).reason
    is_exact_by_the_baseline(problem)


def seen_here():
    """Whether oneDNN uses AMX in this process, and is the version of which the failures are known."""
    return "avx512_core_amx" in onednn_in_force() and CPU.version("onednn").startswith("3.12")


@pytest.mark.skipif(not seen_here(), reason="needs oneDNN 3.12 on a CPU with AMX")
@pytest.mark.parametrize("key", [key for key, name in WRONG_VOLUMES if name not in UNWRITTEN])
def test_stock_pytorch_is_wrong_there(key):
    """So that a row that no longer holds is noticed; against float64, on integers whose sums are exact."""
    problem = parse_problem(key)
    assert isinstance(problem, Conv3dProblem)
    data = make_data(problem, 1, "integer")
    first, second = (*data.args, *data.constants)[:2]
    stride, padding, dilation, groups = torch_sizes(problem)
    if problem.direction == "fprop":
        made = torch.conv3d(first, second, None, stride, padding, dilation, groups)
    else:
        of_x = problem.direction == "dgrad"
        missing = torch.empty((problem.x_spec if of_x else problem.weight_spec).shape, dtype=first.dtype)
        x, dy, weight = (missing, first, second) if of_x else (first, second, missing)
        found = torch.ops.aten.convolution_backward(
            dy, x, weight, None, stride, padding, dilation, False, [0] * 3, groups, [of_x, not of_x, False]
        )
        made = found[0 if of_x else 1]
    (exact,) = oracle(problem, data)
    assert exact.dtype == torch.float64
    assert not torch.equal(made, exact.to(made.dtype))


@pytest.mark.parametrize("key", [key for key, name in WRONG_VOLUMES if "bf16" in name])
def test_volumes_in_fp32_are_ordinary(key, amx):
    assert defect_of(parse_problem(key.replace("bf16:half", "fp32:as_torch")), CPU) is None


@pytest.mark.parametrize(
    "problem",
    [
        Conv3dProblem(1, 3, (16, 112, 112), 64, (3, 7, 7), (1, 3, 3), (1, 2, 2), dtype="bf16"),
        Conv3dProblem(1, 64, (16, 56, 56), 128, (3, 3, 3), (1, 1, 1), (2, 2, 2), dtype="bf16"),
        Conv3dProblem(1, 64, (16, 56, 56), 128, (3, 3, 3), (1, 1, 1), (2, 2, 2), dtype="bf16", direction="dgrad"),
        Conv3dProblem(1, 64, (16, 56, 56), 128, (3, 3, 3), (1, 1, 1), (2, 2, 2), dtype="bf16", direction="wgrad"),
        Conv3dProblem(1, 64, (16, 56, 56), 128, (1, 1, 1), (0, 0, 0), (2, 2, 2), dtype="bf16", direction="dgrad"),
        Conv3dProblem(1, 64, (16, 56, 56), 64, (3, 3, 3), (1, 1, 1), groups=64, dtype="bf16", direction="wgrad"),
        Conv3dProblem(1, 512, (1, 4, 4), 512, (3, 3, 3), (1, 1, 1), dtype="bf16"),
        Conv3dProblem(1, 32, (8, 8, 8), 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), (2, 2, 2), dtype="bf16"),
        Conv3dProblem(1, 512, (2, 7, 7), 400, (2, 7, 7), dtype="bf16"),
    ],
    ids=str,
)
def test_volumes_of_real_nets_are_not_refused(problem, amx):
    assert defect_of(problem, CPU) is None


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


def test_a_plan_of_volumes_tells_it_too_and_is_right(amx, tmp_path):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv3d(32, 64, (1, 3, 3), 3, (0, 1, 1)), nn.ReLU()).bfloat16().eval()
    for parameter in net.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).bfloat16()
    x = torch.randint(-2, 3, (1, 32, 9, 15, 3)).bfloat16()
    fast = convoy.optimize(net, (x,), settings=convoy.Settings(effort="none", db=tmp_path / "db"))
    assert any("onednn-amx-bf16-volumes-one-output-column" in note for note in fast.plan.notes)
    assert torch.equal(fast(x), net.double()(x.double()).bfloat16())


def test_a_plan_tells_where_stock_pytorch_is_wrong(amx, tmp_path):
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, (3, 4), (1, 2), (0, 2))).bfloat16()
    x = torch.randn(1, 2, 7, 1).bfloat16()
    fast = convoy.optimize(net.eval(), (x,), settings=convoy.Settings(effort="none", db=tmp_path / "db"))
    assert any("stock PyTorch may be wrong" in note for note in fast.plan.notes)
