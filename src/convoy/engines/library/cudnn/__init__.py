"""cudnn: every execution plan that cuDNN's heuristics know for a convolution, and neighbours of the best, as a candidate each.

ATen takes the plan that its own benchmark of cuDNN's first few finds, without an epilogue in it. Here a plan is a knob: its
name is stored, and builds the same kernel again in milliseconds. With `fused`, bias, residual and activation are nodes of the
same graph; without, they follow as ATen calls that overwrite the result. (The frontend's module has the same name as this
package: it is imported in `library` alone.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Final

import torch

from convoy.engines.base import Engine, Executable, Knobs
from convoy.engines.library.cudnn import library, plans, surveys
from convoy.engines.library.cudnn.executable import CudnnConvolution
from convoy.engines.library.cudnn.graphs import fused_part
from convoy.engines.library.cudnn.plans import CudnnPlan
from convoy.engines.support_checks import torch_convolution, transforms_allowed
from convoy.errors import CompileError, InputError
from convoy.problem import ConvolutionProblem, Epilogue, Problem
from convoy.support import Support
from convoy.target import Target

MOST_PLANS: Final = 160
"""Plans offered for one problem. cuDNN lists about forty, the most likely first, as many again with a fused epilogue, and then
the `beyond` plans that its heuristics do not list. Effort `quick` tries the first few."""

TRANSFORMS: Final = tuple(note.lower() for note in plans.TRANSFORMING)
"""Notes that name an algorithm; a plan without any is an implicit GEMM."""

_INDEX_LIMIT: Final = 2**31
_CAPABILITIES: Final = {"fp32": 70, "fp16": 70, "bf16": 80}
_NOTHING: Final = Epilogue()


class Cudnn(Engine):
    """cuDNN's plans, by name."""

    id = "cudnn"
    family = "library"
    devices = ("cuda",)
    builds_on_device = True
    asks_library = True
    quick_settings = 2
    """Settings at effort `quick`. With an epilogue these are the first separate and the second fused plan. The first of cuDNN's
    list is 0.3 % behind the best of 24 on average, the first two 0.1 % (23 layers of ResNet-50 at batch 32, H100)."""

    def supports(self, problem: Problem, target: Target) -> Support:
        """Convolutions in fp32, fp16 and bf16, all directions, if cuDNN has a plan.

        Only cuDNN knows whether it has a plan, so a problem that passes every other check costs one query of its heuristics
        per process; `space` uses the same answer.
        """
        support = _within_reach(problem, target)
        if not support or not isinstance(problem, ConvolutionProblem):
            return support
        try:
            found = offered_plans(problem, _is_exact(problem, target), torch.cuda.current_device(), target.digest)
        except library.errors() as error:
            return Support.no(f"cuDNN has no plan for this problem: {library.first_line(error)}")
        return Support.yes() if found else Support.no("cuDNN has no plan that keeps the numerics of this problem")

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Fused and separate epilogues alternately, each in the order of the heuristics."""
        assert isinstance(problem, ConvolutionProblem)
        return offered_plans(problem, _is_exact(problem, target), torch.cuda.current_device(), target.digest)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """What cuDNN reports before a plan is built."""
        assert isinstance(problem, ConvolutionProblem)
        plan, fused = _read(problem, knobs)
        device = torch.cuda.current_device()
        known = surveys.announced(problem, fused, device).get(plan)
        return plans.facts(problem, fused, plan, device).workspace_bytes if known is None else known

    def asks_for_workspace(self, problem: Problem, knobs: Knobs) -> bool:
        """Of a plan that cuDNN did not recommend, the query takes some 15 ms."""
        assert isinstance(problem, ConvolutionProblem)
        plan, fused = _read(problem, knobs)
        return plan not in surveys.announced(problem, fused, torch.cuda.current_device())

    def notes(self, problem: Problem, knobs: Knobs) -> tuple[str, ...]:
        """Notes of cuDNN on a plan: `tensor_core`, `winograd`, `fft`, `nondeterministic`, `runtime_compilation`, ...

        Raises:
            InputError: knobs that name no plan.
        """
        assert isinstance(problem, ConvolutionProblem)
        plan, fused = _read(problem, knobs)
        plans.facts(problem, fused, plan, torch.cuda.current_device())
        return plans.notes(problem, fused, plan)

    def algorithm(self, problem: Problem, knobs: Knobs) -> str:
        """The plan's family by cuDNN's notes, and what else they say of its products: `winograd, tensor_core`."""
        assert isinstance(problem, ConvolutionProblem)
        if library.absence():
            return self.family
        try:
            plan, fused = _read(problem, knobs)
            found = plans.noted(problem, fused, plan, torch.cuda.current_device())
        except (InputError, *library.errors()):
            return self.family
        transforms = dict.fromkeys(note.partition("_")[0] for note in found if note in TRANSFORMS)
        return ", ".join([*(transforms or ["implicit_gemm"]), *(note for note in found if note not in TRANSFORMS)])

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The plan that the knobs name, and no other."""
        assert isinstance(problem, ConvolutionProblem)
        try:
            plan, fused = _read(problem, knobs)
            if reason := plans.denial(problem, plan):
                raise CompileError(self.id, f"engine {plan.engine} is denied: {reason}")
            facts = plans.facts(problem, fused, plan, torch.cuda.current_device())
            if _is_exact(problem, target) and not facts.exact:
                raise CompileError(self.id, f"plan {plan.name} rounds operands or sums, and {problem} wants fp32")
            allowed = transforms_allowed(problem) if problem.x_dtype == "fp32" else Support.yes()
            if not allowed and plans.transforms(problem, fused, plan, torch.cuda.current_device()):
                raise CompileError(self.id, f"plan {plan.name} {allowed.reason}")
            graph, index = plans.graph_of(problem, fused, plan)
            graph.build_plan_at_index(index)
            wanted = int(graph.get_workspace_size_plan_at_index(index))
        except InputError as error:
            raise CompileError(self.id, str(error)) from error
        except library.errors() as error:
            raise CompileError(self.id, f"cuDNN cannot build {knobs}", str(error)) from error
        if wanted > facts.workspace_bytes:
            says = f"wants {wanted} bytes of workspace, announced {facts.workspace_bytes}"
            raise CompileError(self.id, f"plan {plan.name} {says}")
        return CudnnConvolution(problem, fused, graph, index, facts)


