"""The engines that skip zeros, and convolution + pooling, on the GPU: right at any share of zeros, inside guards, in a graph."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from convoy.capture import capture_inference
from convoy.engines.base import Buffers
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement.accuracy import judge, make_data, oracle
from convoy.measurement.data import Data
from convoy.measurement.data_with_zeros import with_zeros
from convoy.measurement.device.detect import detect_target
from convoy.plan.plan import Step
from convoy.problem import ConvProblem, Epilogue, Pool, TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep
from convoy.program.eager import EagerProgram
from convoy.program.lifetimes import with_frees
from convoy.program.zero_marks import with_zero_marks
from convoy.regions import propose

pytestmark = pytest.mark.gpu

NAMES = ("ecr", "gather", "blocks", "channels", "pooled")
KINDS = [("fp32", "strict"), ("fp32", "as_torch"), ("fp16", "half"), ("bf16", "half")]
RELU, FULL = Epilogue(bias=True, activation="relu"), Epilogue(bias=True, residual=True, activation="relu")
TRIED = 4
"""Settings tried of each problem: the first, and others evenly from the rest."""

POOLS = {
    "unpooled": None,
    "2x2": Pool("max", 2, 2, 2, 2),
    "3x3 stride 2, padded": Pool("max", 3, 3, 2, 2, 1, 1),
    "3x3 stride 2, ceil": Pool("max", 3, 3, 2, 2, ceil_mode=True),
    "average": Pool("avg", 2, 2, 2, 2),
    "average, counted padding, ceil": Pool("avg", 3, 3, 2, 2, 1, 1, ceil_mode=True, count_include_pad=True),
}
SHAPES = {
    "3x3": ConvProblem(1, 64, 14, 14, 96, 3, 3, 1, 1, epilogue=FULL),
    "3x3 long": ConvProblem(1, 512, 14, 14, 512, 3, 3, 1, 1, epilogue=RELU),
    "3x3 odd": ConvProblem(3, 40, 13, 11, 72, 3, 3, 1, 1, epilogue=FULL),
    "3x3 stride 2": ConvProblem(2, 64, 28, 28, 64, 3, 3, 1, 1, 2, 2, epilogue=RELU),
    "1x1": ConvProblem(2, 256, 14, 14, 64, 1, 1, epilogue=FULL),
    "dilated": ConvProblem(1, 32, 17, 17, 32, 3, 3, 4, 4, 1, 1, 4, 4),
    "odd channels": ConvProblem(1, 3, 30, 31, 7, 5, 5, 2, 2, epilogue=RELU),
}


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


def typed(problem, dtype, numerics, pool):
    words = {"x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype, "layout": "nhwc", "numerics": numerics}
    return replace(problem, epilogue=replace(problem.epilogue, pool=pool), **words)


def executables(name, problem, target, tried=TRIED):
    engine = load_engine("triton.pooled" if name == "pooled" else f"zeroskip.{name}")
    support = engine.supports(problem, target)
    if not support:
        return
    space = engine.space(problem, target)
    chosen = space[:: max(1, len(space) // tried)][:tried]
    for knobs, executable in buildable(engine, problem, chosen, target):
        yield engine, knobs, executable


def buildable(engine, problem, space, target):
    for knobs in space:
        try:
            yield knobs, engine.build(problem, knobs, target)
        except CompileError as error:
            if "shared memory" not in str(error) and "spills" not in str(error):
                raise


def in_channels_last(data):
    return Data(tuple(t.contiguous(memory_format=torch.channels_last) for t in data.args), data.constants)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_right_at_every_share_of_zeros(name, shape, pool, target):
    for dtype, numerics in KINDS:
        problem = typed(SHAPES[shape], dtype, numerics, POOLS[pool])
        for engine, knobs, executable in executables(name, problem, target):
            assert executable.workspace_bytes == engine.workspace_bytes(problem, knobs)
            for kind, zeros in (("integer", 0), ("integer", 60), ("normal", 90), ("normal", 100)):
                data = in_channels_last(with_zeros(make_data(problem, 3, kind, "cuda"), zeros, 4))
                verdict = judge(executable, engine.family, problem, data, kind, tf32=numerics == "as_torch")
                assert verdict.ok, f"{dtype} {numerics} [{knobs}] {kind} {zeros} %: {verdict.reason}"


@pytest.mark.parametrize("name", NAMES)
def test_dead_channels_and_dead_regions(name, target):
    for dtype, numerics in KINDS:
        problem = typed(SHAPES["3x3 long"], dtype, numerics, None if name == "channels" else POOLS["2x2"])
        data = make_data(problem, 5, "integer", "cuda")
        x = data.args[0].clone(memory_format=torch.preserve_format)
        x[:, ::3], x[:, 100:300, :7] = 0, 0
        for engine, _, executable in executables(name, problem, target):
            verdict = judge(executable, engine.family, problem, Data((x,), data.constants), "integer")
            assert verdict.ok, verdict.reason


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pooled"])
def test_negative_zeros_are_zeros(name, target):
    for dtype, numerics in KINDS:
        problem = typed(SHAPES["3x3"], dtype, numerics, None)
        data = in_channels_last(with_zeros(make_data(problem, 5, "integer", "cuda"), 70, 7, "dead_channels"))
        x = torch.where(data.args[0] == 0, -0.0, data.args[0]).contiguous(memory_format=torch.channels_last)
        data = Data((x, *data.args[1:]), data.constants)
        for engine, knobs, executable in executables(name, problem, target, 1):
            verdict = judge(executable, engine.family, problem, data, "integer")
            assert verdict.ok, f"{dtype} {numerics} [{knobs}]: {verdict.reason}"


@pytest.mark.parametrize("pool", ["2x2", "average", "3x3 stride 2, padded"])
def test_blocks_that_stay_pool_rightly(pool, target):
    engine = load_engine("triton.pooled")
    for dtype, numerics in KINDS[1:]:
        problem = typed(ConvProblem(32, 64, 28, 27, 96, 3, 3, 1, 1, epilogue=FULL), dtype, numerics, POOLS[pool])
        staying = [knobs for knobs in engine.space(problem, target) if "blocks" in knobs]
        built = list(buildable(engine, problem, staying, target))[:3]
        assert built, dtype
        for knobs, executable in built:
            for kind in ("integer", "normal"):
                data = in_channels_last(make_data(problem, 3, kind, "cuda"))
                verdict = judge(executable, engine.family, problem, data, kind, tf32=numerics == "as_torch")
                assert verdict.ok, f"{dtype} [{knobs}] {kind}: {verdict.reason}"


@pytest.mark.parametrize("name", ["ecr", "gather", "blocks"])
def test_what_is_not_finite_comes_out_as_in_pytorch(name, target):
    for dtype, numerics in KINDS:
        problem = typed(SHAPES["3x3"], dtype, numerics, POOLS["2x2"])
        data = in_channels_last(with_zeros(make_data(problem, 6, "normal", "cuda"), 70, 7))
        x = data.args[0].clone(memory_format=torch.preserve_format)
        x[0, 3, 5, 5], x[0, 9, 10, 2] = torch.nan, torch.inf
        weight = data.constants[0].clone()
        weight[2, 5, 1, 1] = torch.inf
        for args, constants in (((x, *data.args[1:]), data.constants), (data.args, (weight, *data.constants[1:]))):
            (wanted,) = oracle(problem, Data(args, constants))
            for _, knobs, executable in executables(name, problem, target, 2):
                y = torch.empty(problem.y_spec.shape, dtype=x.dtype, device="cuda", memory_format=torch.channels_last)
                workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8, device="cuda")
                executable.launch(Buffers(args, [y], executable.pack(constants)), workspace)
                assert torch.equal(y.isnan(), wanted.isnan()), f"{dtype} {numerics} [{knobs}]"


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_follows_inputs_whose_zeros_change(name, target):
    for dtype, numerics in KINDS:
        problem = typed(
            SHAPES["3x3 odd"], dtype, numerics, None if name == "channels" else POOLS["3x3 stride 2, padded"]
        )
        data = make_data(problem, 8, "integer", "cuda")
        for _, knobs, executable in executables(name, problem, target, 1):
            x = data.args[0].clone(memory_format=torch.preserve_format)
            y = torch.empty(problem.y_spec.shape, dtype=x.dtype, device="cuda", memory_format=torch.channels_last)
            workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8, device="cuda")
            buffers = Buffers((x, *data.args[1:]), [y], executable.pack(data.constants))
            executable.launch(buffers, workspace)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                executable.launch(buffers, workspace)
            for zeros in (0, 95, 50, 100, 0):
                x.copy_(in_channels_last(with_zeros(data, zeros, zeros)).args[0])
                x[:, : problem.c * zeros // 200] = 0
                graph.replay()
                (wanted,) = oracle(problem, Data((x, *data.args[1:]), data.constants))
                assert torch.equal(y, wanted.to(y.dtype)), f"{dtype} {numerics} [{knobs}] {zeros} %"


LIVE = {
    "one image": ConvProblem(1, 512, 14, 14, 512, 3, 3, 1, 1, epilogue=FULL),
    "images": ConvProblem(8, 128, 7, 7, 96, 3, 3, 1, 1, epilogue=RELU),
    "stride": ConvProblem(2, 64, 28, 28, 64, 3, 3, 1, 1, 2, 2),
    "1x1": ConvProblem(3, 256, 14, 14, 64, 1, 1, epilogue=FULL),
    "odd": ConvProblem(3, 40, 13, 11, 72, 3, 3, 1, 1, epilogue=RELU),
}


@pytest.mark.parametrize("dead", [0.0, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("shape", LIVE)
def test_live_channels_of_each_image_and_no_others_weights(shape, dead, target):
    """The weights of channels that are dead in all images are NaN once they are packed: nobody may read them."""
    problem = typed(LIVE[shape], "fp32", "strict", None)
    for kind in ("integer", "normal"):
        data = in_channels_last(make_data(problem, 9, kind, "cuda"))
        x = data.args[0].clone(memory_format=torch.preserve_format)
        order = torch.randperm(problem.c, generator=torch.Generator().manual_seed(1)).cuda()
        gone = order[: int(dead * problem.c)]
        x[:, gone] = 0
        x[0, order[: int((0.5 + dead / 2) * problem.c)]] = 0  # and more of them in the first image
        data = Data((x, *data.args[1:]), data.constants)
        (wanted,) = oracle(problem, data)
        for engine, knobs, executable in executables("channels", problem, target):
            verdict = judge(executable, engine.family, problem, data, kind)
            assert verdict.ok, f"[{knobs}] {kind}: {verdict.reason}"
            packed = list(executable.pack(data.constants))
            if dead >= 0.5:
                packed[0] = torch.full_like(packed[0], torch.nan)
                packed[-2][:, :, :, gone] = torch.nan
            y = torch.empty(problem.y_spec.shape, device="cuda", memory_format=torch.channels_last)
            workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8, device="cuda")
            executable.launch(Buffers(data.args, [y], tuple(packed)), workspace)
            assert torch.allclose(y.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())), f"[{knobs}]"


def chain(engine, n, size, target):
    """Four convolutions with ReLU, bound to slots one behind the other; most channels between them die."""
    torch.manual_seed(0)
    steps, layers = [], []
    for at, (c, k) in enumerate(((64, 128), (128, 128), (128, 96), (96, 64))):
        problem = typed(ConvProblem(n, c, size, size, k, 3, 3, 1, 1, epilogue=RELU), "fp32", "strict", None)
        weight, bias = torch.randn(k, c, 3, 3, device="cuda") / (9 * c) ** 0.5, torch.randn(k, device="cuda")
        bias[torch.randperm(k)[: k * 3 // 4]] = -9.0
        executable = engine.build(problem, engine.space(problem, target)[0], target)
        made = Step("region", "conv", ("n",), ("a",), ("r",), problem.key, engine.config(), "nhwc")
        packed = executable.pack((weight, bias))
        steps.append(BoundStep(made, executable, packed, (at,), (at + 1,), (problem.y_spec,)))
        layers.append((weight.double(), bias.double()))
    return steps, layers


def program_of(steps, names, spec):
    outputs = [len(steps)]
    size = max(step.executable.workspace_bytes for step in steps)
    return EagerProgram(
        BoundPlan(with_frees(steps, outputs), names, [(spec, "nhwc")], outputs, size, 0), torch.device("cuda")
    )


@pytest.mark.parametrize("name", ["zeroskip.channels", "triton.split_fp32"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("size", [14, 40])
def test_what_producers_mark_replaces_the_look_of_readers(n, size, name, target):
    """The same bits as from readers that look, eagerly and in a captured graph, on inputs with other zeros."""
    steps, layers = chain(load_engine(name), n, size, target)
    names = [f"v{index}" for index in range(5)]
    x = torch.randn(n, 64, size, size, device="cuda").contiguous(memory_format=torch.channels_last)
    spec = TensorSpec(tuple(x.shape), "fp32")
    looking = program_of(steps, names, spec)
    marked, names = with_zero_marks(steps, names)
    assert len(names) == 5 + 3
    told = program_of(marked, names, spec)
    given = x.clone(memory_format=torch.preserve_format)
    told([given])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (replayed,) = told([given])
    for scale in (1.0, 0.0, -3.0, 1e4):
        given.copy_(x * scale)
        wanted = given.double()
        for weight, bias in layers:
            wanted = F.relu(F.conv2d(wanted, weight, bias, padding=1))
        (found,), (plain,) = told([given]), looking([given])
        graph.replay()
        assert torch.equal(found, plain)
        assert torch.equal(found, replayed)
        assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5 * max(1.0, float(wanted.abs().max())))


def test_pooled_halves_have_nan_and_infinity_where_pytorch_has_them(target):
    for dtype in ("fp16", "bf16"):
        for pool in ("2x2", "3x3 stride 2, padded"):
            problem = typed(ConvProblem(2, 64, 28, 28, 64, 1, 1), dtype, "half", POOLS[pool])
            data = in_channels_last(make_data(problem, 6, "integer", "cuda"))
            x, weight = data.args[0].clone(memory_format=torch.preserve_format), data.constants[0].abs() + 1
            x[0, 3, 5, 5], x[0, :, 8:12, 8:12], x[1, 9, 10, 2] = torch.nan, -torch.inf, torch.inf
            data = Data((x,), (weight,))
            (wanted,) = oracle(problem, data)
            assert wanted.isnan().any()
            assert (wanted == -torch.inf).any()
            for _, knobs, executable in executables("pooled", problem, target):
                y = torch.empty(problem.y_spec.shape, dtype=x.dtype, device="cuda", memory_format=torch.channels_last)
                workspace = torch.full((max(1, executable.workspace_bytes),), 255, dtype=torch.uint8, device="cuda")
                executable.launch(Buffers((x,), [y], executable.pack((weight,))), workspace)
                assert torch.equal(y.isnan(), wanted.isnan()), f"{dtype} {pool} [{knobs}]"
                assert torch.equal(y.isinf(), wanted.to(y.dtype).isinf()), f"{dtype} {pool} [{knobs}]"


POOLINGS = {
    "2x2": lambda x: F.max_pool2d(x, 2),
    "3x3 stride 2, padded": lambda x: F.max_pool2d(x, 3, 2, 1),
    "3x3 stride 2, ceil": lambda x: F.max_pool2d(x, 3, 2, 0, ceil_mode=True),
    "5x5": lambda x: F.max_pool2d(x, 5, 1, 2),
    "average": lambda x: F.avg_pool2d(x, 2),
    "average, ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average of all": lambda x: F.adaptive_avg_pool2d(x, 1),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_a_pooling_by_itself_agrees_with_pytorch(name, target):
    engine = load_engine("triton.pooling")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in ((1, 512, 7, 7), (3, 20, 7, 8), (2, 7, 8, 5)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).cuda().to(dtype)
            x = x.contiguous(memory_format=torch.channels_last)
            x[0, 1, 2, 3], x[0, 2], x[0, 3, 4, 4] = torch.nan, -torch.inf, torch.inf
            captured = capture_inference(Pooling(name), (x,))
            (region,) = [
                r for r in propose(captured.graph, layouts=("nhwc",), numerics="as_torch") if r.pattern == "op"
            ]
            (problem,) = region.problems
            assert engine.supports(problem, target), engine.supports(problem, target).reason
            y = torch.full_like(POOLINGS[name](x), 77.0)
            wanted = POOLINGS[name](x.double())
            executable = engine.build(problem, engine.space(problem, target)[0], target)
            executable.launch(Buffers((x,), [y], executable.pack(())), None)
            # An average of values of both signs may be near zero: its error is that of the sum.
            rtol = 1e-2 if dtype != torch.float32 else 1e-5
            assert torch.allclose(y.double(), wanted, rtol=rtol, atol=1e-6, equal_nan=True)


class Pooling(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return POOLINGS[self.name](x)
