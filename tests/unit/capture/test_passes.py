"""Each rewrite on small graphs: what it changes, what it must leave, and that the numbers stay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.capture import capture_inference, inference, training
from convoy.capture.draft import Draft
from convoy.capture.passes.fold_batch_norm import fold_batch_norm, replace_batch_norm
from convoy.capture.passes.fold_constants import SMALL_ELEMENTS, copy_returned_constants, fold_constants
from convoy.capture.passes.fold_pad import fold_pad
from convoy.capture.passes.note_randomness import note_randomness
from convoy.capture.passes.recognise_layers import recognise_layers
from convoy.capture.passes.remove_identities import remove_identities
from convoy.engines.interpret import compile_graph
from convoy.engines.torch_operators import DTYPES
from convoy.graph.ir import Graph
from convoy.graph.text import parse_graph, print_graph
from convoy.graph.verify import verify

Rewrite = type(fold_pad)


def integers(graph: Graph, kind: str) -> dict[str, torch.Tensor]:
    """Seeded small integers (exact sums) for values of one kind; variances get positive ones."""
    generator = torch.Generator().manual_seed(11)
    found = {}
    for value in graph.values.values():
        if value.kind == kind:
            least = 1 if "var" in value.name else -3
            drawn = torch.randint(least, 4, value.spec.shape, generator=generator)
            found[value.name] = drawn.to(DTYPES[value.spec.dtype])
    return found


def rewritten(text: str, *rewrites: Rewrite, rtol: float = 0.0) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Apply rewrites; the result must be a good graph that computes the same."""
    graph = parse_graph("graph 1\n" + text)
    verify(graph)
    inputs, constants = integers(graph, "input"), integers(graph, "constant")
    draft = Draft.of(graph, constants)
    for rewrite in rewrites:
        rewrite(draft)
    after, kept = draft.finish()
    verify(after)
    assert after.inputs == graph.inputs
    wants = compile_graph(graph)(list(inputs.values()), list(constants.values()))
    for have, want in zip(compile_graph(after)(list(inputs.values()), list(kept.values())), wants, strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have, want, rtol=rtol, atol=rtol)
    return after, kept


def ops(graph: Graph) -> list[str]:
    return [node.op.removeprefix("aten.").removesuffix(".default") for node in graph.nodes]


# ---- identities


@pytest.mark.parametrize(
    "line",
    [
        "%y: fp32[2,3,4,4] = aten.dropout.default(%x, 0.5, False)",
        "%y: fp32[2,3,4,4], _ = aten.native_dropout.default(%x, 0.5, False)",
        "%y: fp32[2,3,4,4] = aten.clone.default(%x, memory_format=memory_format.nchw)",
        "%y: fp32[2,3,4,4] = aten._to_copy.default(%x, dtype=dtype.fp32)",
        "%y: fp32[2,3,4,4] = aten.alias.default(%x)",
        "%y: fp32[2,3,4,4] = aten.view.default(%x, (2, 3, 4, 4))",
        "%y: fp32[2,3,4,4] = aten.expand.default(%x, (2, -1, 4, 4))",
        "%y: fp32[2,3,4,4] = aten.permute.default(%x, (0, 1, 2, 3))",
        "%y: fp32[2,3,4,4] = aten.slice.Tensor(%x, 2, 0, 9223372036854775807)",
        "%y: fp32[2,3,4,4] = aten.adaptive_avg_pool2d.default(%x, (4, 4))",
    ],
)
def test_identities_go(line: str):
    text = f"input %x: fp32[2,3,4,4]\n{line}\n%z: fp32[2,3,4,4] = aten.neg.default(%y)\nreturn %z\n"
    graph, _ = rewritten(text, remove_identities)
    assert print_graph(graph).splitlines()[2:] == ["%z: fp32[2,3,4,4] = aten.neg.default(%x)", "return %z"]


