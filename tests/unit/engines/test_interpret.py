"""Graphs run by PyTorch's own operators: right for any memory format and device word, lean, and strict about what it runs."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F

from convoy.engines import interpret, torch_operators
from convoy.engines.interpret import compile_graph
from convoy.engines.torch_operators import DTYPES, resolve
from convoy.errors import InputError
from convoy.graph.ir import Graph, Node
from convoy.graph.text import parse_graph
from convoy.graph.verify import SYMBOLS
from convoy.problem import DTYPE_BYTES

NET = """\
graph 1
input %x: fp32[2,3,9,9]
constant %w: fp32[4,3,3,3]
constant %b: fp32[4]
constant %v: fp32[4,2,1,1]
constant %fc: fp32[5,48]
%c1: fp32[2,4,5,5] = conv2d(%x, %w, %b, (2, 2), (1, 1), (1, 1), 1)
%c2: fp32[2,4,5,5] = conv2d(%c1, %v, None, (1, 1), (0, 0), (1, 1), 2)
%sum: fp32[2,4,5,5] = aten.add.Tensor(%c1, %c2, alpha=2)
%pool: fp32[2,4,2,2], %where: i64[2,4,2,2] = aten.max_pool2d_with_indices.default(%sum, (3, 3), (2, 2))
%moved: fp32[2,4,2,2] = aten.mul.Tensor(%pool, %where)
%cat: fp32[2,12,2,2] = aten.cat.default((%moved, %pool, %moved), 1)
%flat: fp32[2,48] = aten.view.default(%cat, (2, 48))
%y: fp32[2,5] = linear(%flat, %fc, None)
return %y, %pool
"""


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, 3, 9, 9), (4, 3, 3, 3), (4,), (4, 2, 1, 1), (5, 48)]
    x, *constants = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in shapes)
    return x, constants


def by_hand(x: torch.Tensor, w, b, v, fc) -> tuple[torch.Tensor, torch.Tensor]:
    first = F.conv2d(x, w, b, stride=2, padding=1)
    total = first + 2 * F.conv2d(first, v, groups=2)
    pool, where = F.max_pool2d(total, 3, 2, return_indices=True)
    cat = torch.cat([pool * where, pool, pool * where], 1)
    return F.linear(cat.reshape(2, 48), fc), pool


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_net_gives_what_torch_gives(memory_format: torch.memory_format, dtype: torch.dtype):
    x, constants = tensors(dtype)
    found = compile_graph(parse_graph(NET))([x.contiguous(memory_format=memory_format)], constants)
    for have, want in zip(found, by_hand(x, *constants), strict=True):
        assert have.dtype == dtype
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def test_a_view_that_no_memory_format_allows():
    graph = parse_graph(
        "graph 1\ninput %x: fp32[2,3,4,5]\n%y: fp32[6,20] = aten.view.default(%x, (6, 20))\nreturn %y\n"
    )
    x = torch.arange(120.0).reshape(2, 3, 4, 5)
    (y,) = compile_graph(graph)([x.contiguous(memory_format=torch.channels_last)])
    assert torch.equal(y, x.reshape(6, 20))


def test_an_empty_batch():
    graph = parse_graph(NET.replace("[2,", "[0,").replace("(2, 48)", "(0, 48)"))
    x, constants = tensors()
    y, pool = compile_graph(graph)([x[:0]], constants)
    assert y.shape == (0, 5)
    assert pool.shape == (0, 4, 2, 2)


def test_values_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch):
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
        made = x + 1
        seen.append(weakref.ref(made))
        return made

    monkeypatch.setattr(interpret, "resolve", lambda _: watch)
    monkeypatch.setattr(interpret, "returns_many", lambda _: False)
    chain = "".join(f"%v{i + 1}: fp32[2] = aten.neg.default(%v{i})\n" for i in range(6))
    graph = parse_graph(f"graph 1\ninput %v0: fp32[2]\n{chain}return %v6, %v2\n")
    last, second = compile_graph(graph)([torch.zeros(2)])
    assert alive == [0, 1, 1, 2, 2, 2]  # what it reads, and %v2, which is returned
    assert (last[0], second[0]) == (6, 2)


def test_calls_from_many_threads_do_not_meet():
    function = compile_graph(parse_graph(NET))
    _, constants = tensors()
    inputs = [torch.full((2, 3, 9, 9), float(i)) for i in range(8)]
    found: dict[int, torch.Tensor] = {}

    def call(index: int) -> None:
        for _ in range(20):
            found[index] = function([inputs[index]], constants)[0]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(inputs):
        assert torch.equal(found[index], by_hand(x, *constants)[0])


ONE = "graph 1\ninput %x: fp32[2,3,4,4]\n{}\nreturn %y\n"

CALLS = [
    ("%y: fp32[2,3,4,4] = aten.clamp.default(%x, -1.0, None)", lambda x: x.clamp(-1)),
    ("%y: fp32[2,3,4,4] = aten.hardtanh.default(%x, min_val=0.0, max_val=6.0)", lambda x: x.clamp(0, 6)),
    ("%y: fp32[2,3,4,4] = aten.sub.Tensor(2.0, %x)", lambda x: 2 - x),
    ("%y: fp32[2,3,4,4] = aten.pow.Scalar(2, %x)", lambda x: 2**x),
    ("%y: fp16[2,3,4,4] = aten._to_copy.default(%x, dtype=dtype.fp16)", lambda x: x.half()),
    (
        """%z: fp32[1] = aten.full.default((1,), 2.0, dtype=dtype.fp32, layout=layout.strided, device=device.inputs)
