"""inductor.whole: a net, or a part of one with its layers, compiled by torch._inductor as one program.

It is what `torch.compile` makes of a net, so a plan is never slower than that. The weights are constants of the program. On a
GPU they are given in channels_last, in which Inductor computes convolutions. On a CPU Inductor packs them for oneDNN
("freezing"), which needs their values: there the program is compiled when weights are packed, about 10 s for a net.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch

from convoy.engines import nondeterminism
from convoy.engines.base import Buffers, Engine, Executable, Knobs, Packed
from convoy.engines.interpret import compile_graph
from convoy.engines.library.inductor import COMMON_OPTIONS, COMPILING, compiler_here, example, keep_triton_cache
from convoy.engines.subgraph import SubgraphResults, parse_subgraph, torch_format, torch_support
from convoy.engines.torch_flags import convolutions
from convoy.errors import CompileError
from convoy.graph.ir import Graph
from convoy.problem import VOLUME_LAYOUTS, Problem, SubgraphProblem, kind_in_words
from convoy.regions.whole import LEAST_LAYERS, PATTERN, layers_of, why_not_plain
from convoy.settings import Effort, Settings
from convoy.support import Support
from convoy.target import Target
from convoy.tuning_lock import with_dynamo

MODE: Final = "mode"

_SAMPLE: Final = """\
graph 1
input %x: fp32[1,8,16,16]
constant %v: fp32[8,8,3,3]
constant %w: fp32[8,8,3,3]
%a: fp32[1,8,16,16] = conv2d(%x, %v, None, (1, 1), (1, 1), (1, 1), 1)
%p: fp32[1,8,8,8] = aten.max_pool2d.default(%a, (2, 2), (2, 2))
%y: fp32[1,8,8,8] = conv2d(%p, %w, None, (1, 1), (1, 1), (1, 1), 1)
return %y
"""

MODES: Final[dict[str, dict[str, dict[str, object]]]] = {
    "cuda": {
        "default": {},
        "1x1-as-mm": {"conv_1x1_as_mm": True, "coordinate_descent_tuning": True},
        "max-autotune": {"max_autotune": True, "conv_1x1_as_mm": True, "coordinate_descent_tuning": True},
    },
    "cpu": {"default": {}, "max-autotune": {"max_autotune": True}},
}
"""By device, Inductor's options by the knob's value: the default first. (`torch.compile`'s CUDA graphs are the program's own.)"""


class _Compiled(Executable):
    """A compiled net on a GPU: its constants are arguments. Its results are new tensors."""

    allocates_results = True

    def __init__(self, problem: SubgraphProblem, target: Target, mode: str, *, deterministic: bool) -> None:
        self._problem, self._device = problem, torch.device(target.device)
        self._results = SubgraphResults(problem)
        self.deterministic = deterministic
        self._function = _compiled(problem, target, mode, None)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Convolutions' weights in channels_last; the other constants as they are."""
        specs = [value.spec for value in parse_subgraph(self._problem.text).constants()]
        return tuple(
            tensor.detach().contiguous(memory_format=torch_format("ndhwc", len(spec.shape)))
            if len(spec.shape) == 4 or (len(spec.shape) == 5 and self._problem.layout in VOLUME_LAYOUTS)
            else tensor.detach()
            for tensor, spec in zip(constants, specs, strict=True)
        )

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        tensors = (*buffers.args, *buffers.constants)
        with torch.no_grad(), convolutions("as_torch", self._device):
            made = self._function(*tensors)
        self._results.store(made, tensors, buffers.results)


class _Frozen(Executable):
    """A compiled net on a CPU. `pack` compiles it with the weights, and gives the program as its only packed constant."""

    allocates_results = True

    def __init__(self, problem: SubgraphProblem, target: Target, mode: str, *, deterministic: bool) -> None:
        self._problem, self._target, self._mode = problem, target, mode
        self._results = SubgraphResults(problem)
        self.deterministic = deterministic
        self._packed: tuple[tuple[torch.Tensor, ...], Packed] | None = None

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The program; the one that was compiled last if it has the same weights."""
        held = tuple(tensor.detach() for tensor in constants)
        if self._packed is not None and all(map(torch.equal, self._packed[0], held)):
            return self._packed[1]
        function = _compiled(self._problem, self._target, self._mode, held)
        self._packed = (held, (function, held))
        return self._packed[1]

    def resident_bytes(self, constants: Packed) -> int:
        """Bytes of the weights, which the program holds in oneDNN's arrangement."""
        return sum(tensor.numel() * tensor.element_size() for tensor in constants[1])

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        del workspace
        function, held = buffers.constants
        with torch.no_grad():
            made = function(*buffers.args)
        self._results.store(made, (*buffers.args, *held), buffers.results)


