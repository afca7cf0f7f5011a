"""Operators whose results may differ from run to run: on which devices, in ATen and in Inductor, and the remedy.

The source is the documentation of `torch.use_deterministic_algorithms` (2.13). It lists modules and functions that users call;
`TABLE` lists the ATen operators that a graph has of them. Entries that the documentation lacks name their source.

Inductor differs both ways. Its decompositions (`torch._inductor.decomposition`) turn some deterministic operators into sums by
atomic operations, and some nondeterministic operators into deterministic ones. For the rest it calls ATen, or is no better.

ATen's gradient of an image max pooling is deterministic: both of its kernels gather (DilatedMaxPool2d.cu), and the documentation
does not list it. Inductor's kernel scatters.
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
"""The number of `embedding_bag`'s mode `max`."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One operator call in a graph."""

    graph: Graph
    node: Node

    def argument(self, index: int, name: str, default: Arg = None) -> Arg:
        """An argument, given by position or by name."""
        given = self.node.args
        return given[index] if len(given) > index else dict(self.node.kwargs).get(name, default)

    def sums_floats(self) -> bool:
        """Whether it sums floats; sums of integers do not depend on their order."""
        return self.graph.values[self.node.outputs[0]].spec.dtype in ("fp16", "bf16", "fp32", "fp64")

    def accumulates(self) -> bool:
        """For `index_put`: whether values with equal indices are summed."""
        return self.argument(3, "accumulate", default=False) is True and self.sums_floats()

    def overwrites(self) -> bool:
        """For `index_put`: whether the last of several values with equal indices stays. A mask selects each element once."""
        indices = self.argument(1, "indices")
        named = [index.name for index in indices if isinstance(index, Ref)] if isinstance(indices, tuple) else []
        by_index = any(self.graph.values[name].spec.dtype != "bool" for name in named)
        return by_index and self.argument(3, "accumulate", default=False) is not True

    def adds_up_images(self) -> bool:
        """For a loss: whether it classifies pixels and is summed or averaged. With one target a sample it is deterministic."""
        first = next(self.node.refs())
        return len(self.graph.values[first].spec.shape) > 2 and self.argument(3, "reduction", default=1) != 0

    def returns_indices(self) -> bool:
        """Whether the indices are used too: the operator may return the index of any of several equal values."""
        return any(self.node.outputs[1:])


def _always(use: _Use) -> bool:
    del use
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """When an operator is nondeterministic.

    Attributes:
        aten: devices on which ATen's kernel is nondeterministic.
        inductor: devices on which Inductor's code is nondeterministic.
        when: the calls for which that holds.
        has_deterministic_variant: whether ATen has a deterministic algorithm too, which it uses under
            `deterministic_algorithms`.
    """

    aten: Devices = _GPU
    inductor: Devices = _GPU
    when: Callable[[_Use], bool] = _always
    has_deterministic_variant: bool = False


_ATOMIC: Final = (Rule(),)
_CUDNN: Final = (Rule(has_deterministic_variant=True),)
_LOSS: Final = (Rule(inductor=_NOWHERE, when=_Use.adds_up_images),)
_PUT: Final = (
    Rule(_BOTH, _BOTH, _Use.overwrites, has_deterministic_variant=True),
    Rule(_CPU, _BOTH, _Use.accumulates, has_deterministic_variant=True),  # on a GPU ATen sorts first
)

