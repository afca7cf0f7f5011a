"""From a package's members to a runnable program: executables around its compiled code, or built anew from the plan."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convoy.capture import Captured
from convoy.capture.weight_masks import weight_masks
from convoy.engines.base import Executable, Packed
from convoy.engines.dynamic_weight import build
from convoy.engines.manifest import load_engine
from convoy.engines.torch_operators import DTYPES
from convoy.errors import InputError, PackageError
from convoy.graph.ir import Graph
from convoy.package.archive import PackageArchive
from convoy.package.kernels import PackagedKernel, TeamRunner, why_not_packed
from convoy.package.manifest import Manifest, ProgramMembers
from convoy.package.package_fit import check_fit, check_steps, read_graph, read_plan
from convoy.package.plan_regions import plan_regions
from convoy.package.program_file import PackedProgram, read_program
from convoy.plan.describe import title
from convoy.plan.plan import Plan, Step
from convoy.problem import Problem
from convoy.program import PackedSteps, Program, bind
from convoy.program.bind import step_key
from convoy.program.native_chains import ChainedProgram
from convoy.program.verification.usable_config import why_not
from convoy.program.verification.verify_plan import Regions, Verified, verify_plan
from convoy.target import Target


@dataclass(frozen=True, slots=True)
class OpenedParts:
    """What all programs of a package share.

    Attributes:
        archive: the file.
        manifest: its manifest.
        tensors: its tensors, in the file's memory.
        functions: functions of its compiled code; None where that is not trusted.
        library: the compiled code, likewise.
        target: this machine.
    """

    archive: PackageArchive
    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    functions: Sequence[Any] | None
    library: ctypes.CDLL | None
    target: Target


def bound_program(parts: OpenedParts, members: ProgramMembers) -> tuple[Program, PackedProgram]:
    """A program of a package, ready to run.

    Raises:
        PackageError: its parts do not fit each other, or it needs another machine.
        CompileError: a kernel must be built, and cannot be.
    """
    archive = parts.archive
    program = read_program(
        archive.view(members.program), f"{members.program} of {archive.path}", len(parts.manifest.kernels)
    )
    try:
        graph = read_graph(archive, members.graph)
        plan = read_plan(archive, members.plan)
        check_steps(archive, plan, program)
        check_fit(archive, graph, plan, program)
        captured = _captured(parts, graph, plan, program)
        verified = verify_plan(plan, graph, captured[1], parts.target, ask_engines=False)
        packed = _packed_steps(parts, program, captured[0], verified)
        bound = bind(plan, captured[0], captured[1], parts.target, packed=packed, tuned=True)
    except PackageError:
        raise
    except InputError as error:  # of graphs and plans
        raise PackageError(f"{error.argument} of {archive.path}", error.value, error.expected, error.todo) from error
    with torch.no_grad():
        runner = None if parts.library is None else TeamRunner(parts.library, program.threads)
        runnable = ChainedProgram(bound, torch.device("cpu"), runner)
    return Program(plan, captured[0], runnable, bound.resident_bytes), program


def _captured(parts: OpenedParts, graph: Graph, plan: Plan, program: PackedProgram) -> tuple[Captured, Regions]:
    """The graph with those constants that the package holds unpacked, and its regions.

    A constant that it holds packed alone is a tensor without memory: nothing reads it.
    """
    regions = plan_regions(graph, plan, {})
    constants = {
        value.name: torch.empty(value.spec.shape, dtype=DTYPES[value.spec.dtype], device="meta")
        for value in graph.constants()
    }
    for step, own in zip(plan.steps, program.steps, strict=True):
        region = regions.get((step.pattern, step.nodes))
        if own.packed or step.kind == "convert" or region is None:  # `verify_plan` refuses a step without a region
            continue
        if len(region.constants) != len(own.constants):
            raise PackageError(f"constants of {parts.archive.path}", title(step), "as many constants as its region has")
        for name, tensor_name in zip(region.constants, own.constants, strict=True):
            tensor, spec = _tensor(parts, tensor_name), graph.values[name].spec
            if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
                raise PackageError(f"constants of {parts.archive.path}", list(tensor.shape), f"{spec} for {name}")
            constants[name] = tensor
    captured = Captured(graph, constants, program.arguments, program.results, strides=program.strides)
    known = dataclasses.replace(captured, constants={n: t for n, t in constants.items() if not t.is_meta})
    masks = weight_masks(known) if any("mask" in step.problem for step in plan.steps) else {}
    return captured, plan_regions(graph, plan, masks) if masks else regions


def _tensor(parts: OpenedParts, name: object) -> torch.Tensor:
    if not isinstance(name, str) or name not in parts.tensors:
        raise PackageError(f"constants of {parts.archive.path}", name, "names of tensors in the package")
    return parts.tensors[name]


def _packed_steps(parts: OpenedParts, program: PackedProgram, captured: Captured, verified: Verified) -> PackedSteps:
    """Executables and constants of the steps that the package holds packed; `bind` builds the others."""
    found: PackedSteps = {}
    for step, own, problem, region in zip(
        verified.plan.steps, program.steps, verified.problems, verified.regions, strict=True
    ):
        constants = [captured.constants[name] for name in (region.constants if region else ())]
        key = step_key(step, constants)
        if key in found:
            continue
        trusted = parts.functions is not None and own.launch is not None
        if not trusted:
            _check_can_run(parts, step, problem)
        if not own.packed:
            continue
        tensors: Packed = tuple(_tensor(parts, one) if isinstance(one, str) else one for one in own.constants)
        if parts.functions is not None and own.launch is not None:
            found[key] = PackagedKernel(own.launch, parts.functions, program.workspace_bytes), tensors
        else:
            found[key] = _built(parts, step, problem, constants, tensors), tensors
    return found


def _check_can_run(parts: OpenedParts, step: Step, problem: Problem) -> None:
    """Raise PackageError if this machine, as it is, cannot run a step's engine."""
    reason = why_not(step.config, problem, parts.target)
    if reason:
        made, here = parts.manifest.target, parts.target
        raise PackageError(
            f"step {title(step)} of {parts.archive.path}",
            step.config.engine,
            f"a machine that can run it: it was made on {made.name} ({made.arch}), this is {here.name} ({here.arch})",
            f"Here {reason}. Export the package again on this machine.",
        )


