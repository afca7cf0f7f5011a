"""The Triton engines of zeroskip without a GPU: exact in Triton's interpreter, built for Hopper, refusing by reason."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from convoy.engines.activation_sparsity import with_sparsity
from convoy.engines.manifest import load_engine
from convoy.engines.sparse_activations.zeroskip_tile_geometry import TileGeometry
from convoy.engines.sparse_activations.zeroskip_tiles import tile_space
from convoy.engines.triton.pooling.pool_windows import window_box
from convoy.engines.triton.pooling.pooled import way_of
from convoy.engines.triton.triton_build import assembler_log
from convoy.engines.triton.triton_tiles import conv_view
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool, SubgraphProblem, TensorSpec
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

SCRIPT = Path(__file__).with_name("interpreted_zeroskip.py")
TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
NAMES = ("ecr", "gather", "blocks", "channels", "pooled")
PAIRS = Pool("max", 2, 2, 2, 2)
OVERLAP = Pool("max", 3, 3, 2, 2, 1, 1)


def engine(name):
    return load_engine("triton.pooled" if name == "pooled" else f"zeroskip.{name}")


def conv(*sizes, dtype="fp32", pool=None, **rest):
    words = {"layout": "nhwc", "x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype}
    numerics = {"numerics": "strict" if dtype == "fp32" else "half"} | rest
    return ConvProblem(*sizes, epilogue=Epilogue(True, activation="relu", pool=pool), **words, **numerics)


# ---- the interpreter


def case_names():
    """The script's cases, read from its text: importing it would turn the interpreter on in this process."""
    tree = ast.parse(SCRIPT.read_text())
    (cases,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "CASES"]
    return [ast.literal_eval(key) for key in cases.keys]


# One process: the fixture takes up to half a minute.
pytestmark = pytest.mark.xdist_group("zeroskip interpreter")


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", case_names())
def test_agrees_with_float64(outcomes, name):
    # An average that does not divide by a power of two is rounded.
    assert outcomes[name]["error"] <= (1e-6 if "count" in name else 0.0)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["max", "max, padded, ceil", "average", "average of all"])
def test_poolings_agree_with_torch_on_nan_and_infinities_too(outcomes, name, dtype):
    assert outcomes[f"pooling {name} {dtype}"]["error"] == 0


def test_weights_of_dead_channels_are_not_read(outcomes):
    assert outcomes["dead weights"]["error"] == 0


def test_an_input_without_zeros_is_multiplied_as_it_lies(outcomes):
    """Not one weight is gathered, which bounds the cost of having looked."""
    assert outcomes["a dense input"]["error"] == 0


@pytest.mark.parametrize(
    "name", ["split_fp32", "split_fp32, parts", "split_fp32, images", "channels", "channels, parts"]
)
def test_what_a_producer_marks_is_what_a_reader_would_have_seen(outcomes, name):
    assert outcomes[f"marks of {name}"]["error"] == 0


@pytest.mark.parametrize("name", ["ecr", "gather", "blocks", "channels"])
def test_negative_zeros_are_zeros(outcomes, name):
    assert outcomes[f"{name}, negative zeros"]["error"] == 0


@pytest.mark.parametrize("name", ["ecr", "gather", "channels"])
def test_what_is_not_finite_comes_out_as_in_pytorch_with_infinite_weights_too(outcomes, name):
    assert outcomes[f"{name}, not finite"]["same"] == [True, True]


def test_a_planted_fault_is_seen(outcomes):
    assert outcomes["a planted fault"]["error"] > 0


# ---- builds for Hopper

BUILDS = [
    ("gather", conv(1, 512, 14, 14, 512, 3, 3, 1, 1), "FFMA"),
    ("gather", conv(1, 256, 56, 56, 256, 3, 3, 1, 1, pool=PAIRS), "FFMA"),
    ("blocks", conv(1, 512, 14, 14, 512, 3, 3, 1, 1, dtype="fp16"), "MMA"),
    ("blocks", conv(1, 512, 14, 14, 512, 3, 3, 1, 1, numerics="as_torch"), "MMA"),
    ("pooled", conv(1, 64, 224, 224, 64, 3, 3, 1, 1, dtype="fp16", pool=PAIRS), "HGMMA"),
    ("pooled", conv(32, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2, dtype="bf16", pool=OVERLAP), "HGMMA"),
    ("pooled", conv(1, 64, 224, 224, 64, 3, 3, 1, 1, pool=PAIRS), "HGMMA"),
    ("pooled", conv(1, 512, 14, 14, 512, 3, 3, 1, 1, pool=PAIRS), "HGMMA"),
    ("ecr", conv(1, 512, 14, 14, 512, 3, 3, 1, 1, pool=PAIRS), "FFMA"),
    ("channels", conv(1, 512, 14, 14, 512, 3, 3, 1, 1), "HGMMA"),
    ("channels", conv(8, 64, 28, 28, 96, 3, 3, 1, 1, stride_h=2, stride_w=2), "LDGSTS"),
]


