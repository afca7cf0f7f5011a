"""Every Triton engine on the GPU: exact on integers, within the bounds on real numbers, inside guards, the same in a graph."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from convoy.engines import manifest
from convoy.engines.base import Buffers
from convoy.engines.manifest import MANIFEST
from convoy.errors import CompileError
from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem
from convoy.target import Target

pytestmark = pytest.mark.gpu

OTHERS = (
    "triton.dgrad",
    "triton.wgrad",
    "triton.stem_wgrad",
    "triton.merged",
    "cuda.wgrad",
    "cuda.bottleneck",
    "cuda.inverted_residual",
    "cuda.expand_depthwise",
    "triton.conv3d",
)
ENGINES = [n for n in MANIFEST if n.startswith(("triton.", "cuda.")) and n not in OTHERS and ".pool" not in n]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FULL = Epilogue(bias=True, residual=True, activation="relu")
GUARD = 4096


def load_engine(engine_id):
    return manifest.load_engine(engine_id)


def conv(*sizes, **rest):
    return ConvProblem(*sizes, layout="nhwc", **rest)


SHAPES = {
    "3x3": conv(1, 64, 14, 14, 96, 3, 3, 1, 1, epilogue=FULL),
    "3x3 long": conv(1, 512, 7, 7, 512, 3, 3, 1, 1),
    "3x3 odd": conv(3, 40, 13, 11, 72, 3, 3, 1, 1, epilogue=FULL),
    "3x3 stride 2": conv(2, 64, 28, 28, 64, 3, 3, 1, 1, 2, 2, epilogue=FULL),
    "3x3 stride 2 odd": conv(1, 32, 35, 35, 48, 3, 3, 0, 0, 2, 2),
    "dilated": conv(1, 32, 17, 17, 32, 3, 3, 4, 4, 1, 1, 4, 4),
    "1x7": conv(1, 128, 17, 17, 128, 1, 7, 0, 3, epilogue=FULL),
    "5x5": conv(2, 48, 14, 14, 64, 5, 5, 2, 2),
    "1x1": conv(2, 256, 14, 14, 64, 1, 1, epilogue=FULL),
    "1x1 stride 2": conv(1, 64, 15, 15, 128, 1, 1, 0, 0, 2, 2),
    "1x1 padded": conv(1, 16, 6, 6, 16, 1, 1, 2, 2),
    "one pixel": conv(4, 96, 1, 1, 24, 1, 1, epilogue=Epilogue(bias=True, activation="silu")),
    "stem 7x7": conv(1, 3, 56, 56, 64, 7, 7, 3, 3, 2, 2, epilogue=FULL),
    "stem 11x11": conv(1, 3, 63, 63, 64, 11, 11, 2, 2, 4, 4),
    "grouped": conv(2, 64, 9, 9, 32, 3, 3, 1, 1, groups=4, epilogue=FULL),
    "depthwise": conv(2, 96, 14, 14, 96, 3, 3, 1, 1, groups=96, epilogue=Epilogue(bias=True, activation="relu6")),
    "depthwise 5x5 stride 2": conv(1, 40, 15, 15, 40, 5, 5, 2, 2, 2, 2, groups=40),
    "one channel": conv(1, 1, 30, 31, 1, 3, 3, 1, 1),
    "stride over filter": conv(1, 8, 20, 20, 8, 1, 2, 0, 0, 3, 4),
    "filter over image": conv(1, 16, 3, 3, 16, 7, 7, 3, 3),
    "linear": LinearProblem(1, 2048, 1000, epilogue=Epilogue(bias=True)),
    "linear batch": LinearProblem(7, 520, 136, epilogue=FULL),
    "linear large batch": LinearProblem(40, 512, 264, epilogue=Epilogue(bias=True, activation="gelu")),
}
KINDS = [("fp16", "half"), ("bf16", "half"), ("fp32", "as_torch"), ("fp32", "strict")]


def typed(problem, dtype, numerics):
    if isinstance(problem, LinearProblem):
        return LinearProblem(problem.n, problem.c, problem.k, dtype, numerics, problem.epilogue)
    fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    return ConvProblem(
        **(fields | dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype) | {"numerics": numerics})
    )


@pytest.fixture(scope="module")
def target():
    properties = torch.cuda.get_device_properties(0)
    arch = f"sm_{properties.major}{properties.minor}"
    return Target("cuda", properties.name, arch, properties.multi_processor_count, properties.total_memory, 50 << 20)


def oracle(problem, x, weight, bias, residual):
    bias = None if bias is None else bias.double()
    if isinstance(problem, LinearProblem):
        y = F.linear(x.double(), weight.double(), bias)
    else:
        stride, pad = (problem.stride_h, problem.stride_w), (problem.pad_h, problem.pad_w)
        dilation = (problem.dilation_h, problem.dilation_w)
        y = F.conv2d(x.double(), weight.double(), bias, stride, pad, dilation, problem.groups)
    y = y if residual is None else y + residual.double()
    return {"none": lambda v: v, "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "gelu": F.gelu}[
        problem.epilogue.activation
    ](y)


class Case:
    """Buffers of one problem; y lies between guards."""

    def __init__(self, problem, make, seed=0):
        torch.manual_seed(seed)
        self.problem, self.dtype = problem, DTYPES[problem.x_spec.dtype]
        self.x, self.weight = (
            self.tensor(make(problem.x_spec.shape)),
            make(problem.weight_spec.shape).to("cuda", self.dtype),
        )
        self.bias = make((problem.k,)).to("cuda", self.dtype) if problem.epilogue.bias else None
        self.residual = self.tensor(make(problem.y_spec.shape)) if problem.epilogue.residual else None
        elements = problem.y_spec.elements
        self.room = torch.full((elements + 2 * GUARD,), 12345.0, device="cuda").to(self.dtype)
        inner = self.room[GUARD : GUARD + elements]
        if isinstance(problem, LinearProblem):
            self.y = inner.view(problem.n, problem.k)
        else:
            self.y = inner.view(problem.n, problem.p, problem.q, problem.k).permute(0, 3, 1, 2)
        self.expected = oracle(problem, self.x, self.weight, self.bias, self.residual)

    def tensor(self, values):
        values = values.to("cuda", self.dtype)
        return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values

    def prepare(self, executable):
        constants = [self.weight] if self.bias is None else [self.weight, self.bias]
        args = (self.x,) if self.residual is None else (self.x, self.residual)
        size = executable.workspace_bytes
        workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda") if size else None
        return Buffers(args, [self.y], executable.pack(constants)), workspace

    def launch(self, executable):
        buffers, workspace = self.prepare(executable)
        self.y.fill_(float("nan"))
        executable.launch(buffers, workspace)
        assert (self.room[:GUARD] == self.room[0]).all(), "wrote before y"
        assert (self.room[-GUARD:] == self.room[0]).all(), "wrote behind y"
        return self.y.double()

    def error(self, executable):
        return ((self.launch(executable) - self.expected).norm() / self.expected.norm()).item()


def integers(shape):
    return torch.randint(-1, 2, shape).float()


def some_knobs(engine, problem, target):
    space = list(engine.space(problem, target))
    return space[:1] + space[1 :: max(1, len(space) // 2)]


def strict_bound(problem):
    return max(0.6 * 2.0**-23 * problem.reduction_length**0.5, 1e-7)


def supported():
    """(engine, shape, kind) wherever an engine says yes on Hopper; what it refuses is tested without a device."""
    hopper = Target("cuda", "any H100", "sm_90", 132, 80 << 30, 50 << 20)
    for engine_id in ENGINES:
        for name, problem in SHAPES.items():
            for kind in KINDS:
                if load_engine(engine_id).supports(typed(problem, *kind), hopper):
                    yield pytest.param(engine_id, name, kind, id=f"{engine_id}-{name}-{'-'.join(kind)}")


@pytest.mark.parametrize(("engine_id", "name", "kind"), list(supported()))
def test_right_wherever_it_says_yes(engine_id, name, kind, target):
    engine, problem = load_engine(engine_id), typed(SHAPES[name], *kind)
    support = engine.supports(problem, target)
    if not support:
        pytest.skip(support.reason)
    exact, real = Case(problem, integers), Case(problem, torch.randn)
    bound = {"fp16": 4e-4, "bf16": 3e-3}.get(kind[0], strict_bound(problem) if kind[1] == "strict" else 2.0**-10)
    smooth = problem.epilogue.activation in ("silu", "gelu")
    for knobs in some_knobs(engine, problem, target):
        executable = engine.build(problem, knobs, target)
        assert executable.workspace_bytes == engine.workspace_bytes(problem, knobs)
        if not smooth:
            torch.testing.assert_close(
                exact.launch(executable), exact.expected.to(exact.dtype).double(), rtol=0, atol=0, msg=str(knobs)
            )
        assert real.error(executable) <= bound, knobs


SLICED = ["triton.swapped", "triton.pointwise", "triton.implicit_gemm", "triton.persistent", "triton.stem",
          "cuda.implicit_gemm", "cuda.swapped"]  # fmt: skip


@pytest.mark.parametrize("engine_id", SLICED)
@pytest.mark.parametrize("name", ["3x3", "3x3 long", "1x1", "stem 7x7", "3x3 stride 2"])
def test_a_slice_of_a_larger_tensor_is_written_and_nothing_beside_it(engine_id, name, target):
    engine, problem = load_engine(engine_id), typed(SHAPES[name], "fp16", "half")
    if not engine.supports(problem, target):
        pytest.skip(engine.supports(problem, target).reason)
    case = Case(problem, integers)
    space = list(engine.space(problem, target))
    for knobs in [*space[:2], *[k for k in space if dict(k.items_).get("split", 1) != 1][:1]]:
        executable = engine.build(problem, knobs, target)
        n, k, p, q = problem.y_spec.shape
        whole = torch.full((n, p, q, k + 64), 7.0, device="cuda", dtype=torch.float16).permute(0, 3, 1, 2)
        case.y = whole.narrow(1, 24, k)
        assert executable.accept_slice(0, k + 64, 24)
        buffers, workspace = case.prepare(executable)
        executable.launch(buffers, workspace)
        assert torch.equal(case.y.double(), case.expected.half().double()), knobs
        assert (whole[:, :24] == 7).all()
        assert (whole[:, 24 + k :] == 7).all()


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("name", ["3x3", "3x3 odd", "3x3 stride 2", "dilated", "1x7", "1x1"])
def test_every_kind_of_cooperation_of_the_cuda_kernel(name, kind, target):
    """Blocks alone, in pairs, in turns, and splits of every size: exact, and the same bits each time."""
    engine, problem = load_engine("cuda.implicit_gemm"), typed(SHAPES[name], *kind)
    case = Case(problem, integers)
    forms = [
        (64, 48, 4, 2, False, 1, 1),
        (64, 48, 4, 1, False, 1, 1),
        (64, 32, 3, 2, True, 2, 1),
        (64, 64, 4, 2, False, 2, 1),
    ]
    forms += [(64, 40, 4, 1, False, 1, split) for split in (2, 3, 8)] + [
        (128, 96, 3, 2, False, 1, 4),
        (64, 64, 3, 3, False, 1, 6),
    ]
    names = ("rows", "filters", "stages", "consumers", "turns", "cluster", "split")
    for form in forms:
        executable = engine.build(problem, Knobs.of(**dict(zip(names, form, strict=True))), target)
        for _ in range(5):
            made = case.launch(executable)
            torch.testing.assert_close(
                made,
                case.expected.to(case.dtype).double(),
                rtol=0,
                atol=0,
                msg=lambda text, form=form: f"{form}: {text}",
            )


def test_paired_blocks_wait_for_each_other_at_their_end(target):
    """A block's last message to its peer may be under way when the block has ended, and longer while others fill the memory."""
    engine = load_engine("cuda.implicit_gemm")
    problem = typed(conv(32, 256, 14, 14, 1024, 1, 1, epilogue=FULL), "fp16", "half")
    knobs = {"rows": 64, "filters": 128, "stages": 4, "consumers": 2, "turns": False, "cluster": 2, "split": 1}
    executable, case = engine.build(problem, Knobs.of(**knobs), target), Case(problem, integers)
    buffers, workspace = case.prepare(executable)
    aside, full, empty = torch.cuda.Stream(), *torch.empty((2, 1 << 27), device="cuda")
    for _ in range(100):
        with torch.cuda.stream(aside):
            empty.copy_(full)
        for _ in range(100):
            executable.launch(buffers, workspace)
        torch.cuda.synchronize()
    torch.testing.assert_close(case.y.double(), case.expected.to(case.dtype).double(), rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 32])
