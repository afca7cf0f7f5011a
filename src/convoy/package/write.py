"""From bound plans to a package: programs, packed weights with each tensor once, kernels, graphs and plans."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from convoy import plan as plans
from convoy.capture import Captured
from convoy.engines.cpu import cpu_layout
from convoy.engines.cpu.native_launch import KernelSource, Native, NativeExecutable
from convoy.engines.manifest import BASELINE
from convoy.errors import InputError
from convoy.graph.text import print_graph
from convoy.package.archive import Content, write_archive
from convoy.package.kernels import CompiledKernels, compile_kernels, needs_here, source_member
from convoy.package.manifest import MANIFEST, Manifest, PackedKernel, ProgramMembers, manifest_bytes
from convoy.package.packed_tensors import PackedTensors
from convoy.package.plan_choice import launches_no_kernel
from convoy.package.program_file import (
    Launch,
    PackedProgram,
    PackedStep,
    PackedTensor,
    SlotPlace,
    program_bytes,
)
from convoy.package.tensor_file import is_storable, write_tensors
from convoy.plan.describe import title
from convoy.program import BoundPlan, BoundStep
from convoy.regions import Region
from convoy.schedule import plan_memory
from convoy.target import Target

WEIGHTS: Final = "weights.safetensors"
LIBRARY: Final = "kernels/kernels.so"


@dataclass(frozen=True, slots=True)
class BoundNet:
    """One program to be exported.

    Attributes:
        captured: its graph and constants.
        bound: its plan, bound.
        regions: region of each step; None for a copy.
        target: the device that it was bound for.
    """

    captured: Captured
    bound: BoundPlan
    regions: Sequence[Region | None]
    target: Target


@dataclass(frozen=True, slots=True)
class _Contents:
    """Tensors and kernels of a package, each once.

    Attributes:
        tensors: weights and other constants.
        kernels: in the manifest's order, each function with a name of its own.
        known: index of each kernel.
    """

    tensors: PackedTensors = field(default_factory=PackedTensors)
    kernels: list[KernelSource] = field(default_factory=list[KernelSource])
    known: dict[KernelSource, int] = field(default_factory=dict[KernelSource, int])

    def kernel(self, kernel: KernelSource) -> int:
        """The index of a kernel. They become one library, so a function whose name is taken gets another one."""
        if kernel not in self.known:
            index = self.known[kernel] = len(self.kernels)
            taken = {one.function for one in self.kernels}
            name = kernel.function if kernel.function not in taken else f"{kernel.function}_{index}"
            renaming = () if name == kernel.function else (f"-D{kernel.function}={name}",)
            self.kernels.append(replace(kernel, function=name, flags=(*kernel.flags, *renaming)))
        return self.known[kernel]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What people and `convoy run` want to know of a model.

    Attributes:
        name: the user's name of it.
        target: the machine that its plans are for.
        mean: mean of each channel that images are normalised by; empty: not known.
        std: standard deviation of each channel, likewise.
    """

    name: str
    target: Target
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def write_package(path: Path, nets: Sequence[BoundNet], model: ModelInfo, *, portable: bool) -> None:
    """Write a package.

    Args:
        path: the file.
        nets: a program for each set of input shapes.
        model: what is said of the model.
        portable: refuse steps that the C runtime cannot run.

    Raises:
        InputError: a step that the C runtime cannot run, a structure that a package cannot hold, or a path that cannot be
            written.
        CompileError: the kernels could not be compiled.
    """
    contents = _Contents()
    programs = [_program(net, contents) for net in nets]
    missing = [
        title(step.step)
        for net, program in zip(nets, programs, strict=True)
        for step, packed in zip(net.bound.steps, program.steps, strict=True)
        if packed.launch is None
    ]
    if portable and missing:
        shown = ", ".join(dict.fromkeys(missing))
        raise InputError("portable", shown, "layers that a C kernel of Convoy computes", "Leave it out.")
    compiled = compile_kernels(contents.kernels) if contents.kernels else CompiledKernels((), {}, b"")
    members: list[tuple[str, Content]] = []
    for index, (net, program) in enumerate(zip(nets, programs, strict=True)):
        members += program_members(index, net, program_bytes(program))
    members += [(source, [text.encode()]) for source, text in compiled.sources.items()]
    members += [(LIBRARY, [compiled.code])] if compiled.code else []
    members.append((WEIGHTS, write_tensors(contents.tensors.by_name)))
    manifest = Manifest(
        model=model.name,
        convoy="",
        target=model.target,
        needs=needs_here(contents.kernels),
        portable=not missing,
        programs=tuple(map(member_names, range(len(nets)))),
        weights=WEIGHTS,
        library=LIBRARY if compiled.code else "",
        flags=compiled.flags,
        kernels=tuple(PackedKernel(kernel.function, source_member(kernel)) for kernel in contents.kernels),
        mean=model.mean,
        std=model.std,
        sums={},
    )
    write_members(path, manifest, members)


def member_names(index: int) -> ProgramMembers:
    """Names of the members of a program."""
    return ProgramMembers(f"graphs/g{index}.txt", f"plans/p{index}.json", f"programs/p{index}.json")


def program_members(index: int, net: BoundNet, program: bytes) -> list[tuple[str, Content]]:
    """The members of a program: itself, the graph that it computes, and the plan that it was made from."""
    assert net.bound.plan is not None
    names = member_names(index)
    return [
        (names.program, [program]),
        (names.graph, [print_graph(net.captured.graph).encode()]),
        (names.plan, [json.dumps(plans.to_dict(net.bound.plan), indent=1).encode()]),
    ]


