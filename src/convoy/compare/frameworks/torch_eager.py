"""PyTorch without a compiler: eager on a CPU, one captured CUDA graph on a GPU, in both memory formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from convoy.collection_pause import collection_paused
from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, Outputs, UnsupportedCaseError
from convoy.compare.frameworks.torch_model import (
    FrameworkNet,
    FrameworkStep,
    built,
    check_step,
    load_net,
    outputs_of,
    set_flags,
)
from convoy.pipeline.check.stock_graph import stock_graph


class Torch:
    """PyTorch as it comes, at its best setting.

    Args:
        layouts: memory formats to try.
        graph: on a GPU, capture the work as one CUDA graph.
    """

    def __init__(self, layouts: Sequence[str] = ("channels_last", "nchw"), *, graph: bool = True) -> None:
        self.layouts, self.graph = tuple(layouts), graph

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """Both memory formats; on a GPU as captured graphs, with cudnn.benchmark."""
        if case.training and case.dtype == "fp16" and case.device == "cpu":
            raise UnsupportedCaseError("training in fp16 on a CPU: PyTorch has no such autocast; use bf16")
        found: list[FrameworkConfig] = []
        graph = self.graph and case.device == "cuda"
        for layout in self.layouts:
            build = partial(_train if case.training else _infer, case, material, layout, graph=graph)
            found.append(FrameworkConfig(f"{_words(case, graph=graph)}, {layout}", build))
        return found


FRAMEWORK = Torch()


def _words(case: Case, *, graph: bool) -> str:
    words = "one CUDA graph" if graph else "eager" if case.training else "eager, inference_mode"
    words += ", cudnn.benchmark, TF32 where fp32" if case.device == "cuda" else ""
    return words + (", fused SGD" if case.training else "")


def _infer(case: Case, material: CaseInputs, layout: str, *, graph: bool) -> BuiltModel:
    net = load_net(case, material, layout)
    set_flags(case.device)
    if graph:
        read = net.x.clone()  # which the graph reads; a call copies its input there, as `make_graphed_callables` does
        replay = stock_graph(net.model, (read,), {})

        def call() -> Any:
            read.copy_(net.x)
            return replay()

        return built(call, lambda: outputs_of(call()), case, replay=replay)

    @torch.inference_mode()
    def run() -> Any:
        return net.model(net.x)

    return built(run, lambda: outputs_of(run()), case)


def _train(case: Case, material: CaseInputs, layout: str, *, graph: bool) -> BuiltModel:
    net = load_net(case, material, layout)
    set_flags(case.device)
    if graph and case.dtype != "fp16":  # a gradient scaler waits for the device in each step
        return captured_training(net, case)
    step = FrameworkStep(net, case)
    return built(step, lambda: check_step(step, step.gradients), case)


def captured_training(net: FrameworkNet, case: Case, forward: Callable[..., Any] | None = None) -> BuiltModel:
    """A whole step, its optimizer included, as one CUDA graph; a call copies its batch to where the graph reads it.

    Args:
        net: model in training mode, input, labels.
        case: the setting.
        forward: called instead of the model (a compiled one), if given.
    """
    read = replace(net, x=net.x.clone(), labels=net.labels.clone())
    step = FrameworkStep(read, case, forward)
    replay, check = captured(read, step)

    def call() -> torch.Tensor:
        read.x.copy_(net.x)
        read.labels.copy_(net.labels)
        return replay()

    return built(call, check, case, replay=replay)


def captured_inference(net: FrameworkNet, case: Case, run: Callable[[torch.Tensor], Any]) -> BuiltModel:
    """What a function launches for an input, as one CUDA graph; a call copies its input to where the graph reads it.

    Args:
        net: the model and its input.
        case: the setting.
        run: launches it, warmed up so that nothing is compiled while it is captured.
    """
    read = net.x.clone()
    replay = captured_call(lambda: run(read))

    def call() -> Any:
        read.copy_(net.x)
        return replay()

    return built(call, lambda: outputs_of(call()), case, replay=replay)


def captured_call(run: Callable[[], Any]) -> Callable[[], Any]:
    """A call as one CUDA graph, with the kernels that PyTorch's present flags choose (`stock_graph` lets cuDNN search)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with collection_paused(), torch.cuda.graph(graph):
            outputs = run()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def captured(net: FrameworkNet, step: FrameworkStep) -> tuple[Callable[[], torch.Tensor], Callable[[], Outputs]]:
    """A whole step as one CUDA graph, and its check: the parameters are restored to their values before the capture."""
    before = {name: t.detach().clone() for name, t in net.model.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    step.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with collection_paused(), torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    def check() -> Outputs:
        with torch.no_grad():
            for name, t in net.model.state_dict().items():
                t.copy_(before[name])
            for state in step.optimizer.state.values():
                state["momentum_buffer"].zero_()
        return check_step(lambda: replay().clone(), step.gradients)

    return replay, check