def test_parallel_convolutions_in_one_launch(batch, target):
    from convoy.graph.text import parse_graph
    from convoy.regions import propose

    filters = (192, 96, 16)
    lines = ["graph 1", f"input %x: fp16[{batch},480,14,14]"]
    lines += [f"constant %w{i}: fp16[{k},480,1,1]" for i, k in enumerate(filters)]
    lines += [
        f"%y{i}: fp16[{batch},{k},14,14] = conv2d(%x, %w{i}, None, (1, 1), (0, 0), (1, 1), 1)"
        for i, k in enumerate(filters)
    ]
    graph = parse_graph("\n".join([*lines, "return %y0, %y1, %y2"]) + "\n")
    (region,) = [
        r for r in propose(graph, layouts=("nhwc",), numerics="half", patterns=("merge",)) if r.pattern == "merge"
    ]
    engine, problem = load_engine("triton.merged"), region.problems[0]
    assert engine.supports(problem, target)
    torch.manual_seed(0)
    x = integers((batch, 480, 14, 14)).to("cuda", torch.float16).contiguous(memory_format=torch.channels_last)
    weights = [integers((k, 480, 1, 1)).to("cuda", torch.float16) for k in filters]
    for knobs in engine.space(problem, target):
        executable = engine.build(problem, knobs, target)
        made = [torch.full((batch, k, 14, 14), float("nan"), device="cuda", dtype=torch.float16) for k in filters]
        made = [m.contiguous(memory_format=torch.channels_last) for m in made]
        executable.launch(Buffers((x,), made, executable.pack(weights)), None)
        for result, weight in zip(made, weights, strict=True):
            assert torch.equal(result, F.conv2d(x.double(), weight.double()).half()), knobs


