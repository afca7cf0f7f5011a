"""The table of nondeterministic operators, the engines that consult it, and which engines are left for a net with a pooling."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy.capture import capture_inference, capture_training
from convoy.engines import nondeterminism
from convoy.engines.base import DETERMINISTIC, Buffers, Engine
from convoy.engines.interpret import compile_graph
from convoy.engines.library import aten, inductor
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.engines.subgraph import parse_subgraph, torch_support
from convoy.engines.torch_operators import DTYPES
from convoy.graph.ir import GRADIENTS, Graph
from convoy.measurement.device.detect import detect_target
from convoy.problem import Knobs, Problem, SubgraphProblem
from convoy.regions import propose
from convoy.target import Target

CPU = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20, (("cxx", "13"),))
HERE = detect_target("cpu")
GPU = Target("cuda", "a GPU", "sm_90", 132, 80 << 30, 50 << 20, (("triton", "3.6.0"),))
DETERMINISTIC_KNOBS = Knobs.of(**{DETERMINISTIC: True})


@dataclass(frozen=True)
class Case:
    """One operator: where it is nondeterministic in ATen and in Inductor, and whether ATen has a deterministic variant."""

    text: str
    aten: str = "cuda"
    inductor: str = "cuda"
    has_deterministic_variant: bool = False


def lone(inputs: str, made: str, call: str) -> str:
    """A graph of one operator on inputs a, b, ..."""
    specs = [part.strip() for part in inputs.split(";")]
    names = [f"%{chr(ord('a') + index)}" for index in range(len(specs))]
    heads = "".join(f"input {name}: {spec}\n" for name, spec in zip(names, specs, strict=True))
    results = made.split(";")
    outputs = ", ".join(f"%y{index}: {spec.strip()}" for index, spec in enumerate(results))
    returned = ", ".join(f"%y{index}" for index in range(len(results)))
    return f"graph 1\n{heads}{outputs} = {call}\nreturn {returned}\n"


PLANE, MAP = "fp32[2,3,8,8]", "i64[2,3,4,4]"
SMALL = "fp32[2,3,4,4]"
ROWS, PLACES, FIVE = "fp32[10,4]", "i64[5]", "fp32[5,4]"
VOLUME, CELLS = "fp32[2,3,4,4,4]", "i64[2,3,2,2,2]"
CELL = "fp32[2,3,2,2,2]"
SCORES, LABELS = "fp32[2,3,4,4]", "i64[2,4,4]"


def resized(sides: int, op: str, *, corners: str = ", False") -> str:
    shape, small = "8," * sides, "4," * sides
    sizes = f"({shape}), (2, 3, {small})".replace(",)", ")") if sides > 1 else "(8,), (2, 3, 4)"
    scales = ", None" * sides
    return lone(
        f"fp32[2,3,{shape[:-1]}]", f"fp32[2,3,{small[:-1]}]", f"aten.{op}.default(%a, {sizes}{corners}{scales})"
    )


def padded(kind: str, sides: int) -> str:
    shape, inner = ",".join("6" * sides), ",".join("4" * sides)
    made = f"fp32[2,3,{inner}]"
    edges = ", ".join("1" * (2 * sides))
    return lone(f"fp32[2,3,{shape}]; {made}", made, f"aten.{kind}_pad{sides}d_backward.default(%a, %b, ({edges}))")


CASES: dict[str, Case] = {
    # convolutions
    "dgrad": Case(
        lone(
            "fp32[2,4,6,6]; fp32[4,3,3,3]", "fp32[2,3,6,6]", "conv2d_dgrad(%a, %b, (6, 6), (1, 1), (1, 1), (1, 1), 1)"
        ),
        has_deterministic_variant=True,
    ),
    "wgrad": Case(
        lone(
            "fp32[2,3,6,6]; fp32[2,4,6,6]", "fp32[4,3,3,3]", "conv2d_wgrad(%a, %b, (3, 3), (1, 1), (1, 1), (1, 1), 1)"
        ),
        has_deterministic_variant=True,
    ),
    "dgrad of volumes": Case(
        lone(
            "fp32[1,4,4,4,4]; fp32[4,3,3,3,3]",
            "fp32[1,3,4,4,4]",
            "conv3d_dgrad(%a, %b, (4, 4, 4), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)",
        ),
        has_deterministic_variant=True,
    ),
    "wgrad of volumes": Case(
        lone(
            "fp32[1,3,4,4,4]; fp32[1,4,4,4,4]",
            "fp32[4,3,3,3,3]",
            "conv3d_wgrad(%a, %b, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)",
        ),
        has_deterministic_variant=True,
    ),
    "convolution_backward": Case(
        lone(
            "fp32[2,4,6]; fp32[2,3,6]; fp32[4,3,3]",
            "fp32[2,3,6]; fp32[4,3,3]; fp32[4]",
            "aten.convolution_backward.default(%a, %b, %c, (4,), (1,), (1,), (1,), False, (0,), 1, (True, True, True))",
        ),
        has_deterministic_variant=True,
    ),
    "convolution of three dimensions": Case(
        lone(
            "fp32[2,3,4,4,4]; fp32[4,3,1,1,1]",
            "fp32[2,4,4,4,4]",
            "aten.convolution.default(%a, %b, None, (1, 1, 1), (0, 0, 0), (1, 1, 1), False, (0, 0, 0), 1)",
        ),
        "",
        "",
    ),
    "transposed convolution": Case(
        lone(
            "fp32[2,3,4,4]; fp32[3,4,2,2]",
            "fp32[2,4,8,8]",
            "aten.convolution.default(%a, %b, None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1)",
        ),
        has_deterministic_variant=True,
    ),
    "conv_transpose1d": Case(
        lone("fp32[2,3,4]; fp32[3,4,2]", "fp32[2,4,8]", "aten.conv_transpose1d.default(%a, %b, None, (2,))"),
        has_deterministic_variant=True,
    ),
    "conv_transpose2d": Case(
        lone("fp32[2,3,4,4]; fp32[3,4,2,2]", "fp32[2,4,8,8]", "aten.conv_transpose2d.input(%a, %b, None, (2, 2))"),
        has_deterministic_variant=True,
    ),
    "conv_transpose3d": Case(
        lone(
            "fp32[2,3,4,4,4]; fp32[3,4,2,2,2]",
            "fp32[2,4,8,8,8]",
            "aten.conv_transpose3d.input(%a, %b, None, (2, 2, 2))",
        ),
        has_deterministic_variant=True,
    ),
    # poolings
    "_adaptive_avg_pool2d_backward": Case(
        lone(f"fp32[2,3,3,3]; {PLANE}", PLANE, "aten._adaptive_avg_pool2d_backward.default(%a, %b)")
    ),
    "_adaptive_avg_pool3d_backward": Case(
        lone(f"fp32[2,3,3,3,3]; {VOLUME}", VOLUME, "aten._adaptive_avg_pool3d_backward.default(%a, %b)")
    ),
    "adaptive_max_pool2d_backward": Case(
        lone(f"{SMALL}; {PLANE}; {MAP}", PLANE, "aten.adaptive_max_pool2d_backward.default(%a, %b, %c)")
    ),
    "adaptive_max_pool3d_backward": Case(
        lone(f"{CELL}; {VOLUME}; {CELLS}", VOLUME, "aten.adaptive_max_pool3d_backward.default(%a, %b, %c)")
    ),
    "avg_pool2d_backward": Case(
        lone(
            f"{SMALL}; {PLANE}",
            PLANE,
            "aten.avg_pool2d_backward.default(%a, %b, (3, 3), (2, 2), (1, 1), False, True, None)",
        ),
        "",
        "",
    ),
    "avg_pool3d_backward": Case(
        lone(
            f"{CELL}; {VOLUME}",
            VOLUME,
            "aten.avg_pool3d_backward.default(%a, %b, (2, 2, 2), (2, 2, 2), (0, 0, 0), False, True, None)",
        )
    ),
    "fractional_max_pool2d_backward": Case(
        lone(
            f"{SMALL}; {PLANE}; {MAP}",
            PLANE,
            "aten.fractional_max_pool2d_backward.default(%a, %b, (2, 2), (4, 4), %c)",
        )
    ),
    "fractional_max_pool3d_backward": Case(
        lone(
            f"{CELL}; {VOLUME}; {CELLS}",
            VOLUME,
            "aten.fractional_max_pool3d_backward.default(%a, %b, (2, 2, 2), (2, 2, 2), %c)",
        )
    ),
    "max_pool2d_with_indices_backward": Case(
        lone(
            f"{SMALL}; {PLANE}; {MAP}",
            PLANE,
            "aten.max_pool2d_with_indices_backward.default(%a, %b, (3, 3), (2, 2), (1, 1), (1, 1), False, %c)",
        ),
        aten="",
    ),
    "max_pool3d_with_indices_backward": Case(
        lone(
            f"{CELL}; {VOLUME}; {CELLS}",
            VOLUME,
            "aten.max_pool3d_with_indices_backward.default"
            "(%a, %b, (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), False, %c)",
        )
    ),
    "max_unpool2d": Case(lone(f"{SMALL}; {MAP}", PLANE, "aten.max_unpool2d.default(%a, %b, (8, 8))"), "both", "both"),
    "max_unpool3d": Case(
        lone(f"{CELL}; {CELLS}", VOLUME, "aten.max_unpool3d.default(%a, %b, (4, 4, 4), (2, 2, 2), (0, 0, 0))"),
        "both",
        "both",
    ),
    # changes of size, and paddings
    "upsample_linear1d_backward": Case(resized(1, "upsample_linear1d_backward")),
    "upsample_bilinear2d_backward": Case(resized(2, "upsample_bilinear2d_backward")),
    "upsample_bicubic2d_backward": Case(resized(2, "upsample_bicubic2d_backward")),
    "upsample_trilinear3d_backward": Case(resized(3, "upsample_trilinear3d_backward")),
    "_upsample_bilinear2d_aa_backward": Case(resized(2, "_upsample_bilinear2d_aa_backward")),
    "_upsample_bicubic2d_aa_backward": Case(resized(2, "_upsample_bicubic2d_aa_backward")),
    "upsample_nearest2d_backward": Case(resized(2, "upsample_nearest2d_backward", corners=""), "", ""),
    "grid_sampler_2d_backward": Case(
        lone(
            f"{SMALL}; {PLANE}; fp32[2,4,4,2]",
            f"{PLANE}; fp32[2,4,4,2]",
            "aten.grid_sampler_2d_backward.default(%a, %b, %c, 0, 0, False, (True, True))",
        )
    ),
    "grid_sampler_3d_backward": Case(
        lone(
            f"{CELL}; {VOLUME}; fp32[2,2,2,2,3]",
            f"{VOLUME}; fp32[2,2,2,2,3]",
            "aten.grid_sampler_3d_backward.default(%a, %b, %c, 0, 0, False, (True, True))",
        )
    ),
    "cudnn_grid_sampler_backward": Case(
        lone(
            f"{PLANE}; fp32[2,4,4,2]; {SMALL}",
            f"{PLANE}; fp32[2,4,4,2]",
            "aten.cudnn_grid_sampler_backward.default(%a, %b, %c)",
        )
    ),
    **{f"reflection_pad{sides}d_backward": Case(padded("reflection", sides), inductor="") for sides in (1, 2, 3)},
    **{f"replication_pad{sides}d_backward": Case(padded("replication", sides)) for sides in (1, 2, 3)},
    # losses
    "nll_loss2d_forward": Case(
        lone(f"{SCORES}; {LABELS}", "fp32[]; fp32[]", "aten.nll_loss2d_forward.default(%a, %b, None, 1, -100)"),
        inductor="",
    ),
    "nll_loss2d_forward, not reduced": Case(
        lone(f"{SCORES}; {LABELS}", "fp32[2,4,4]; fp32[]", "aten.nll_loss2d_forward.default(%a, %b, None, 0, -100)"),
        "",
        "",
    ),
    "nll_loss2d": Case(lone(f"{SCORES}; {LABELS}", "fp32[]", "aten.nll_loss2d.default(%a, %b)"), inductor=""),
    "nll_loss_nd": Case(lone(f"{SCORES}; {LABELS}", "fp32[]", "aten.nll_loss_nd.default(%a, %b)"), inductor=""),
    "nll_loss_nd of samples": Case(lone("fp32[2,3]; i64[2]", "fp32[]", "aten.nll_loss_nd.default(%a, %b)"), "", ""),
    "nll_loss_forward": Case(
        lone("fp32[2,3]; i64[2]", "fp32[]; fp32[]", "aten.nll_loss_forward.default(%a, %b, None, 1, -100)"), "", ""
    ),
    "cross_entropy_loss": Case(
        lone(f"{SCORES}; {LABELS}", "fp32[]", "aten.cross_entropy_loss.default(%a, %b)"), inductor=""
    ),
    "cross_entropy_loss of samples": Case(
        lone("fp32[2,3]; i64[2]", "fp32[]", "aten.cross_entropy_loss.default(%a, %b)"), "", ""
    ),
    "_ctc_loss_backward": Case(
        lone(
            "fp32[2]; fp32[6,2,3]; i64[2,2]; fp32[2]; fp32[2,6,5]",
            "fp32[6,2,3]",
            "aten._ctc_loss_backward.default(%a, %b, %c, (6, 6), (2, 2), %d, %e, 0)",
        )
    ),
    # places named by indices
    "scatter_add": Case(
        lone(f"{ROWS}; i64[5,4]; {FIVE}", ROWS, "aten.scatter_add.default(%a, 0, %b, %c)"),
        has_deterministic_variant=True,
    ),
    "scatter_add of integers": Case(
        lone("i64[10,4]; i64[5,4]; i64[5,4]", "i64[10,4]", "aten.scatter_add.default(%a, 0, %b, %c)"), "", ""
    ),
    "scatter": Case(
        lone(f"{ROWS}; i64[5,4]; {FIVE}", ROWS, "aten.scatter.src(%a, 0, %b, %c)"),
        inductor="both",
        has_deterministic_variant=True,
    ),
    "scatter of one value": Case(lone(f"{ROWS}; i64[5,4]", ROWS, "aten.scatter.value(%a, 0, %b, 1.0)"), "", ""),
    "scatter that adds": Case(
        lone(f"{ROWS}; i64[5,4]; {FIVE}", ROWS, 'aten.scatter.reduce(%a, 0, %b, %c, reduce="add")'), inductor="both"
    ),
    "scatter_reduce, sum": Case(
        lone(f"{ROWS}; i64[5,4]; {FIVE}", ROWS, 'aten.scatter_reduce.two(%a, 0, %b, %c, "sum")'),
        has_deterministic_variant=True,
    ),
    "scatter_reduce, mean": Case(
        lone(f"{ROWS}; i64[5,4]; {FIVE}", ROWS, 'aten.scatter_reduce.two(%a, 0, %b, %c, "mean")'),
        has_deterministic_variant=True,
    ),
    "scatter_reduce, prod": Case(
        lone(f"{ROWS}; i64[5,4]; {FIVE}", ROWS, 'aten.scatter_reduce.two(%a, 0, %b, %c, "prod")')
    ),
    "scatter_reduce, amax": Case(
        lone(f"{ROWS}; i64[5,4]; {FIVE}", ROWS, 'aten.scatter_reduce.two(%a, 0, %b, %c, "amax")'), "", ""
    ),
    "index_add": Case(
        lone(f"{ROWS}; {PLACES}; {FIVE}", ROWS, "aten.index_add.default(%a, 0, %b, %c)"),
        inductor="both",
        has_deterministic_variant=True,
    ),
    "index_copy": Case(
        lone(f"{ROWS}; {PLACES}; {FIVE}", ROWS, "aten.index_copy.default(%a, 0, %b, %c)"),
        "both",
        "both",
        has_deterministic_variant=True,
    ),
    "index_put": Case(
        lone(f"{ROWS}; {PLACES}; {FIVE}", ROWS, "aten.index_put.default(%a, (%b,), %c)"),
        "both",
        "both",
        has_deterministic_variant=True,
    ),
    "index_put by a mask": Case(
        lone(f"{ROWS}; bool[10,4]; fp32[]", ROWS, "aten.index_put.default(%a, (%b,), %c)"), "", ""
    ),
    "index_put that adds": Case(
        lone(f"{ROWS}; {PLACES}; {FIVE}", ROWS, "aten.index_put.default(%a, (%b,), %c, True)"),
        "cpu",
        "both",
        has_deterministic_variant=True,
    ),
    "_unsafe_index_put": Case(
        lone(f"{ROWS}; {PLACES}; {FIVE}", ROWS, "aten._unsafe_index_put.default(%a, (%b,), %c, True)"),
        "cpu",
        "both",
        has_deterministic_variant=True,
    ),
    "_unsafe_masked_index_put_accumulate": Case(
        lone(
            f"{ROWS}; bool[5,1]; {PLACES}; {FIVE}",
            ROWS,
            "aten._unsafe_masked_index_put_accumulate.default(%a, %b, (%c,), %d)",
        ),
        "cpu",
        "both",
        has_deterministic_variant=True,
    ),
    "index_reduce": Case(lone(f"{ROWS}; {PLACES}; {FIVE}", ROWS, 'aten.index_reduce.default(%a, 0, %b, %c, "prod")')),
    "put": Case(lone(f"{ROWS}; {PLACES}; fp32[5]", ROWS, "aten.put.default(%a, %b, %c, True)"), "both", "both"),
    "gather": Case(lone(f"{ROWS}; i64[5,4]", FIVE, "aten.gather.default(%a, 0, %b)"), "", ""),
    "col2im": Case(
        lone("fp32[2,27,36]", "fp32[2,3,6,6]", "aten.col2im.default(%a, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1))"),
        "",
        "both",
    ),
    "unfold_backward": Case(
        lone("fp32[3,3]", "fp32[8]", "aten.unfold_backward.default(%a, (8,), 0, 3, 2)"), "", "both"
    ),
    "embedding_dense_backward": Case(
        lone(f"{FIVE}; {PLACES}", ROWS, "aten.embedding_dense_backward.default(%a, %b, 10, -1, False)"), "", "both"
    ),
    "_embedding_bag_backward": Case(
        lone(
            f"fp32[2,4]; {PLACES}; i64[2]; {PLACES}; i64[2]; i64[2,4]",
            ROWS,
            "aten._embedding_bag_backward.default(%a, %b, %c, %d, %e, %f, 10, False, 2, False, None)",
        )
    ),
    "_embedding_bag_dense_backward": Case(
        lone(
            f"fp32[2,4]; {PLACES}; {PLACES}; i64[2]; i64[2,4]",
            ROWS,
            "aten._embedding_bag_dense_backward.default(%a, %b, %c, %d, %e, 10, False, 2, None)",
        )
    ),
    "_embedding_bag_dense_backward of sums": Case(
        lone(
            f"fp32[2,4]; {PLACES}; {PLACES}; i64[2]; i64[2,4]",
            ROWS,
            "aten._embedding_bag_dense_backward.default(%a, %b, %c, %d, %e, 10, False, 0, None)",
        ),
        "",
        "",
    ),
    # counts, scans and orders
    "bincount": Case(lone("i64[9]; fp32[9]", "fp32[5]", "aten.bincount.default(%a, %b)")),
    "bincount without weights": Case(lone("i64[9]", "i64[5]", "aten.bincount.default(%a)"), "", ""),
    "histc": Case(lone("fp32[9]", "fp32[5]", "aten.histc.default(%a, 5)")),
    "cumsum": Case(lone(FIVE, FIVE, "aten.cumsum.default(%a, 0)")),
    "cumsum of integers": Case(lone("i64[5,4]", "i64[5,4]", "aten.cumsum.default(%a, 0)"), "", ""),
    "median": Case(lone(FIVE, "fp32[4]; i64[4]", "aten.median.dim(%a, 0)")),
    "median of all": Case(lone(FIVE, "fp32[]", "aten.median.default(%a)"), "", ""),
    "nanmedian": Case(lone(FIVE, "fp32[4]; i64[4]", "aten.nanmedian.dim(%a, 0)")),
    "kthvalue": Case(lone(FIVE, "fp32[4]; i64[4]", "aten.kthvalue.default(%a, 2, 0)")),
}
NAMED = [pytest.param(case, id=name) for name, case in CASES.items()]
UNDETERMINISTIC_KNOBS = [pytest.param(case, id=name) for name, case in CASES.items() if case.aten in ("cuda", "both")]


def unsteady_on(where: str, target: Target) -> bool:
    return where in (target.device, "both")


def bare(graph: Graph) -> str:
    op = graph.nodes[0].op
    return op.split(".")[1] if op.startswith("aten.") else op


def test_every_operator_of_the_table_has_a_case():
    assert {bare(parse_subgraph(case.text)) for case in CASES.values()} >= set(nondeterminism.TABLE)


def test_every_operator_of_the_table_is_one_of_pytorchs():
    assert [name for name in nondeterminism.TABLE if name not in GRADIENTS and not hasattr(torch.ops.aten, name)] == []


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("case", NAMED)
def test_a_piece_of_atens_says_whether_it_is_steady(case: Case, target: Target):
    problem = SubgraphProblem(case.text)
    assert torch_support(problem), torch_support(problem).reason
    steady = not unsteady_on(case.aten, target)
    assert aten.ENGINE.build(problem, Knobs(), target).deterministic is steady
    reason = aten.ENGINE.nondeterminism_reason(problem, Knobs(), target)
    assert (parse_subgraph(case.text).nodes[0].op in reason) is not steady
    wanted = [Knobs()] if steady or not case.has_deterministic_variant else [Knobs(), DETERMINISTIC_KNOBS]
    assert list(aten.ENGINE.space(problem, target)) == wanted
    for knobs in wanted[1:]:
        assert aten.ENGINE.build(problem, knobs, target).deterministic
        assert not aten.ENGINE.nondeterminism_reason(problem, knobs, target)


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("case", NAMED)
def test_a_compiled_piece_says_whether_it_is_steady(case: Case, target: Target, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor, "_compile", lambda problem, target: lambda *tensors: tensors)
    problem = SubgraphProblem(case.text)
    steady = not unsteady_on(case.inductor, target)
    assert inductor.ENGINE.build(problem, Knobs(), target).deterministic is steady
    assert (
        parse_subgraph(case.text).nodes[0].op in inductor.ENGINE.nondeterminism_reason(problem, Knobs(), target)
    ) is not steady


ATOMIC = frozenset({
    "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add", "index_put", "scatter_add", "scatter_reduce",
})  # fmt: skip
"""What Inductor lowers to atomic additions, where it is left after the decompositions."""
NOT_TRACED = frozenset({
    "bincount", "cudnn_grid_sampler_backward",  # a result of unknown size; without a trace for a CPU
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",  # other names of `convolution`
    *GRADIENTS,  # Inductor is never asked for layers
})  # fmt: skip
TRACED = [
    pytest.param(case, id=name) for name, case in CASES.items() if bare(parse_subgraph(case.text)) not in NOT_TRACED
]


def left_by_inductor(graph: Graph) -> set[str]:
    """The operators that are there after Inductor's decompositions."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    run = compile_graph(graph)
    with FakeTensorMode(), torch.no_grad():
        specs = [graph.values[name].spec for name in graph.inputs]
        examples = [torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in specs]
        traced = make_fx(lambda *tensors: run(tensors), decomposition_table=select_decomp_table())(*examples)
    return {str(node.target).split(".")[1] for node in traced.graph.nodes if str(node.target).startswith("aten.")}


