"""Operators of PyTorch that may give other bits from run to run: on which devices, by ATen and by Inductor, and what helps.

The source is the documentation of `torch.use_deterministic_algorithms` (2.13). It lists modules and functions that users call;
here stand the operators that a graph has of them. What it does not list names its source.

Inductor differs both ways. Its decompositions (`torch._inductor.decomposition`) turn some steady operators into sums by atomic
operations, and take some unsteady ones apart into steady ones; for the rest it calls ATen, or does no better.

ATen's gradient of a max pooling over images is steady: both of its kernels gather (DilatedMaxPool2d.cu), and the documentation
leaves it out. Inductor's scatters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.torch_flags import HeldFlag
from convoy.graph.ir import GRADIENTS, Arg, Graph, Node, Ref

Devices = tuple[str, ...]

_NOWHERE: Final[Devices] = ()
_CPU: Final[Devices] = ("cpu",)
_GPU: Final[Devices] = ("cuda",)
_BOTH: Final[Devices] = ("cpu", "cuda")

_MAXIMUM: Final = 2
"""What `embedding_bag` calls its mode `max`."""


@dataclass(frozen=True, slots=True)
class _Use:
    """An operator in a graph."""

    graph: Graph
    node: Node

    def argument(self, index: int, name: str, default: Arg = None) -> Arg:
        """An argument, given by position or by name."""
        given = self.node.args
        return given[index] if len(given) > index else dict(self.node.kwargs).get(name, default)

    def sums_floats(self) -> bool:
        """Sums of integers are the same in any order."""
        return self.graph.values[self.node.outputs[0]].spec.dtype in ("fp16", "bf16", "fp32", "fp64")

    def accumulates(self) -> bool:
        """Of `index_put`: whether values for one place are added up."""
        return self.argument(3, "accumulate", default=False) is True and self.sums_floats()

    def overwrites(self) -> bool:
        """Of `index_put`: whether the last of several values for one place stays. A mask names each place once."""
        indices = self.argument(1, "indices")
        named = [index.name for index in indices if isinstance(index, Ref)] if isinstance(indices, tuple) else []
        places = any(self.graph.values[name].spec.dtype != "bool" for name in named)
        return places and self.argument(3, "accumulate", default=False) is not True

    def adds_up_images(self) -> bool:
        """Of a loss: whether it is one of classes by pixel, summed or averaged. Of one target a sample it is steady."""
        first = next(self.node.refs())
        return len(self.graph.values[first].spec.shape) > 2 and self.argument(3, "reduction", default=1) != 0

    def names_places(self) -> bool:
        """Whether indices are read too: which of several equal values they name is left open."""
        return any(self.node.outputs[1:])


def _always(use: _Use) -> bool:
    del use
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known of an operator.

    Attributes:
        aten: devices on which ATen's may give other bits from run to run.
        inductor: devices on which what Inductor makes of it may.
        when: for which of its uses that holds.
        steady_form: whether ATen has a second algorithm for it, which does not, and takes it under `steady_algorithms`.
    """

    aten: Devices = _GPU
    inductor: Devices = _GPU
    when: Callable[[_Use], bool] = _always
    steady_form: bool = False


_ATOMIC: Final = (Rule(),)
_CUDNN: Final = (Rule(steady_form=True),)
_LOSS: Final = (Rule(inductor=_NOWHERE, when=_Use.adds_up_images),)
_PUT: Final = (
    Rule(_BOTH, _BOTH, _Use.overwrites, steady_form=True),
    Rule(_CPU, _BOTH, _Use.accumulates, steady_form=True),  # on a GPU ATen sorts first
)

