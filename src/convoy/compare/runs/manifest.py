"""The manifest of a run file: device, clocks, driver, versions, commit and protocol of the measurements."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from convoy._version import __version__
from convoy.measurement import detect_target
from convoy.measurement.device.detect import installed
from convoy.settings import commit_from_environment

PACKAGES: Final = (
    "torch",
    "torchvision",
    "timm",
    "triton",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx",
    "onnxscript",
    "openvino",
    "numpy",
    "nvidia-cudnn-frontend",
)
"""Distributions whose versions a run file names, where they are installed."""

_TOOL_S: Final = 20.0


def make_manifest(
    *, device: str, protocol: str, request: Mapping[str, Any], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Describe a run that is about to begin.

    Args:
        device: `cpu` or `cuda`.
        protocol: how a figure is taken, in a line for people.
        request: the command's name and its options, as JSON. A file is resumed only by the same request.
        notes: lines for people.

    Raises:
        InputError: no such device here.
    """
    target = detect_target(device)
    versions = {name: version for name in PACKAGES if (version := installed(name))}
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "request": dict(request),
        "target": target.to_dict(),
        "versions": {"convoy": __version__, "python": platform.python_version(), **versions, **dict(target.versions)},
        "system": {"os": platform.platform(), "cores": os.cpu_count() or 0, "load": _load(), "host": host()},
        "clocks": gpu_clocks() if device == "cuda" else cpu_clocks(),
        "protocol": protocol,
        "commit": commit(),
        "notes": list(notes),
    }


def host() -> str:
    """A digest of the host's name: rows of one host can be told from another's, and nobody learns its name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _load() -> float:
    """Processes that wanted to run in the last minute: many beside ours make timings worthless. 0 where it is not known."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def commit() -> str:
    """The commit that is run: git's, or `CONVOY_COMMIT` where the tree was copied without its history; empty for a release."""
    named = commit_from_environment(os.environ)
    root = Path(__file__).parents[4]
    if named or not (root / ".git").exists():
        return named
    return ask_tool(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])


def cpu_clocks(directory: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq")) -> dict[str, str]:
    """The CPU's clock as Linux reports it: governor, least and most MHz; empty where it does not (virtual machines)."""
    found: dict[str, str] = {}
    for name, file, scale in (
        ("governor", "scaling_governor", 0),
        ("least_mhz", "scaling_min_freq", 1000),
        ("most_mhz", "scaling_max_freq", 1000),
    ):
        try:
            text = (directory / file).read_text().strip()
            found[name] = str(int(text) // scale) if scale else text
        except (OSError, ValueError):
            continue
    return found


def gpu_clocks() -> dict[str, str]:
    """The GPU's clocks and power now, from nvidia-smi; empty where that cannot run."""
    names = ("uuid", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu", "persistence_mode")
    words = ask_gpu(*names)
    return dict(zip(names, words, strict=True)) if words else {}


def ask_gpu(*fields: str, units: bool = True) -> list[str]:
    """Fields that nvidia-smi knows of the first GPU that programs here see; empty where it cannot be asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    which = [f"--id={visible}"] if visible else []
    form = "csv,noheader" if units else "csv,noheader,nounits"
    answer = ask_tool(["nvidia-smi", *which, f"--query-gpu={','.join(fields)}", f"--format={form}"])
    words = [word.strip() for word in answer.splitlines()[0].split(",")] if answer else []
    return words if len(words) == len(fields) else []


def ask_tool(command: Sequence[str]) -> str:
    """Output of a tool on the PATH; empty where it is absent or fails."""
    tool = shutil.which(command[0])
    if tool is None:
        return ""
    try:
        answer = subprocess.run(  # noqa: S603 - a known tool with fixed arguments
            [tool, *command[1:]], capture_output=True, text=True, timeout=_TOOL_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
