"""OpenVINO on the model that torch.onnx exported, for latency."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, cast

import numpy as np

from convoy.compare.case import Case
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig, Outputs, UnsupportedCaseError
from convoy.compare.layer_kinds import by_kind

# Optional, and its stubs lack many properties.
openvino = cast("Any", import_module("openvino"))
properties = cast("Any", import_module("openvino.properties"))

TYPES: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


class OpenVino:
    """The CPU plugin. Its arithmetic type is set, because its default may be narrower than the case's."""

    def ways(self, case: Case, material: CaseInputs) -> Sequence[FrameworkConfig]:
        """One configuration: the latency hint."""
        if case.training:
            raise UnsupportedCaseError("OpenVINO does not train")
        if case.device != "cpu":
            raise UnsupportedCaseError("OpenVINO has no plugin for NVIDIA GPUs")
        words = f"latency hint, {TYPES[case.dtype]}, {case.threads} threads"
        return [FrameworkConfig(words, partial(_build, case, material))]


FRAMEWORK = OpenVino()


def _compile(case: Case, material: CaseInputs, *, profile: bool) -> Any:
    core = openvino.Core()
    return core.compile_model(
        str(material.onnx_path),
        "CPU",
        {
            properties.hint.performance_mode(): properties.hint.PerformanceMode.LATENCY,
            properties.hint.inference_precision(): TYPES[case.dtype],
            properties.inference_num_threads(): case.threads,
            properties.hint.enable_cpu_pinning(): False,
            properties.enable_profiling(): profile,
        },
    )


def _build(case: Case, material: CaseInputs) -> BuiltModel:
    compiled = _compile(case, material, profile=False)
    request = compiled.create_infer_request()
    kind = np.float32 if case.dtype != "fp16" else np.float16
    x = material.input().astype(kind)
    request.set_input_tensor(openvino.Tensor(x, shared_memory=True))

    def check() -> Outputs:
        request.infer()
        count = len(compiled.outputs)
        return {f"out{i}": np.asarray(request.get_output_tensor(i).data, np.float32) for i in range(count)}

    def kinds() -> dict[str, float]:
        profiled = _compile(case, material, profile=True).create_infer_request()
        profiled.set_input_tensor(openvino.Tensor(x, shared_memory=True))
        profiled.infer()
        profiled.infer()
        return by_kind((i.node_type, i.real_time.total_seconds() * 1e3) for i in profiled.get_profiling_info())

    return BuiltModel(request.infer, check, kinds=kinds)