GRADIENTS = ["triton.dgrad", "triton.wgrad", "triton.stem_wgrad", "cuda.wgrad"]
GRADIENT_SHAPES = {
    "3x3": conv(2, 64, 14, 14, 96, 3, 3, 1, 1),
    "3x3 batch 32": conv(32, 128, 14, 14, 128, 3, 3, 1, 1),
    "3x3 odd": conv(3, 40, 13, 11, 72, 3, 3, 1, 1),
    "3x3 stride 2": conv(8, 64, 28, 28, 64, 3, 3, 1, 1, 2, 2),
    "3x3 stride 2 odd": conv(20, 32, 35, 35, 48, 3, 3, 0, 0, 2, 2),
    "dilated": conv(4, 32, 17, 17, 32, 3, 3, 4, 4, 1, 1, 4, 4),
    "1x7": conv(16, 128, 17, 17, 128, 1, 7, 0, 3),
    "1x1": conv(32, 256, 14, 14, 64, 1, 1),
    "1x1 stride 2": conv(4, 64, 15, 15, 128, 1, 1, 0, 0, 2, 2),
    "1x1 padded": conv(1, 16, 6, 6, 16, 1, 1, 2, 2),
    "one pixel": conv(64, 96, 1, 1, 32, 1, 1),
    "stride over filter": conv(2, 16, 20, 20, 16, 1, 2, 0, 0, 3, 4),
    "filter over image": conv(1, 16, 3, 3, 16, 7, 7, 3, 3),
    "stem 7x7": conv(32, 3, 56, 56, 64, 7, 7, 3, 3, 2, 2),
    "stem 11x11": conv(3, 3, 63, 63, 64, 11, 11, 2, 2, 4, 4),
    "stem 3x3": conv(2, 3, 33, 33, 32, 3, 3, 1, 1),
}


