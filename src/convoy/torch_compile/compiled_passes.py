"""AOTAutograd's cut of a training graph: a forward and a backward pass, each of which is tuned in its first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from convoy.capture.recording.undecomposed import undecomposed
from convoy.settings import Settings
from convoy.torch_compile.training_graph import TracedGraph


@dataclass(frozen=True, slots=True)
class CompiledPasses:
    """What AOTAutograd made of a graph.

    Attributes:
        run: takes all the graph's inputs; it writes to those that the graph writes to.
        is_plain: whether there is no backward pass, no input is written to, and no result is a view of an input.
    """

    run: Callable[..., Any]
    is_plain: bool


def compile_passes(graph_module: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> CompiledPasses:
    """Have AOTAutograd cut a graph in forward and backward pass; each is tuned in its first call.

    AOTAutograd makes passes functional: what the graph writes to its inputs it copies back after the call, and results that are
    views of inputs it makes anew of those.

    Args:
        graph_module: the graph that Dynamo caught.
        example_inputs: its inputs.
        settings: what may be done.
    """
    from torch._dynamo.backends.common import aot_autograd

    plain: list[bool] = []

    def compiler(name: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]:
        def compile_pass(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            del inputs  # fake tensors: the first call brings real ones
            plain.append(name == "inference" and _is_plain())
            visible = 0 if name == "backward" else _visible()
            graph = TracedGraph(module, settings, "forward" if name == "inference" else name, visible)

            def run(args: list[Any]) -> Any:
                return graph(args)

            run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess] - AOTAutograd's word for one list, which may be emptied
            return run

        return compile_pass

    compilers = {"fw_compiler": "forward", "bw_compiler": "backward", "inference_compiler": "inference"}
    backend = aot_autograd(**{argument: compiler(name) for argument, name in compilers.items()})
    with undecomposed(deterministic=settings.deterministic):
        run = backend(graph_module, example_inputs)
    return CompiledPasses(run, plain == [True])


def _is_plain() -> bool:
    """Whether the graph that AOTAutograd compiles now writes to no input and returns no view of one."""
    from torch._functorch._aot_autograd.schemas import OutputType

    metadata = _metadata()
    if metadata is None:
        return False
    written = any(given.mutates_data or given.mutates_metadata for given in metadata.input_info)
    return not written and all(made.output_type is OutputType.non_alias for made in metadata.output_info)


def _visible() -> int:
    """How many results of the forward pass that AOTAutograd compiles now leave it; the others are for the backward pass."""
    metadata = _metadata()
    if metadata is None:
        return 0
    return metadata.num_mutated_inp_runtime_indices + metadata.num_outputs + metadata.num_intermediate_bases


def _metadata() -> Any:
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata
