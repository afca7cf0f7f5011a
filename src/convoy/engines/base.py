"""The one contract for every implementation: Engine says whether and how, Executable does it.

A cuDNN plan, a Triton kernel, a generated kernel and the plain ATen call are the same kind of thing. To add one, write one
module with one `Engine` subclass, name the instance `ENGINE`, and add one line to `manifest.py`.

The life of an implementation:

1. `engine.supports(problem, target)` → `Support`: a value with a reason, never an exception. It is cheap: no compiling.
2. `engine.space(problem, target)` → the knob settings worth trying, the default first; finite and in a fixed order.
3. `engine.workspace_bytes(problem, knobs)` → scratch bytes that a launch needs, known before anything is built.
4. `engine.build(problem, knobs, target)` → `Executable`: slow, done once; raises `CompileError` with the tool's log inside.
5. `executable.pack(constants)` → the weight in the engine's own arrangement: done once when a net is loaded.
6. `executable.launch(buffers, workspace)`: hot; on a GPU it may be captured in a CUDA graph.

The test matrix holds every engine to a promise: where `supports` says yes, the default knobs build and give the right answer,
for any contents of the input buffers, the output buffers and the workspace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from convoy.graph.ir import Graph
from convoy.problem import ConvProblem, EngineConfig, Knobs, Problem, TensorSpec
from convoy.settings import Settings
from convoy.support import Support
from convoy.target import Target
from convoy.user_warning import warn_user

__all__ = ["DETERMINISTIC", "Buffers", "Engine", "EngineConfig", "Executable", "Knobs", "Packed"]

Packed = tuple[Any, ...]
"""A region's constants in the arrangement that one executable wants; opaque to everyone else."""


@dataclass(slots=True)
class Buffers:
    """The tensors of one launch.

    `args` are what the region reads, `results` what it writes, `constants` what `pack` returned. For a convolution or a
    linear layer in direction `fprop`: args = (x,) or (x, residual), results = [y]; weight and bias are constants, or, in a
    convolution with `dynamic_weight`, stand behind x (`engines.dynamic_weight`). For `dgrad`: args = (dy, weight), results =
    [dx]. For `wgrad`: args = (x, dy), results = [dweight] (and [dbias] where the epilogue has a bias). For a subgraph: its
    inputs and its outputs, in order.

    Logical shapes are those of the problem; the memory format of every 4-D tensor is the problem's layout. An engine never
    writes to `args` or `constants`. `results` hold allocated tensors, unless the executable `allocates_results`: then each
    entry may be None and is replaced by the executable's own new tensor.
    """

    args: tuple[torch.Tensor, ...]
    results: list[torch.Tensor | None]
    constants: Packed = ()


