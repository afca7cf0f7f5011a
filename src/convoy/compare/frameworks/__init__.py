"""The frameworks by name: module, requirements, and the command that installs each. Imports none of them."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Final, cast

from convoy.compare.frameworks.base import Framework
from convoy.errors import unknown_name


@dataclass(frozen=True, slots=True)
class Entry:
    """One framework.

    Attributes:
        id: its name on the command line and in rows.
        location: `module:NAME` of its `Framework`.
        needs: modules that must be there.
        install: the line that installs it on a CPU-only machine.
        install_cuda: the line for an NVIDIA GPU; empty: the same.
        onnx: whether it reads the model from an ONNX file.
        cuda: distributions of which it needs one on an NVIDIA GPU; empty: none.
    """

    id: str
    location: str
    needs: tuple[str, ...] = ()
    install: str = ""
    install_cuda: str = ""
    onnx: bool = False
    cuda: tuple[str, ...] = ()

    def absence(self, device: str) -> str:
        """Why it cannot be used and the line that installs it; empty where it is there."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if not missing and device == "cuda" and self.cuda and not any(map(_installed, self.cuda)):
            missing = [" or ".join(self.cuda)]
        if not missing:
            return ""
        return f"{', '.join(missing)} not installed: {(device == 'cuda' and self.install_cuda) or self.install}"

    def load(self) -> Framework:
        """Import it."""
        module, _, name = self.location.partition(":")
        return cast("Framework", getattr(importlib.import_module(module), name))


def _installed(distribution: str) -> bool:
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


_HERE: Final = "convoy.compare.frameworks"

FRAMEWORKS: Final = {
    entry.id: entry
    for entry in (
        Entry("torch", f"{_HERE}.torch_eager:FRAMEWORK", ("torch",)),
        Entry("inductor", f"{_HERE}.torch_inductor:FRAMEWORK", ("torch",)),
        Entry(
            "jax",
            f"{_HERE}.jax_xla:FRAMEWORK",
            ("jax",),
            "pip install 'jax>=0.9'",
            "pip install 'jax[cuda13]>=0.9'",
            cuda=("jax-cuda13-plugin", "jax-cuda12-plugin"),
        ),
        Entry(
            "tensorflow",
            f"{_HERE}.tensorflow_keras:FRAMEWORK",
            ("tensorflow", "keras"),
            "pip install 'tensorflow-cpu>=2.20'",
            "pip install 'tensorflow[and-cuda]>=2.20'",
        ),
        Entry(
            "onnxruntime",
            f"{_HERE}.onnx_runtime:FRAMEWORK",
            ("onnxruntime", "onnx", "onnxscript"),
            "pip install onnxruntime onnx onnxscript",
            "pip install onnxruntime-gpu onnx onnxscript",
            onnx=True,
            cuda=("onnxruntime-gpu",),
        ),
        Entry(
            "openvino",
            f"{_HERE}.open_vino:FRAMEWORK",
            ("openvino", "onnx", "onnxscript"),
            "pip install openvino onnx onnxscript",
            onnx=True,
        ),
        Entry("convoy", f"{_HERE}.convoy_program:FRAMEWORK", ("torch",)),
    )
}
"""In the order in which they are run and shown."""

_OWN = re.compile(r"[A-Za-z][\w.-]{0,99}=[\w.]+:\w+")


def find(word: str) -> Entry:
    """The entry of a name, or of one's own framework as `id=module:NAME`; raises InputError for anything else."""
    if word in FRAMEWORKS:
        return FRAMEWORKS[word]
    if _OWN.fullmatch(word):
        name, _, location = word.partition("=")
        return Entry(name, location, (location.partition(":")[0].partition(".")[0],), "install it")
    raise unknown_name("--frameworks", word, FRAMEWORKS, "A framework of your own is given as id=module:NAME.")
