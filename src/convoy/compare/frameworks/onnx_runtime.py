"""ONNX Runtime on the model that torch.onnx exported, with all graph optimisations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np

from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, Outputs, UnsupportedCaseError
from convoy.compare.layer_kinds import by_kind

onnxruntime = cast("Any", import_module("onnxruntime"))  # optional, and it declares few types

PROFILED_CALLS = 3

NO_MEMORY = "no figure for memory: ONNX Runtime does not report the size of its arena on a GPU"
"""The driver's count by process does not help: process ids differ inside a container, and it includes CUDA's context."""


class OnnxRuntime:
    """The CPU or the CUDA execution provider."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """All graph optimisations; on a GPU also NHWC convolutions."""
        if case.training:
            raise UnsupportedCaseError("ONNX Runtime trains no more: its training packages ended with version 1.19")
        if case.dtype == "bf16":
            raise UnsupportedCaseError("ONNX Runtime's convolutions have no bf16")
        if case.device == "cpu":
            return [FrameworkConfig(f"ORT_ENABLE_ALL, {case.threads} threads", partial(_build, case, material, {}))]
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise UnsupportedCaseError("this ONNX Runtime is built without CUDA: pip install onnxruntime-gpu")
        options = {"cudnn_conv_algo_search": "EXHAUSTIVE", "use_tf32": "1"}
        return [
            FrameworkConfig(
                f"ORT_ENABLE_ALL, CUDA, exhaustive search, {words}, bound input and output",
                partial(_build, case, material, {**options, "prefer_nhwc": nhwc}),
            )
            for nhwc, words in (("1", "NHWC"), ("0", "NCHW"))
        ]


FRAMEWORK = OnnxRuntime()


def _session(case: Case, material: CaseInputs, cuda: dict[str, str], *, profile: str = "") -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = case.threads
    options.log_severity_level = 3
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    providers = [("CUDAExecutionProvider", cuda)] if case.device == "cuda" else ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(str(material.onnx_path), options, providers=providers)


def _build(case: Case, material: CaseInputs, cuda: dict[str, str]) -> BuiltModel:
    session = _session(case, material, cuda)
    kind = np.float16 if case.dtype == "fp16" else np.float32
    name, x = session.get_inputs()[0].name, material.input().astype(kind)
    names = [output.name for output in session.get_outputs()]
    if case.device == "cuda":
        binding = session.io_binding()
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x, "cuda", 0))
        for output in names:
            binding.bind_output(output, "cuda")

        def run() -> Any:
            session.run_with_iobinding(binding)
            return binding.get_outputs()

        def arrays() -> Sequence[Any]:
            return [value.numpy() for value in run()]
    else:

        def run() -> Any:
            return session.run(names, {name: x})

        arrays = run

    def check() -> Outputs:
        return {f"out{i}": np.asarray(array, np.float32) for i, array in enumerate(arrays())}

    built = BuiltModel(run, check, kinds=lambda: _kinds(case, material, cuda, name, x))
    if case.device == "cuda":
        built.peak_memory, built.notes = (lambda: None), [NO_MEMORY]
    return built


def _kinds(case: Case, material: CaseInputs, cuda: dict[str, str], name: str, x: Any) -> dict[str, float]:
    """Milliseconds of one call by layer kind, from the profile of a separate session."""
    with tempfile.TemporaryDirectory() as folder:
        session = _session(case, material, cuda, profile=str(Path(folder) / "profile"))
        session.run(None, {name: x})
        for _ in range(PROFILED_CALLS):
            session.run(None, {name: x})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    count = len(nodes) // (PROFILED_CALLS + 1)
    timed = nodes[count:]  # without the first call
    return by_kind((e["args"]["op_name"], e["dur"] / 1e3 / PROFILED_CALLS) for e in timed)
