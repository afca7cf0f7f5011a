"""convoy.conv2d against torch's own: arguments, layouts, gradients, refusals that name the argument, the database's choice."""

import importlib
import itertools
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import convoy
from convoy import InputError, Settings, UnsupportedError, conv2d, engines, functional
from convoy.engines.base import DETERMINISTIC, Engine
from convoy.engines.cpu.native_launch import address
from convoy.engines.manifest import MANIFEST
from convoy.errors import LaunchError
from convoy.functional.config_choice import _fastest
from convoy.measurement.device.detect import detect_target
from convoy.measurement.protocol import protocol_for
from convoy.perfdb import Database, Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Epilogue, Knobs

ON_CPU = ["aten", "onednn", "gemm", "winograd2", "winograd4", "fft", "fft_tiled"]


@pytest.fixture(autouse=True)
def own_database(tmp_path, monkeypatch):
    """No test reads or writes the user's database."""
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))
    return tmp_path / "perf.db"


def tensors(shape=(2, 4, 11, 12), weight=(6, 4, 3, 3), dtype=torch.float32, **kwargs):
    """x, weight and bias with a fixed seed."""
    generator = torch.Generator().manual_seed(7)
    sides = (shape, weight, weight[:1])
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(kwargs.get("grad", False)) for s in sides]


def agree(found, expected, tolerance=1e-4):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.allclose(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


def test_it_is_the_packages_function():
    assert convoy.conv2d is conv2d


def test_engines_lists_them_before_and_after_the_package_of_that_name_is_imported():
    for _ in range(2):
        assert [e.id for e in convoy.engines()] == list(MANIFEST)
        assert all(isinstance(engine, Engine) for engine in engines())
    assert importlib.import_module("convoy.engines")() == engines() == functional.engines()
    code = "import convoy; a = convoy.engines(); import convoy.engines.base; assert a == convoy.engines()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("engine", ["auto", *ON_CPU])
def test_every_engine_gives_torchs_result(engine):
    x, weight, bias = tensors()
    agree(conv2d(x, weight, bias, padding=1, engine=engine), F.conv2d(x, weight, bias, padding=1), 1e-3)


ARGUMENTS = [
    {"stride": 2},
    {"stride": (1, 2), "padding": (2, 0)},
    {"stride": [2], "padding": [1]},
    {"dilation": (2, 3), "padding": 2},
    {"padding": "valid"},
    {"padding": "same"},
    {"padding": "same", "dilation": 2},
    {"stride": torch.tensor(2)},
]


@pytest.mark.parametrize("engine", ["auto", "gemm", "fft"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_arguments_are_torchs(arguments, engine):
    x, weight, bias = tensors()
    agree(conv2d(x, weight, bias, **arguments, engine=engine), F.conv2d(x, weight, bias, **arguments))
    agree(conv2d(x, weight, **arguments, engine=engine), F.conv2d(x, weight, **arguments))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("sides", [(2, 2), (4, 3), (1, 6)])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_same_padding_of_even_filters_adds_below_and_to_the_right(sides, dilation):
    x, weight, bias = tensors(weight=(6, 4, *sides))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        laid = x.contiguous(memory_format=memory_format)
        found = conv2d(laid, weight, bias, padding="same", dilation=dilation, engine="gemm")
        agree(found, F.conv2d(x, weight, bias, padding="same", dilation=dilation))
        assert found.is_contiguous(memory_format=memory_format)


def test_arguments_may_be_positional():
    x, weight, bias = tensors(weight=(6, 2, 3, 3))
    found = conv2d(x, weight, bias, (1, 2), (1, 1), (1, 1), 2, "gemm")
    agree(found, F.conv2d(x, weight, bias, (1, 2), (1, 1), (1, 1), 2))


@pytest.mark.parametrize("engine", ["auto", "gemm", "winograd2"])
def test_an_unbatched_image_stays_unbatched(engine):
    x, weight, bias = tensors()
    found = conv2d(x[0], weight, bias, padding=1, engine=engine)
    agree(found, F.conv2d(x[0], weight, bias, padding=1))


@pytest.mark.parametrize("engine", ["auto", "gemm", "fft", "winograd4", "fft_tiled"])
def test_an_empty_batch_is_computed(engine):
    x, weight, bias = tensors()
    assert conv2d(x[:0], weight, bias, engine=engine).shape == (0, 6, 9, 10)


STRIDES = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every other pixel": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "expanded batch": lambda x: x[:1].expand(2, -1, -1, -1),
    "expanded channel": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "one value": lambda x: x[:1, :1, :1, :1].expand(2, 4, 11, 12),
    "cut out": lambda x: F.pad(x, (3, 2, 1, 4))[..., 1:-4, 3:-2],
    "offset": lambda x: torch.cat((x[:1], x))[1:],
    "flipped": lambda x: x.flip(3),
}


@pytest.mark.parametrize("engine", ["auto", *ON_CPU])
@pytest.mark.parametrize("strides", STRIDES)
def test_inputs_of_any_strides_are_taken_and_left_alone(strides, engine):
    x, weight, bias = tensors()
    x = STRIDES[strides](x)
    weight = weight.contiguous(memory_format=torch.channels_last)
    before = [t.clone() for t in (x, weight, bias)]
    agree(conv2d(x, weight, bias, padding=1, engine=engine), F.conv2d(x, weight, bias, padding=1), 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, bias), strict=True))


