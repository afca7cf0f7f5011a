"""The child of an options run: builds the model under a set of PyTorch's options, checks it, and times several sets in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from convoy.compare.case import Case
from convoy.compare.case_inputs import read
from convoy.compare.checking import loss_error, part, relative_error
from convoy.compare.child_failure import WrongResultError, failure
from convoy.compare.framework_session import LEAST_SAMPLE_S, SETTLED_S
from convoy.compare.frameworks.base import CaseInputs, Outputs, UnsupportedCaseError
from convoy.compare.frameworks.torch_eager import captured, captured_call
from convoy.compare.frameworks.torch_model import FORMATS, FrameworkStep, check_step, load_net, outputs_of
from convoy.compare.options.data_loader import fed_by
from convoy.compare.rounding_limits import half_limits
from convoy.measurement.device.detect import compiler_version
from convoy.target import usable_cores
from convoy.typed_torch import in_memory_format, torch_compile

_TYPES: Final = {"autocast_bf16": "bf16", "autocast_fp16": "fp16", "bf16": "bf16", "fp16": "fp16"}
_COMPILE: Final = {
    "compile": "default",
    "compile_freezing": "default",
    "compile_reduce_overhead": "reduce-overhead",
    "compile_max_autotune": "max-autotune",
    "compile_freezing_reduce_overhead": "reduce-overhead",
}
_FROZEN: Final = frozenset({"compile_freezing", "compile_freezing_reduce_overhead"})


def facts(case: Case) -> dict[str, Any]:
    """Features of this device, by the words in `TorchOption.needs`: true, or the reason why not."""
    cores = usable_cores()
    found: dict[str, Any] = {
        "threads": case.threads > 1 or "there is one thread only",
        "more_cores": cores > case.threads or "there are no more cores",
    }
    if case.device == "cuda":
        major = torch.cuda.get_device_capability()[0]
        found["tf32"] = found["bf16"] = major >= 8 or "the GPU has no such tensor cores"
        found["compiler"] = True
    else:
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported() if torch.backends.mkldnn.is_available() else False
        found["bf16"] = has_bf16 or "the CPU has no bf16 instructions"
        found["compiler"] = bool(compiler_version()) or "there is no C++ compiler"
    return found


def serve_trials(case: Case, folder: Path, say: Callable[[dict[str, Any]], None], read_line: Callable[[], str]) -> None:
    """Build, drop and time settings as the parent asks."""
    torch._dynamo.config.recompile_limit = 1000  # every setting is a model of its own, and none must fall back to eager
    torch._dynamo.config.accumulated_recompile_limit = 10000
    material = read(folder)
    limits: dict[str, dict[str, float]] = {}
    variants: dict[str, ModelVariant] = {}
    say({"facts": facts(case)})
    while line := read_line():
        message = json.loads(line)
        if message["do"] == "build":
            say({"stage": f"build {message['name']}"})
            try:
                variants[message["name"]] = variant = ModelVariant(
                    case, material, frozenset(message["options"]), limits
                )
                say({"built": variant.prepare()})
            except Exception as error:  # whatever an option does is a row with its reason
                variants.pop(message["name"], None)
                clear(case)
                say({"built": {"failed": failure(error, "build")}})
        elif message["do"] == "drop":
            variants.pop(message["name"], None)
            clear(case)
        elif message["do"] == "rounds":
            say({"samples": rounds([variants[name] for name in message["names"]], int(message["rounds"]))})
        elif message["do"] == "load":
            say({"loaded": variants[message["name"]].fed_by(int(message["workers"]))})


def clear(case: Case) -> None:
    """Free the memory that a setting held: on a GPU the next one needs it."""
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()


def rounds(variants: list[ModelVariant], count: int) -> list[list[float]]:
    """Milliseconds of a call of each, in interleaved rounds."""
    samples: list[list[float]] = [[] for _ in variants]
    calls = [max(1, round(LEAST_SAMPLE_S / max(variant.timed(1), 1e-7))) for variant in variants]
    for _ in range(count):
        for variant, repeats, own in zip(variants, calls, samples, strict=True):
            if not own or own[-1] * repeats < SETTLED_S * 1e3:
                variant.timed(1)
            own.append(variant.timed(repeats) / repeats * 1e3)
    return samples


class ModelVariant:
    """The model under a set of options; `-NAME` takes a usual one away.

    Args:
        case: net and setting.
        material: its weights, input and exact results.
        options: the set.
        limits: allowed errors of settings of a half type, by dtype; computed at the first use.
    """

    def __init__(
        self, case: Case, material: CaseInputs, options: frozenset[str], limits: dict[str, dict[str, float]]
    ) -> None:
        self.options, self.material, self._limits = options, material, limits
        kind = next((_TYPES[name] for name in options if name in _TYPES), "fp32")
        self.case = dataclasses.replace(case, dtype=kind)
        self._check: Callable[[], Outputs] = dict
        self._net = load_net(
            dataclasses.replace(case, dtype=kind if options & {"bf16", "fp16"} else "fp32"), material, keep_memory=False
        )
        with self._flags():
            self._run = self._train() if case.training else self._infer()

    def prepare(self) -> dict[str, float]:
        """Run and check it: error, and seconds of the first call (compilation) and of a later one.

        Raises:
            WrongResultError: outputs or gradients are too far off.
        """
        start = time.perf_counter()
        with self._flags():
            outputs = self._check()
        first_s = time.perf_counter() - start
        error = self._judge(outputs)
        self.timed(1)
        return {"error": error, "first_s": first_s, "call_s": min(self.timed(1) for _ in range(2))}

    def timed(self, calls: int) -> float:
        """Seconds of some calls."""
        with self._flags():
            self._wait()
            start = time.perf_counter()
            for _ in range(calls):
                self._run()
            self._wait()
            return time.perf_counter() - start

    def fed_by(self, workers: int) -> list[float]:
        """Milliseconds of each step when a data loader with so many workers feeds it."""

        def step() -> None:
            self._run()
            self._wait()

        with self._flags():
            return fed_by(self._net.x, self._net.labels, step, workers)

    def _wait(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()

    def _judge(self, outputs: Outputs) -> float:
        exact, limits = self.material.exact(), self._allowed()
        if not self.case.training:
            error, limit = relative_error(outputs, exact), limits["out"]
        else:
            gradients = part(outputs, "grad:")
            error, limit = relative_error(gradients, {name: exact[name] for name in gradients}), limits["grad"]
            off = loss_error(outputs, exact, "loss1")
            if "-bias_gradient" not in self.options and not off <= limits["loss"]:
                raise WrongResultError(
                    f"loss after the first step: relative error {off:.1e}, limit {limits['loss']:.1e}"
                )
        if not error <= limit:
            raise WrongResultError(f"relative L2 error {error:.1e}, limit {limit:.1e}")
        return error

    def _allowed(self) -> dict[str, float]:
        kind = self.case.dtype
        if kind == "fp32":
            return self.material.facts["limits"]
        if kind not in self._limits:
            self._limits[kind] = half_limits(self.case, self.material, kind)
        return self._limits[kind]

    def _prepared_model(self) -> nn.Module:
        model = self._net.model
        if "fuse_conv_bn" in self.options:
            from torch.fx.experimental.optimization import fuse

            model = fuse(model)
        if "channels_last" in self.options:
            model = in_memory_format(model, FORMATS["channels_last"])
            self._net.x = self._net.x.contiguous(memory_format=FORMATS["channels_last"])
        self._net.model = model
        return model

    def _compiled(self, model: nn.Module) -> Callable[..., Any]:
        from torch._inductor import config

        mode = next((_COMPILE[name] for name in self.options if name in _COMPILE), None)
        config.freezing = not _FROZEN.isdisjoint(self.options)
        return model if mode is None else torch_compile(model, mode=mode, dynamic=False)

    def _infer(self) -> Callable[[], Any]:
        model = self._prepared_model()
        net = self._net
        if "cuda_graph" in self.options:
            replay = captured_call(lambda: model(net.x))
            self._check = lambda: outputs_of(replay())
            return replay
        forward = self._compiled(model)

        def run() -> Any:
            return forward(net.x)

        self._check = lambda: outputs_of(run())
        return run

    def _train(self) -> Callable[[], Any]:
        model = self._prepared_model()
        net = self._net
        if "-no_first_data_gradient" in self.options:
            net.x.requires_grad_()
        if "-bias_gradient" in self.options:
            for name, parameter in model.named_parameters():
                if name.rpartition(".")[2] == "bias":
                    parameter.requires_grad_(False)
        optimizer: dict[str, dict[str, Any]] = {
            "fused_optimizer": {"fused": True},
            "foreach_optimizer": {"foreach": True},
        }
        chosen = next((optimizer[name] for name in self.options if name in optimizer), dict[str, Any]())
        forward = self._compiled(model)
        step = FrameworkStep(net, self.case, forward, optimizer=chosen, set_to_none="-set_to_none" not in self.options)
        if "cuda_graph" in self.options:
            if step.scaler is not None:
                raise UnsupportedCaseError("a step with a GradScaler asks the host whether it is taken: no CUDA graph")
            replay, self._check = captured(net, step)
            return replay
        self._check = lambda: check_step(step, step.gradients)
        return step

    @contextlib.contextmanager
    def _flags(self) -> Generator[None]:
        """The process-wide switches and contexts of this set; others keep PyTorch's defaults."""
        has = self.options.__contains__
        threads = self.case.threads
        threads = (
            max(1, threads // 2) if has("half_threads") else (os.cpu_count() or 1) if has("all_threads") else threads
        )
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_flush_denormal(has("flush_denormal"))
        torch.backends.cudnn.benchmark = has("cudnn_benchmark")
        if self.case.device == "cuda":
            torch.set_float32_matmul_precision("high" if has("tf32") else "highest")
            torch.backends.cudnn.allow_tf32 = not has("-cudnn_tf32")
        with contextlib.ExitStack() as stack:
            if has("-onednn"):
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            if has("-cudnn"):
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            if not self.case.training:
                # Freezing works without gradients only, and a graph is captured without them.
                frozen = not _FROZEN.isdisjoint(self.options)
                quiet = frozen or has("no_grad") or has("cuda_graph")
                stack.enter_context(
                    torch.inference_mode() if has("inference_mode") and not frozen
                    else torch.no_grad() if quiet else contextlib.nullcontext()
                )  # fmt: skip
                for kind in ("bf16", "fp16"):
                    if has(f"autocast_{kind}"):
                        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
                        # A graph that is captured inside would read casts of weights that are gone when it is replayed.
                        keep = not has("cuda_graph")
                        stack.enter_context(torch.autocast(self.case.device, dtype=dtype, cache_enabled=keep))
            yield
