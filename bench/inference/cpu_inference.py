"""How much faster is a net on this CPU? Question `cpu-inference`, metric `latency_ms`.

Convoy beside eager PyTorch (NCHW and channels_last), torch.compile and ONNX Runtime: same weights, same input, outputs
checked against eager, all timed in turn in one process (A B C A B C ...). Run it on a quiet machine:

    python bench/inference/cpu_inference.py [--nets alexnet,resnet50] [--batch 1,8] [--rounds 15] [--dtype bf16] [--numerics half]

With `--dtype bf16` models and inputs are bf16, and ONNX Runtime, whose CPU kernels lack it, is left out.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import convoy
from convoy.measurement import detect_target
from convoy.pipeline.check.end_to_end import Latency, interleave
from convoy.zoo import load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NETS = "alexnet,vgg16,googlenet,resnet50,mobilenet_v2,densenet121,efficientnet_b0"


def onnxruntime_call(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The model in ONNX Runtime with as many threads as torch has; None where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model, (x,), str(path), dynamo=True, external_data=False, verbose=False)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def peers(model: nn.Module, x: torch.Tensor, numerics: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Every way to run the model, by provider name."""
    import copy

    x_nhwc = x.contiguous(memory_format=torch.channels_last)
    model_nhwc = copy.deepcopy(model).to(memory_format=torch.channels_last)
    compiled = torch.compile(copy.deepcopy(model))
    start = time.perf_counter()
    fast = convoy.optimize(model, (x,), settings=convoy.Settings(numerics=numerics))
    print(f"  convoy tuned in {time.perf_counter() - start:.1f} s", flush=True)
    found: dict[str, Callable[[], torch.Tensor]] = {
        "torch.eager": lambda: model(x),
        "torch.eager.nhwc": lambda: model_nhwc(x_nhwc),
        "inductor.default": lambda: compiled(x),
        "convoy": lambda: fast(x),
    }
    onnx = onnxruntime_call(model, x) if x.dtype == torch.float32 else None
    if onnx is not None:
        found["onnxruntime"] = onnx
    return found


def compare(net: str, batch: int, options: argparse.Namespace, recorder: Recorder) -> dict[str, Latency]:
    """Check and time one net at one batch size, and record the figures."""
    torch._dynamo.reset()
    dtype, allowed = DTYPES[options.dtype], 1e-4 if (options.dtype, options.numerics) == ("fp32", "as_torch") else 5e-2
    model = load_model(net).eval()
    x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(batch))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = model(x)
        runs = peers(model.to(dtype), x.to(dtype), options.numerics)
        errors = {name: float((run().float() - wanted).norm() / wanted.norm()) for name, run in runs.items()}
        timed = interleave(runs, cuda=False, rounds=options.rounds)
    for name, figures in timed.items():
        recorder.add(
            subject=net,
            batch=batch,
            provider=name,
            metric="latency_ms",
            unit="ms",
            p50=figures.median_ms,
            p20=figures.median_ms - figures.spread_ms,
            p80=figures.median_ms + figures.spread_ms,
            dtype=options.dtype,
            numerics=options.numerics,
            ok=errors[name] < allowed,
            note=f"rel_l2_to_eager={errors[name]:.1e}",
        )
    return timed


def main() -> None:
    """Run the comparison, print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--batch", type=counts, default="1,8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--numerics", choices=("as_torch", "half"), default="as_torch")
    options = parser.parse_args()
    target = detect_target("cpu")
    recorder = Recorder(
        "cpu-inference",
        device=f"{target.name} {target.units} threads",
        versions=f"torch={torch.__version__} python={platform.python_version()}",
        protocol=f"interleaved rounds={options.rounds} numerics={options.numerics} median, p20 and p80 as median -+ spread",
    )
    lines: list[str] = []
    gains: list[float] = []
    to_onnx: list[float] = []
    for net in options.nets.split(","):
        for batch in options.batch:
            print(f"{net} batch {batch}", flush=True)
            timed = compare(net, batch, options, recorder)
            eager = min(timed["torch.eager"].median_ms, timed["torch.eager.nhwc"].median_ms)
            ours = timed["convoy"].median_ms
            gains.append(eager / ours)
            if "onnxruntime" in timed:
                to_onnx.append(timed["onnxruntime"].median_ms / ours)
            columns = "  ".join(f"{name} {figures.median_ms:8.2f}" for name, figures in timed.items())
            lines.append(f"{net:14} {batch:3}  {columns}  gain over best eager {eager / ours:.2f}x")
            recorder.write()
    print("\nmilliseconds, medians")
    print("\n".join(lines))
    print(f"geometric mean over the better eager: {geometric_mean(gains):.2f}x", end="")
    print(f", over ONNX Runtime: {geometric_mean(to_onnx):.2f}x" if to_onnx else "")
    print(recorder.write())


def geometric_mean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    run_main(main)