%y: fp32[2,3,4,4] = aten.mul.Tensor(%x, %z)""",
        lambda x: 2 * x,
    ),
    (
        "%y: fp32[2,3,4,4] = aten.clone.default(%x, memory_format=memory_format.nhwc)",
        lambda x: x.contiguous(memory_format=torch.channels_last),
    ),
    (
        """%i: i64[2] = aten.arange.default(2, device=device.inputs)
%y: fp32[2,2,4,4] = aten.index.Tensor(%x, (None, %i))""",
        lambda x: x[:, torch.arange(2)],
    ),
    (
        "_, %b: fp32[2,1,4,4], _ = aten.split.Tensor(%x, 1, 1) as %cut\n%y: fp32[2,1,4,4] = aten.relu.default(%b)",
        lambda x: x[:, 1:2].relu(),
    ),
    ("%y: fp32[2,3,4,4] = aten.split.Tensor(%x, 3, 1)", lambda x: x),
    (
        "%y: fp32[2,3,8,8] = aten.upsample_nearest2d.vec(%x, None, (2.0, 2.0))",
        lambda x: F.interpolate(x, scale_factor=2),
    ),
    ('%y: fp32[2,3,4,4] = aten.gelu.default(%x, approximate="tanh")', lambda x: F.gelu(x, approximate="tanh")),
]


@pytest.mark.parametrize(("line", "want"), CALLS, ids=[line.split("= ")[-1][:30] for line, _ in CALLS])
def test_every_form_of_argument(line: str, want):
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    (found,) = compile_graph(parse_graph(ONE.format(line)))([x])
    torch.testing.assert_close(found, want(x), rtol=0, atol=0)
    assert found.stride() == want(x).stride()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("side", ["1,3,1,1", "2,3,4,4"])
def test_a_batch_norm_as_one_product_and_sum(memory_format: torch.memory_format, side: str):
    graph = parse_graph(
        f"graph 1\ninput %x: fp32[2,3,4,4]\nconstant %b: fp32[{side}]\nconstant %s: fp32[{side}]\n"
        "%y: fp32[2,3,4,4] = aten.addcmul.default(%b, %x, %s)\nreturn %y\n"
    )
    x = torch.arange(96.0).reshape(2, 3, 4, 4).contiguous(memory_format=memory_format)
    before = x.clone()
    constants = [torch.arange(3.0).reshape(1, 3, 1, 1).expand(*map(int, side.split(","))) + i for i in (0, 1)]
    (y,) = compile_graph(graph)([x], constants)
    assert torch.equal(y, constants[0] + x * constants[1])
    assert side != "1,3,1,1" or y.is_contiguous(memory_format=memory_format)
    assert torch.equal(x, before)


def test_double_reads_named_floating_dtypes_as_float64():
    text = ONE.format(
        "%h: fp16[2,3,4,4] = aten._to_copy.default(%x, dtype=dtype.fp16)\n"
        "%i: i32[2,3,4,4] = aten._to_copy.default(%x, dtype=dtype.i32)\n"
        "%y: fp16[2,3,4,4] = aten.mul.Tensor(%h, %i)"
    )
    x = torch.full((2, 3, 4, 4), 1.0 + 2.0**-40, dtype=torch.float64)
    (found,) = compile_graph(parse_graph(text), double=True)([x])
    assert found.dtype == torch.float64
    assert torch.equal(found, x)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten.relu.nothing", "overload"),
        ("aten.no_such_operator.default", "overload"),
        ("aten.overloads.default", "overload"),
        ("aten._foreach_add_.Scalar", "overwrites"),
        ("aten.resize_.default", "overwrites"),
        ("aten.add.out", "overwrites"),
        ("aten.as_strided.default", "strides"),
        ("prims.add.default", "overload"),
    ],
)
def test_operators_that_are_refused(op: str, expected: str):
    with pytest.raises(InputError, match=expected):
        resolve(op)


def test_an_operator_of_no_pytorch_is_refused_when_compiled():
    with pytest.raises(InputError, match=r"aten\.quite_new\.default"):
        compile_graph(parse_graph(ONE.format("%y: fp32[2] = aten.quite_new.default(%x)")))


def test_a_malformed_graph_is_refused_when_compiled():
    graph = parse_graph(NET)
    broken = Graph(graph.inputs, graph.outputs, graph.values, (*graph.nodes, Node("dead", "aten.neg.default", ())))
    with pytest.raises(InputError, match="alive"):
        compile_graph(broken)


@pytest.mark.parametrize(("args", "constants"), [(0, 4), (2, 4), (1, 3), (1, 5)])
def test_a_wrong_number_of_tensors_is_refused(args: int, constants: int):
    with pytest.raises(InputError, match="1 inputs and 4 constants"):
        compile_graph(parse_graph(NET))([torch.zeros(1)] * args, [torch.zeros(1)] * constants)


def test_every_symbol_and_dtype_is_understood():
    assert set(DTYPES) == set(DTYPE_BYTES)
    assert set(torch_operators.SYMBOLS) | {torch_operators.DEVICE} == SYMBOLS
    for name, size in DTYPE_BYTES.items():
        assert DTYPES[name].itemsize == size


@pytest.mark.parametrize("op", torch_operators.QUICK)
def test_quick_entry_points_take_the_same_arguments(op: str):
    """The public function and the overload agree on an operator's defaults and on positional arguments."""
    _, name, overload = op.split(".")
    original = getattr(getattr(torch.ops.aten, name), overload)
    x, y, z = torch.randn(3, 1, 4, 6, 6).unbind(0)
    args = {
        "add": (x, y),
        "mul": (x, y),
        "addcmul": (x, y, z),
        "cat": ([x, y], 1),
        "adaptive_avg_pool2d": (x[None], [2, 2]),
        "max_pool2d": (x, [3, 3], [2, 2], [1, 1], [1, 1], True),
    }.get(name, (x,))
    torch.testing.assert_close(resolve(op)(*args), original(*args), rtol=0, atol=0)