def gradient(problem, x, weight, dy):
    """Float64, by torch."""
    stride, pad = [problem.stride_h, problem.stride_w], [problem.pad_h, problem.pad_w]
    wanted = [problem.direction == "dgrad", problem.direction == "wgrad", False]
    made = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight.double(), None, stride, pad, [problem.dilation_h, problem.dilation_w],
        False, [0, 0], 1, wanted,
    )  # fmt: skip
    return made[0] if problem.direction == "dgrad" else made[1]


@pytest.mark.parametrize("engine_id", GRADIENTS)
@pytest.mark.parametrize("name", GRADIENT_SHAPES)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_gradients_are_right_and_the_same_every_time(engine_id, name, kind, target):
    engine = load_engine(engine_id)
    problem = typed(GRADIENT_SHAPES[name], *kind)
    problem = replace(problem, direction="dgrad" if engine_id == "triton.dgrad" else "wgrad")
    support = engine.supports(problem, target)
    if not support:
        pytest.skip(support.reason)
    shapes = [spec.shape for spec in (problem.x_spec, problem.weight_spec, problem.y_spec)]
    dtype = DTYPES[kind[0]]
    bound = {"fp16": 4e-4, "bf16": 3e-3, "fp32": 2.0**-10}[kind[0]]
    for place, knobs in enumerate(some_knobs(engine, problem, target)):
        try:
            executable = engine.build(problem, knobs, target)
        except CompileError as error:
            if place == 0 or "C7515" not in str(error):  # the first has to build, the tuner passes over the others
                raise
            continue
        size = executable.workspace_bytes
        assert size == engine.workspace_bytes(problem, knobs)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda") if size else None
        for make in (integers, torch.randn):
            torch.manual_seed(1)
            tensors = [make(shape).to("cuda", dtype) for shape in shapes]
            x, weight, dy = (t.contiguous(memory_format=torch.channels_last) for t in tensors)
            args = (dy, weight) if problem.direction == "dgrad" else (x, dy)
            like = x if problem.direction == "dgrad" else weight
            expected = gradient(problem, x, weight, dy)
            made = []
            for _ in range(3):
                room = torch.full((like.numel() + 2 * GUARD,), 12345.0, device="cuda").to(dtype)
                n, c, h, w = like.shape
                result = room[GUARD : GUARD + like.numel()].view(n, h, w, c).permute(0, 3, 1, 2)
                result.fill_(float("nan"))
                executable.launch(Buffers(args, [result]), workspace)
                assert (room[:GUARD] == room[0]).all(), "wrote before the result"
                assert (room[-GUARD:] == room[0]).all(), "wrote behind the result"
                made.append(result)
            assert torch.equal(made[0], made[1])
            assert torch.equal(made[0], made[2])
            if make is integers:
                torch.testing.assert_close(made[0], expected.to(dtype), rtol=0, atol=0, msg=str(knobs))
            else:
                error = ((made[0].double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
                assert error <= bound, (knobs, error)


@pytest.mark.parametrize("engine_id", ["triton.split_fp32", "cuda.split_fp32", "triton.implicit_gemm"])
@pytest.mark.parametrize("data", ["relu", "positive", "alternating"])
@pytest.mark.parametrize("c", [8, 64, 512])
def test_strict_fp32_keeps_its_bound(engine_id, data, c, target):
    """design.md, section 7: on cancelling data the error is taken against the sum of |x||weight|."""
    problem = typed(conv(1, c, 8, 8, 64, 3, 3, 1, 1), "fp32", "strict")

    def make(shape):
        if data == "relu":
            return torch.randn(shape).clamp_min(0) if shape == problem.x_spec.shape else torch.randn(shape)
        values = torch.rand(shape) + 0.5
        if data == "alternating" and shape == problem.weight_spec.shape:
            values[:, ::2] *= -1
        return values

    case, engine = Case(problem, make), load_engine(engine_id)
    scale = oracle(problem, case.x.abs(), case.weight.abs(), None, None).norm()
    for knobs in some_knobs(engine, problem, target):
        y = case.launch(engine.build(problem, knobs, target))
        assert ((y - case.expected).norm() / scale).item() <= strict_bound(problem), knobs


@pytest.mark.parametrize("engine_id", ["triton.split_fp32", "cuda.split_fp32"])
@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e6, 1e30])
def test_split_fp32_at_any_scale(factor, engine_id, target):
    problem = typed(conv(1, 64, 8, 8, 64, 3, 3, 1, 1), "fp32", "strict")
    case = Case(problem, torch.randn)
    case.x *= factor
    case.expected *= factor
    engine = load_engine(engine_id)
    case.expected = oracle(problem, case.x, case.weight, None, None)
    assert case.error(engine.build(problem, engine.space(problem, target)[0], target)) <= strict_bound(problem)


