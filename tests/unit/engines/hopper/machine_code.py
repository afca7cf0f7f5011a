"""Digests of the machine code that NVRTC makes of the CUDA engines' kernels: an edit of a kernel's text shows what it changes.

`python tests/unit/engines/hopper/machine_code.py record` writes `machine_code.json`; `check` compares with it and lists what
differs; `test_machine_code.py` checks a few. A digest is of the instructions, the registers and the constants of a cubin, not of
names, lines or notes. It holds for one version of NVRTC. Not a test module.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from convoy.capture.weight_masks import mask_of
from convoy.engines.base import Engine
from convoy.engines.hopper import nvrtc_kernel
from convoy.engines.manifest import load_engine
from convoy.engines.sparse_weights import pruned_csr
from convoy.errors import CompileError
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool
from convoy.target import Target

GOLDEN = Path(__file__).with_name("machine_code.json")
GPU = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
MOST_OF_PROBLEM = 4


@dataclass(frozen=True)
class Case:
    """One kernel to compile.

    Attributes:
        engine: its id.
        name: of the problem, in `PROBLEMS`.
        knobs: as text.
    """

    engine: str
    name: str
    knobs: str

    @property
    def key(self) -> str:
        """In the file of digests."""
        return f"{self.engine} | {self.name} | {self.knobs}"


def conv(*sizes: int, dtype: str = "fp16", layout: str = "nhwc", **rest: Any) -> ConvProblem:
    """A problem on tensors of one dtype."""
    numerics = "as_torch" if dtype == "fp32" else "half"
    return ConvProblem(
        *sizes, layout=layout, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, **({"numerics": numerics} | rest)
    )


FULL = Epilogue(bias=True, residual=True, activation="relu")
SILU = Epilogue(bias=True, activation="silu")
RELU = Epilogue(bias=True, activation="relu")
POOL = Epilogue(bias=True, activation="relu", pool=Pool("max", 3, 3, 2, 2, 1, 1))
BARE_POOL = Epilogue(bias=True, activation="relu", pool=Pool("max", 3, 3, 2, 2))
STEM = (3, 224, 224, 64, 7, 7, 3, 3, 2, 2)
ALEX = (3, 224, 224, 64, 11, 11, 2, 2, 4, 4)
SPARSE = ("pruned.sparse24", "pruned.blocks", "pruned.direct", "pruned.csr", "pruned.cuda")

DENSE = {
    "3x3": conv(32, 256, 14, 14, 256, 3, 3, 1, 1, epilogue=FULL),
    "3x3, batch 1, bf16": conv(1, 512, 7, 7, 512, 3, 3, 1, 1, dtype="bf16", epilogue=RELU),
    "3x3, stride 2, gelu": conv(8, 128, 28, 28, 256, 3, 3, 1, 1, 2, 2, epilogue=Epilogue(True, False, "gelu")),
    "1x1, silu": conv(32, 64, 56, 56, 256, 1, 1, epilogue=SILU),
    "1x1, batch 1, hardswish": conv(1, 960, 7, 7, 160, 1, 1, epilogue=Epilogue(True, True, "hardswish")),
    "tf32": conv(8, 128, 28, 28, 128, 3, 3, 1, 1, dtype="fp32", epilogue=FULL),
    "tf32, 1x1, batch 1": conv(1, 512, 14, 14, 128, 1, 1, dtype="fp32", epilogue=SILU),
}
STRICT = {
    "strict": conv(8, 128, 28, 28, 128, 3, 3, 1, 1, dtype="fp32", numerics="strict", epilogue=FULL),
    "strict, 1x1, batch 1": conv(1, 512, 14, 14, 128, 1, 1, dtype="fp32", numerics="strict", epilogue=RELU),
}
BACK = {
    "gradient, 3x3": conv(32, 256, 14, 14, 128, 3, 3, 1, 1, dtype="bf16", direction="dgrad"),
    "gradient, 1x1": conv(32, 256, 14, 14, 64, 1, 1, direction="dgrad"),
}
WGRAD = {
    "wgrad, 3x3": conv(32, 128, 28, 28, 128, 3, 3, 1, 1, dtype="bf16", direction="wgrad"),
    "wgrad, 1x1": conv(32, 256, 14, 14, 1024, 1, 1, direction="wgrad"),
    "wgrad, 3x3, stride 2": conv(4, 64, 56, 56, 128, 3, 3, 1, 1, 2, 2, direction="wgrad"),
}
FIRST = {
    "7x7, pooled": conv(32, *STEM, epilogue=POOL),
    "7x7, bf16": conv(1, *STEM, dtype="bf16", epilogue=SILU),
    "11x11, pooled": conv(1, *ALEX, epilogue=BARE_POOL),
    "3x3": conv(32, 3, 224, 224, 32, 3, 3, 1, 1, 2, 2, epilogue=SILU),
}
FIRST_TF32 = {
    f"tf32, {name}": replace(FIRST[name], x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", numerics="as_torch")
    for name in FIRST
    if "bf16" not in name
}
DEPTHWISE = {
    "depthwise 3x3": conv(32, 144, 56, 56, 144, 3, 3, 1, 1, groups=144, epilogue=FULL),
    "depthwise 5x5": conv(32, 240, 28, 28, 240, 5, 5, 2, 2, groups=240, dtype="bf16", epilogue=SILU),
    "depthwise 5x5, stride 2": conv(1, 240, 28, 28, 240, 5, 5, 2, 2, 2, 2, groups=240, epilogue=SILU),
}
DEPTHWISE_FP32 = {"depthwise 3x3, fp32": conv(1, 32, 112, 112, 32, 3, 3, 1, 1, groups=32, dtype="fp32", epilogue=FULL)}
PRUNED = {
    "pruned 3x3": conv(8, 64, 28, 28, 64, 3, 3, 1, 1, layout="nchw", dtype="fp32", numerics="strict", epilogue=FULL),
    "pruned 1x1": conv(1, 64, 14, 14, 128, 1, 1, layout="nchw", dtype="fp32", numerics="strict", epilogue=RELU),
    "pruned 3x3, fp16, stride 2": conv(4, 64, 28, 28, 64, 3, 3, 1, 1, 2, 2, layout="nchw", epilogue=SILU),
}
HALF_PRUNED = {name: DENSE[name] for name in ("3x3", "3x3, batch 1, bf16", "1x1, silu")}
FRESH = {
    f"dynamic weight, {name}": replace(DENSE[name], dynamic_weight=True)
    for name in ("3x3", "3x3, batch 1, bf16", "1x1, silu")
}
OF_ENGINE = {
    "cuda.implicit_gemm": DENSE, "cuda.swapped": DENSE, "cuda.fresh": FRESH, "cuda.dgrad": BACK, "cuda.split_fp32": STRICT,
    "cuda.wgrad": WGRAD, "cuda.first_layer": FIRST, "cuda.first_layer_tf32": FIRST_TF32,
    "cuda.depthwise": DEPTHWISE | DEPTHWISE_FP32, "cuda.depthwise_tile": DEPTHWISE, "pruned.sparse24": HALF_PRUNED,
    "pruned.blocks": HALF_PRUNED, "pruned.direct": PRUNED, "pruned.csr": PRUNED, "pruned.cuda": PRUNED,
}  # fmt: skip


def problem_of(engine: str, name: str) -> ConvProblem:
    """A problem, with a mask where the engine wants one."""
    problem = OF_ENGINE[engine][name]
    if engine not in SPARSE:
        return problem
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(problem.weight_spec.shape, generator=generator) + 1
    k, c, r, s = weight.shape
    if engine == "pruned.sparse24":
        weight[:, ::2] = 0
    elif engine == "pruned.blocks":
        keep = torch.rand((-(-k // 64), c // 8, r, s), generator=generator) < 0.3
        weight *= keep.repeat_interleave(64, 0)[:k].repeat_interleave(8, 1)
    else:
        weight *= torch.rand(weight.shape, generator=generator) < 0.1
    return problem.with_mask(mask_of(weight))


def engine_of(name: str) -> Engine:
    """An engine by its id, one that is not in the default search too."""
    return pruned_csr.ENGINE if name == pruned_csr.ENGINE.id else load_engine(name)


def chosen(engine: str, name: str) -> Iterator[Case]:
    """Settings of a problem that differ in many knobs: the first of the space, then each that shows a new value."""
    space = list(engine_of(engine).space(problem_of(engine, name), GPU))
    seen: set[tuple[str, object]] = set()
    left = MOST_OF_PROBLEM
    for index, knobs in enumerate(space):
        told = {
            (key, value > 0 if key == "halo" else value)
            for key, value in knobs.items()
            if key not in ("stages", "pixels", "filters", "tile", "lanes")
        }
        if index == 0 or not told <= seen:
            seen |= told
            left -= 1
            yield Case(engine, name, str(knobs))
        if not left:
            return


def digest(cubin: bytes) -> str:
    """Of the instructions, the constants and the numbers of registers."""
    start = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]
    strings = headers[names_at][4]
    found = []
    for name_at, kind, _, _, offset, length, _, info, *_ in headers:
        name = cubin[strings + name_at : cubin.index(b"\0", strings + name_at)].decode()
        if kind != 8 and name.startswith((".text.", ".nv.constant")):  # 8: no bytes in the file
            section = name.split(".")[1 + name.startswith(".nv.")]
            registers = info >> 24 if section == "text" else 0
            found.append(f"{section} {registers} {hashlib.sha256(cubin[offset : offset + length]).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16]


def compiled(case: Case) -> tuple[str, str]:
    """The case's key and its kernels' digests; what the compiler refuses is told by its message."""
    made: list[str] = []
    right = nvrtc_kernel.Function.__init__

    def kept(self: Any, engine: str, cubin: bytes, *rest: Any) -> None:
        right(self, engine, cubin, *rest)
        if engine == case.engine:
            made.append(digest(cubin))

    nvrtc_kernel.Function.__init__ = kept
    try:
        engine_of(case.engine).build(problem_of(case.engine, case.name), Knobs.parse(case.knobs), GPU)
    except CompileError as error:
        return case.key, f"refused: {str(error).splitlines()[0]}"
    finally:
        nvrtc_kernel.Function.__init__ = right
    return case.key, " ".join(made)


class _SeenError(Exception):
    """Carries the PTX's digest out of a build."""


