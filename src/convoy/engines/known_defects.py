"""Faults of the libraries that Convoy calls, as data: where each one shows, who found it, and what to tell the user.

Engines that reach the library refuse such problems (`onednn`). The baseline computes them without the library (`aten`).
`convoy doctor` lists the defects that this machine has, and a plan's notes name the layers of the net that they reach: stock
PyTorch is wrong there, or crashes.

A defect is taken to hold in every version of its library until a row says in which one it is mended. Conditions are
wider than the failures that were seen: refusing a good layer costs time, and trusting a bad one costs the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.compilers.instruction_sets import onednn_in_force
from convoy.engines.group_norm_backward import without_input_gradient
from convoy.engines.library import defect_conditions as conditions
from convoy.engines.torch_flags import onednn_conv_flags
from convoy.graph.ir import Graph
from convoy.problem import Conv3dProblem, ConvolutionProblem, ConvProblem
from convoy.target import Target


@dataclass(frozen=True, slots=True)
class KnownDefect:
    """One fault of a library.

    Attributes:
        name: a short name, fixed for ever.
        library: the library, as `Target.versions` names it.
        seen_in: versions in which it was seen.
        mended_in: the first version without it; empty: none is known.
        device: `cpu` or `cuda`.
        instruction_sets: the fault needs one of these (`instruction_sets.ONEDNN_LEVELS`); empty: it shows with any.
        directions: of the convolution.
        dtypes: that the products are computed in.
        condition: whether a convolution of such a direction and dtype may show it, in two dimensions.
        volumes: the same in three dimensions.
        effect: the fault in words: "oneDNN <effect>".
        source: how it was found, with the smallest case.
    """

    name: str
    library: str
    seen_in: tuple[str, ...]
    device: str
    directions: tuple[str, ...]
    dtypes: tuple[str, ...]
    effect: str
    source: str
    condition: Callable[[ConvProblem], bool] = conditions.no_convolution
    volumes: Callable[[Conv3dProblem], bool] = conditions.no_convolution
    instruction_sets: tuple[str, ...] = ()
    mended_in: str = ""

    def is_here(self, target: Target) -> bool:
        """Whether a device with its software has the fault; a library whose version is not known has it."""
        if target.device != self.device or not (
            self.mended_in == "" or _is_older(target.version(self.library), self.mended_in)
        ):
            return False
        return not self.instruction_sets or bool(set(self.instruction_sets) & set(onednn_in_force()))

    def reaches(self, problem: ConvolutionProblem, target: Target) -> bool:
        """Whether the library may compute a convolution wrongly there."""
        if problem.direction not in self.directions or _product_dtype(problem) not in self.dtypes:
            return False
        shows = self.volumes(problem) if isinstance(problem, Conv3dProblem) else self.condition(problem)
        return shows and self.is_here(target)

    @property
    def words(self) -> str:
        """The fault in a sentence without its full stop."""
        return f"{_NAMES[self.library]} {self.effect}"


_NAMES: Final = {"onednn": "oneDNN", "torch": "PyTorch"}

_FLOATS: Final = ("fp32", "fp16", "bf16", "fp64")

_AMX: Final = ("avx512_core_amx", "avx512_core_amx_fp16")


KNOWN_DEFECTS: Final = (
    KnownDefect(
        name="onednn-dilated-filter-in-padding",
        library="onednn",
        seen_in=("3.10", "3.12"),
        device="cpu",
        directions=("fprop",),
        dtypes=_FLOATS,
        condition=conditions.fits_into_padding,
        effect="crashes where a dilated filter fits into the padding beside the image",
        source="fuzz with PyTorch 2.11 and 2.13: 1 channel of 9x2, filter 3x2, padding 4, stride 3, dilation 3 along the width",
    ),
    KnownDefect(
        name="onednn-volumes-dilated-filter-in-padding",
        library="onednn",
        seen_in=("3.12",),
        device="cpu",
        directions=("fprop", "dgrad"),
        dtypes=_FLOATS,
        volumes=conditions.sees_padding_alone,
        effect="crashes where a dilated filter sees padding alone, beside a volume or through its gaps",
        source="fuzz with PyTorch 2.13 in bf16 and fp16, with AMX and without: "
        "1 channel of 1x10x10, 1 filter of 2x7x5, padding (1, 2, 3), stride (2, 3, 1), dilation 2 in depth",
    ),
    KnownDefect(
        name="onednn-one-channel-groups-one-output-column",
        library="onednn",
        seen_in=("3.10", "3.12"),
        device="cpu",
        directions=("fprop",),
        dtypes=_FLOATS,
        condition=conditions.is_one_channel_a_group,
        effect="is wrong for one channel a group, not depthwise, where a stride leaves one output column",
        source="fuzz with PyTorch 2.11 and 2.13: 1 channel of 5x3, 4 filters of 3x3, padding (2, 1), stride 5 along the width",
    ),
    KnownDefect(
        name="onednn-bf16-wgrad-columns-in-padding",
        library="onednn",
        seen_in=("3.10", "3.12"),
        device="cpu",
        directions=("wgrad",),
        dtypes=("bf16",),
        condition=conditions.has_columns_in_padding,
        volumes=conditions.has_volume_columns_in_padding,
        effect="leaves bf16 weight gradients of filter columns unwritten that see padding alone",
        source="fuzz with PyTorch 2.11 and 2.13: 2 channels of 9x1, 6 filters of 3x3, padding 1, stride 5",
    ),
    KnownDefect(
        name="onednn-amx-bf16-one-output-column",
        library="onednn",
        seen_in=("3.12",),
        device="cpu",
        directions=("fprop",),
        dtypes=("bf16",),
        condition=conditions.has_one_padded_output_column,
        effect="is wrong in bf16 with AMX where a padded convolution has one output column",
        source="fuzz with PyTorch 2.13 on an Intel CPU with AMX; with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 it is right. "
        "2 channels of 2x7, 1 filter of 4x7, padding 3, stride (1, 2), dilation (1, 2): 3 of 5 values",
        instruction_sets=_AMX,
    ),
    KnownDefect(
        name="onednn-amx-bf16-volumes-one-output-column",
        library="onednn",
        seen_in=("3.12",),
        device="cpu",
        directions=("fprop",),
        dtypes=("bf16",),
        volumes=conditions.has_one_output_column,
        effect="is wrong in bf16 with AMX where padding or a stride leaves a three-dimensional convolution one output column",
        source="fuzz with PyTorch 2.13 on an Intel CPU with AMX; with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 it is right. "
        "3 channels of 3x16x9, 1 filter of 1x5x5, stride (1, 3, 2), dilation (1, 3, 2), no padding: 2 of 6 values",
        instruction_sets=_AMX,
    ),
    KnownDefect(
        name="onednn-bf16-volumes-of-depth-one",
        library="onednn",
        seen_in=("3.12",),
        device="cpu",
        directions=("fprop",),
        dtypes=("bf16",),
        volumes=conditions.is_padded_slice,
        effect="is wrong in bf16 for volumes of depth 1 and fewer than 16 channels a group that are padded in depth",
        source="fuzz with PyTorch 2.13, without AMX for one channel a group. With AMX: 3 channels of 1x11x5, 1 filter of 4x3x3, "
        "padding (2, 2, 1), stride 3 in depth, dilation 3 along the height: 41 of 45 values",
    ),
    KnownDefect(
        name="onednn-bf16-volumes-dgrad-unseen-slices",
        library="onednn",
        seen_in=("3.12",),
        device="cpu",
        directions=("dgrad",),
        dtypes=("bf16",),
        volumes=conditions.has_unseen_slices,
        effect="does not write bf16 gradients of slices in depth that no output sees, in volumes of more than 16 columns",
        source="fuzz with PyTorch 2.13: gradient of 9 channels of 8x5x24, 1 filter of 4x3x4, stride (3, 3, 1): 58 of 8640 values",
    ),
    KnownDefect(
        name="onednn-volumes-wgrad-much-padding",
        library="onednn",
        seen_in=("3.12",),
        device="cpu",
        directions=("wgrad",),
        dtypes=_FLOATS,
        volumes=conditions.makes_deeper,
        effect="is wrong in weight gradients of volumes with more padding in depth than keeps the depth",
        source="fuzz with PyTorch 2.13. fp32: 33 channels of 3x5x4, 40 filters of 4x1x4, padding 3 in depth, stride (2, 1, 1): "
        "5159 of 21120 values. bf16: 4 channels of 3x5x16, a filter of 4x4x3 for each, padding (3, 1, 0), stride (3, 2, 1), "
        "dilation 2 along the width: 134 of 192",
    ),
    KnownDefect(
        name="torch-group-norm-backward-channels-last",
        library="torch",
        seen_in=("2.13",),
        device="cpu",
        directions=(),
        dtypes=(),
        effect="crashes in the backward pass of a GroupNorm whose channels_last input needs no gradient",
        source="fuzz of modules with PyTorch 2.13, every size and floating-point dtype, channels_last_3d too: "
        "x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last); torch.nn.GroupNorm(2, 4)(x).sum().backward()",
    ),
)


def defect_of(problem: ConvolutionProblem, target: Target) -> KnownDefect | None:
    """The first known defect that stock PyTorch may meet in a convolution on a target; None where there is none."""
    return next((defect for defect in KNOWN_DEFECTS if defect.reaches(problem, target)), None)


def defects_here(target: Target) -> tuple[KnownDefect, ...]:
    """The defects that a device has with its software."""
    return tuple(defect for defect in KNOWN_DEFECTS if defect.is_here(target))


def stock_is_wrong(
    problems: Iterable[ConvolutionProblem], target: Target, channels_last: Graph | None = None
) -> list[str]:
    """Notes for a plan: where stock PyTorch may be wrong in a net, a line for each defect.

    Args:
        problems: of the net's convolutions.
        target: the device.
        channels_last: the net as PyTorch runs it, where some of its inputs lie in channels_last.
    """
    met: dict[str, list[ConvolutionProblem]] = {}
    words: dict[str, str] = {}
    for problem in problems:
        if defect := defect_of(problem, target):
            met.setdefault(defect.name, []).append(problem)
            words[defect.name] = defect.words
    norms = 0 if channels_last is None else without_input_gradient(channels_last)
    others = [
        f"stock PyTorch may fail in {norms} group norm{'s' if norms > 1 else ''}: {defect.words} (known defect {defect.name})"
        for defect in KNOWN_DEFECTS
        if norms and defect.library == "torch" and defect.is_here(target)
    ]
    return others + [
        f"stock PyTorch may be wrong in {len(found)} convolution{'s' if len(found) > 1 else ''}: {words[name]} "
        f"(known defect {name}), first in {found[0].key}"
        for name, found in met.items()
    ]


def _product_dtype(problem: ConvolutionProblem) -> str:
    """The dtype in which oneDNN multiplies: torch's flag may let it round fp32 operands to bf16."""
    if problem.x_dtype != "fp32" or problem.numerics == "strict" or not torch.backends.mkldnn.is_available():
        return problem.x_dtype
    return "bf16" if onednn_conv_flags().fp32_precision == "bf16" else "fp32"


def _is_older(version: str, other: str) -> bool:
    """Whether a version of dotted numbers comes before another; one that is not known does."""
    parts = [[int("".join(filter(str.isdigit, part)) or 0) for part in v.split(".")] for v in (version, other)]
    return not version or parts[0] < parts[1]