@pytest.mark.parametrize(
    "engine_id", ["triton.swapped", "triton.implicit_gemm", "triton.split_fp32", "cuda.swapped", "cuda.split_fp32"]
)
def test_nan_is_not_lost(engine_id, target):
    dtype = "fp32" if engine_id.endswith("split_fp32") else "fp16"
    problem = typed(conv(1, 64, 8, 8, 64, 3, 3, 1, 1, epilogue=Epilogue(activation="relu")), dtype, "as_torch")
    case, engine = Case(problem, torch.randn), load_engine(engine_id)
    case.x[0, 3, 4, 4] = float("nan")
    y = case.launch(engine.build(problem, engine.space(problem, target)[0], target))
    assert y[:, :, 3:6, 3:6].isnan().all()
    assert y[:, :, :3].isfinite().all()
    assert y[:, :, 6:].isfinite().all()


def run(executable, chain, workspace):
    for buffers in chain:
        executable.launch(buffers, workspace)


def square(engine_id):
    """A problem that an engine takes, and whose result may be its input."""
    if engine_id.endswith("split_fp32"):
        return typed(conv(1, 64, 14, 14, 64, 3, 3, 1, 1, epilogue=FULL), "fp32", "strict")
    if engine_id == "triton.pointwise":
        return typed(conv(1, 64, 14, 14, 64, 1, 1, epilogue=FULL), "fp16", "half")
    if engine_id.endswith(".depthwise"):
        return typed(conv(1, 64, 14, 14, 64, 3, 3, 1, 1, groups=64, epilogue=FULL), "fp16", "half")
    if engine_id == "triton.stem":
        return typed(conv(1, 4, 14, 14, 4, 3, 3, 1, 1, epilogue=FULL), "fp32", "as_torch")
    if engine_id == "triton.gemv":
        return LinearProblem(2, 256, 256, "fp16", "half", FULL)
    return typed(conv(1, 64, 14, 14, 64, 3, 3, 1, 1, epilogue=FULL), "fp16", "half")