@pytest.mark.parametrize("engine", ["auto", *ON_CPU])
def test_the_result_has_the_inputs_memory_format(engine):
    x, weight, bias = tensors()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        found = conv2d(x.contiguous(memory_format=memory_format), weight, bias, engine=engine)
        assert found.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ["auto", "gemm", "winograd2", "fft"])
def test_other_dtypes_are_computed_in_kind(engine, dtype):
    x, weight, bias = tensors(dtype=dtype)
    tolerance = {torch.float64: 1e-11, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    agree(conv2d(x, weight, bias, engine=engine), F.conv2d(x, weight, bias), tolerance)


def test_autocast_is_followed():
    x, weight, bias = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = conv2d(x, weight, bias, engine="gemm"), F.conv2d(x, weight, bias)
    agree(found, expected, 5e-2)


@pytest.mark.parametrize("engine", ["aten", "gemm", "pointwise", "winograd2", "winograd4", "fft", "fft_tiled"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_right(engine, layout):
    side, groups = (1, 1) if engine == "pointwise" else (3, 1)
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    weight = torch.randn(3, 4 // groups, side, side, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def run(*inputs):
        return conv2d(*inputs, groups=groups, engine=engine)

    assert torch.autograd.gradcheck(run, (x, weight, bias), fast_mode=True)
    assert torch.autograd.gradcheck(run, (x, weight, None), fast_mode=True)


@pytest.mark.parametrize("engine", ["aten", "gemm"])
def test_gradients_of_strided_dilated_grouped_and_same_padded_convolutions_are_right(engine):
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    for arguments in ({"stride": (2, 1), "dilation": (1, 2), "padding": (1, 2)}, {"padding": "same"}):
        assert torch.autograd.gradcheck(
            lambda x, w, a=arguments: conv2d(x, w, groups=2, engine=engine, **a), (x, weight), fast_mode=True
        )


@pytest.mark.parametrize("engine", ["aten", "gemm", "winograd4"])
def test_only_the_gradients_that_are_wanted_are_computed(engine):
    for wanted in itertools.product((False, True), repeat=3):
        if not any(wanted):
            continue
        ours, theirs = tensors(), tensors()
        for mine, other, wants in zip(ours, theirs, wanted, strict=True):
            mine.requires_grad_(wants)
            other.requires_grad_(wants)
        conv2d(*ours, engine=engine).square().sum().backward()
        F.conv2d(*theirs).square().sum().backward()
        for mine, other, wants in zip(ours, theirs, wanted, strict=True):
            assert (mine.grad is not None) == wants
            if wants:
                agree(mine.grad, other.grad, 1e-2)


def test_nothing_is_recorded_where_no_gradient_is_wanted():
    x, weight, bias = tensors(grad=True)
    with torch.no_grad():
        assert conv2d(x, weight, bias, engine="gemm").grad_fn is None
    with torch.inference_mode():
        agree(conv2d(x, weight, bias, engine="gemm"), F.conv2d(x, weight, bias))


X, W, B = torch.randn(2, 4, 6, 6), torch.randn(6, 4, 3, 3), torch.randn(6)

INVALID = [
    ("x", (X[0, 0], W), {}),
    ("x", (X[None], W), {}),
    ("x", ([1.0], W), {}),
    ("x", (X.to_sparse(), W), {}),
    ("x", (X.int(), W.int()), {}),
    ("x", (X[:, :3], W), {}),
    ("x", (X[:, :, :0], W), {}),
    ("weight", (X, W[0]), {}),
    ("weight", (X, None), {}),
    ("weight", (X, W.to("meta")), {}),
    ("weight", (X, W.half()), {}),
    ("weight", (X, W[:0]), {}),
    ("weight", (X, torch.randn(6, 4, 7, 7)), {}),
    ("weight", (X, W), {"dilation": 3}),
    ("bias", (X, W, B[:5]), {}),
    ("bias", (X, W, B[None]), {}),
    ("bias", (X, W, B.double()), {}),
    ("bias", (X, W, 1.0), {}),
    ("stride", (X, W), {"stride": 0}),
    ("stride", (X, W), {"stride": (1, 1, 1)}),
    ("stride", (X, W), {"stride": 1.0}),
    ("stride", (X, W), {"stride": True}),
    ("stride", (X, W), {"stride": ()}),
    ("padding", (X, W), {"padding": -1}),
    ("padding", (X, W), {"padding": "full"}),
    ("padding", (X, W), {"padding": "same", "stride": 2}),
    ("padding", (X, W), {"padding": (1, None)}),
    ("dilation", (X, W), {"dilation": 0}),
    ("groups", (X, W), {"groups": 0}),
    ("groups", (X, W), {"groups": 4}),
    ("groups", (X, W), {"groups": (1, 1)}),
    ("x", (X, W), {"groups": 2}),
    ("engine", (X, W), {"engine": "cudnn5"}),
    ("engine", (X, W), {"engine": None}),
]


@pytest.mark.parametrize("engine", ["auto", "gemm"])
@pytest.mark.parametrize(("name", "args", "kwargs"), INVALID, ids=[f"{i}-{case[0]}" for i, case in enumerate(INVALID)])
def test_invalid_arguments_are_refused_by_name(name, args, kwargs, engine):
    with pytest.raises(InputError) as caught:
        conv2d(*args, **{"engine": engine, **kwargs})
    assert caught.value.argument == name
    assert str(caught.value).startswith(f"{name}: got ")


def is_plain(tensor):
    return tensor.device.type != "meta" and tensor.is_floating_point() and not tensor.is_sparse


# Torch computes some of what is integer, sparse or meta.
INVALID_FOR_TORCH = [case for case in INVALID[:-2] if all(is_plain(t) for t in case[1] if isinstance(t, torch.Tensor))]


@pytest.mark.parametrize(("args", "kwargs"), [case[1:] for case in INVALID_FOR_TORCH])
def test_what_is_refused_is_refused_by_torch_too(args, kwargs):
    with pytest.raises((RuntimeError, TypeError)):
        F.conv2d(*args, **kwargs)


@pytest.mark.parametrize("engine", ["auto", "cpu.direct", "cpu.winograd", "onednn"])
def test_tensors_without_memory_do_as_in_torch(engine):
    """A FakeTensor's address is NULL: kernels that took it ended the process."""
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (X, W)]
        inside = conv2d(*fake, padding=1, engine=engine)
    for args in (fake, (X.to("meta"), W.to("meta"))):
        found, wanted = conv2d(*args, padding=1, engine=engine), F.conv2d(*args, padding=1)
        assert (type(found), found.device, found.shape) == (type(wanted), wanted.device, wanted.shape)
    assert type(inside) is type(fake[0])
    pairs = torch.stack([X, X + 1])
    found = torch.vmap(lambda x: conv2d(x, W, engine=engine))(pairs)
    torch.testing.assert_close(found, torch.vmap(lambda x: F.conv2d(x, W))(pairs))
    with pytest.raises(InputError, match="nested"):
        conv2d(torch.nested.as_nested_tensor([X[0], X[1]]), W, engine=engine)


def test_kernels_refuse_addresses_that_are_none():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    for tensor in (fake, X.to("meta")):
        with pytest.raises(LaunchError, match="no memory"):
            address(tensor)
    assert address(X) == X.data_ptr()
    assert address(torch.empty(0)) == 0


def test_an_engine_that_cannot_says_why():
    with pytest.raises(
        UnsupportedError, match=r"engine 'winograd2' cannot do conv:fprop:.*: needs a 3x3 filter, got 5x5"
    ):
        conv2d(X, torch.randn(6, 4, 5, 5), engine="winograd2")
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        conv2d(X, W, engine="triton.implicit_gemm")


class OnlyChannelsLast(type(engines()[0])):
    """The baseline, refusing nchw."""

    id = "only_nhwc"

    def supports(self, problem, target):
        if problem.layout != "nhwc":
            return convoy.support.Support.no("needs layout nhwc")
        return super().supports(problem, target)


def test_tensors_are_converted_for_an_engine_of_the_other_layout():
    settings = Settings(engines=(f"only_nhwc={__name__}:OnlyChannelsLast",))
    found = conv2d(X, W, B, engine="only_nhwc", settings=settings)
    agree(found, F.conv2d(X, W, B))
    assert found.is_contiguous()


class Unreliable(type(engines()[0])):
    """The baseline, said to differ from run to run."""

    id = "unreliable"

    def build(self, problem, knobs, target):
        executable = super().build(problem, knobs, target)
        executable.deterministic = False
        return executable


def test_deterministic_refuses_what_is_not():
    settings = Settings(engines=(f"unreliable={__name__}:Unreliable",), deterministic=True)
    with pytest.raises(UnsupportedError, match="gives different bits from run to run"):
        conv2d(X, W, B, engine="unreliable", settings=settings)


class Told(type(engines()[0])):
    """The baseline as on a GPU: it gives the same bits in every run where it is told to."""

    id = "told"

    def space(self, problem, target):
        return Knobs(), Knobs.of(**{DETERMINISTIC: True})

    def build(self, problem, knobs, target):
        executable = super().build(problem, knobs, target)
        executable.deterministic = bool(knobs.get(DETERMINISTIC))
        return executable


def test_deterministic_takes_the_setting_that_is_there_for_it_in_all_directions():
    settings = Settings(engines=(f"told={__name__}:Told",), deterministic=True)
    x, weight, bias = tensors(grad=True)
    y = conv2d(x, weight, bias, engine="told", settings=settings)
    wanted = F.conv2d(x, weight, bias)
    for ours, theirs in zip(
        torch.autograd.grad(y.sum(), (x, weight, bias)),
        torch.autograd.grad(wanted.sum(), (x, weight, bias)),
        strict=True,
    ):
        agree(ours, theirs)


def test_auto_takes_the_baselines_setting_that_is_there_for_it(own_database, monkeypatch):
    monkeypatch.setattr(functional.config_choice, "load_engine", lambda *_: Told())
    for asked in (False, True):
        config, _ = functional.config_choice.choose_config(
            "auto", PROBLEM, detect_target("cpu"), Settings(deterministic=asked)
        )
        assert bool(config.knobs.get(DETERMINISTIC)) == asked


class OnlyForward(type(engines()[0])):
    """The baseline without its gradients."""

    id = "only_forward"

    def supports(self, problem, target):
        return super().supports(problem, target) if problem.direction == "fprop" else convoy.support.Support.no("no")


@pytest.mark.parametrize("asked", [False, True])
def test_gradients_that_an_engine_leaves_to_aten_are_as_steady_as_asked_for(asked, monkeypatch):
    held = []

    def convolutions(numerics, device, *, deterministic=False):
        held.append(deterministic)
        return nullcontext()

    monkeypatch.setattr(functional.autograd, "convolutions", convolutions)
    settings = Settings(engines=(f"only_forward={__name__}:OnlyForward",), deterministic=asked)
    x, weight, bias = tensors(grad=True)
    conv2d(x, weight, bias, engine="only_forward", settings=settings).sum().backward()
    assert held == ([True] if asked else [])


PROBLEM = ConvProblem(2, 4, 6, 6, 6, 3, 3, epilogue=Epilogue(bias=True))


def row(engine, median_us, *, problem=PROBLEM, spread_us=1.0, status=Status.OK, version=1, knobs=None, **values):
    target = detect_target("cpu")
    if status != Status.OK:
        values, median_us, spread_us = {"reason": "as planted", **values}, 0.0, 0.0
    return Measurement(
        problem.key, EngineConfig(engine, version, knobs or Knobs()), target.digest,
        protocol_for(Settings().effort, "cpu").id, status, 9 if median_us else 0, median_us, spread_us, **values,
    )  # fmt: skip


GEMM = Knobs.of(images=2)


@pytest.mark.parametrize(
    ("rows", "settings", "chosen"),
    [
        ([], {}, "aten"),
        ([("aten", 100.0, {}), ("gemm", 50.0, {"knobs": GEMM})], {}, "gemm"),
        (
            [("aten", 100.0, {}), ("gemm", 50.0, {"knobs": GEMM}), ("fft", 40.0, {"knobs": Knobs.of(images=1)})],
            {},
            "fft",
        ),
        ([("aten", 100.0, {}), ("gemm", 99.5, {"knobs": GEMM})], {}, "aten"),
        ([("gemm", 50.0, {"knobs": GEMM})], {}, "gemm"),
        ([("aten", 100.0, {}), ("gemm", 50.0, {"knobs": GEMM, "status": Status.WRONG_RESULT})], {}, "aten"),
        ([("aten", 100.0, {}), ("gemm", 50.0, {"knobs": GEMM, "version": 99})], {}, "aten"),
        ([("aten", 100.0, {}), ("withdrawn", 50.0, {})], {}, "aten"),
        ([("aten", 100.0, {}), ("gemm", 50.0, {"knobs": GEMM})], {"deny_engines": ("gemm",)}, "aten"),
        ([("aten", 100.0, {}), ("gemm", 50.0, {"knobs": GEMM})], {"only_engines": ("fft",)}, "aten"),
        (
            [("aten", 100.0, {}), ("gemm", 50.0, {"knobs": GEMM, "deterministic": False})],
            {"deterministic": True},
            "aten",
        ),
        ([("aten", 100.0, {}), ("winograd2", 50.0, {"problem": PROBLEM.with_layout("nhwc")})], {}, "aten"),
        ([("aten", 100.0, {}), ("pointwise", 50.0, {"knobs": Knobs.of(per_image=True)})], {}, "aten"),
    ],
)
def test_auto_takes_the_fastest_measured_config_that_may_be_used(own_database, rows, settings, chosen):
    with Database.open(own_database) as database:
        database.put([row(engine, median, **values) for engine, median, values in rows])
    from convoy.functional.config_choice import choose_config

    config, problem = choose_config("auto", PROBLEM, detect_target("cpu"), Settings(**settings))
    assert config.engine == chosen
    assert problem == PROBLEM
    agree(conv2d(X, W, B, settings=Settings(**settings)), F.conv2d(X, W, B))


@pytest.mark.parametrize("denied", ["aten", "nobody"])
def test_auto_refuses_engines_that_cannot_be_denied(denied):
    x, weight = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    with pytest.raises(InputError, match="deny_engines"):
        convoy.conv2d(x, weight, engine="auto", settings=Settings(deny_engines=(denied,)))


def test_auto_sees_new_rows_at_once_and_reads_the_database_only_when_it_changed(own_database):
    settings = Settings()
    conv2d(X, W, B, settings=settings)
    conv2d(X, W, B, settings=settings)
    reads = _fastest.cache_info().misses
    for _ in range(5):
        conv2d(X, W, B, settings=settings)
    assert _fastest.cache_info().misses == reads
    with Database.open(own_database) as database:
        database.put([row("aten", 100.0), row("gemm", 50.0, knobs=GEMM)])
    conv2d(X, W, B, settings=settings)
    assert _fastest.cache_info().misses > reads


def test_threads_may_share_an_engine():
    inputs = [torch.randn(2, 4, 12, 12) for _ in range(4)]
    expected = [F.conv2d(x, W, B) for x in inputs]
    found = [[] for _ in inputs]

    def work(index):
        found[index] = [conv2d(inputs[index], W, B, engine="winograd4") for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, wanted in zip(found, expected, strict=True):
        assert len(results) == 10
        for result in results:
            agree(result, wanted, 1e-3)


@pytest.mark.parametrize(("width", "avoided"), [(1, True), (9, False)])
def test_gradients_by_aten_avoid_what_onednn_is_known_to_do_wrong(width, avoided, monkeypatch):
    """The gradient of an engine that has none, in bf16, of filter columns that see padding alone."""
    entered = []

    def watched():
        entered.append(True)
        return nullcontext()

    monkeypatch.setattr("convoy.functional.autograd.without_onednn", watched)
    x, weight = torch.randn(1, 2, 9, width).bfloat16(), torch.randn(6, 2, 3, 3).bfloat16().requires_grad_()
    conv2d(x, weight, None, 1 if width > 1 else 5, 1, engine="fft").sum().backward()
    assert bool(entered) is avoided