@pytest.mark.parametrize(("name", "problem", "instruction"), BUILDS)
def test_the_first_guess_is_built_without_spilling(name, problem, instruction):
    assert engine(name).supports(problem, TARGET)
    executable = engine(name).build(problem, engine(name).space(problem, TARGET)[0], TARGET)
    multiply = getattr(executable, "dense", executable).kernel
    assert instruction in multiply.compiled.asm["sass"]
    others = [getattr(getattr(executable, name, None), "kernel", None) for name in ("reduce", "pooling")]
    others += [getattr(executable, name, None) for name in ("look", "maxima")]
    if name == "channels":
        assert executable.marks_written()
        assert executable.accept_marks(TensorSpec((2, 3 * problem.n, -(-problem.c // 32)), "i32"))
        assert len(executable.planes) == 2
        others += [executable.marking, *executable.planes.values()]
    for kernel in filter(None, (multiply, *others)):
        log = assembler_log(kernel.compiled)
        assert_no_spills(log)
        assert int(re.search(r"Used (\d+) registers", log)[1]) <= 255


def test_split_products_are_tensor_core_instructions():
    problem = conv(1, 512, 14, 14, 512, 3, 3, 1, 1)
    knobs = next(k for k in engine("gather").space(problem, TARGET) if k["precision"] == "tf32x3")
    executable = engine("gather").build(problem, knobs, TARGET)
    assert "MMA" in executable.kernel.compiled.asm["sass"]
    assert_no_spills(assembler_log(executable.kernel.compiled))


# ---- what they take


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("gather", conv(1, 64, 14, 14, 64, 3, 3, dtype="fp16"), "needs fp32, got fp16"),
        ("gather", conv(1, 64, 14, 14, 64, 3, 3, numerics="as_torch"), "needs numerics strict, got as_torch"),
        ("blocks", conv(1, 64, 14, 14, 64, 3, 3), "numerics strict"),
        ("pooled", conv(1, 64, 14, 14, 64, 3, 3), "with a pooling, got none"),
        ("pooled", conv(1, 64, 14, 14, 64, 3, 3, pool=Pool("avg", 12, 12, 12, 12)), "at most 64, got 144"),
        ("pooled", replace(conv(1, 64, 14, 14, 64, 3, 3, pool=PAIRS), layout="nchw"), "layout nhwc"),
        ("channels", conv(1, 64, 14, 14, 64, 3, 3, pool=PAIRS), "no pooling in the epilogue"),
        ("channels", conv(1, 64, 14, 14, 64, 3, 3, numerics="as_torch"), "needs numerics strict, got as_torch"),
        ("channels", conv(1, 63, 14, 14, 64, 3, 3), "c and k as multiples of 8"),
        ("channels", conv(1, 4096, 14, 14, 64, 3, 3), "at most 2048 channels, got 4096"),
        ("ecr", conv(1, 64, 14, 14, 64, 3, 3, groups=2), "needs groups = 1, got 2"),
        ("ecr", conv(32, 64, 224, 224, 64, 3, 3, 1, 1), "compressed windows"),
        ("ecr", replace(conv(1, 64, 14, 14, 64, 3, 3), layout="nchw"), "layout nhwc"),
        ("gather", conv(0, 64, 14, 14, 64, 3, 3), "batch of at least 1"),
    ],
)
def test_refusals_say_what_was_needed(name, problem, reason):
    assert reason in engine(name).supports(problem, TARGET).reason


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_they_stay_out(name):
    assert not engine(name).supports(conv(1, 64, 14, 14, 64, 3, 3, pool=PAIRS), detect_target("cpu"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pool", [None, PAIRS, OVERLAP, Pool("avg", 3, 2, 1, 2, 1, 1, ceil_mode=True)])
def test_spaces_are_finite_and_their_workspace_is_known(name, pool):
    for dtype in ("fp32", "fp16"):
        for problem in (
            conv(1, 64, 14, 14, 64, 3, 3, 1, 1, dtype=dtype, pool=pool),
            conv(2, 5, 9, 9, 7, 1, 1, pool=pool),
        ):
            if engine(name).supports(problem, TARGET):
                space = engine(name).space(problem, TARGET)
                assert 0 < len(space) == len(set(space)) <= 42
                assert all(Knobs.parse(str(k)) == k and engine(name).workspace_bytes(problem, k) >= 0 for k in space)


def test_tiles_cover_all_results():
    for pool in (None, PAIRS, OVERLAP, Pool("avg", 5, 3, 2, 3, 2, 1)):
        problem = conv(1, 64, 29, 31, 64, 3, 3, 1, 1, pool=pool)
        _, _, y_h, y_w = problem.y_spec.shape
        for knobs in tile_space(problem, 132, precisions=("ieee",), block_cs=(16,)):
            geometry = TileGeometry.of(problem, knobs)
            tiles_h, tiles_w = geometry.tiles(problem)
            assert tiles_h * geometry.result_h >= y_h
            assert tiles_w * geometry.result_w >= y_w
            assert geometry.region_w <= geometry.pitch
            assert geometry.region_h * geometry.pitch <= geometry.block_p
            assert geometry.result_h * geometry.result_w <= geometry.block_r


def test_small_images_are_split_over_channels():
    small, large = (conv(1, 512, size, size, 512, 3, 3, 1, 1) for size in (7, 56))
    assert engine("gather").space(small, TARGET)[0]["split"] > 1
    assert engine("gather").space(large, TARGET)[0]["split"] == 1


POOLING = "graph 1\ninput %x: fp16[1,64,8,8]\n%y: fp16[1,64,4,4] = aten.max_pool2d.default(%x, (2, 2))\nreturn %y\n"


def test_a_pooling_by_itself_is_built_with_wide_loads():
    pooling, problem = load_engine("triton.pooling"), SubgraphProblem(POOLING, "nhwc")
    assert pooling.supports(problem, TARGET)
    assert 1.2 < pooling.estimate_us(problem, Knobs(), TARGET) < 1.3
    large = SubgraphProblem(POOLING.replace(",8,8]", ",224,224]").replace(",4,4]", ",112,112]"), "nhwc")
    code = pooling.build(large, Knobs(), TARGET).windows.kernel.compiled.asm["sass"]
    assert "LDG.E.128" in code
    assert "STG.E.128" in code


@pytest.mark.parametrize(
    ("text", "layout", "reason"),
    [
        (POOLING, "nchw", "needs layout nhwc"),
        (POOLING.replace(",4,4]", ",8,8]").replace("max_pool2d.default(%x, (2, 2))", "relu.default(%x)"), "nhwc", "another"),
        (POOLING.replace("fp16", "fp64"), "nhwc", "fp64"),
        (POOLING.replace(",8,8]", ",9,9]").replace(",4,4]", ",1,1]").replace("(2, 2)", "(9, 9)"), "nhwc", "at most 64, got 81"),
    ],
)  # fmt: skip
def test_pieces_that_are_no_small_pooling_are_refused(text, layout, reason):
    assert reason in load_engine("triton.pooling").supports(SubgraphProblem(text, layout), TARGET).reason


def test_a_convolution_is_no_pooling():
    assert "computes poolings, got a convolution" in load_engine("triton.pooling").supports(BUILDS[0][1], TARGET).reason


# ---- what they expect to take

MEASURED = [  # c, k, side, zeros, gather, ecr: microseconds on an H100 (docs/kernels/sparse-activations.md)
    (3, 64, 224, 55, 41.6, 129.2),
    (64, 64, 224, 41, 112.6, 655.5),
    (64, 128, 112, 24, 63.0, 334.2),
    (128, 256, 56, 14, 57.3, 344.6),
    (256, 256, 56, 35, 112.5, 531.8),
    (256, 256, 56, 96, 111.5, 79.6),
    (512, 512, 28, 76, 117.8, 240.6),
    (512, 512, 14, 66, 40.8, 143.9),
    (512, 512, 14, 90, 40.8, 62.2),
]


@pytest.mark.parametrize(("c", "k", "side", "zeros", "gather", "ecr"), MEASURED)
def test_cost_models_are_near_what_was_measured(c, k, side, zeros, gather, ecr):
    problem = conv(1, c, side, side, k, 3, 3, 1, 1)
    for name, us, factor in (("gather", gather, 1.25), ("ecr", ecr, 1.4)):
        knobs = with_sparsity(engine(name).space(problem, TARGET)[0], zeros)
        assert us / factor < engine(name).estimate_us(problem, knobs, TARGET) < us * factor


@pytest.mark.parametrize(("side", "measured"), [(28, {0: 34.2, 95: 15.9}), (14, {0: 17.9, 95: 11.8})])
def test_time_over_live_channels_falls_from_the_dense_kernels(side, measured):
    """Microseconds on an H100 (docs/kernels/sparse-activations.md)."""
    problem, channels = conv(1, 512, side, side, 512, 3, 3, 1, 1), engine("channels")
    space = channels.space(problem, TARGET)
    guesses = {
        share: min(channels.estimate_us(problem, with_sparsity(k, share, channels.zeros_kind), TARGET) for k in space)
        for share in (0, 50, 75, 95)
    }
    assert list(guesses.values()) == sorted(guesses.values(), reverse=True)
    for share, us in measured.items():
        assert us / 1.5 < guesses[share] < us * 1.5
    dense = load_engine("triton.split_fp32")
    assert guesses[0] > min(dense.estimate_us(problem, k, TARGET) for k in dense.space(problem, TARGET))


# ---- where the pooling is


def ways(problem):
    found = engine("pooled")
    space = found.space(problem, TARGET)
    guesses = [found.estimate_us(problem, knobs, TARGET) for knobs in space]
    assert guesses == sorted(guesses)
    return [way_of(problem, knobs) for knobs in space]


def test_windows_without_overlap_are_pooled_in_registers_or_where_parts_are_added():
    assert ways(conv(1, 64, 224, 224, 64, 3, 3, 1, 1, pool=PAIRS))[0] == "registers"
    assert ways(conv(1, 512, 14, 14, 512, 3, 3, 1, 1, pool=PAIRS))[0] == "parts"
    for dtype in ("fp16", "fp32"):
        for problem in (conv(2, 64, 29, 31, 64, 3, 3, 1, 1, dtype=dtype, pool=PAIRS),
                        conv(2, 64, 20, 20, 64, 1, 1, dtype=dtype, pool=PAIRS)):  # fmt: skip
            assert "pass" not in ways(problem)


def test_many_pixels_are_pooled_by_blocks_that_stay_too():
    problem = conv(32, 512, 14, 14, 512, 3, 3, 1, 1, dtype="fp16", pool=PAIRS)
    staying = [knobs for knobs in engine("pooled").space(problem, TARGET) if "blocks" in knobs]
    assert len(staying) == 12
    assert {way_of(problem, knobs) for knobs in staying} == {"registers", "pass"}
    executable = engine("pooled").build(problem, staying[0], TARGET)
    assert "HGMMA" in executable.kernel.compiled.asm["sass"]
    assert_no_spills(assembler_log(executable.kernel.compiled))
    small = replace(problem, n=1)
    assert not [knobs for knobs in engine("pooled").space(small, TARGET) if "blocks" in knobs]


def test_other_windows_are_pooled_in_a_second_kernel():
    for pool in (
        OVERLAP,
        Pool("max", 2, 2, 2, 2, ceil_mode=True),
        Pool("avg", 3, 3, 3, 3),
        Pool("max", 2, 2, 2, 2, 1, 1),
    ):
        assert "registers" not in ways(conv(1, 64, 29, 31, 64, 3, 3, 1, 1, pool=pool))


def test_a_box_of_whole_windows_has_the_pixels_asked_for_and_covers_the_output_with_fewest_tiles():
    view = conv_view(conv(1, 64, 30, 28, 64, 3, 3, 1, 1))
    for pixels in (16, 32, 64, 128):
        n, h, w = window_box(view, pixels, PAIRS)
        assert n * h * w == pixels
        assert h % 2 == w % 2 == 0
    assert window_box(view, 64, PAIRS) == (1, 16, 4)
    assert window_box(view, 2, PAIRS) is None