@pytest.mark.parametrize(
    "line",
    [
        "%y: fp32[4,4,4,4] = aten.permute.default(%x, (0, 1, 3, 2))",
        "%y: fp32[4,4,4,4] = aten.transpose.int(%x, 0, 1)",
        "%y: fp32[4,4,4,4] = aten.neg.default(%x)",
        "%y: fp32[4,4,4,4] = aten.avg_pool2d.default(%x, (3, 3), (1, 1), (1, 1))",
        "%y: fp32[4,16,2,2] = aten.view.default(%x, (4, 16, 2, 2))",
        "%y: fp32[4,4,1,1] = aten.adaptive_avg_pool2d.default(%x, (1, 1))",
        "%y: fp16[4,4,4,4] = aten._to_copy.default(%x, dtype=dtype.fp16)",
    ],
)
def test_what_computes_stays(line: str):
    graph, _ = rewritten(f"input %x: fp32[4,4,4,4]\n{line}\nreturn %y\n", remove_identities)
    assert len(graph.nodes) == 1


def test_dropout_that_is_on_stays_and_is_told():
    draft = Draft.of(
        parse_graph("graph 1\ninput %x: fp32[9]\n%y: fp32[9] = aten.dropout.default(%x, 0.5, True)\nreturn %y\n"), {}
    )
    remove_identities(draft)
    note_randomness(draft)
    assert len(draft.nodes) == 1
    assert draft.notes == [
        "the model draws random numbers in evaluation mode (y): its results differ from call to call"
    ]


@pytest.mark.parametrize(("dropout", "told"), [("", False), (", None, 0.0", False), (", None, 0.1", True)])
def test_attention_is_random_only_with_dropout(dropout: str, told: bool):
    text = (
        f"input %x: fp32[1,2,3,4]\n%y: fp32[1,2,3,4] = aten.scaled_dot_product_attention.default(%x, %x, %x{dropout})"
    )
    draft = Draft.of(parse_graph(f"graph 1\n{text}\nreturn %y\n"), {})
    note_randomness(draft)
    assert bool(draft.notes) is told


def test_a_copy_of_an_input_that_is_returned_stays_a_copy():
    graph, _ = rewritten("input %x: fp32[2]\n%y: fp32[2] = aten.clone.default(%x)\nreturn %y, %x\n", remove_identities)
    assert print_graph(graph) == ("graph 1\ninput %x: fp32[2]\n%y: fp32[2] = aten.clone.default(%x)\nreturn %y, %x\n")


def test_one_value_returned_twice_through_a_copy_stays_two():
    text = (
        "input %x: fp32[2]\n%a: fp32[2] = aten.neg.default(%x)\n%b: fp32[2] = aten.clone.default(%a)\n"
        "%c: fp32[2] = aten.alias.default(%a)\nreturn %a, %b, %c\n"
    )
    graph, _ = rewritten(text, remove_identities)
    assert graph.outputs == ("a", "b", "a")
    assert ops(graph) == ["neg", "clone"]


# ---- constants


def test_what_depends_on_constants_is_computed_once():
    text = (
        "input %x: fp32[2,3]\nconstant %w: fp32[3]\n%m: fp32[3] = aten.mul.Tensor(%w, 2.0)\n"
        "%r: fp32[3] = aten.arange.start_step(0, 3, 1, dtype=dtype.fp32, device=device.inputs)\n"
        "%s: fp32[3] = aten.add.Tensor(%m, %r)\n%y: fp32[2,3] = aten.mul.Tensor(%x, %s)\nreturn %y\n"
    )
    graph, constants = rewritten(text, fold_constants)
    assert ops(graph) == ["mul.Tensor"]
    assert list(constants) == ["s"]


def test_one_of_several_results_is_computed_once():
    text = (
        "input %x: fp32[2]\nconstant %w: fp32[4]\n_, %b: fp32[2] = aten.split.Tensor(%w, 2) as %s\n"
        "%y: fp32[2] = aten.mul.Tensor(%x, %b)\nreturn %y\n"
    )
    graph, constants = rewritten(text, fold_constants)
    assert ops(graph) == ["mul.Tensor"]
    assert list(constants) == ["b"]


def test_a_constant_does_not_grow_without_bound():
    side = SMALL_ELEMENTS // 64
    text = (
        f"input %x: fp32[1]\nconstant %w: fp32[64,1]\n%e: fp32[64,{side + 1}] = aten.expand.default(%w, (64, {side + 1}))\n"
        f"%y: fp32[64,{side + 1}] = aten.mul.Tensor(%e, %x)\nreturn %y\n"
    )
    graph, constants = rewritten(text, fold_constants)
    assert ops(graph) == ["expand", "mul.Tensor"]
    assert list(constants) == ["w"]