def write_members(path: Path, manifest: Manifest, members: Sequence[tuple[str, Content]]) -> None:
    """Write the archive: the manifest with the sums of all members, then the members."""
    whole = replace(manifest, sums={member: _sum(content) for member, content in members})
    write_archive(path, [(MANIFEST, [manifest_bytes(whole)]), *members])


def _sum(content: Content) -> str:
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return digest.hexdigest()


def _program(net: BoundNet, contents: _Contents) -> PackedProgram:
    bound, graph = net.bound, net.captured.graph
    steps = tuple(
        _step(step, net.captured, region, contents) for step, region in zip(bound.steps, net.regions, strict=True)
    )
    slots, copies, arena_bytes = _places(bound, steps)
    border = {} if bound.plan is None else bound.plan.border
    return PackedProgram(
        inputs=tuple(
            PackedTensor(name, spec, layout, slot)
            for slot, (name, (spec, layout)) in enumerate(zip(graph.inputs, bound.inputs, strict=True))
        ),
        outputs=tuple(
            PackedTensor(name, graph.values[name].spec, border.get(name, "any"), slot)
            for name, slot in zip(graph.outputs, bound.outputs, strict=True)
        ),
        arguments=net.captured.arguments,
        results=net.captured.results,
        strides=net.captured.strides,
        slots=slots,
        copies=copies,
        arena_bytes=arena_bytes,
        workspace_bytes=bound.workspace_bytes,
        threads=torch.get_num_threads(),
        steps=steps,
    )


def _step(step: BoundStep, captured: Captured, region: Region | None, contents: _Contents) -> PackedStep:
    """A step with its constants: packed for its C kernel, or as the graph has them."""
    native = None
    if isinstance(step.executable, NativeExecutable) and not step.slices:
        native = step.executable.native(step.constants)
    if native is not None and all(_is_packable(constant) for constant in step.constants):
        names = tuple(contents.tensors.name(one) if isinstance(one, torch.Tensor) else one for one in step.constants)
        return PackedStep(step.args, step.results, names, True, _launch(step, native, contents))
    names = tuple(contents.tensors.name(captured.constants[name]) for name in (region.constants if region else ()))
    return PackedStep(step.args, step.results, names, False, _copy(step, region, contents))


def _copy(step: BoundStep, region: Region | None, contents: _Contents) -> Launch | None:
    """PyTorch's view of a dense value as a copy, by the kernel that changes memory formats; None for any other step."""
    problems = [] if region is None else [one for one in region.problems if one.key == step.step.problem]
    if step.step.config.engine != BASELINE or not any(map(launches_no_kernel, problems)):
        return None
    spec = step.specs[0]
    value_bytes = spec.size_bytes // max(spec.elements, 1)  # 0 of an empty value
    if value_bytes not in cpu_layout.SIZES:
        return None
    one_channel = 1, 1, spec.elements, 1, value_bytes, torch.get_num_threads()
    return Launch(contents.kernel(cpu_layout.kernel(value_bytes)), one_channel, (), (("arg", 0), ("result", 0)))


def _is_packable(constant: object) -> bool:
    return (
        constant is None
        or isinstance(constant, bool)
        or (isinstance(constant, torch.Tensor) and is_storable(constant) and constant.is_contiguous())
    )


def _launch(step: BoundStep, native: Native, contents: _Contents) -> Launch:
    assert isinstance(step.executable, NativeExecutable)
    raw = bytes(native.settings)
    words = list(struct.unpack(f"={ctypes.sizeof(native.settings) // 8}q", raw))
    for word, _ in native.calls:
        words[word] = 0
    constants = [id(constant) for constant in step.constants]
    tensors = tuple(
        ("constant", constants.index(id(source))) if isinstance(source, torch.Tensor) else source
        for source in native.tensors
    )
    calls = tuple((word, contents.kernel(kernel)) for word, kernel in native.calls)
    return Launch(contents.kernel(step.executable.kernel), tuple(words), calls, tensors)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class _Values:
    """Values that a step reads and makes, for `plan_memory`."""

    args: tuple[str, ...]
    results: tuple[str, ...]


def _places(
    bound: BoundPlan, steps: Sequence[PackedStep]
) -> tuple[tuple[SlotPlace, ...], tuple[tuple[int, int], ...], int]:
    """Where the C runtime puts each slot, the outputs that it copies at the end, and the arena's size."""
    sizes = {slot: spec.size_bytes for slot, (spec, _) in enumerate(bound.inputs)}
    sizes.update((s, spec.size_bytes) for step in bound.steps for s, spec in zip(step.results, step.specs, strict=True))
    made = {slot for step in bound.steps for slot in step.results}
    uses = Counter(bound.outputs)
    direct = {slot: index for index, slot in enumerate(bound.outputs) if slot in made and uses[slot] == 1}
    copies = tuple((slot, index) for index, slot in enumerate(bound.outputs) if slot not in direct)
    if any(step.launch is None for step in steps):
        python = tuple(SlotPlace("python", 0, sizes.get(slot, 0)) for slot in range(len(bound.slot_names)))
        return python, (), 0
    keep = {str(slot) for slot, _ in copies}
    values = [
        _Values(
            tuple(str(slot) for slot in step.args if slot in made and slot not in direct),
            tuple(str(slot) for slot in step.results if slot not in direct),
        )
        for step in bound.steps
    ]
    arena = plan_memory(values, {str(slot): size for slot, size in sizes.items()}, keep=keep)
    places: list[SlotPlace] = []
    for slot in range(len(bound.slot_names)):
        if slot < len(bound.inputs):
            places.append(SlotPlace("input", slot, sizes[slot]))
        elif slot in direct:
            places.append(SlotPlace("output", direct[slot], sizes[slot]))
        else:
            places.append(SlotPlace("arena", arena.offsets.get(str(slot), 0), sizes.get(slot, 0)))
    return tuple(places), copies, arena.size_bytes