class InductorWhole(Engine):
    """PyTorch's compiler, for whole nets."""

    id = "inductor.whole"
    family = "compiler"
    trusted = False
    builds_on_device = True
    starts_quickly = False
    patterns = (PATTERN,)
    only_its_patterns = True
    only_numerics = ("as_torch", "half")
    build_patience = 5.0
    quick_settings = 0

    def is_offered(self, settings: Settings) -> bool:
        """Not at effort `none`, which promises an answer at once."""
        return super().is_offered(settings) and settings.effort is not Effort.NONE

    def samples(self) -> Sequence[Problem]:
        """Two convolutions with a pooling between them."""
        return (SubgraphProblem(_SAMPLE, "nhwc"),)

    def supports(self, problem: Problem, target: Target) -> Support:
        """Subgraphs of several layers with constant weights, in nhwc."""
        if not isinstance(problem, SubgraphProblem):
            return Support.no(f"compiles nets, got {kind_in_words(problem)}")
        support = torch_support(problem)
        if not support:
            return support
        if problem.layout == "nchw":
            return Support.no("is compiled in one memory format, nhwc, because convolutions inside choose their own")
        support = compiler_here(target)
        return _is_net(parse_subgraph(problem.text)) if support else support

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Inductor's modes."""
        del problem
        return tuple(Knobs.of(**{MODE: mode}) for mode in MODES[target.device])

    def nondeterminism_reason(self, problem: Problem, knobs: Knobs, target: Target) -> str:
        """Subgraphs with operators that the compiler turns into atomic operations, or leaves to a nondeterministic ATen."""
        del knobs
        assert isinstance(problem, SubgraphProblem)
        return nondeterminism.describe(nondeterminism.in_inductor(parse_subgraph(problem.text), target.device))

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile, on a CPU when the weights are packed; raises CompileError with the compiler's message."""
        assert isinstance(problem, SubgraphProblem)
        steady = not self.nondeterminism_reason(problem, knobs, target)
        made = _Frozen if target.device == "cpu" else _Compiled
        return made(problem, target, str(knobs[MODE]), deterministic=steady)


def _is_net(graph: Graph) -> Support:
    """Whether it is a subgraph with layers that are compiled together."""
    if layers_of(graph.nodes) < LEAST_LAYERS:
        return Support.no(f"compiles several layers together, got {layers_of(graph.nodes)}")
    if reason := why_not_plain(graph):
        return Support.no(reason)
    if any(value.spec.elements == 0 for value in graph.values.values()):
        return Support.no("needs tensors with elements, got an empty one")
    return Support.yes()


def _compiled(
    problem: SubgraphProblem, target: Target, mode: str, constants: Sequence[torch.Tensor] | None
) -> Callable[..., Any]:
    """A function of the args (and constants, if none are given), in order, that gives the results in nhwc.

    Raises:
        CompileError: with the compiler's message.
    """
    try:
        return _compile(problem, target, MODES[target.device][mode], constants)
    except Exception as error:  # Inductor and its compilers raise many types; the message goes into the log
        words = str(error).strip() or type(error).__name__
        raise CompileError(InductorWhole.id, words.splitlines()[0], words) from error


def _compile(
    problem: SubgraphProblem, target: Target, options: dict[str, object], constants: Sequence[torch.Tensor] | None
) -> Callable[..., Any]:
    # Importing these takes about a second, which only those pay who build.
    import torch._inductor.config as settings
    from torch._inductor import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = parse_subgraph(problem.text)
    run = compile_graph(graph)
    inputs = len(graph.inputs)
    layouts = [torch_format(problem.layout, len(graph.values[name].spec.shape)) for name in graph.outputs]

    def net(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = run(tensors[:inputs], tensors[inputs:])
        return tuple(t.contiguous(memory_format=layout) for t, layout in zip(made, layouts, strict=True))

    args = [example(graph.values[name].spec, problem.layout, target.device) for name in graph.inputs]
    if constants is None:
        weights_in = "ndhwc" if problem.layout in VOLUME_LAYOUTS else "nhwc"
        weights = [example(value.spec, weights_in, target.device) for value in graph.constants()]
    else:
        weights = list(constants)
    own = {"cpp.threads": target.units, "freezing": True} if target.device == "cpu" else {"compile_threads": 1}
    if target.device == "cuda":
        keep_triton_cache()
    patch: Any = cast("Any", settings).patch
    compiled: Callable[..., Callable[..., Any]] = cast("Any", compile_fx).compile_fx
    with with_dynamo(), COMPILING, torch.no_grad(), patch({**COMMON_OPTIONS, **own, **options}):
        traced = make_fx(net, tracing_mode="fake")(*args, *weights)
        if constants is None:
            return compiled(traced, [*args, *weights])
        _hold(traced, inputs, constants)
        return compiled(traced, args)


def _hold(traced: torch.fx.GraphModule, inputs: int, constants: Sequence[torch.Tensor]) -> None:
    """Make attributes of a traced module's arguments behind the first, so that the compiler knows their values.

    before: arg %w; %y = aten.convolution(%x, %w, ...)
    after:  %w = get_attr _constant0; ...
    """
    arguments = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for index, (node, tensor) in enumerate(zip(arguments[inputs:], constants, strict=True)):
        name = f"_constant{index}"
        traced.register_buffer(name, tensor)
        with traced.graph.inserting_before(node):
            held = traced.graph.get_attr(name)
        held.meta = dict(node.meta)
        node.replace_all_uses_with(held)
        traced.graph.erase_node(node)
    traced.recompile()


ENGINE = InductorWhole()
