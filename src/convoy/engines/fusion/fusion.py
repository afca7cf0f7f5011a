"""cuda.fusion: the subgraphs between layers as one generated CUDA kernel each (docs/kernels/fusion.md).

Elementwise operators over equal or broadcast shapes, reductions over the same dimensions, poolings, and operators that move
elements. Arithmetic is fp32; values between operators are not rounded. NVRTC compiles a kernel in a fraction of a second.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.fusion.kernel_code import FusionCode, code_of, workspace_of
from convoy.engines.fusion.lowering import INDEX_LIMIT
from convoy.engines.fusion.stages import UNITS
from convoy.engines.gpu.device_tensors import aligned, fits_tma, pitch_of, scratch, sliced_nhwc
from convoy.engines.hopper.nvrtc_kernel import Function, absence, compile_cubin, pointer
from convoy.engines.subgraph import parse_subgraph, torch_format, torch_support
from convoy.engines.torch_operators import DTYPES
from convoy.errors import LaunchError
from convoy.graph.ir import Graph
from convoy.problem import Knobs, Problem, SubgraphProblem, kind_in_words
from convoy.support import Support
from convoy.target import Target

LEAST_CAPABILITY: Final = 80
"""bf16 conversions need it."""

_LAUNCH_US: Final = 1.5
_BYTES_US: Final = 2.4e6
"""Bytes a microsecond that an H100's memory gives."""

_BLOCK_BYTES_US: Final = 5e4
"""The same for one block: a multiprocessor has about this many bytes in flight for each microsecond of latency."""

_FOR_HALVES: Final = ("--prec-div=false", "--prec-sqrt=false", "--define-macro=FAST_EXPONENTIAL")
"""Options of NVRTC where all results are rounded to half types: divisions, roots and exponentials may be off by some units in
the last place of fp32."""

_MOST_SPILLED: Final = 256
"""Bytes that a kernel may spill: it is bound by memory. A pooling of four concatenated values in fp32 spills 24 bytes, because
it has more conditions than there are registers for them."""

_MOVES_OR_REDUCES: Final = frozenset({
    "cat", "stack", "split", "split_with_sizes", "chunk", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d",
    "max_pool2d_with_indices", "mean", "sum", "amax", "softmax", "_softmax", "log_softmax", "_log_softmax",
    "linalg_vector_norm", "unbind", "adaptive_avg_pool3d", "avg_pool3d", "max_pool3d", "max_pool3d_with_indices",
    "layer_norm", "native_layer_norm", "rms_norm", "batch_norm", "upsample_bilinear2d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "glu",
})  # fmt: skip
"""Operators that gain by a kernel of their own: ATen takes several launches, or does not read whole vectors."""


Slice = tuple[int, int]
"""A result that is some channels of a larger NHWC tensor: its number, and the channels of that tensor."""


class FusionExecutable(Executable):
    """The kernels of one subgraph; with a result in a slice they are others."""

    def __init__(self, engine: str, problem: SubgraphProblem, target: Target) -> None:
        graph = parse_subgraph(problem.text)
        self._engine, self._problem, self._target = engine, problem, target
        self._results = [graph.values[name].spec for name in graph.outputs]
        shapes = [graph.values[name].spec.shape for name in (*graph.inputs, *graph.outputs)]
        self._formats = [torch_format(problem.layout, len(shape)) for shape in shapes]
        self._inputs = len(graph.inputs)
        self._lock = threading.Lock()
        self._kernels: dict[Slice | None, tuple[FusionCode, list[Function]]] = {}
        self.log = ""
        self.code, self.functions = self._compiled(None)
        self.workspace_bytes = self.code.workspace_bytes

    def _compiled(self, part: Slice | None) -> tuple[FusionCode, list[Function]]:
        """The kernels, with no result or one in a slice."""
        with self._lock:
            if part not in self._kernels:
                code = code_of(self._problem.text, self._problem.layout, part)
                assert isinstance(code, FusionCode)
                half = all(spec.dtype != "fp32" for spec in self._results)
                options = _FOR_HALVES if half else ()
                cubin, log = compile_cubin(self._engine, code.source, self._target, options, most_spilled=_MOST_SPILLED)
                self.log += log
                functions = [Function(self._engine, cubin, kernel.name, shared_bytes=0) for kernel in code.kernels]
                self._kernels[part] = code, functions
            return self._kernels[part]

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Whether pixels and the slice start at multiples of 16 bytes; its kernels are compiled here."""
        spec = self._results[result]
        fits = len(spec.shape) == 4 and self._problem.layout == "nhwc" and fits_tma(DTYPES[spec.dtype], pitch, offset)
        if not fits or spec.elements // spec.shape[1] * pitch >= INDEX_LIMIT:
            return False
        self._compiled((result, pitch))
        return True

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Contiguous, at addresses that vectors can be read from."""
        return tuple(aligned(tensor.detach().contiguous()) for tensor in constants)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One kernel after another."""
        args = [self._checked(f"argument {place}", t, place) for place, t in enumerate(buffers.args)]
        results, part = self._written(buffers.results)
        code, functions = self._compiled(part)
        places = {f"x{place}": pointer(tensor) for place, tensor in enumerate(args)}
        places |= {f"c{place}": pointer(tensor) for place, tensor in enumerate(buffers.constants)}
        places |= {f"y{place}": pointer(tensor) for place, tensor in enumerate(results)}
        if (held := scratch(workspace, self.workspace_bytes)) is not None:
            places |= {f"w{place}": pointer(held[offset:]) for place, offset in enumerate(code.offsets)}
        device, dependent = results[0].device.index or 0, self._target.capability >= 90
        for kernel, function in zip(code.kernels, functions, strict=True):
            arguments = [places[name] for name in kernel.parameters]
            function.launch(device, kernel.blocks, kernel.threads, arguments, dependent=dependent)

    def _written(self, given: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], Slice | None]:
        """The results, and which of them is a slice."""
        found: list[torch.Tensor] = []
        parts: list[Slice] = []
        for place, tensor in enumerate(given):
            if tensor is None:
                raise LaunchError(f"{self._engine}: result {place}: no tensor was given to write to")
            memory_format = self._formats[self._inputs + place]
            if memory_format == torch.channels_last and not tensor.is_contiguous(memory_format=memory_format):
                found.append(sliced_nhwc(f"{self._engine}: result {place}", tensor))
                parts.append((place, pitch_of(tensor)))
            else:
                found.append(self._checked(f"result {place}", tensor, self._inputs + place))
        if len(parts) > 1:
            raise LaunchError(
                f"{self._engine}: takes one result that is some channels of a larger tensor, got {len(parts)}"
            )
        return found, parts[0] if parts else None

    def _checked(self, role: str, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """The tensor, dense in the problem's memory format and aligned; raises LaunchError otherwise."""
        if not tensor.is_contiguous(memory_format=self._formats[place]) or tensor.data_ptr() % 16:
            layout = f"strides {tuple(tensor.stride())} at {tensor.data_ptr():#x}"
            raise LaunchError(f"{self._engine}: {role}: {layout} are not those of a dense, 16-byte aligned tensor")
        return tensor