def test_random_numbers_are_not_computed_once():
    text = "graph 1\ninput %x: fp32[4]\n%r: fp32[4] = aten.rand.default((4,))\n%y: fp32[4] = aten.mul.Tensor(%x, %r)\nreturn %y\n"
    draft = Draft.of(parse_graph(text), {})
    fold_constants(draft)
    assert len(draft.nodes) == 2


def test_a_returned_constant_is_copied():
    graph, constants = rewritten("input %x: fp32[2]\nconstant %w: fp32[3]\nreturn %w, %x\n", copy_returned_constants)
    (copy, _) = compile_graph(graph)([torch.zeros(2)], list(constants.values()))
    assert copy.data_ptr() != constants["w"].data_ptr()


# ---- layers

IMAGE = "input %x: fp32[2,4,7,9]\nconstant %w: fp32[6,4,3,2]\nconstant %b: fp32[6]\n"


@pytest.mark.parametrize(
    ("call", "shape", "args"),
    [
        ("conv2d.default(%x, %w)", "2,6,5,8", "None, (1, 1), (0, 0), (1, 1), 1"),
        ("conv2d.default(%x, %w, %b, (2,), (1,))", "2,6,4,5", "%b, (2, 2), (1, 1), (1, 1), 1"),
        ("conv2d.default(%x, %w, bias=%b, dilation=(2, 3))", "2,6,3,6", "%b, (1, 1), (0, 0), (2, 3), 1"),
        ("conv2d.padding(%x, %w, %b)", "2,6,5,8", "%b, (1, 1), (0, 0), (1, 1), 1"),
        ('conv2d.padding(%x, %w, None, (1, 1), "same", (1, 2))', "2,6,7,9", "None, (1, 1), (1, 1), (1, 2), 1"),
        (
            "convolution.default(%x, %w, %b, (1, 2), (1, 0), (1, 1), False, (0, 0), 1)",
            "2,6,7,4",
            "%b, (1, 2), (1, 0), (1, 1), 1",
        ),
    ],
)
def test_convolutions_are_recognised(call: str, shape: str, args: str):
    used = IMAGE if "%b" in call else IMAGE.replace("constant %b: fp32[6]\n", "")
    graph, _ = rewritten(f"{used}%y: fp32[{shape}] = aten.{call}\nreturn %y\n", recognise_layers)
    assert print_graph(graph).splitlines()[-2] == f"%y: fp32[{shape}] = conv2d(%x, %w, {args})"


def test_padding_that_is_not_the_same_on_both_sides_gets_a_node():
    used = IMAGE.replace("constant %b: fp32[6]\n", "")
    text = f'{used}%y: fp32[2,6,7,9] = aten.conv2d.padding(%x, %w, None, (1, 1), "same")\nreturn %y\n'
    graph, _ = rewritten(text, recognise_layers)
    assert ops(graph) == ["constant_pad_nd", "conv2d"]
    assert graph.nodes[1].args[4] == (1, 0)


def test_an_image_without_batch_gets_one():
    text = (
        "input %x: fp32[4,7,9]\nconstant %w: fp32[6,4,3,2]\n%y: fp32[6,5,8] = aten.conv2d.default(%x, %w)\nreturn %y\n"
    )
    graph, _ = rewritten(text, recognise_layers)
    assert ops(graph) == ["unsqueeze", "conv2d", "squeeze.dim"]


NO_LAYERS = """
input %x: fp32[1,4,8]
constant %w: fp32[6,4,3]
%y: fp32[1,6,6] = aten.conv1d.default(%x, %w)

input %x: fp32[1,2,4,4,4]
constant %w: fp32[3,2,2,2,2]
%y: fp32[1,3,3,3,3] = aten.conv3d.default(%x, %w)

input %x: fp32[1,4,5,5]
constant %w: fp32[4,3,2,2]
%y: fp32[1,3,6,6] = aten.conv_transpose2d.input(%x, %w)

input %x: fp32[1,4,5,5]
constant %w: fp32[4,3,2,2]
%y: fp32[1,3,6,6] = aten.convolution.default(%x, %w, None, (1, 1), (0, 0), (1, 1), True, (0, 0), 1)

input %x: i64[1,4,5,5]
constant %w: i64[3,4,2,2]
%y: i64[1,3,4,4] = aten.conv2d.default(%x, %w)

input %x: fp32[1,2,5,8]
constant %w: fp32[3,8]
%y: fp32[1,2,5,3] = aten.linear.default(%x, %w)

input %x: fp32[5,8]
input %w: fp32[3,8]
%y: fp32[5,3] = aten.linear.default(%x, %w)

input %x: fp32[5,8]
constant %b: fp32[5,3]
constant %w: fp32[8,3]
%y: fp32[5,3] = aten.addmm.default(%b, %x, %w)

input %x: fp32[5,8]
constant %b: fp32[3]
constant %w: fp32[8,3]
%y: fp32[5,3] = aten.addmm.default(%b, %x, %w, beta=2)
"""