TABLE: Final[Mapping[str, tuple[Rule, ...]]] = {
    # cuDNN's gradients, and transposed convolutions, which cuDNN computes as gradients. Its forward passes are deterministic
    # ("Reproducibility" in its documentation).
    **dict.fromkeys((*GRADIENTS, "convolution_backward"), _CUDNN),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _CUDNN),
    "convolution": (Rule(when=lambda use: use.argument(6, "transposed") is True, has_deterministic_variant=True),),
    # Poolings.
    "_adaptive_avg_pool2d_backward": _ATOMIC,
    "_adaptive_avg_pool3d_backward": _ATOMIC,
    "adaptive_max_pool2d_backward": _ATOMIC,
    "adaptive_max_pool3d_backward": _ATOMIC,  # AdaptiveMaxPooling3d.cu
    "avg_pool3d_backward": _ATOMIC,
    "fractional_max_pool2d_backward": _ATOMIC,
    "fractional_max_pool3d_backward": _ATOMIC,
    "max_pool2d_with_indices_backward": (Rule(aten=_NOWHERE),),
    "max_pool3d_with_indices_backward": _ATOMIC,  # the documentation's alternative must be chosen in the forward pass
    "max_unpool2d": (Rule(_BOTH, _BOTH),),
    "max_unpool3d": (Rule(_BOTH, _BOTH),),
    # Resizing and padding.
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
    # Indexed writes, in which an index may occur twice.
    "scatter_add": (Rule(when=_Use.sums_floats, has_deterministic_variant=True),),
    "scatter": (
        Rule(_GPU, _BOTH, lambda use: use.node.op.endswith(".src"), has_deterministic_variant=True),
        Rule(_GPU, _BOTH, lambda use: use.node.op.endswith(".reduce")),  # as scatter_reduce
    ),
    "scatter_reduce": (
        Rule(
            when=lambda use: use.argument(4, "reduce") in ("sum", "mean") and use.sums_floats(),
            has_deterministic_variant=True,
        ),
        Rule(when=lambda use: use.argument(4, "reduce") == "prod" and use.sums_floats()),
    ),
    "index_add": (Rule(_GPU, _BOTH, _Use.sums_floats, has_deterministic_variant=True),),
    "index_copy": (Rule(_BOTH, _BOTH, has_deterministic_variant=True),),
    "index_put": _PUT,
    "_unsafe_index_put": _PUT,
    "_unsafe_masked_index_put_accumulate": (Rule(_CPU, _BOTH, _Use.sums_floats, has_deterministic_variant=True),),
    "index_reduce": (Rule(when=_Use.sums_floats),),  # Indexing.cu
    "put": (Rule(_BOTH, _BOTH),),
    **dict.fromkeys(("col2im", "embedding_dense_backward", "unfold_backward"), (Rule(_NOWHERE, _BOTH),)),
    "_embedding_bag_backward": (Rule(when=lambda use: use.argument(8, "mode") == _MAXIMUM),),
    "_embedding_bag_dense_backward": (Rule(when=lambda use: use.argument(7, "mode") == _MAXIMUM),),
    # Histograms, scans and order statistics.
    "bincount": (Rule(when=lambda use: use.argument(1, "weights") is not None),),
    "histc": _ATOMIC,
    "cumsum": (Rule(when=_Use.sums_floats),),
    "median": (Rule(when=_Use.returns_indices),),
    "nanmedian": (Rule(when=_Use.returns_indices),),
    "kthvalue": (Rule(when=_Use.returns_indices),),  # Sorting.cpp
}
"""The rules of each operator, by its name without namespace and overload."""


def in_aten(graph: Graph, device: str) -> tuple[str, ...]:
    """The operators of a graph that are nondeterministic in ATen, each once, in order.

    Args:
        graph: a graph that `verify` accepts.
        device: `cpu` or `cuda`.
    """
    return tuple(dict.fromkeys(node.op for node, rule in _rules(graph) if device in rule.aten))


def in_inductor(graph: Graph, device: str) -> tuple[str, ...]:
    """The operators of a graph that are nondeterministic if Inductor compiles it, each once, in order."""
    return tuple(dict.fromkeys(node.op for node, rule in _rules(graph) if device in rule.inductor))


def has_deterministic_variant(graph: Graph, device: str) -> bool:
    """Whether ATen computes the whole graph deterministically under `deterministic_algorithms`."""
    return all(rule.has_deterministic_variant for _, rule in _rules(graph) if device in rule.aten)


def describe(operators: tuple[str, ...]) -> str:
    """A sentence for reports that names the operators; empty if there are none."""
    return f"{', '.join(operators)} may give different bits from run to run" if operators else ""


def _rules(graph: Graph) -> Iterator[tuple[Node, Rule]]:
    """Each node with each rule that holds for it."""
    for node in graph.nodes:
        for rule in TABLE.get(node.op.split(".")[1] if node.op.startswith("aten.") else node.op, ()):
            if rule.when(_Use(graph, node)):
                yield node, rule


class _Algorithms:
    """PyTorch's process-wide switch for deterministic algorithms, as one attribute.

    `torch.use_deterministic_algorithms` would also change Inductor's configuration.
    """

    @property
    def mode(self) -> tuple[bool, bool]:
        """Whether deterministic algorithms are used, and whether operators that have none only warn."""
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    @mode.setter
    def mode(self, value: tuple[bool, bool]) -> None:
        torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


# Other threads see the switch too, and their operators may have no deterministic algorithm: those must warn, not raise.
_DETERMINISTIC: Final = HeldFlag(_Algorithms, "mode", (True, True))
_UNFILLED: Final = HeldFlag(lambda: torch.utils.deterministic, "fill_uninitialized_memory", value=False)


def deterministic_algorithms() -> AbstractContextManager[object]:
    """A context in which ATen uses its deterministic algorithms where it has them.

    PyTorch's switch also fills new tensors before operators write to them. The operators write every element, so the context
    turns that filling off.
    """
    stack = ExitStack()
    stack.enter_context(_UNFILLED.held())
    stack.enter_context(_DETERMINISTIC.held())
    return stack