@pytest.mark.parametrize("case", TRACED)
def test_inductors_decompositions_are_those_that_the_table_was_made_from(case: Case):
    """A later PyTorch may take operators apart otherwise."""
    graph = parse_subgraph(case.text)
    left = left_by_inductor(graph)
    if bare(graph) in left or bare(graph) in ATOMIC:  # left to ATen, or lowered with no more care
        assert unsteady_on(case.inductor, GPU) or not unsteady_on(case.aten, GPU)
    else:
        floats = graph.values[graph.outputs[0]].spec.dtype.startswith("fp")
        assert unsteady_on(case.inductor, GPU) == (floats and not left.isdisjoint(ATOMIC))


@pytest.mark.parametrize("name", ["nll_loss2d_forward", "nll_loss2d", "reflection_pad2d_backward"])
def test_inductor_takes_a_lone_operator_that_it_alone_computes_steadily(name: str):
    problem = SubgraphProblem(CASES[name].text)
    assert inductor.ENGINE.supports(problem, GPU)
    assert not inductor.ENGINE.supports(problem, CPU)  # where ATen's is steady it gains nothing
    assert not inductor.ENGINE.supports(SubgraphProblem(CASES["put"].text), GPU)


@pytest.mark.skipif(not HERE.version("cxx"), reason="needs a C++ compiler")
def test_what_inductor_makes_of_a_loss_is_the_loss():
    graph = parse_subgraph(CASES["nll_loss2d_forward"].text)
    problem, given = SubgraphProblem(CASES["nll_loss2d_forward"].text), filled(graph)
    results: list[list[torch.Tensor | None]] = []
    for engine in (aten.ENGINE, inductor.ENGINE):
        buffers = Buffers(tuple(given), [None, None])
        engine.build(problem, Knobs(), HERE).launch(buffers, None)
        results.append(buffers.results)
    torch.testing.assert_close(*results)