@pytest.mark.parametrize(("on_gpu", "padding", "nchw"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_a_padded_average_has_its_gradient_in_nchw_on_a_gpu(monkeypatch, on_gpu, padding, nchw):
    """PyTorch's kernel for channels_last is wrong there."""
    monkeypatch.setattr(torch_operators, "_is_on_gpu", lambda tensor: on_gpu)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    y = F.avg_pool2d(x, 3, 1, padding)
    dy = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, x, dy)
    gradient = resolve("aten.avg_pool2d_backward.default")
    found = gradient(dy, x.detach(), [3, 3], [1, 1], [padding, padding], False, True, None)
    assert found.is_contiguous() == nchw
    torch.testing.assert_close(found, wanted)


def test_attention_reads_heads_of_any_strides():
    """The CPU's kernel takes the last dimension for contiguous: heads of images in nchw are not, and it read foreign memory."""
    text = """graph 1
input %x: fp32[2,96,2,3]
%v: fp32[2,3,32,6] = aten.view.default(%x, (2, 3, 32, 6))
%h: fp32[2,3,6,32] = aten.permute.default(%v, (0, 1, 3, 2))
%y: fp32[2,3,6,32], %l: fp32[2,3,6] = aten._scaled_dot_product_flash_attention_for_cpu.default(%h, %h, %h)
%q, %k, %w = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(%h, %h, %h, %h, %y, %l, 0.0, False)
return %y, %q, %k, %w
"""
    text = text.replace("%q, %k, %w =", ", ".join(f"%{name}: fp32[2,3,6,32]" for name in "qkw") + " =")
    x = torch.randn(2, 96, 2, 3, generator=torch.Generator().manual_seed(0))
    found = compile_graph(parse_graph(text))([x])
    heads = [x.view(2, 3, 32, 6).transpose(2, 3).double().clone().requires_grad_() for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*heads)
    gradients = torch.autograd.grad(wanted, heads, heads[0].detach())
    for mine, exact in zip(found, (wanted, *gradients), strict=True):
        torch.testing.assert_close(mine.double(), exact.detach(), rtol=1e-5, atol=1e-5)