TABLE: Final[Mapping[str, tuple[Rule, ...]]] = {
    # cuDNN's gradients, which a transposed convolution is too; its forward passes are steady ("Reproducibility" in its
    # documentation).
    **dict.fromkeys((*GRADIENTS, "convolution_backward"), _CUDNN),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _CUDNN),
    "convolution": (Rule(when=lambda use: use.argument(6, "transposed") is True, steady_form=True),),
    # Poolings.
    "_adaptive_avg_pool2d_backward": _ATOMIC,
    "_adaptive_avg_pool3d_backward": _ATOMIC,
    "adaptive_max_pool2d_backward": _ATOMIC,
    "adaptive_max_pool3d_backward": _ATOMIC,  # AdaptiveMaxPooling3d.cu
    "avg_pool3d_backward": _ATOMIC,
    "fractional_max_pool2d_backward": _ATOMIC,
    "fractional_max_pool3d_backward": _ATOMIC,
    "max_pool2d_with_indices_backward": (Rule(aten=_NOWHERE),),
    "max_pool3d_with_indices_backward": _ATOMIC,  # what the documentation offers instead is chosen in the forward pass
    "max_unpool2d": (Rule(_BOTH, _BOTH),),
    "max_unpool3d": (Rule(_BOTH, _BOTH),),
    # Changes of size, and paddings.
    "upsample_linear1d_backward": _ATOMIC,
    "upsample_bilinear2d_backward": _ATOMIC,
    "upsample_bicubic2d_backward": _ATOMIC,
    "upsample_trilinear3d_backward": _ATOMIC,
    "_upsample_bilinear2d_aa_backward": _ATOMIC,  # UpSampleBilinear2d.cu
    "_upsample_bicubic2d_aa_backward": _ATOMIC,  # UpSampleBilinear2d.cu
    "grid_sampler_2d_backward": _ATOMIC,
    "grid_sampler_3d_backward": _ATOMIC,
    "cudnn_grid_sampler_backward": _ATOMIC,
    **dict.fromkeys((f"reflection_pad{sides}d_backward" for sides in (1, 2, 3)), (Rule(inductor=_NOWHERE),)),
    **dict.fromkeys((f"replication_pad{sides}d_backward" for sides in (1, 2, 3)), _ATOMIC),  # as max_pool3d
    # Losses.
    **dict.fromkeys(("nll_loss2d_forward", "nll_loss2d", "nll_loss_nd", "cross_entropy_loss"), _LOSS),
    "_ctc_loss_backward": _ATOMIC,
    # Places named by indices, some of them maybe twice.
    "scatter_add": (Rule(when=_Use.sums_floats, steady_form=True),),
    "scatter": (
        Rule(_GPU, _BOTH, lambda use: use.node.op.endswith(".src"), steady_form=True),
        Rule(_GPU, _BOTH, lambda use: use.node.op.endswith(".reduce")),  # as scatter_reduce
    ),
    "scatter_reduce": (
        Rule(when=lambda use: use.argument(4, "reduce") in ("sum", "mean") and use.sums_floats(), steady_form=True),
        Rule(when=lambda use: use.argument(4, "reduce") == "prod" and use.sums_floats()),
    ),
    "index_add": (Rule(_GPU, _BOTH, _Use.sums_floats, steady_form=True),),
    "index_copy": (Rule(_BOTH, _BOTH, steady_form=True),),
    "index_put": _PUT,
    "_unsafe_index_put": _PUT,
    "_unsafe_masked_index_put_accumulate": (Rule(_CPU, _BOTH, _Use.sums_floats, steady_form=True),),
    "index_reduce": (Rule(when=_Use.sums_floats),),  # Indexing.cu
    "put": (Rule(_BOTH, _BOTH),),
    **dict.fromkeys(("col2im", "embedding_dense_backward", "unfold_backward"), (Rule(_NOWHERE, _BOTH),)),
    "_embedding_bag_backward": (Rule(when=lambda use: use.argument(8, "mode") == _MAXIMUM),),
    "_embedding_bag_dense_backward": (Rule(when=lambda use: use.argument(7, "mode") == _MAXIMUM),),
    # Counts, scans and orders.
    "bincount": (Rule(when=lambda use: use.argument(1, "weights") is not None),),
    "histc": _ATOMIC,
    "cumsum": (Rule(when=_Use.sums_floats),),
    "median": (Rule(when=_Use.names_places),),
    "nanmedian": (Rule(when=_Use.names_places),),
    "kthvalue": (Rule(when=_Use.names_places),),  # Sorting.cpp
}
"""The rules of an operator, by its bare name or a layer's."""


def by_aten(graph: Graph, device: str) -> tuple[str, ...]:
    """The operators of a piece for which ATen may give other bits from run to run, each once, in order.

    Args:
        graph: a piece that `verify` accepts.
        device: `cpu` or `cuda`.
    """
    return tuple(dict.fromkeys(node.op for node, rule in _rules(graph) if device in rule.aten))


def by_inductor(graph: Graph, device: str) -> tuple[str, ...]:
    """The same where Inductor compiles the piece."""
    return tuple(dict.fromkeys(node.op for node, rule in _rules(graph) if device in rule.inductor))


def has_steady_form(graph: Graph, device: str) -> bool:
    """Whether ATen gives the same bits in every run of the whole piece under `steady_algorithms`."""
    return all(rule.steady_form for _, rule in _rules(graph) if device in rule.aten)


def words(operators: tuple[str, ...]) -> str:
    """What such operators mean for who runs them, for reports; empty where there are none."""
    return f"{', '.join(operators)} may give other bits from run to run" if operators else ""


def _rules(graph: Graph) -> Iterator[tuple[Node, Rule]]:
    """The nodes that rules hold for, with each such rule."""
    for node in graph.nodes:
        for rule in TABLE.get(node.op.split(".")[1] if node.op.startswith("aten.") else node.op, ()):
            if rule.when(_Use(graph, node)):
                yield node, rule


class _Algorithms:
    """torch's process-wide choice of algorithms, as one attribute.

    `torch.use_deterministic_algorithms` would turn a switch of Inductor's configuration as well.
    """

    @property
    def mode(self) -> tuple[bool, bool]:
        """Whether steady ones are chosen, and whether operators that have none only warn."""
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    @mode.setter
    def mode(self, value: tuple[bool, bool]) -> None:
        torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


# Other threads see the choice too, and what they run may have no steady algorithm: it must not raise there.
_STEADY: Final = HeldFlag(_Algorithms, "mode", (True, True))
_UNFILLED: Final = HeldFlag(lambda: torch.utils.deterministic, "fill_uninitialized_memory", value=False)


def steady_algorithms() -> AbstractContextManager[object]:
    """A context in which ATen takes the algorithms that give the same bits in every run, where it has them.

    By itself that choice has new tensors filled before operators write to them. They write all of them, so that is left out.
    """
    stack = ExitStack()
    stack.enter_context(_UNFILLED.held())
    stack.enter_context(_STEADY.held())
    return stack