def several(engine, problem, target):
    """Some settings, one with a split reduction among them where there is one."""
    space = list(engine.space(problem, target))
    return [*space[:2], *[k for k in space if k.get("split", 1) != 1][:1]]


@pytest.mark.parametrize("engine_id", ENGINES)
def test_a_hundred_runs_give_the_same_bits(engine_id, target):
    """Each on a result and a workspace full of NaN."""
    engine, problem = load_engine(engine_id), square(engine_id)
    if not (support := engine.supports(problem, target)):
        pytest.skip(support.reason)
    for knobs in several(engine, problem, target):
        executable = engine.build(problem, knobs, target)
        case = Case(problem, torch.randn)
        buffers, workspace = case.prepare(executable)
        first = case.launch(executable)
        for _ in range(100):
            case.y.fill_(float("nan"))
            if workspace is not None:
                workspace.fill_(255)
            executable.launch(buffers, workspace)
            assert torch.equal(case.y.double(), first), knobs


@pytest.mark.parametrize("engine_id", ENGINES)
def test_graph_replays_equal_eager_launches(engine_id, target):
    """Captured, with inputs that change, in a run of launches that hand their results on: what dependent launch could break."""
    problem = square(engine_id)
    engine = load_engine(engine_id)
    if not (support := engine.supports(problem, target)):
        pytest.skip(support.reason)
    for knobs in several(engine, problem, target):
        executable = engine.build(problem, knobs, target)
        case = Case(problem, torch.randn)
        first, workspace = case.prepare(executable)
        between = torch.empty_like(case.x)
        chain = [Buffers(first.args, [between], first.constants)]
        chain += [Buffers((between, *first.args[1:]), [case.y], first.constants)]

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(executable, chain, workspace)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(5):
                    run(executable, chain, workspace)
        for i in range(50):
            torch.manual_seed(i)
            case.x.copy_(torch.randn(case.x.shape, device="cuda") * 0.1)
            graph.replay()
            replayed = case.y.clone()
            case.y.fill_(float("nan"))
            run(executable, chain, workspace)
            torch.cuda.synchronize()
            assert torch.equal(replayed, case.y), (i, knobs)