def calls_torch(problem: Problem, knobs: Knobs) -> bool:
    """Whether a launch calls operators of PyTorch's too: for a part of the epilogue that is not in the plan's graph."""
    return not isinstance(problem, ConvolutionProblem) or _read(problem, knobs)[1] != problem.epilogue


def _within_reach(problem: Problem, target: Target) -> Support:
    """Everything that can be said without asking cuDNN about the problem."""
    if target.device != "cuda":
        return Support.no(f"needs an NVIDIA GPU, got {target.device}")
    support = torch_convolution(problem, ("fprop", "dgrad", "wgrad"))
    if not support or not isinstance(problem, ConvolutionProblem):
        return support
    least = _CAPABILITIES.get(problem.x_dtype)
    if least is None:
        return Support.no(f"needs fp32, fp16 or bf16, got {problem.x_dtype}")
    if target.capability < least:
        needs = f"{problem.x_dtype} needs compute capability {least // 10}.{least % 10} or newer"
        return Support.no(f"{needs}, got {target.arch}")
    if problem.acc_dtype != "fp32":
        return Support.no(f"accumulates in fp32, got acc_dtype {problem.acc_dtype}")
    if problem.n == 0:
        return Support.no("needs a batch of at least 1, got 0")
    largest = max(spec.elements for spec in (problem.x_spec, problem.weight_spec, problem.y_spec))
    if largest >= _INDEX_LIMIT:
        return Support.no(f"takes tensors of fewer than 2^31 elements, got {largest}")
    reason = library.absence()
    return Support.no(reason) if reason else Support.yes()


def _is_exact(problem: ConvolutionProblem, target: Target) -> bool:
    """Whether fp32 products must be fp32: under `strict`, and where torch's own flag keeps cuDNN from TF32."""
    if problem.x_dtype != "fp32":
        return False
    torch_says_no = bool(target.version("fp32_precision")) or target.version("cudnn_tf32") == "off"
    return problem.numerics == "strict" or (problem.numerics == "as_torch" and torch_says_no)


@lru_cache(maxsize=4096)
def offered_plans(problem: ConvolutionProblem, exact: bool, device: int, where: str) -> tuple[Knobs, ...]:
    """The knobs worth trying, the most promising first; the same in every call of a process, and for one cuDNN in all."""
    del device  # the current one: part of the cache's key
    part = fused_part(problem.epilogue) if problem.direction == "fprop" else _NOTHING
    separate = surveys.recommended(problem, _NOTHING, where, exact=exact)
    fused = _fused(problem, part, where, exact=exact) if part else ()
    found = [*_in_turn(fused, separate), *_in_turn(surveys.beyond(fused), surveys.beyond(separate))]
    return tuple(found[:MOST_PLANS])


def _in_turn(fused: Sequence[CudnnPlan], separate: Sequence[CudnnPlan]) -> list[Knobs]:
    pairs = zip_longest(_knobs(fused, fused=True), _knobs(separate, fused=False))
    return [knobs for knobs in chain.from_iterable(pairs) if knobs is not None]


def _fused(problem: ConvolutionProblem, part: Epilogue, where: str, *, exact: bool) -> tuple[CudnnPlan, ...]:
    """Plans with the epilogue inside; none where cuDNN refuses that graph, which it does for many."""
    try:
        return surveys.recommended(problem, part, where, exact=exact)
    except library.errors():
        return ()


def _knobs(found: Sequence[CudnnPlan], *, fused: bool) -> list[Knobs]:
    return [Knobs.of(plan=plan.name, fused=fused) for plan in found]


def _read(problem: ConvolutionProblem, knobs: Knobs) -> tuple[CudnnPlan, Epilogue]:
    """The plan that knobs name, and what of the epilogue its graph holds."""
    if set(knobs) != {"plan", "fused"} or not isinstance(knobs["fused"], bool):
        raise InputError("knobs", str(knobs), "fused (true or false) and plan")
    plan = CudnnPlan.parse(str(knobs["plan"]))
    part = fused_part(problem.epilogue)
    if knobs["fused"] and (problem.direction != "fprop" or not part):
        raise InputError("fused", True, f"false: {problem} has no epilogue that a graph holds")
    return plan, part if knobs["fused"] else _NOTHING


ENGINE = Cudnn()
