"""Run the Triton engines of zeroskip in Triton's interpreter and print one JSON line a case. A script of its own: the interpreter
is chosen by the environment before triton is imported, and other tests of the same process may have imported it already.

Integer data, so that every product and sum is exact: a right result agrees with float64 to the last bit.
"""

from tests.unit.engines import quick_interpreter  # noqa: F401 - turns the interpreter on, before triton is imported

# isort: split

import ast
import json
from dataclasses import replace

import torch

from convoy.engines.base import Buffers
from convoy.engines.manifest import load_engine
from convoy.engines.triton.pooling.pool_windows import unpooled
from convoy.measurement.data import Data, make_data
from convoy.measurement.oracle import oracle
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool, SubgraphProblem
from convoy.target import Target

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
NAMES = {"pooled": "triton.pooled"}
FULL = Epilogue(bias=True, residual=True, activation="relu")
RELU = Epilogue(bias=True, activation="relu")
PAIRS = Pool("max", 2, 2, 2, 2)
OVERLAP = Pool("max", 3, 3, 2, 2, 1, 1)


def conv(*sizes, dtype="fp32", epilogue=RELU, pool=None, **rest):
    numerics = {"numerics": "strict" if dtype == "fp32" else "half"} | rest
    words = {"layout": "nhwc", "x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype}
    return ConvProblem(*sizes, epilogue=replace(epilogue, pool=pool), **words, **numerics)


def tile(**changes):
    base = {
        "tile_h": 4,
        "tile_w": 4,
        "block_k": 32,
        "block_c": 16,
        "split": 1,
        "stages": 2,
        "warps": 4,
        "precision": "ieee",
    }
    return Knobs.of(**{**base, **changes})


CONV = conv(2, 20, 4, 5, 18, 3, 3, 1, 1)
SMALL = conv(1, 20, 4, 4, 18, 1, 3, 0, 1)
HALF = conv(1, 64, 4, 4, 18, 3, 3, 1, 1, dtype="fp16")
ECR = Knobs.of(block_k=16, warps=1)


def box(**changes):
    base = {"block_k": 16, "block_n": 1, "block_h": 4, "block_w": 4, "block_c": 16, "stages": 2, "warps": 4, "split": 1}
    return Knobs.of(**(base | {"pdl": False, "prefetch": False} | changes))


GATHERED = Knobs.of(block_k=16, block_p=16, block_c=16, stages=2, warps=4, split=2, pdl=False, flat=True)

STAYING = Knobs.of(
    block_k=16, block_n=1, block_h=4, block_w=4, block_c=16, stages=2, warps=4, pdl=False, parts=1, blocks=1,
    swapped=True,
)  # fmt: skip

# Engine, problem, knobs, how x's zeros lie.
CASES = {
    "ecr": ("ecr", conv(2, 9, 2, 3, 18, 3, 3, 1, 1), ECR, "random"),
    "ecr, strides, padding, residual": ("ecr", conv(1, 5, 6, 5, 7, 3, 2, 2, 0, 2, 1, epilogue=FULL), ECR, "random"),
    "ecr, all zero": ("ecr", conv(1, 6, 3, 3, 7, 3, 3, 1, 1), ECR, "none alive"),
    "ecr, fp16": ("ecr", conv(1, 6, 3, 4, 7, 3, 3, 1, 1, dtype="fp16"), ECR, "random"),
    "ecr, one filter": ("ecr", conv(2, 1, 9, 11, 1, 3, 3, 1, 1), Knobs.of(block_k=1, warps=4), "random"),
    "ecr, many filters": ("ecr", conv(1, 5, 3, 4, 40, 3, 3, 1, 1), Knobs.of(block_k=64, warps=1), "random"),
    "pecr": ("ecr", conv(1, 6, 4, 6, 7, 3, 3, 1, 1, pool=PAIRS), ECR, "random"),
    "pecr, overlapping, padded": ("ecr", conv(1, 6, 5, 4, 7, 3, 3, 1, 1, pool=OVERLAP), ECR, "random"),
    "pecr, one filter": ("ecr", conv(1, 1, 12, 13, 1, 3, 3, 1, 1, pool=OVERLAP), Knobs.of(block_k=1, warps=4), "random"),
    "pecr, average": ("ecr", conv(1, 4, 8, 6, 7, 1, 1, pool=Pool("avg", 2, 2, 2, 2)), ECR, "random"),
    "gather": ("gather", CONV, tile(block_k=16), "channels"),
    "gather, dense": ("gather", SMALL, tile(), "all alive"),
    "gather, all zero": ("gather", SMALL, tile(), "none alive"),
    "gather, random": ("gather", SMALL, tile(tile_h=4, tile_w=8), "random"),
    "gather, strides, dilation": ("gather", conv(1, 20, 11, 12, 7, 3, 3, 2, 1, 2, 1, 2, 1), tile(), "channels"),
    "gather, split": ("gather", conv(1, 60, 4, 5, 18, 1, 3, 0, 1, epilogue=FULL), tile(split=2), "channels"),
    "gather, split, dense": ("gather", conv(1, 60, 4, 5, 18, 3, 1, 1, 0), tile(split=4), "all alive"),
    "gather, split products": ("gather", CONV, tile(precision="tf32x3"), "channels"),
    "gather, pooled": ("gather", conv(1, 20, 4, 6, 18, 3, 3, 1, 1, pool=PAIRS), tile(), "channels"),
    "gather, windows": ("gather", conv(1, 20, 5, 4, 18, 1, 1, epilogue=FULL, pool=OVERLAP), tile(), "channels"),
    "blocks": ("blocks", HALF, tile(block_c=32), "channels"),
    "blocks, dense": ("blocks", HALF, tile(block_c=32), "all alive"),
    "blocks, all zero": ("blocks", HALF, tile(block_c=32), "none alive"),
    "blocks, split": ("blocks", HALF, tile(block_c=16, split=2), "channels"),
    "blocks, TF32": ("blocks", conv(1, 40, 4, 4, 18, 3, 3, 1, 1, numerics="as_torch"), tile(), "channels"),
    "blocks, pooled": ("blocks", replace(HALF, r=1, pad_h=0, epilogue=replace(RELU, pool=OVERLAP)), tile(block_c=32), "channels"),
    "channels": ("channels", conv(2, 40, 5, 6, 24, 3, 1, 1, 0, epilogue=FULL), box(), "channels"),
    "channels, dense": ("channels", conv(1, 40, 4, 4, 24, 1, 3, 0, 1), box(), "all alive"),
    "channels, all zero": ("channels", conv(1, 24, 4, 4, 24, 1, 3, 0, 1), box(), "none alive"),
    "channels, random": ("channels", conv(1, 24, 4, 5, 24, 3, 1, 1, 0), box(), "random"),
    "channels, split": ("channels", conv(1, 80, 4, 5, 8, 3, 3, 1, 1, epilogue=FULL), box(split=4), "channels"),
    "channels, images": ("channels", conv(4, 40, 3, 3, 8, 3, 3, 1, 1), box(block_n=2, block_h=2), "one image"),
    "channels, stride": ("channels", conv(1, 48, 6, 8, 16, 3, 3, 1, 1, 2, 2), box(), "channels"),
    "channels, 1x1": ("channels", conv(3, 48, 3, 5, 40, 1, 1), box(), "one image"),
    "pooled": ("pooled", conv(1, 16, 9, 8, 24, 3, 3, 1, 1, dtype="fp16", epilogue=FULL, pool=PAIRS), box(), "random"),
    "pooled, images": ("pooled", conv(3, 16, 4, 5, 8, 1, 3, 0, 1, dtype="fp16", pool=PAIRS), box(block_n=2, block_h=2), "random"),
    "pooled, average": ("pooled", conv(1, 8, 8, 8, 8, 1, 1, dtype="fp16", pool=Pool("avg", 4, 4, 4, 4)), box(), "random"),
    "pooled, flat window": ("pooled", conv(1, 8, 5, 8, 8, 1, 1, dtype="fp16", pool=Pool("max", 1, 2, 1, 2)), box(), "random"),
    "pooled, stride": ("pooled", conv(1, 16, 8, 8, 8, 3, 3, 1, 1, 2, 2, dtype="fp16", pool=PAIRS), box(), "random"),
    "pooled, TF32": ("pooled", conv(1, 8, 4, 6, 8, 3, 3, 1, 1, numerics="as_torch", pool=PAIRS), box(), "random"),
    "pooled, split products": ("pooled", conv(2, 16, 5, 6, 24, 3, 1, 1, 0, epilogue=FULL, pool=PAIRS), box(), "random"),
    "pooled, split products, 1x1": ("pooled", conv(2, 16, 4, 6, 24, 1, 1, pool=PAIRS), box(), "random"),
    "pooled, parts": ("pooled", conv(1, 40, 5, 6, 8, 3, 3, 1, 1, epilogue=FULL, pool=OVERLAP), box(split=3), "random"),
    "pooled, parts, 1x1": ("pooled", conv(2, 40, 5, 6, 24, 1, 1, pool=PAIRS), box(split=2), "random"),
    "pooled, parts, fp16": ("pooled", conv(1, 16, 5, 7, 24, 3, 3, 1, 1, dtype="fp16", pool=PAIRS), box(split=3), "random"),
    "pooled, persistent": (
        "pooled", conv(2, 16, 5, 8, 24, 3, 1, 1, 0, dtype="fp16", epilogue=FULL, pool=PAIRS), STAYING, "random",
    ),
    "pooled, persistent, pass": (
        "pooled", conv(1, 16, 5, 6, 24, 1, 3, 0, 1, dtype="fp16", pool=OVERLAP), STAYING, "random",
    ),
    "pooled, stem": (
        "pooled", conv(1, 3, 12, 11, 16, 7, 7, 3, 3, 2, 2, dtype="fp16", epilogue=FULL, pool=OVERLAP), box(), "random",
    ),
    "pooled, stem in registers": (
        "pooled", conv(1, 3, 12, 11, 16, 3, 3, 1, 1, dtype="fp16", pool=PAIRS), box(), "random",
    ),
    "pooled, stem in parts": (
        "pooled", conv(1, 3, 9, 9, 16, 3, 3, 1, 1, dtype="fp16", pool=OVERLAP), box(split=3), "random",
    ),
    "pooled, 3x3": ("pooled", conv(1, 8, 7, 9, 24, 1, 1, pool=OVERLAP), box(block_h=1, block_w=16), "random"),
    "pooled, ceil": ("pooled", conv(1, 8, 6, 8, 8, 1, 3, pool=Pool("max", 3, 3, 2, 2, ceil_mode=True)), box(), "random"),
    "pooled, pairs, ceil": (
        "pooled", conv(1, 8, 9, 8, 8, 3, 3, pool=Pool("max", 2, 2, 2, 2, ceil_mode=True)), box(), "random",
    ),
    "pooled, counts": (
        "pooled",
        conv(1, 8, 5, 4, 8, 1, 1, epilogue=Epilogue(), pool=Pool("avg", 4, 4, 2, 2, 1, 1, True, True)),
        box(block_h=1), "random",
    ),
    "pooled, uncounted": (
        "pooled", conv(1, 8, 5, 4, 8, 1, 1, pool=Pool("avg", 2, 2, 2, 2, 1, 1, ceil_mode=True)), box(block_h=1), "random",
    ),
    "pooled, large windows": (
        "pooled", conv(1, 16, 8, 8, 8, 3, 3, 1, 1, pool=Pool("avg", 7, 7, 1, 1)), box(split=3), "random",
    ),
    "pooled, odd channels": ("pooled", conv(1, 5, 5, 7, 7, 3, 3, 1, 1, pool=OVERLAP), GATHERED, "random"),
}  # fmt: skip


WIDE = conv(2, 16, 5, 6, 40, 3, 3, 1, 1, epilogue=FULL)
MARKED = {  # producer, problem, knobs: its result is what a convolution over live channels reads
    "split_fp32": ("triton.split_fp32", WIDE, box(block_k=32)),
    "split_fp32, parts": ("triton.split_fp32", WIDE, box(block_k=32, split=3)),
    "split_fp32, images": (
        "triton.split_fp32",
        replace(WIDE, n=3, r=1, pad_h=0),
        box(block_k=32, block_n=2, block_h=2),
    ),
    "channels": ("zeroskip.channels", replace(WIDE, n=1, h=4), box(block_k=64)),
    "channels, parts": ("zeroskip.channels", replace(WIDE, n=1), box(block_k=32, split=2)),
}


NEGATIVE = {
    "ecr": (conv(1, 9, 2, 3, 18, 1, 3, 0, 1), ECR),
    "gather": (conv(1, 40, 4, 4, 18, 1, 3, 0, 1), tile()),
    "blocks": (conv(1, 64, 4, 4, 18, 1, 3, 0, 1, dtype="fp16"), tile(block_c=32)),
    "channels": (conv(1, 40, 4, 4, 24, 1, 3, 0, 1), box()),
}


def thinned(x, kind):
    generator = torch.Generator().manual_seed(3)
    if kind == "none alive":
        return torch.zeros_like(x)
    x = torch.where(x == 0, torch.ones_like(x), x)
    if kind == "random":
        return x * (torch.rand(x.shape, generator=generator) < 0.4).to(x.dtype)
    if kind == "one image":
        x[0, ::2], x[1, 1::2] = 0, 0
    if kind == "channels":
        x[:, ::3] = 0
        x[:, x.shape[1] // 2 :, :3] = 0
        x[:, :-16] *= (torch.arange(x.shape[1] - 16) % 5 > 1).to(x.dtype).reshape(1, -1, 1, 1) if x.shape[1] > 16 else 1
    return x


def launch(engine_id, problem, knobs, data):
    engine = load_engine(NAMES.get(engine_id, f"zeroskip.{engine_id}"))
    support = engine.supports(problem, TARGET)
    assert support, support.reason
    space = engine.space(problem, TARGET)
    if "blocks" in knobs:  # offered from many pixels on
        space = load_engine("triton.persistent").space(unpooled(problem), TARGET)
    assert space
    assert {tuple(k) for k in space} == {tuple(knobs)}, "the space has these knobs"
    executable = engine.build(problem, knobs, TARGET)
    assert executable.workspace_bytes == engine.workspace_bytes(problem, knobs)
    size = executable.workspace_bytes
    workspace = torch.full((size,), 255, dtype=torch.uint8) if size else None
    y = torch.full(problem.y_spec.shape, torch.nan, dtype=data.args[0].dtype).contiguous(
        memory_format=torch.channels_last
    )
    executable.launch(Buffers(data.args, [y], executable.pack(data.constants)), workspace)
    return y


def error(engine_id, problem, knobs, kind, corrupt=False):
    data = make_data(problem, 5, "integer")
    data = Data((thinned(data.args[0], kind), *data.args[1:]), data.constants)
    (wanted,) = oracle(problem, data)
    if corrupt:
        data.constants[0].view(-1)[0] += 1
    return (
        (launch(engine_id, problem, knobs, data).double() - wanted.to(data.args[0].dtype).double()).abs().max().item()
    )


def not_finite(engine_id, problem, knobs):
    """Whether NaN and infinities come out where float64 has them; with an infinite weight too.

    Split products may make NaN of an infinity (docs/kernels/strict-fp32.md): there the two count as one.
    """
    seen = torch.isfinite if engine_id == "channels" else torch.isnan
    data = make_data(problem, 6, "normal")
    x = thinned(data.args[0], "channels").clone(memory_format=torch.preserve_format)
    x[0, 1, 2, 3], x[0, 2, 4, 4] = torch.nan, torch.inf
    found = Data((x, *data.args[1:]), data.constants)
    weight = data.constants[0].clone()
    weight[1, 0, 0, 0] = torch.inf
    with_infinity = Data((thinned(x, "channels").nan_to_num(posinf=0.0), *data.args[1:]), (weight, *data.constants[1:]))
    outcomes = []
    for case in (found, with_infinity):
        (wanted,), y = oracle(problem, case), launch(engine_id, problem, knobs, case)
        outcomes.append(bool(wanted.isnan().any()) and torch.equal(seen(y), seen(wanted)))
    return outcomes


def reads_no_dead_weights():
    """Error where every weight that a dead channel would meet is NaN in memory: 0, unless one of them is read.

    The channels are dead of zeros and of negative zeros.
    """
    problem, knobs = conv(1, 40, 4, 5, 24, 3, 3, 1, 1), box(split=2)
    data = make_data(problem, 5, "integer")
    x = data.args[0].clone(memory_format=torch.preserve_format)
    x[:, torch.arange(40) % 4 > 0] = 0
    x[:, torch.arange(40) % 4 > 1] = -0.0
    (wanted,) = oracle(problem, Data((x,), data.constants))
    executable = load_engine("zeroskip.channels").build(problem, knobs, TARGET)
    packed = list(executable.pack(data.constants))
    packed[0] = torch.full_like(packed[0], torch.nan)  # the tiles of a dense input
    packed[-2][:, :, :, torch.arange(40) % 4 > 0] = torch.nan
    y = torch.empty(problem.y_spec.shape).contiguous(memory_format=torch.channels_last)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers((x,), [y], tuple(packed)), workspace)
    return (y.double() - wanted.double()).abs().nan_to_num(99.0).max().item()


def reads_dense_as_it_lies():
    """Error on an input without zeros where the weights that live channels are gathered from are NaN: 0, unless it gathers."""
    problem, knobs = conv(1, 40, 4, 5, 24, 1, 3, 0, 1), box()
    data = make_data(problem, 5, "integer")
    x = data.args[0] + 9
    x[:, ::9] = 0  # fewer than an eighth
    x = x.contiguous(memory_format=torch.channels_last)
    (wanted,) = oracle(problem, Data((x,), data.constants))
    executable = load_engine("zeroskip.channels").build(problem, knobs, TARGET)
    packed = list(executable.pack(data.constants))
    packed[-2] = torch.full_like(packed[-2], torch.nan)
    y = torch.empty(problem.y_spec.shape).contiguous(memory_format=torch.channels_last)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    executable.launch(Buffers((x,), [y], tuple(packed)), workspace)
    return (y.double() - wanted.double()).abs().nan_to_num(99.0).max().item()


def marked(engine_id, problem, knobs):
    """Error of marks that a producer writes, and of a reader that is given them instead of looking: 0 and 0."""
    producer = load_engine(engine_id).build(problem, knobs, TARGET)
    data = make_data(problem, 5, "integer")
    bias = torch.where(torch.arange(40) % 3 == 0, data.constants[1], -999.0)  # two of three channels die
    bias[39] = torch.inf
    data = Data(data.args, (data.constants[0], bias))
    spec = producer.marks_written()
    y = torch.full(problem.y_spec.shape, torch.nan).contiguous(memory_format=torch.channels_last)
    marks = torch.full(spec.shape, -1, dtype=torch.int32)
    workspace = torch.full((producer.workspace_bytes,), 255, dtype=torch.uint8)
    producer.launch(Buffers(data.args, [y, marks], producer.pack(data.constants)), workspace)
    assert torch.equal(y.double(), oracle(problem, data)[0])
    n, lines = problem.n, spec.shape[1]
    alive = (marks[1].reshape(n, lines // n, -1, 1) >> torch.arange(32) & 1).amax(1).flatten(1)[:, :40]
    wrong = int((alive != (y != 0).flatten(2).any(2)).sum())
    largest = marks[0].max().view(torch.float32)
    wrong += int(largest != y[y.isfinite()].abs().max())
    y[:, 39] = 1.0  # infinities are for the marks, sums are not
    reading = conv(n, 40, problem.p, problem.q, 24, 1, 3, 0, 1)
    weights = make_data(reading, 6, "integer").constants
    (wanted,) = oracle(reading, Data((y,), weights))
    for reader in ("zeroskip.channels", "triton.split_fp32"):
        executable = load_engine(reader).build(reading, box(), TARGET)
        assert executable.accept_marks(spec)
        assert not executable.accept_marks(replace(spec, shape=(2, 1 << 14, 2))), "too many to be worth it"
        executable.look = executable.maxima = None  # whoever looks, fails
        result = torch.full(reading.y_spec.shape, torch.nan).contiguous(memory_format=torch.channels_last)
        workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
        executable.launch(Buffers((y, marks), [result], executable.pack(weights)), workspace)
        wrong += (result.double() - wanted).abs().nan_to_num(99.0).max().item()
    return wrong


def negative_zeros(engine_id, problem, knobs):
    """Error where every zero of x is negative."""
    data = make_data(problem, 5, "integer")
    x = thinned(data.args[0], "channels")
    x = torch.where(x == 0, -torch.zeros_like(x), x).contiguous(memory_format=torch.channels_last)
    (wanted,) = oracle(problem, Data((x, *data.args[1:]), data.constants))
    y = launch(engine_id, problem, knobs, Data((x, *data.args[1:]), data.constants))
    return (y.double() - wanted.to(x.dtype).double()).abs().max().item()


POOLINGS = {
    "max": ("max_pool2d.default(%x, (2, 2), (2, 2))", (1, 24, 6, 5)),
    "max, padded, ceil": ("max_pool2d.default(%x, (3, 3), (2, 2), (1, 1), (1, 1), True)", (2, 7, 6, 9)),
    "average": ("avg_pool2d.default(%x, (2, 4), (1, 2))", (1, 16, 5, 8)),
    "average of all": ("adaptive_avg_pool2d.default(%x, (1, 1))", (3, 16, 4, 8)),
}


def pooling(call, shape, dtype):
    """Largest error of the stand-alone pooling against torch, NaN and infinities among the data."""
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(3)).double()
    operator, arguments = call.split("(%x, ")
    wanted = getattr(torch.ops.aten, operator.removesuffix(".default"))
    made = wanted(x, *eval_sizes(arguments))
    sizes = ",".join(map(str, made.shape))
    text = f"graph 1\ninput %x: {dtype}[{','.join(map(str, shape))}]\n%y: {dtype}[{sizes}] = aten.{call}\nreturn %y\n"
    problem = SubgraphProblem(text, "nhwc")
    engine = load_engine("triton.pooling")
    support = engine.supports(problem, TARGET)
    assert support, support.reason
    x = x.to(torch.float16 if dtype == "fp16" else torch.float32).contiguous(memory_format=torch.channels_last)
    x[0, 1, 2, 3], x[0, 2, 4 % shape[2]] = torch.nan, -torch.inf
    y = torch.full(made.shape, 77.0, dtype=x.dtype).contiguous(memory_format=torch.channels_last)
    executable = engine.build(problem, engine.space(problem, TARGET)[0], TARGET)
    executable.launch(Buffers((x,), [y], executable.pack([])), None)
    expected = wanted(x.double(), *eval_sizes(arguments)).to(x.dtype)
    same = torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())
    return (y - expected)[expected.isfinite()].abs().max().item() if same else 99.0


def eval_sizes(text):
    return ast.literal_eval(f"({text.removesuffix(')')},)")


def main():
    for name, (call, shape) in POOLINGS.items():
        for dtype in ("fp32", "fp16"):
            print(json.dumps({"case": f"pooling {name} {dtype}", "error": pooling(call, shape, dtype)}), flush=True)
    for name, (engine_id, problem, knobs, kind) in CASES.items():
        print(json.dumps({"case": name, "error": error(engine_id, problem, knobs, kind)}), flush=True)
    finite = {"ecr": (ECR, PAIRS, 20, 7), "gather": (tile(), PAIRS, 20, 7), "channels": (box(), None, 24, 8)}
    for engine_id, (knobs, pool, c, k) in finite.items():
        problem = conv(1, c, 6, 6, k, 1, 3, epilogue=Epilogue(bias=True), pool=pool)
        print(
            json.dumps({"case": f"{engine_id}, not finite", "same": not_finite(engine_id, problem, knobs)}), flush=True
        )
    for name, found in MARKED.items():
        print(json.dumps({"case": f"marks of {name}", "error": marked(*found)}), flush=True)
    for engine_id, (case, knobs) in NEGATIVE.items():
        row = {"case": f"{engine_id}, negative zeros", "error": negative_zeros(engine_id, case, knobs)}
        print(json.dumps(row), flush=True)
    print(json.dumps({"case": "dead weights", "error": reads_no_dead_weights()}))
    print(json.dumps({"case": "a dense input", "error": reads_dense_as_it_lies()}))
    print(json.dumps({"case": "a planted fault", "error": error("gather", CONV, tile(), "all alive", corrupt=True)}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