@pytest.mark.parametrize("text", NO_LAYERS.strip().split("\n\n"), ids=lambda text: text.split("aten.")[1][:24])
def test_what_is_no_layer_of_ours_stays(text: str):
    graph, _ = rewritten(f"{text}\nreturn %y\n", recognise_layers)
    assert graph == parse_graph(f"graph 1\n{text}\nreturn %y\n")


@pytest.mark.parametrize(
    ("constants", "call", "op"),
    [
        ("constant %w: fp32[3,8]\nconstant %b: fp32[3]\n", "linear.default(%x, %w, %b)", "linear"),
        ("constant %w: fp32[3,8]\n", "linear.default(%x, %w)", "linear"),
        ("constant %b: fp32[3]\nconstant %w: fp32[8,3]\n", "addmm.default(%b, %x, %w)", "linear"),
        ("constant %w: fp32[8,3]\n", "mm.default(%x, %w)", "linear"),
    ],
)
def test_linear_layers_are_recognised(constants: str, call: str, op: str):
    graph, _ = rewritten(f"input %x: fp32[5,8]\n{constants}%y: fp32[5,3] = aten.{call}\nreturn %y\n", recognise_layers)
    assert ops(graph) == [op]


# ---- batch norm

NORM = "constant %g: fp32[6]\nconstant %h: fp32[6]\nconstant %mean: fp32[6]\nconstant %var: fp32[6]\n"
CONVOLVED = "%y: fp32[2,6,5,8] = conv2d(%x, %w, %b, (1, 1), (0, 0), (1, 1), 1)\n"
NORMED = "%n: fp32[2,6,5,8] = aten.batch_norm.default(%y, %g, %h, %mean, %var, False, 0.1, 1e-05, True)\n"


def test_a_batch_norm_is_folded_into_its_convolution():
    graph, _ = rewritten(f"{IMAGE}{NORM}{CONVOLVED}{NORMED}return %n\n", fold_batch_norm, rtol=1e-5)
    assert print_graph(graph).splitlines()[1:] == [
        "input %x: fp32[2,4,7,9]",
        "constant %w.weight.folded: fp32[6,4,3,2]",
        "constant %w.bias.folded: fp32[6]",
        "%y: fp32[2,6,5,8] = conv2d(%x, %w.weight.folded, %w.bias.folded, (1, 1), (0, 0), (1, 1), 1)",
        "return %y",
    ]


@pytest.mark.parametrize(
    "norm",
    [
        "%n: fp32[2,6,5,8], _, _ = aten._native_batch_norm_legit_no_training.default(%y, None, None, %mean, %var, 0.1, 1e-3)",
        "%n: fp32[2,6,5,8], _, _ = aten.native_batch_norm.default(%y, None, None, %mean, %var, False, 0.1, 1e-3)",
        "%n: fp32[2,6,5,8] = aten.batch_norm.default(%y, None, None, %mean, %var, False, 0.1, 1e-3, False)",
    ],
)
def test_every_form_of_batch_norm_without_parameters(norm: str):
    image, mean = IMAGE.replace("constant %b: fp32[6]\n", ""), "constant %mean: fp32[6]\nconstant %var: fp32[6]\n"
    text = f"{image}{mean}{CONVOLVED.replace('%b', 'None')}{norm}\nreturn %n\n"
    graph, _ = rewritten(text, fold_batch_norm, rtol=1e-5)
    assert ops(graph) == ["conv2d"]


def test_two_batch_norms_in_a_row_are_both_folded():
    again = NORMED.replace("%y", "%n").replace("%n:", "%m:")
    graph, _ = rewritten(f"{IMAGE}{NORM}{CONVOLVED}{NORMED}{again}return %m\n", fold_batch_norm, rtol=1e-5)
    assert ops(graph) == ["conv2d"]


