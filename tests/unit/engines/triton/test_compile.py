"""Builds for a Hopper GPU that need not be there: what the compiler made, and that slow builds are refused."""

import numpy as np
import pytest

from convoy.engines import manifest
from convoy.engines.sparse_weights.pruned_channels import inner_knobs, smaller
from convoy.engines.triton.triton_build import assembler_log
from convoy.errors import CompileError
from convoy.graph.text import parse_graph
from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem, Pool
from convoy.regions import propose
from convoy.target import Target
from tests.unit.engines.pruned_cases import mask_of
from tests.unit.engines.spills import assert_no_spills

pytest.importorskip("triton")

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
FULL = Epilogue(bias=True, residual=True, activation="relu")


def conv(*sizes, dtype="fp16", **rest):
    return ConvProblem(*sizes, layout="nhwc", x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, **rest)


def load_engine(engine_id):
    return manifest.load_engine(engine_id)


# Engine, problem, instruction that must be there, instruction that must not.
CASES = [
    ("triton.swapped", conv(1, 256, 14, 14, 256, 3, 3, 1, 1, epilogue=FULL), "HGMMA", "HMMA"),
    ("triton.swapped", conv(1, 128, 28, 28, 128, 3, 3, 1, 1, 2, 2, dtype="bf16"), "HGMMA", "HMMA"),
    ("triton.swapped", conv(1, 128, 28, 28, 128, 3, 3, 1, 1, dtype="fp32"), "HGMMA", "FFMA.FTZ"),
    ("triton.pointwise", conv(1, 512, 7, 7, 2048, 1, 1, epilogue=FULL), "UTMALDG", "HMMA"),
    ("triton.stem", conv(1, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2), "HGMMA", "HMMA"),
    ("triton.split_fp32", conv(1, 256, 14, 14, 256, 3, 3, 1, 1, dtype="fp32", numerics="strict"), "HGMMA", "LDSM"),
    (
        "triton.implicit_gemm",
        conv(1, 64, 14, 14, 64, 3, 3, 2, 2, 1, 1, 2, 2),
        "LDGSTS.E.BYPASS.128",
        "LDSM",
    ),
    ("triton.persistent", conv(32, 256, 14, 14, 256, 3, 3, 1, 1, epilogue=FULL), "HGMMA", " HMMA"),
    ("triton.persistent", conv(32, 1024, 14, 14, 512, 1, 1), "UTMALDG", "LDSM"),
    ("triton.dgrad", conv(32, 128, 28, 28, 128, 3, 3, 1, 1, 2, 2, direction="dgrad"), "HGMMA", "LDSM"),
    ("triton.dgrad", conv(32, 128, 28, 28, 96, 3, 3, 1, 1, dtype="fp32", direction="dgrad"), "HGMMA", " HMMA"),
    ("triton.wgrad", conv(32, 128, 28, 28, 128, 3, 3, 1, 1, 2, 2, direction="wgrad"), "HGMMA", "LDSM"),
    ("triton.wgrad", conv(1, 64, 28, 28, 128, 3, 3, 1, 1, direction="wgrad"), "HGMMA", " HMMA"),
    ("triton.depthwise", conv(1, 96, 14, 14, 96, 3, 3, 1, 1, groups=96), "LDG.E.128", "LDL"),
    ("triton.gemv", LinearProblem(1, 4096, 1000, "fp16", "half"), ".128", "STL"),
]


@pytest.mark.parametrize(("engine_id", "problem", "wanted", "unwanted"), CASES)
def test_the_first_guess_compiles_to_the_instructions_meant(engine_id, problem, wanted, unwanted):
    engine = load_engine(engine_id)
    assert engine.supports(problem, TARGET)
    executable = engine.build(problem, engine.space(problem, TARGET)[0], TARGET)
    code = executable.kernel.compiled.asm["sass"]
    assert wanted in code
    assert unwanted not in code
    log = assembler_log(executable.kernel.compiled)
    assert_no_spills(log)
    assert "C7515" not in log


POOL = Epilogue(bias=True, pool=Pool("max", 2, 2, 2, 2))
WIDE = Epilogue(bias=True, pool=Pool("max", 3, 3, 2, 2, 1, 1))
FEW = [
    *(("triton.swapped", conv(1, c, 14, 14, 64, 3, 3, 1, 1, dtype="fp32")) for c in (4, 8)),
    *(("triton.swapped", conv(1, c, 14, 14, 64, 3, 3, 1, 1, 2, 2, dtype="fp32")) for c in (16, 48)),
    *(("triton.persistent", conv(32, c, 28, 28, 64, 3, 3, 1, 1, dtype="fp32")) for c in (4, 8)),
    ("triton.persistent", conv(32, 8, 28, 28, 64, 1, 1, dtype="fp32")),
    ("triton.persistent", conv(32, 16, 28, 28, 64, 3, 3, 1, 1, 2, 2, dtype="fp32")),
    *(("triton.pointwise", conv(1, c, 14, 14, 64, 1, 1, dtype="fp32")) for c in (4, 8)),
    ("triton.stem", conv(1, 1, 24, 24, 32, 3, 3, 1, 1, dtype="fp32")),
    ("triton.stem", conv(1, 3, 24, 24, 32, 3, 3, 1, 1, 2, 2, dtype="fp32")),
    *(("triton.pooled", conv(1, 8, 16, 16, 64, 3, 3, 1, 1, dtype="fp32", epilogue=e)) for e in (POOL, WIDE)),
    ("triton.pooled", conv(1, 16, 16, 16, 64, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=POOL)),
    ("triton.pooled", conv(1, 24, 16, 16, 64, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=POOL)),
    ("triton.pooled", conv(1, 3, 24, 24, 32, 3, 3, 1, 1, 2, 2, dtype="fp32", epilogue=POOL)),
]
"""TF32 over so few channels that an iteration of 32 bytes would be under the 16 that a dot takes at least."""