def _built(
    parts: OpenedParts, step: Step, problem: Problem, constants: Sequence[torch.Tensor], packed: Packed
) -> Executable:
    """An executable that is built here, from sources that Convoy holds, for constants that the package holds packed."""
    path = parts.archive.path
    refused = why_not_packed(parts.manifest.needs)
    if refused:
        todo = "Allow its own code, if you trust the person who made it (trust=True, --trust), or export it here."
        raise PackageError("package", path, f"kernels that fit it, but {refused}", todo)
    executable = build(load_engine(step.config.engine), problem, step.config.knobs, parts.target)
    expected = _packed_like(executable, constants)
    fits = len(expected) == len(packed) and all(map(_alike, expected, packed))
    if not fits:
        raise PackageError(f"constants of {path}", title(step), "the shapes and dtypes that its kernel reads")
    return executable


def _packed_like(executable: Executable, constants: Sequence[torch.Tensor]) -> Packed:
    """Packed constants of the right shapes: of tensors without memory, or of zeros if an engine must read values."""
    specs = [(constant.shape, constant.dtype) for constant in constants]
    try:
        return executable.pack([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs])
    except (RuntimeError, NotImplementedError):
        return executable.pack([torch.zeros(shape, dtype=dtype) for shape, dtype in specs])


def _alike(expected: object, given: object) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(given, torch.Tensor):
        return type(expected) is type(given)
    return (expected.shape, expected.dtype) == (given.shape, given.dtype)
