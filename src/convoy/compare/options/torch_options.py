"""PyTorch's options for speed, as data: which there are, on which device, and which exclude each other. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from convoy.errors import unknown_name

BOTH: Final = ("inference", "training")


@dataclass(frozen=True, slots=True)
class TorchOption:
    """One option.

    Attributes:
        id: its name on the command line.
        words: description.
        modes: where it is of use.
        group: options of one group are alternatives; empty: it has none.
        usual: PyTorch has it on by default (or leaves the work out by itself): it is taken away from the best setting.
        devices: where it is of use.
        needs: a fact of the device that must hold (`DeviceFacts`).
        changes: it changes the computation; it is measured and never advised.
        compiles: building it takes as long as a compiler does: it is tried after the others, and only while it may win.
        rougher: it computes in a type of fewer bits, so its error is shown.
        arithmetic: that type, as the headline names it; empty for an option that keeps the model's own.
    """

    id: str
    words: str
    modes: tuple[str, ...] = BOTH
    group: str = ""
    usual: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs: str = ""
    changes: bool = False
    compiles: bool = False
    rougher: bool = False
    arithmetic: str = ""


OPTIONS: Final = {
    option.id: option
    for option in (
        TorchOption("inference_mode", "torch.inference_mode()", ("inference",), "grad"),
        TorchOption("no_grad", "torch.no_grad()", ("inference",), "grad"),
        TorchOption("channels_last", "memory format channels_last of model and input"),
        TorchOption("fuse_conv_bn", "batch norms folded into convolutions (torch.fx)", ("inference",)),
        TorchOption("cudnn_benchmark", "torch.backends.cudnn.benchmark = True", devices=("cuda",)),
        TorchOption(
            "tf32",
            "TF32 in matrix products too: set_float32_matmul_precision('high')",
            devices=("cuda",),
            needs="tf32",
            rougher=True,
            arithmetic="TF32",
        ),
        TorchOption(
            "autocast_bf16",
            "torch.autocast, bf16",
            group="type",
            needs="bf16",
            rougher=True,
            arithmetic="bf16 by autocast",
        ),
        TorchOption(
            "autocast_fp16",
            "torch.autocast, fp16",
            group="type",
            devices=("cuda",),
            rougher=True,
            arithmetic="fp16 by autocast",
        ),
        TorchOption(
            "bf16", "weights and input in bf16", ("inference",), "type", needs="bf16", rougher=True, arithmetic="bf16"
        ),
        TorchOption(
            "fp16",
            "weights and input in fp16",
            ("inference",),
            "type",
            devices=("cuda",),
            rougher=True,
            arithmetic="fp16",
        ),
        TorchOption("compile", "torch.compile", group="compile", needs="compiler", compiles=True),
        TorchOption(
            "compile_freezing",
            "torch.compile with frozen weights",
            ("inference",),
            "compile",
            needs="compiler",
            compiles=True,
        ),
        TorchOption(
            "compile_reduce_overhead",
            "torch.compile, mode reduce-overhead",
            group="compile",
            devices=("cuda",),
            needs="compiler",
            compiles=True,
        ),
        TorchOption(
            "compile_max_autotune",
            "torch.compile, mode max-autotune",
            group="compile",
            devices=("cuda",),
            needs="compiler",
            compiles=True,
        ),
        TorchOption(
            "compile_freezing_reduce_overhead",
            "torch.compile with frozen weights, mode reduce-overhead",
            ("inference",),
            "compile",
            devices=("cuda",),
            needs="compiler",
            compiles=True,
        ),
        TorchOption("cuda_graph", "captured as one CUDA graph", group="compile", devices=("cuda",)),
        TorchOption("fused_optimizer", "SGD(fused=True)", ("training",), "optimizer"),
        TorchOption("foreach_optimizer", "SGD(foreach=True)", ("training",), "optimizer"),
        TorchOption("flush_denormal", "torch.set_flush_denormal(True)", devices=("cpu",)),
        TorchOption("half_threads", "half as many threads", group="threads", devices=("cpu",), needs="threads"),
        TorchOption(
            "all_threads",
            "as many threads as there are logical cores",
            group="threads",
            devices=("cpu",),
            needs="more_cores",
        ),
        TorchOption("onednn", "convolutions by oneDNN", usual=True, devices=("cpu",)),
        TorchOption("cudnn", "convolutions by cuDNN", usual=True, devices=("cuda",)),
        TorchOption("cudnn_tf32", "TF32 in cuDNN's convolutions", usual=True, devices=("cuda",), needs="tf32"),
        TorchOption("set_to_none", "zero_grad drops gradients", ("training",), usual=True),
        TorchOption("no_first_data_gradient", "no gradient of the input images", ("training",), usual=True),
        TorchOption("bias_gradient", "gradients of biases", ("training",), usual=True, changes=True),
    )
}
"""By id, in the order in which they are tried."""


def choose(
    words: str, mode: str, device: str, facts: Callable[[], dict[str, Any]]
) -> tuple[list[TorchOption], list[tuple[TorchOption, str]]]:
    """The options that are tried, and those that were named or fit but that this device has not, with the reason.

    Args:
        words: `all`, or ids separated by commas.
        mode: `inference` or `training`.
        device: `cpu` or `cuda`.
        facts: asks the device, by the words in `TorchOption.needs`: true, or the reason why not.

    Raises:
        InputError: a name that is no option.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]
    wanted = list(OPTIONS) if names == ["all"] else names
    unknown = [name for name in wanted if name not in OPTIONS]
    if unknown or not wanted:
        raise unknown_name("--options", unknown[0] if unknown else words, ("all", *OPTIONS))
    known = facts()
    tried: list[TorchOption] = []
    refused: list[tuple[TorchOption, str]] = []
    for name in dict.fromkeys(wanted):
        option = OPTIONS[name]
        reason = _refusal(option, mode, device, known)
        if not reason:
            tried.append(option)
        elif names != ["all"]:
            refused.append((option, reason))
    return tried, refused


def _refusal(option: TorchOption, mode: str, device: str, facts: dict[str, Any]) -> str:
    if mode not in option.modes:
        return f"of no use in {mode}"
    if device not in option.devices:
        return f"of no use on the device {device}"
    missing = facts.get(option.needs, True) if option.needs else True
    return "" if missing is True else str(missing)


def added(setting: frozenset[str], option: TorchOption) -> frozenset[str]:
    """The setting with an option; alternatives to it go."""
    rivals = {o.id for o in OPTIONS.values() if option.group and o.group == option.group}
    return (setting - rivals) | {option.id}


def arithmetic_of(setting: Collection[str], dtype: str) -> str:
    """The type that a setting computes in, for its headline.

    Args:
        setting: ids of options.
        dtype: the model's own type.
    """
    types = [OPTIONS[name].arithmetic for name in OPTIONS if name in setting and OPTIONS[name].arithmetic]
    return " and ".join(types) or dtype


def words_of(setting: Sequence[str] | frozenset[str]) -> str:
    """A setting for people, in the order of `OPTIONS`; `-NAME` is a usual option that was taken away."""
    plain = [name for name in OPTIONS if name in setting]
    taken = [f"without {name}" for name in OPTIONS if f"-{name}" in setting]
    return " + ".join([*plain, *taken]) or "defaults"