def filled(graph: Graph) -> list[torch.Tensor]:
    """Inputs with many indices that name the same place."""
    generator = torch.Generator().manual_seed(5)
    made: list[torch.Tensor] = []
    for name in graph.inputs:
        spec = graph.values[name].spec
        if spec.dtype.startswith("fp"):
            made.append(torch.randn(spec.shape, generator=generator))
        else:
            made.append(torch.randint(0, 2, spec.shape, generator=generator).to(DTYPES[spec.dtype]))
    return made


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=name) for name, c in CASES.items() if c.aten == "cpu" and c.has_deterministic_variant]
)
def test_the_steady_way_computes_the_same(case: Case, monkeypatch: pytest.MonkeyPatch):
    problem, given = SubgraphProblem(case.text), filled(parse_subgraph(case.text))
    seen: list[tuple[bool, bool]] = []
    results: list[torch.Tensor] = []
    for knobs in (Knobs(), DETERMINISTIC_KNOBS):
        built = aten.ENGINE.build(problem, knobs, CPU)
        function = built.function
        monkeypatch.setattr(
            built,
            "function",
            lambda *args, function=function: (
                seen.append(
                    (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
                ),
                function(*args),
            )[1],
        )
        buffers = Buffers(tuple(given), [None])
        built.launch(buffers, None)
        assert buffers.results[0] is not None
        results.append(buffers.results[0])
    assert seen == [(False, True), (True, False)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_choice_of_algorithms_is_put_back_by_the_last_thread(before: tuple[bool, bool]):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        entered, leave = threading.Event(), threading.Event()

        def other() -> None:
            with nondeterminism.deterministic_algorithms():
                entered.set()
                leave.wait(30)

        thread = threading.Thread(target=other)
        with nondeterminism.deterministic_algorithms():
            thread.start()
            entered.wait(30)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        leave.set()
        thread.join()
        found = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        assert found == before
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(mode=False)


MIXED = """\
graph 1
input %a: fp32[2,3,4,4]
input %w: fp32[3,4,2,2]
%t: fp32[2,4,8,8] = aten.convolution.default(%a, %w, None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1)
%r: fp32[2,4,8,8] = aten.relu.default(%t)
%y: fp32[2,4,4,4] = aten.upsample_bilinear2d_backward.default(%r, (8, 8), (2, 4, 4, 4), False, None, None)
%z: fp32[2,4,4,4] = aten.upsample_bilinear2d_backward.default(%r, (8, 8), (2, 4, 4, 4), True, None, None)
return %y, %z
"""


def test_a_piece_is_steady_where_all_of_it_is_and_its_reason_names_each_operator_once():
    problem = SubgraphProblem(MIXED)
    assert list(aten.ENGINE.space(problem, GPU)) == [Knobs()]
    assert aten.ENGINE.nondeterminism_reason(problem, Knobs(), GPU) == (
        "aten.convolution.default, aten.upsample_bilinear2d_backward.default may give different bits from run to run"
    )
    assert not aten.ENGINE.build(problem, Knobs(), GPU).deterministic
    assert aten.ENGINE.build(problem, Knobs(), CPU).deterministic


class Pooled(nn.Module):
    """A convolution, a maximum pooling whose windows overlap, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.conv(x)), 3, 2, 1)
        return self.fc(x.mean((2, 3)))


class Mask(nn.Module):
    """A net for masks: a transposed convolution and a bilinear change of size, for a class by pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 5, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.up(self.conv(x)), scale_factor=2, mode="bilinear")


def offers(graph: Graph) -> dict[str, list[tuple[str, bool]]]:
    """By operator of each lone piece in NHWC: who computes it on a GPU, and whether some setting of theirs is steady."""
    engines: list[Engine] = [load_engine(name) for name in MANIFEST]
    found: dict[str, list[tuple[str, bool]]] = {}
    for region in propose(graph, layouts=("nhwc",), numerics="as_torch"):
        problem: Problem = region.problems[0]
        if len(region.nodes) != 1 or not isinstance(problem, SubgraphProblem):
            continue
        takers = [engine for engine in engines if engine.id != "reference" and engine.accepts(problem, GPU)]
        found[graph.node(region.nodes[0]).op] = [
            (
                engine.id,
                any(not engine.nondeterminism_reason(problem, knobs, GPU) for knobs in engine.space(problem, GPU)),
            )
            for engine in takers
        ]
    return found


def test_a_training_step_with_a_max_pooling_keeps_atens_gradient_and_ours_but_not_inductors():
    pytest.importorskip("triton")
    batch = torch.randn(4, 3, 12, 12), torch.arange(4) % 5
    found = offers(capture_training(Pooled(), cross_entropy, batch).captured.graph)
    takers = dict(found.pop("aten.max_pool2d_with_indices_backward.default"))
    assert takers == {"aten": True, "inductor": False, "triton.pool_backward": True}
    assert all(any(steady for _, steady in takers) for takers in found.values())


def test_inference_with_a_max_pooling_is_steady_by_all():
    found = offers(capture_inference(Pooled().eval(), (torch.randn(2, 3, 12, 12),), {}).graph)
    assert all(steady for takers in found.values() for _, steady in takers)


def test_a_net_for_masks_has_a_steady_way_for_all_it_computes():
    batch = torch.randn(2, 3, 8, 8), torch.zeros(2, 16, 16, dtype=torch.int64)
    found = offers(capture_training(Mask(), cross_entropy, batch, deterministic=True).captured.graph)
    assert [op for op, takers in found.items() if not any(steady for _, steady in takers)] == []
    assert found["aten.nll_loss2d_forward.default"] == [("aten", False), ("inductor", True)]


def test_where_pytorch_itself_would_raise_nobody_is_left():
    """`torch.use_deterministic_algorithms` has no way to derive this pooling: its windows differ in size."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 5))
    batch = torch.randn(2, 3, 8, 8), torch.arange(2)
    found = offers(capture_training(model, cross_entropy, batch).captured.graph)
    none_left = [op for op, takers in found.items() if not any(steady for _, steady in takers)]
    assert none_left == ["aten._adaptive_avg_pool2d_backward.default"]