class FusionEngine(Engine):
    """Generated CUDA C for the subgraphs between layers."""

    id = "cuda.fusion"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    fuses_subgraphs = True
    builds_in_threads = True
    writes_slices = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs of operators that the generator knows, in fp16, bf16 and fp32, on capability 8.0 and newer."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"computes subgraphs, got {kind_in_words(problem)}")
        if target.capability < LEAST_CAPABILITY:
            return Support.no(f"needs a CUDA device of capability 8.0 or newer, got {target.name}")
        if reason := absence():
            return Support.no(reason)
        if not (found := torch_support(problem)):
            return found
        graph = parse_subgraph(problem.text)
        if not _is_worthwhile(graph):
            return Support.no(f"is no faster than ATen for a single {graph.nodes[0].op}")
        # 428 us where a pass over memory takes 106: bf16 [4096, 9216] of fp32, on an H100.
        if turned := next(filter(graph.is_transposed_view, graph.outputs), ""):
            return Support.no(f"would write a copy of {turned}, a transposed matrix, of which PyTorch returns a view")
        found = workspace_of(problem.text, problem.layout)
        return Support.no(found) if isinstance(found, str) else Support.yes()

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Values between kernels."""
        del knobs
        assert isinstance(problem, SubgraphProblem)
        found = workspace_of(problem.text, problem.layout)
        assert isinstance(found, int)
        return found

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """Launches and a pass over memory, by as many multiprocessors as have a block."""
        del knobs
        code = _known(problem)
        share = max(target.units, 1) / UNITS
        rate = min(_BYTES_US * share, max(kernel.blocks for kernel in code.kernels) * _BLOCK_BYTES_US)
        return _LAUNCH_US * len(code.kernels) + problem.bytes_min / rate

    def samples(self) -> Sequence[Problem]:
        """A global mean, and a gate."""
        mean = (
            "graph 1\ninput %v0: fp16[1,512,7,7]\n"
            "%v1: fp16[1,512,1,1] = aten.adaptive_avg_pool2d.default(%v0, (1, 1))\n"
            "%v2: fp16[1,512] = aten.view.default(%v1, (1, 512))\nreturn %v2\n"
        )
        gate = (
            "graph 1\ninput %v0: fp16[1,32,1,1]\ninput %v1: fp16[1,32,56,56]\n"
            "%v2: fp16[1,32,1,1] = aten.sigmoid.default(%v0)\n"
            "%v3: fp16[1,32,56,56] = aten.mul.Tensor(%v2, %v1)\nreturn %v3\n"
        )
        sizes = (
            (mean, 2 * 512 * 50, "adaptive_avg_pool2d + view"),
            (gate, 2 * 32 * (2 * 56 * 56 + 1), "sigmoid + mul"),
        )
        return tuple(SubgraphProblem(text, "nhwc", size, label) for text, size, label in sizes)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Generate and compile; needs no GPU."""
        del knobs
        assert isinstance(problem, SubgraphProblem)
        return FusionExecutable(self.id, problem, target)


def _is_worthwhile(graph: Graph) -> bool:
    """Whether there are several operators, or one that ATen does not compute in one pass over whole vectors."""
    if len(graph.nodes) != 1:
        return bool(graph.nodes)
    node = graph.nodes[0]
    if len(node.op.split(".")) == 3 and node.op.split(".")[1] in _MOVES_OR_REDUCES:
        return True
    shapes = {graph.values[name].spec.shape for name in (*node.refs(), *filter(None, node.outputs))}
    moves_only = len(graph.inputs) + len(graph.constants()) == 1
    return len(shapes) > 1 and not moves_only


def _known(problem: Problem) -> FusionCode:
    assert isinstance(problem, SubgraphProblem)
    code = code_of(problem.text, problem.layout)
    assert isinstance(code, FusionCode)
    return code


ENGINE = FusionEngine()