def test_a_batch_norm_is_folded_into_its_linear_layer():
    text = (
        "input %x: fp32[5,8]\nconstant %w: fp32[6,8]\n" + NORM + "%y: fp32[5,6] = linear(%x, %w, None)\n"
        "%n: fp32[5,6] = aten.batch_norm.default(%y, %g, %h, %mean, %var, False, 0.1, 1e-05, True)\nreturn %n\n"
    )
    graph, _ = rewritten(text, fold_batch_norm, rtol=1e-5)
    assert ops(graph) == ["linear"]


@pytest.mark.parametrize(
    "tail",
    [
        f"{NORMED}return %n, %y\n",
        f"{NORMED}%z: fp32[2,6,5,8] = aten.add.Tensor(%n, %y)\nreturn %z\n",
        f"{NORMED.replace('False', 'True')}return %n\n",
    ],
)
def test_a_batch_norm_stays_where_folding_would_be_wrong(tail: str):
    graph = parse_graph(f"graph 1\n{IMAGE}{NORM}{CONVOLVED}{tail}")
    draft = Draft.of(graph, integers(graph, "constant"))
    fold_batch_norm(draft)
    assert draft.finish()[0] == graph


def test_a_batch_norm_that_overflows_half_precision_stays():
    text = (
        "graph 1\ninput %x: fp16[1,1,2,2]\nconstant %w: fp16[1,1,1,1]\nconstant %mean: fp16[1]\nconstant %var: fp16[1]\n"
        "%y: fp16[1,1,2,2] = conv2d(%x, %w, None, (1, 1), (0, 0), (1, 1), 1)\n"
        "%n: fp16[1,1,2,2] = aten.batch_norm.default(%y, None, None, %mean, %var, False, 0.1, 1e-05, True)\nreturn %n\n"
    )
    half = {"dtype": torch.float16}
    constants = {
        "w": torch.full((1, 1, 1, 1), 6e4, **half),
        "mean": torch.zeros(1, **half),
        "var": torch.full((1,), 0.01, **half),
    }
    draft = Draft.of(parse_graph(text), constants)
    fold_batch_norm(draft)
    assert ops(draft.finish()[0]) == ["conv2d", "batch_norm"]
    constants["w"] /= 1000
    draft = Draft.of(parse_graph(text), constants)
    fold_batch_norm(draft)
    assert ops(draft.finish()[0]) == ["conv2d"]


def test_a_lone_batch_norm_becomes_a_product_and_a_sum():
    text = f"input %y: fp32[2,6,5,8]\n{NORM}{NORMED}return %n\n"
    graph, constants = rewritten(text, replace_batch_norm, rtol=1e-5)
    assert ops(graph) == ["addcmul"]
    assert [tuple(t.shape) for t in constants.values()] == [(1, 6, 1, 1)] * 2


@pytest.mark.parametrize("shape", ["5,6", "5,6,4", "2,6,2,3,2"])
def test_a_lone_batch_norm_of_any_rank(shape: str):
    text = f"input %y: fp32[2,6,5,8]\n{NORM}{NORMED}return %n\n".replace("2,6,5,8", shape)
    graph, _ = rewritten(text, replace_batch_norm, rtol=1e-5)
    assert ops(graph) == ["addcmul"]


def test_a_lone_batch_norm_in_half_precision_keeps_its_statistics():
    text = f"input %y: fp32[2,6,5,8]\n{NORM}{NORMED}return %n\n".replace("fp32", "bf16")
    text = text.replace("%n: bf16[2,6,5,8]", "%n: bf16[2,6,5,8], _, _").replace(
        "batch_norm.default(%y, %g, %h, %mean, %var, False, 0.1, 1e-05, True)",
        "_native_batch_norm_legit_no_training.default(%y, %g, %h, %mean, %var, 0.1, 1e-05)",
    )
    graph, constants = rewritten(text, replace_batch_norm, rtol=0.02)
    assert ops(graph) == ["batch_norm"]
    assert list(constants) == ["g", "h", "mean", "var"]


# ---- padding

PADDED = "input %x: fp32[2,4,7,9]\nconstant %w: fp32[6,4,3,2]\n%p: fp32[2,4,9,13] = aten.{}\n"
READ = "%y: fp32[2,6,9,12] = conv2d(%p, %w, None, (1, 1), (1, 0), (1, 1), 1)\n"