def compiled_for(executable):
    """The target of an executable's product, as its PTX names it."""
    return executable.kernel.compiled.asm["ptx"].partition(".target ")[2].split()[0].rstrip(",")


@pytest.mark.parametrize(("engine_id", "problem"), FEW, ids=lambda value: getattr(value, "key", value))
def test_few_channels_of_tf32_compile_in_one_setting_of_each_block(engine_id, problem):
    """The default, and of every other number of channels an iteration the first."""
    engine = load_engine(engine_id)
    assert engine.supports(problem, TARGET)
    first = {knobs.integer("block_c"): knobs for knobs in reversed(engine.space(problem, TARGET))}
    for knobs in first.values():
        executable = engine.build(problem, knobs, TARGET)
        assert compiled_for(getattr(executable, "dense", executable)) == "sm_90a"


@pytest.mark.parametrize(("c", "stride"), [(8, 1), (8, 2), (24, 2), (32, 2)])
def test_what_pruning_leaves_of_tf32_is_given_to_kernels_that_compile(c, stride):
    """Eight channels of 64 and so on: `triton.swapped` and `triton.persistent` say no where they cannot."""
    nonzero = np.zeros((64, 64, 3, 3), dtype=bool)
    nonzero[:, :c] = True
    problem = conv(8, 64, 16, 16, 64, 3, 3, 1, 1, stride, stride, dtype="fp32").with_mask(mask_of(nonzero))
    engine = load_engine("pruned.channels_gpu")
    inner = [
        knobs for knobs in engine.space(problem, TARGET) if knobs["inner"] in ("triton.swapped", "triton.persistent")
    ]
    assert len(inner) == (0 if stride == 2 and c % 16 else 2)
    for knobs in inner:
        name = str(knobs["inner"])
        left = inner_knobs(name, smaller(problem), TARGET)[0]
        assert compiled_for(load_engine(name).build(smaller(problem), left, TARGET)) == "sm_90a"


def test_a_serialised_build_is_refused_with_its_log():
    knobs = Knobs.of(
        block_k=128, block_n=1, block_h=8, block_w=16, block_c=64, stages=3, warps=8, split=1, pdl=False, prefetch=False
    )
    with pytest.raises(CompileError, match="C7515") as caught:
        load_engine("triton.swapped").build(conv(1, 64, 16, 16, 128, 3, 3, 1, 1), knobs, TARGET)
    assert "wgmma" in caught.value.log


def test_a_tile_that_does_not_fit_is_refused():
    knobs = Knobs.of(
        block_k=128,
        block_n=1,
        block_h=8,
        block_w=16,
        block_c=128,
        stages=4,
        warps=4,
        split=1,
        pdl=False,
        prefetch=False,
    )
    with pytest.raises(CompileError, match="shared memory"):
        load_engine("triton.swapped").build(conv(1, 512, 16, 16, 128, 3, 3, 1, 1), knobs, TARGET)


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", 11), ("fp16", 6), ("bf16", 10)])
def test_fp32_inputs_are_copied_as_tf32(dtype, wanted):
    """11 is CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 (the others are Triton's numbers): the copy rounds what the core would cut."""
    engine = load_engine("triton.swapped")
    problem = conv(1, 64, 14, 14, 64, 3, 3, 1, 1, dtype=dtype)
    executable = engine.build(problem, engine.space(problem, TARGET)[0], TARGET)
    kinds = [description["elem_type"] for description in executable.kernel.compiled.metadata.tensordesc_meta]
    assert kinds[0] == wanted
    assert 11 not in kinds[1:]  # the weight is rounded when it is packed, the result not at all


MERGE = """graph 1
input %x: fp16[1,480,14,14]
constant %w1: fp16[192,480,1,1]
constant %b1: fp16[192]
constant %w2: fp16[96,480,1,1]
constant %b2: fp16[96]
constant %w3: fp16[16,480,1,1]
constant %b3: fp16[16]
%a: fp16[1,192,14,14] = conv2d(%x, %w1, %b1, (1, 1), (0, 0), (1, 1), 1)
%b: fp16[1,96,14,14] = conv2d(%x, %w2, %b2, (1, 1), (0, 0), (1, 1), 1)
%c: fp16[1,16,14,14] = conv2d(%x, %w3, %b3, (1, 1), (0, 0), (1, 1), 1)
return %a, %b, %c
"""


def test_parallel_convolutions_compile_to_one_kernel_of_tensor_core_instructions():
    (region,) = [r for r in propose(parse_graph(MERGE), layouts=("nhwc",), numerics="half", patterns=("merge",)) if
                 r.pattern == "merge"]  # fmt: skip
    engine, problem = load_engine("triton.merged"), region.problems[0]
    assert engine.supports(problem, TARGET)
    space = engine.space(problem, TARGET)
    assert len(set(space)) == len(space)
    code = engine.build(problem, space[0], TARGET).kernel.compiled.asm["sass"]
    assert "HGMMA" in code
    assert "LDSM" not in code
    assert code.count("UTMASTG") == 3
    assert "needs layout nhwc" in engine.supports(problem.with_layout("nchw"), TARGET).reason
    assert "of a subgraph" in engine.supports(conv(1, 64, 8, 8, 64, 1, 1), TARGET).reason