def test_misaligned_and_strided_buffers_are_refused(target):
    from convoy.errors import LaunchError

    engine = load_engine("triton.swapped")
    problem = typed(conv(1, 64, 8, 8, 64, 3, 3, 1, 1), "fp16", "half")
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    case = Case(problem, torch.randn)
    buffers, workspace = case.prepare(executable)
    with pytest.raises(LaunchError, match="channels_last"):
        executable.launch(Buffers((case.x.contiguous(),), [case.y], buffers.constants), workspace)
    shifted = torch.empty(case.x.numel() + 1, dtype=case.dtype, device="cuda")[1:]
    shifted = shifted.view(1, 8, 8, 64).permute(0, 3, 1, 2)
    with pytest.raises(LaunchError, match="16 bytes"):
        executable.launch(Buffers((shifted,), [case.y], buffers.constants), workspace)


def test_a_planted_fault_is_seen(target):
    engine = load_engine("triton.swapped")
    problem = typed(conv(1, 64, 8, 8, 64, 3, 3, 1, 1), "fp16", "half")
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    case = Case(problem, integers)
    buffers, workspace = case.prepare(executable)
    buffers.constants[0].view(-1)[5] += 1
    executable.launch(buffers, workspace)
    assert not torch.equal(case.y.double(), case.expected)


def test_a_slow_build_is_refused(target):
    """Eight warps on a 128 x 128 tile with 128-byte rows: ptxas serialises wgmma."""
    engine = load_engine("triton.swapped")
    problem = typed(conv(1, 64, 16, 16, 128, 3, 3, 1, 1), "fp16", "half")
    knobs = Knobs.of(
        block_k=128, block_n=1, block_h=8, block_w=16, block_c=64, stages=3, warps=8, split=1, pdl=False, prefetch=False
    )
    with pytest.raises(CompileError, match="C7515"):
        engine.build(problem, knobs, target)


@pytest.mark.parametrize("engine_id", ["triton.swapped", "triton.pointwise", "triton.stem"])
def test_tf32_products_are_rounded_not_cut(engine_id, target):
    """Cut to ten bits, positive numbers would come out 3.5e-4 too small on the average (half a unit, mean of 1/m)."""
    c, r = (3, 7) if engine_id.endswith("stem") else (256, 1 if engine_id == "triton.pointwise" else 3)
    problem = conv(1, c, 28, 28, 64, r, r, r // 2, r // 2, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32")
    engine = load_engine(engine_id)
    assert engine.supports(problem, target), engine.supports(problem, target).reason
    executable = engine.build(problem, engine.space(problem, target)[0], target)
    x = torch.rand(problem.x_spec.shape, device="cuda").add(1e-3).contiguous(memory_format=torch.channels_last)
    weight = torch.rand((64, c, r, r), device="cuda").add(1e-3)
    y = torch.empty(problem.y_spec.shape, device="cuda").contiguous(memory_format=torch.channels_last)
    workspace = torch.empty(max(1, executable.workspace_bytes), dtype=torch.uint8, device="cuda")
    executable.launch(Buffers((x,), [y], executable.pack([weight])), workspace)
    exact = F.conv2d(x.double(), weight.double(), padding=r // 2)
    bias = float(((y.double() - exact) / exact).mean())
    assert abs(bias) < 5e-5, bias
