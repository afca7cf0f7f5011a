"""Load an ONNX file as an exported PyTorch module, checked against ONNX Runtime where that is installed."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from convoy.errors import InputError
from convoy.typed_torch import from_numpy, l2_norm
from convoy.untrusted import escape_controls
from convoy.zoo.exported import ready_module
from convoy.zoo.onnx_model.module import OnnxModule
from convoy.zoo.onnx_model.read import OnnxGraph, read_graph
from convoy.zoo.onnx_model.value import UnsupportedOnnxError

SIDE: Final = 224
"""Pixels of a side that the file leaves open."""

MOST_ERROR: Final = 1e-3
"""Relative L2 error to ONNX Runtime above which a file was not understood: both compute in fp32, and differ by rounding."""

MOST_VALUES: Final = 1 << 28
"""Elements of one value, for one image: 1 GiB in fp32."""


def load_onnx(file: Path, dtype: torch.dtype) -> nn.Module:
    """Load a net as a module in evaluation mode; `example_input_array` holds example inputs.

    Sizes that the file leaves open may vary where the graph allows it. Where ONNX Runtime is installed, the module's outputs are
    compared with its outputs once.

    Args:
        file: an .onnx file; weights may lie in a file beside it.
        dtype: that the module computes in.

    Raises:
        InputError: it is not there, is damaged, holds something that has no form in PyTorch, or gives other outputs than ONNX
            Runtime.
    """
    if not file.exists():
        raise InputError("model", str(file), "an .onnx file that is there")
    try:
        graph = read_graph(file)
        module = OnnxModule(graph).eval()
        args = example_inputs(graph)
        exported = _exported(module, graph, args, dtype)
    except UnsupportedOnnxError as error:
        words = escape_controls(str(error))[:300]
        todo = f"It has {words}. Use the PyTorch model that it was exported from, or export it again without these."
        raise InputError("model", str(file), "a convolutional net of supported operators", todo) from error
    except InputError:
        raise
    except Exception as error:  # a graph whose sizes do not fit each other makes torch fail in any way
        first = escape_controls((str(error).strip().splitlines() or [type(error).__name__])[0])[:300]
        raise InputError("model", str(file), "a graph that PyTorch can run", f"Running it failed: {first}") from error
    if dtype == torch.float32:
        _compare(file, module, args)
    return ready_module(exported, tuple(_to(one, dtype) for one in args))


def example_inputs(graph: OnnxGraph) -> tuple[torch.Tensor, ...]:
    """Standard normal inputs, seeded: batch 1 and `SIDE` pixels where the file leaves sizes open."""
    generator = torch.Generator().manual_seed(0)
    made: list[torch.Tensor] = []
    for name, sizes in graph.inputs.items():
        chosen = [size if size is not None else (1 if at == 0 else SIDE) for at, size in enumerate(sizes)]
        total = 1
        for size in chosen:
            total *= max(1, size)
        _check_size(total, name)
        made.append(torch.randn(chosen, generator=generator))
    return tuple(made)


def _exported(module: nn.Module, graph: OnnxGraph, args: tuple[torch.Tensor, ...], dtype: torch.dtype) -> nn.Module:
    """The module as torch.export captures it, with open sizes kept open where that works."""
    given = tuple(_to(one, dtype) for one in args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_open_sizes(module, graph, given, dtype) or _export(module, dtype, given, None)


def _with_open_sizes(
    module: nn.Module, graph: OnnxGraph, args: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> nn.Module | None:
    """The module for every size that the file leaves open; None where there is none, or torch.export cannot follow them."""
    is_open = [[at for at, size in enumerate(sizes) if size is None] for sizes in graph.inputs.values()]
    if not any(is_open):
        return None
    wide = tuple(_wide(one, sides) for one, sides in zip(args, is_open, strict=True))
    shapes = tuple(dict.fromkeys(sides, torch.export.Dim.AUTO) for sides in is_open)
    try:
        return _export(module, dtype, wide, shapes)
    except UnsupportedOnnxError:
        raise
    except Exception:  # torch.export fails in many ways on sizes that a graph computes with
        return None


def _export(module: nn.Module, dtype: torch.dtype, args: tuple[torch.Tensor, ...], shapes: Any) -> nn.Module:
    dynamic = None if shapes is None else {"args": shapes}
    program = torch.export.export(module.to(dtype), args, dynamic_shapes=dynamic, strict=False)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        count = value.numel() if isinstance(value, torch.Tensor) else 0
        if type(count) is int:  # and no symbol of a size that may vary
            _check_size(count, node.name)
    return program.module()


def _check_size(count: int, name: str) -> None:
    """Refuse a graph with a value that no memory holds, before it is computed."""
    if count > MOST_VALUES:
        raise UnsupportedOnnxError(f"the value {name[:60]} with {count} elements")


def _wide(example: torch.Tensor, sides: list[int]) -> torch.Tensor:
    """An example whose open sizes are not 1: torch.export takes a size of 1 for a fixed one."""
    for side in sides:
        if example.shape[side] == 1:
            example = torch.cat([example, example], side)
    return example


def _to(example: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return example.to(dtype) if example.is_floating_point() else example


def _compare(file: Path, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        return
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names: list[str] = [one.name for one in session.get_inputs()]
        wanted: list[Any] = session.run(None, {name: one.numpy() for name, one in zip(names, args, strict=True)})
    except Exception:  # what ONNX Runtime cannot run is no reference
        return
    with torch.no_grad():
        found = module(*args)
    outputs: tuple[torch.Tensor, ...] = (
        cast("tuple[torch.Tensor, ...]", found) if isinstance(found, tuple) else (found,)
    )
    for own, other in zip(outputs, wanted, strict=True):
        exact = from_numpy(other)
        if not exact.is_floating_point() or not l2_norm(exact):
            continue
        error = l2_norm(own - exact) / l2_norm(exact)
        if not error <= MOST_ERROR:
            todo = f"The relative error is {error:.1e}. Please report this file; use the PyTorch model that it was exported from."
            raise InputError("model", str(file), "a net that PyTorch computes as ONNX Runtime does", todo)