def ptx_of(case: Case) -> tuple[str, str]:
    """The case's key and the digest of the first PTX that its build makes: the same PTX is the same machine code."""
    right = nvrtc_kernel.cached, nvrtc_kernel.compile_source

    def ptx_alone(engine: str, source: Any, arch: str, options: Any) -> Any:
        ptx = right[1](engine, source, arch.replace("sm_", "compute_"), options)[0]
        text = re.sub(r"//.*", "", ptx.decode().rstrip("\0"))
        for name in re.findall(r"\.entry (\w+)", text):
            text = re.sub(rf"\b{name}(?=\b|_param)", "kernel", text)
        raise _SeenError(hashlib.sha256(text.encode()).hexdigest()[:16])

    nvrtc_kernel.cached = lambda engine, key, make: make()
    nvrtc_kernel.compile_source = ptx_alone
    try:
        engine_of(case.engine).build(problem_of(case.engine, case.name), Knobs.parse(case.knobs), GPU)
    except _SeenError as seen:
        return case.key, str(seen)
    finally:
        nvrtc_kernel.cached, nvrtc_kernel.compile_source = right
    raise AssertionError(f"{case.key}: nothing was compiled")


def all_of(cases: list[Case], make: Callable[[Case], tuple[str, str]] = compiled) -> dict[str, str]:
    """Digests by key."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(pool.map(make, cases))


def nvrtc_version() -> str:
    """Of the compiler here, as text."""
    from cuda.bindings import nvrtc

    return ".".join(map(str, nvrtc.nvrtcVersion()[1:]))


def read() -> tuple[str, dict[str, dict[str, str]]]:
    """NVRTC's version, and of every case the digests of its PTX and of its machine code."""
    told = json.loads(GOLDEN.read_text())
    return told["nvrtc"], told["digests"]