class Executable(ABC):
    """A config compiled for one problem on one target. Safe to launch from several threads on different buffers."""

    workspace_bytes: int = 0
    """Scratch bytes that every launch must be given; its contents are garbage before and after."""

    allocates_results: bool = False
    """Whether results are new tensors of PyTorch, because the library below cannot write to a given one."""

    deterministic: bool = True
    """Whether the same inputs give the same bits in every launch."""

    last_readers: Mapping[int, int] | None = None
    """By argument: the launch's kernel that reads it last, -1 for the last one. None: a launch of one kernel reads each once."""

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Arrange the region's constants (weight, then bias where there is one) once, when a net is loaded.

        Constants come as torch made them: the weight [k, c / groups, r, s] contiguous, the bias [k]. The default keeps
        them as they are. What it returns lives as long as the program: its bytes beyond the originals are `resident_bytes`.
        """
        return tuple(constants)

    def resident_bytes(self, constants: Packed) -> int:
        """Bytes of device memory that packed constants hold."""
        return sum(t.numel() * t.element_size() for t in constants if isinstance(t, torch.Tensor))

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Whether a result may be channels [offset, ...) of an NHWC tensor of `pitch` channels, as `torch.narrow` gives it.

        Asked once for each such place before the first launch, so that an executable can prepare for it. In a launch the strides
        of the result tell which place it is. The default takes only dense results.
        """
        del result, pitch, offset
        return False

    def marks_written(self) -> TensorSpec | None:
        """Spec of the marks of non-zero values that its launches can write beside their first result; None: it writes none.

        Asked before the first launch if a reader accepts marks. A launch whose `results` have one more tensor, of this spec,
        writes them there: int32 [2, images · slices, words of 32 channels], for each slice of an image's pixels the largest
        finite |y| as bits, and a bit for each channel that is not zero (`engines.triton.kernels.nonzero_marks`).
        """
        return None

    def accept_marks(self, spec: TensorSpec) -> bool:
        """Whether it reads marks of its first argument; `spec` is what `marks_written` of the value's writer returned.

        Asked once for each spec before the first launch. A launch gets the marks as one more tensor in `args`.
        """
        del spec
        return False

    @abstractmethod
    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Compute the results, on torch's current stream of the device, without waiting for it.

        Args:
            buffers: inputs, results and packed constants, as described at `Buffers`.
            workspace: a flat uint8 tensor of at least `workspace_bytes`, 256-byte aligned, or None where that is 0.
        """


DETERMINISTIC: Final = "deterministic"
"""Knob of configs that exist only to give the same bits in every run: a search tries them only under `Settings.deterministic`."""


class Engine(ABC):
    """One implementation of one algorithm. Stateless: an instance holds nothing but its class attributes."""

    id: ClassVar[str]
    """The engine's name in rows, plans and settings (`triton.implicit_gemm`). It never changes, wherever the module lies."""

    version: ClassVar[int] = 1
    """Counted up whenever measured times or results would no longer hold; part of every database key."""

    family: ClassVar[str]
    """The algorithm, in the field's words: gemm, implicit_gemm, direct, winograd, fft, library, compiler, reference."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Devices that it has code for. On others `supports` says no, and its patterns propose no regions."""

    trusted: ClassVar[bool] = True
    """False for kernels generated or compiled here: their first runs are made in a child process with a time limit."""

    offered_by_default: ClassVar[bool] = True
    """False for an engine that competes only where the user names it (`Settings.only_engines`, `Settings.engines`), and in
    `convoy study`: for example a published algorithm that no measurement on a current device favours."""

    only_numerics: ClassVar[tuple[str, ...]] = ()
    """Numerics (`convoy.settings.Numerics`) under which it competes; empty: all. Under the others another engine always wins."""

    only_under_memory_budget: ClassVar[bool] = False
    """True for an engine that saves memory and never time: it competes where there is a memory budget."""

    writes_slices: ClassVar[bool] = False
    """Whether its executables can write a result into channels of a larger NHWC tensor (`Executable.accept_slice`)."""

    native: ClassVar[bool] = False
    """Whether all its executables are `NativeExecutable`s (`convoy.engines.cpu.native_launch`), whose launches need no Python.
    A program on a CPU calls chains of them at once, and selection adds no interpreter time to theirs."""

    patterns: ClassVar[tuple[str, ...]] = ()
    """Patterns of `convoy.regions.PATTERNS` that it has kernels for: regions are proposed only for engines that compete."""

    only_its_patterns: ClassVar[bool] = False
    """Whether a search asks it only about regions of its `patterns`, because it builds too long for others."""

    build_patience: ClassVar[float] = 1.0
    """How many times `Settings.timeout_s` a build may take."""

    fuses_subgraphs: ClassVar[bool] = False
    """Whether it computes a subgraph of several operators in one pass over memory: what predictions take it to need."""

    estimates_subgraphs: ClassVar[bool] = False
    """Whether predictions use its `estimate_us` of subgraphs, with a margin, in place of a memory pass for each operator."""

    takes_all_nhwc: ClassVar[bool] = False
    """Whether it takes every forward convolution in nhwc that tensor cores compute: the quick search then leaves nchw out."""

    skips_zeros: ClassVar[bool] = False
    """Whether its time depends on zeros in its input: it is measured for shares that occur (`engines.activation_sparsity`)."""

    zeros_kind: ClassVar[str] = "zeros"
    """Which zeros an engine that skips zeros leaves out: a field of `activation_sparsity.SparsityShares`."""

    builds_on_device: ClassVar[bool] = False
    """Whether building for a GPU needs that GPU (a context of some hundred MB in each building process)."""

    builds_in_threads: ClassVar[bool] = False
    """Whether several threads may build at once, and a build spends its time outside of Python, as in NVRTC or a C compiler."""

    starts_quickly: ClassVar[bool] = True
    """Whether its executables load at once from kept binaries, without a compiler: ties go to such (`selection.quick_start`)."""

    quick_settings: ClassVar[int | None] = None
    """Settings tried besides the default at effort `quick`, where measurements show how many are enough; None: as usual."""

    asks_library: ClassVar[bool] = False
    """Whether `supports` and `space` ask a library about a layer; effort `none` asks only where stored times leave a chance."""

    pure_space: ClassVar[bool] = False
    """Whether its space depends on problem and target alone: it is then kept from session to session."""

    reads_mask: ClassVar[bool] = False
    """Whether it is made for pruned weights: problems with a mask are for such engines alone."""

    def competes(self, problem: Problem) -> bool:
        """Whether it may be asked about a problem: only engines that read masks are asked about one with a weight mask."""
        return self.reads_mask or not (isinstance(problem, ConvProblem) and problem.weight_mask)

    def accepts(self, problem: Problem, target: Target) -> Support:
        """`supports`, after what holds for every engine: what callers ask."""
        if not self.competes(problem):
            return Support.no("computes dense weights: its rows are those of the problem without the mask")
        return self.supports(problem, target)

    def is_offered(self, settings: Settings) -> bool:
        """Whether it competes under settings that do not name it."""
        numerics_fit = not self.only_numerics or str(settings.numerics) in self.only_numerics
        budget_fits = not self.only_under_memory_budget or settings.memory_budget_bytes is not None
        return self.offered_by_default and numerics_fit and budget_fits

    def samples(self) -> Sequence[Problem]:
        """Problems of its own kind, such as those of its `fusions`, that `convoy doctor` asks it about beside the usual ones."""
        return ()

    def fusions(self, graph: Graph) -> Iterable[Sequence[str]]:
        """Groups of nodes, by name, that it computes together: a pattern of its own.

        Each group becomes a region (`fused`), whose problem is a `SubgraphProblem` of these nodes; `supports` is then asked about
        it as about any other. A group has at least two nodes, and no path between two of them leaves it. Groups may overlap.
        """
        del graph
        return ()

    def __init_subclass__(cls, **options: Any) -> None:
        """A method under its former name is taken for one release, with a warning."""
        super().__init_subclass__(**options)
        if "unsteady" in vars(cls):
            warn_user(f"{cls.__name__}.unsteady is now named nondeterminism_reason: rename it, the former name goes")
            cls.nondeterminism_reason = vars(cls)["unsteady"]

    @abstractmethod
    def supports(self, problem: Problem, target: Target) -> Support:
        """Whether this engine can do the problem on this target; a no carries its reason."""

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Knob settings to try for a supported problem, the default first."""
        del problem, target
        return (Knobs(),)

    def has_knobs(self, problem: Problem, knobs: Knobs, target: Target) -> bool:
        """Whether knobs, from a plan file for example, are a setting of its space, so that `build` may be given them.

        What zeros a time holds for (`convoy.engines.activation_sparsity`) is the tuner's knob and no part of the space.
        """
        if self.skips_zeros and self.zeros_kind in knobs:
            share = knobs[self.zeros_kind]
            if isinstance(share, bool) or not isinstance(share, int) or not 0 <= share <= 100:
                return False
            knobs = Knobs(tuple(item for item in knobs.items_ if item[0] != self.zeros_kind))
        equal = (offered for offered in self.space(problem, target) if offered == knobs)
        return any(str(offered) == str(knobs) for offered in equal)  # 1 and true are equal to Python

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Scratch bytes that a launch needs."""
        del problem, knobs
        return 0

    def asks_for_workspace(self, problem: Problem, knobs: Knobs) -> bool:
        """Whether `workspace_bytes` must ask a library first, which takes milliseconds: predictions ask only where they must."""
        del problem, knobs
        return False

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """A cost model's guess in microseconds, for ordering the search; None where there is none."""
        del problem, knobs, target
        return None

    def nondeterminism_reason(self, problem: Problem, knobs: Knobs, target: Target) -> str:
        """Why launches may give different bits from run to run, where that is known before anything is built; empty: it is not.

        Where this says so, the `Executable` does too. It also holds for rows that were measured before it was known.
        """
        del problem, knobs, target
        return ""

    def algorithm(self, problem: Problem, knobs: Knobs) -> str:
        """Name of a config's algorithm, for reports: the engine's family, or more if its configs use different ones."""
        del problem, knobs
        return self.family

    @abstractmethod
    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile for one problem; raises CompileError with the tool's log inside."""

    def config(self, knobs: Knobs | None = None) -> EngineConfig:
        """The config that names this engine with these knobs."""
        return EngineConfig(self.id, self.version, knobs or Knobs())
