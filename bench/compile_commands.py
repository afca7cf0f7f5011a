"""Write compile_commands.json, with which clangd opens the CUDA kernels of `engines/hopper` without a CUDA toolkit.

python bench/compile_commands.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOPPER = ROOT / "src" / "convoy" / "engines" / "hopper"


def commands() -> list[dict[str, object]]:
    """One entry a kernel and a header: clang's CUDA mode for sm_90a, with the names of `include/editor.cuh` in front."""
    include = HOPPER / "include"
    files = sorted([*(HOPPER / "kernels").glob("*.cu"), *include.rglob("*.cuh")])
    options = [
        "clang++", "-xcuda", "-std=c++17", "--cuda-device-only", "--cuda-gpu-arch=sm_90a", "-nocudainc", "-nocudalib",
        "-fsyntax-only", f"-I{include}", "-include", str(include / "editor.cuh"),
    ]  # fmt: skip
    needs = {"depthwise_sums.cuh": ["-include", str(include / "depthwise_registers_config.cuh")]}
    return [
        {"directory": str(ROOT), "file": str(file), "arguments": [*options, *needs.get(file.name, []), str(file)]}
        for file in files
        if file.name != "pruned.cuh"  # generated code stands in front of it
    ]


if __name__ == "__main__":
    (ROOT / "compile_commands.json").write_text(json.dumps(commands(), indent=1) + "\n", encoding="utf-8")