def case_of(key: str) -> Case:
    """Inverse of `Case.key`."""
    return Case(*key.split(" | "))


def differences(keys: Iterable[str]) -> list[str]:
    """Cases whose machine code is not the recorded one. Where the PTX is the recorded one, so is the machine code."""
    known = read()[1]
    ptx = all_of([case_of(key) for key in keys], ptx_of)
    changed = [key for key, value in ptx.items() if value != known[key]["ptx"]]
    machine_code = all_of([case_of(key) for key in changed])
    return [key for key, value in machine_code.items() if value != known[key]["sass"]]


def record() -> None:
    """Write the digests of this tree."""
    cases = [case for engine, problems in OF_ENGINE.items() for name in problems for case in chosen(engine, name)]
    ptx, sass = all_of(cases, ptx_of), all_of(cases)
    found = {case.key: {"ptx": ptx[case.key], "sass": sass[case.key]} for case in cases}
    GOLDEN.write_text(json.dumps({"nvrtc": nvrtc_version(), "digests": found}, indent=1) + "\n")


def main(command: str, *engines: str) -> int:
    """`record`; `ptx` or `check`, of all engines or of some; the number of differences."""
    if command == "record":
        record()
        return 0
    known = read()[1]
    keys = [key for key in known if not engines or key.split(" | ")[0] in engines]
    if command == "ptx":
        found = all_of([case_of(key) for key in keys], ptx_of)
        differ = [key for key, value in found.items() if value != known[key]["ptx"]]
    else:
        differ = differences(keys)
    print(*differ, f"{len(differ)} of {len(keys)} differ", sep="\n")
    return len(differ)


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:])))