@pytest.mark.parametrize(
    "pad",
    [
        "constant_pad_nd.default(%x, (2, 2, 1, 1), 0.0)",
        "constant_pad_nd.default(%x, (2, 2, 1, 1))",
        'pad.default(%x, (2, 2, 1, 1), "constant", 0.0)',
        "pad.default(%x, (2, 2, 1, 1))",
        "pad.default(%x, (2, 2, 1, 1), value=0)",
    ],
)
def test_symmetric_zero_padding_is_folded(pad: str):
    graph, _ = rewritten(f"{PADDED.format(pad)}{READ}return %y\n", fold_pad)
    assert ops(graph) == ["conv2d"]
    assert graph.nodes[0].args[4] == (2, 2)


def test_padding_read_by_two_convolutions_is_folded_into_both():
    pad = PADDED.format("constant_pad_nd.default(%x, (2, 2, 1, 1), 0.0)")
    graph, _ = rewritten(f"{pad}{READ}{READ.replace('%y', '%z')}return %y, %z\n", fold_pad)
    assert ops(graph) == ["conv2d", "conv2d"]


@pytest.mark.parametrize(
    ("pad", "tail"),
    [
        ("constant_pad_nd.default(%x, (2, 2, 1, 1), 1.0)", "return %y\n"),
        ('pad.default(%x, (2, 2, 1, 1), "reflect")', "return %y\n"),
        ("constant_pad_nd.default(%x, (1, 3, 1, 1), 0.0)", "return %y\n"),
        ("constant_pad_nd.default(%x, (2, 2, 0, 2), 0.0)", "return %y\n"),
        ("constant_pad_nd.default(%x, (2, 2, 1, 1), 0.0)", "return %y, %p\n"),
        (
            "constant_pad_nd.default(%x, (2, 2, 1, 1), 0.0)",
            "%z: fp32[2,4,9,13] = aten.neg.default(%p)\nreturn %y, %z\n",
        ),
    ],
)
def test_other_padding_stays(pad: str, tail: str):
    graph, _ = rewritten(f"{PADDED.format(pad)}{READ}{tail}", fold_pad)
    assert graph.nodes[0].outputs == ("p",)


def test_negative_padding_stays():
    text = (
        "input %x: fp32[2,4,7,9]\nconstant %w: fp32[6,4,3,2]\n"
        "%p: fp32[2,4,5,7] = aten.constant_pad_nd.default(%x, (-1, -1, -1, -1), 0.0)\n"
        "%y: fp32[2,6,3,6] = conv2d(%p, %w, None, (1, 1), (0, 0), (1, 1), 1)\nreturn %y\n"
    )
    graph, _ = rewritten(text, fold_pad)
    assert len(graph.nodes) == 2


def test_padding_of_the_weight_stays():
    text = (
        "input %x: fp32[2,4,7,9]\ninput %w: fp32[6,4,1,1]\n"
        "%p: fp32[6,4,3,3] = aten.constant_pad_nd.default(%w, (1, 1, 1, 1), 0.0)\n"
        "%y: fp32[2,6,5,7] = conv2d(%x, %p, None, (1, 1), (0, 0), (1, 1), 1)\nreturn %y\n"
    )
    graph, _ = rewritten(text, fold_pad)
    assert len(graph.nodes) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_folding_a_batch_norm_leaves_the_weight_as_it_is_and_sees_a_nan(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval().to(dtype)
    model[1].weight.data.fill_(2.0)
    before, x = model[0].weight.detach().clone(), torch.randn(1, 3, 5, 5, dtype=dtype)
    graph = capture_inference(model, (x,)).graph
    assert [node.op for node in graph.nodes] == ["conv2d"]
    assert torch.equal(model[0].weight, before)
    model[0].weight.data[2, 1, 0, 1] = torch.nan
    assert len(capture_inference(model, (x,)).graph.nodes) == 2


def test_the_page_about_graphs_lists_the_rewrites_in_order() -> None:
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "graph.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (yes)? ?\| (yes)? ?\| ", page, re.MULTILINE)
    assert [name for name, applied, _ in rows if applied] == [rewrite.__name__ for rewrite in inference.PASSES]
    assert [name for name, _, applied in rows if applied] == [rewrite.__name__ for rewrite in training.PASSES]
