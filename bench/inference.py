"""How much faster is a net on this GPU? Question `inference`, metric `latency_ms`.

Convoy beside eager PyTorch (NCHW and channels_last, cudnn.benchmark), the same captured as a CUDA graph, and torch.compile with
freezing; same weights, same input, outputs checked against float64, all timed in turn in one process. `max-autotune` may
compile for five minutes; a peer that fails or takes longer is left out, and a line says so. JAX, which needs a process of its
own, is in `bench/compare.py`.

    python bench/inference.py [--nets resnet50,googlenet] [--batch 1,32] [--dtype fp16,fp32]
                              [--peers eager,graph,inductor,max-autotune]
"""

from __future__ import annotations

import argparse
import copy
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from record import Recorder
from torch import nn

import convoy
from convoy.measurement import detect_target
from convoy.pipeline import optimize_model
from convoy.pipeline.verdict import errors_against, exact_outputs, interleave, stock_graph
from convoy.zoo import input_size, load_model

NETS = "alexnet,vgg19,googlenet,resnet50,inception_v3,mobilenet_v2,densenet121,efficientnet_b0"
WORSE = 3.0
LEAST_ERROR = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}
"""An output is right within this relative L2 error, or `WORSE` times that of the stock model: nets with random weights magnify
rounding (ResNet-50 with TF32 products is 1.5e-2 off as PyTorch runs it)."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


COMPILE_S = 300
"""What a compiler may take."""


def compiled(model: nn.Module, x: torch.Tensor, mode: str) -> Callable[[], object]:
    """torch.compile with frozen weights, warmed up."""
    from torch._inductor import config

    config.freezing = True
    torch._dynamo.reset()
    fast = torch.compile(model, mode=mode)
    with within(COMPILE_S):
        for _ in range(4):
            fast(x)
        torch.cuda.synchronize()
    return lambda: fast(x)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def late(*signal_and_frame: object) -> None:
        del signal_and_frame
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def eager(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """The module as it is; cuDNN looks for its fastest kernels in the first calls."""
    torch.backends.cudnn.benchmark = True
    for _ in range(3):
        model(x)
    return lambda: model(x)


def peers(model: nn.Module, x: torch.Tensor, wanted: list[str]) -> dict[str, Callable[[], object]]:
    """The other ways to run the model, by provider name."""
    nhwc = copy.deepcopy(model).to(memory_format=torch.channels_last)
    image = x.contiguous(memory_format=torch.channels_last)
    makers: dict[str, tuple[str, Callable[[], Callable[[], object]]]] = {
        "torch.eager": ("eager", lambda: eager(model, x)),
        "torch.eager.nhwc": ("eager", lambda: eager(nhwc, image)),
        "torch.graph": ("graph", lambda: stock_graph(model, (x,), {})),
        "torch.graph.nhwc": ("graph", lambda: stock_graph(nhwc, (image,), {})),
        "inductor.reduce-overhead": ("inductor", lambda: compiled(nhwc, image, "reduce-overhead")),
        "inductor.max-autotune": ("max-autotune", lambda: compiled(nhwc, image, "max-autotune")),
    }
    runs: dict[str, Callable[[], object]] = {}
    for provider, (word, make) in makers.items():
        if word in wanted:
            try:
                runs[provider] = make()
            except Exception as error:  # a peer that fails is said to have failed
                print(f"{provider}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
    return runs


def compare(net: str, batch: int, dtype: str, wanted: list[str], recorder: Recorder, effort: str) -> str:
    """Check and time one net; records every figure and returns a line for people."""
    model = load_model(net).eval().cuda()
    size = input_size(net)
    side = size if isinstance(size, int) else size[-1]
    x = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(batch)).cuda()
    exact = exact_outputs(model, (x,), {}, 0)
    model, x = model.to(DTYPES[dtype]), x.to(DTYPES[dtype])
    start = time.perf_counter()
    result = optimize_model(model, (x,), name=net, settings=convoy.Settings(effort=convoy.Effort(effort)))
    tuned_s = time.perf_counter() - start
    runs = peers(model, x, wanted)
    program = result.program.programs[0]
    if program.runnable is not None:
        program((x,), {})
        runs["convoy"] = program.runnable.replay  # type: ignore[attr-defined]
    timed = interleave(runs, cuda=True)
    stock = errors_against(model(x), exact).rel_l2_error
    line = f"{net:16} b{batch:<3} {dtype}  tuned {tuned_s:5.0f} s "
    for name, figures in timed.items():
        output = result.program(x) if name == "convoy" else runs[name]()
        error = errors_against(output, exact).rel_l2_error
        recorder.add(
            subject=net,
            batch=batch,
            dtype=dtype,
            provider=name,
            metric="latency_ms",
            unit="ms",
            p50=figures.median_ms,
            p20=figures.median_ms - figures.spread_ms,
            p80=figures.median_ms + figures.spread_ms,
            ok=error < max(LEAST_ERROR[dtype], WORSE * stock),
            note=f"rel_l2_to_float64={error:.1e}" + (f" tuning_s={tuned_s:.0f}" if name == "convoy" else ""),
        )
        line += f"  {name} {figures.median_ms:.3f} ({error:.0e})"
    others = [figures.median_ms for name, figures in timed.items() if name != "convoy"]
    gain = min(others) / timed["convoy"].median_ms if "convoy" in timed and others else math.nan
    return line + f"  gain {gain:.2f}"


def main() -> None:
    """Run the comparison, print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--peers", default="graph,inductor")
    parser.add_argument("--effort", default="quick")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    target = detect_target("cuda")
    recorder = Recorder(
        "inference",
        device=target.name,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        protocol="interleaved rounds=15, graph replays, median, p20 and p80 as median -+ spread",
    )
    lines: list[str] = []
    with torch.no_grad():
        for net in options.nets.split(","):
            for batch in options.batch.split(","):
                for dtype in options.dtype.split(","):
                    wanted = options.peers.split(",")
                    lines.append(compare(net, int(batch), dtype, wanted, recorder, options.effort))
                    print(lines[-1], flush=True)
                    recorder.write()
    print("\nmilliseconds, medians (relative L2 error to float64)")
    print("\n".join(lines))
    print(recorder.path)


if __name__ == "__main__":
    main()
