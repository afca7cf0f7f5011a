"""Packages at the command line: exported, run on images, refused where they are damaged; the C runtime is written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

import convoy
from convoy.engines.compilers.host_compiler import compiler_support
from tests.e2e.command import Command

pytestmark = pytest.mark.skipif(not compiler_support(), reason="needs a C compiler")

POOLED = """
import torch
from torch import nn


def pooled():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
"""
SUMS = """
import torch
from torch import nn


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return torch.cumsum(self.conv(x), 1)
"""
EXPORT = ("--trust", "--batches", "2,1", "--size", "16", "--effort", "none", "--portable")


def results(text: str) -> list[str]:
    """The lines of inputs."""
    return re.findall(r"^(?:input \d|images/\d\.png): largest output \d .*$", text, re.MULTILINE)


def test_a_package_is_exported_and_run(convoy_command: Command, folder: Path) -> None:
    (folder / "pooled.py").write_text(POOLED, encoding="utf-8")
    (folder / "images").mkdir()
    draw = torch.Generator().manual_seed(0)
    for index in range(3):  # one and a half batches
        pixels = torch.randint(0, 256, (16, 16, 3), generator=draw, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
    said = convoy_command.works("export", "pooled.py:pooled", *EXPORT, "-o", "net.convoy", "--triton", "models")
    assert re.match(r"net.convoy: .* MiB\nmodels/net: ", said)
    assert convoy.open("net.convoy", trust=True).batch_sizes == (1, 2)
    assert (folder / "models" / "net" / "1" / "net.convoy").read_bytes() == (folder / "net.convoy").read_bytes()
    assert "--batches" in convoy_command.refused(
        "export", "pooled.py:pooled", *EXPORT, "--batch", "2", "-o", "no.convoy"
    )
    built = convoy_command.works("run", "net.convoy", "--input", "images/")
    assert [line.partition(":")[0] for line in results(built)] == [f"images/{index}.png" for index in range(3)]
    assert results(convoy_command.works("run", "net.convoy", "--trust", "--input", "images/")) == results(built)
    assert len(results(convoy_command.works("run", "net.convoy"))) == 2
    found = json.loads(convoy_command.works("run", "net.convoy", "--json"))
    assert [len(found[name]) for name in ("outputs", "images", "latencies")] == [2, 0, 1]
    assert (found["batch"], found["speedup"], found["source"]) == (2, None, None)
    assert "--batch" in convoy_command.refused("run", "net.convoy", "--batch", "3")
    assert "--plan" in convoy_command.refused("run", "pooled.py:pooled", "--trust")
    if shutil.which("ssh-keygen"):
        key = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key")
        subprocess.run(key, check=True, cwd=folder)
        (folder / "signers").write_text("me " + (folder / "key.pub").read_text(), encoding="utf-8")
        assert "a signature in net.convoy.sig" in convoy_command.refused("run", "net.convoy", "--signers", "signers")
        subprocess.run(
            ("ssh-keygen", "-q", "-Y", "sign", "-n", "convoy", "-f", "key", "net.convoy"), check=True, cwd=folder
        )
        signed = convoy_command.works("run", "net.convoy", "--signers", "signers", "--input", "images/")
        assert results(signed) == results(built)
    assert "--signers" in convoy_command.refused("run", "pooled.py:pooled", "--trust", "--signers", "signers")
    path = folder / "net.convoy"
    path.write_bytes(path.read_bytes()[:-7])
    assert "whole .convoy package" in convoy_command.refused("run", "net.convoy")


def test_layers_without_c_kernels_are_named(convoy_command: Command, folder: Path) -> None:
    (folder / "sums.py").write_text(SUMS, encoding="utf-8")
    line = convoy_command.refused("export", "sums.py:Sums", *EXPORT, "-o", "no.convoy")
    assert "cumsum" in line
    assert not (folder / "no.convoy").exists()


def test_the_runtime_is_written(convoy_command: Command, folder: Path) -> None:
    convoy_command.works("runtime", "libconvoy")
    assert {"convoy.h", "net.c", "libconvoy.so"} <= {one.name for one in (folder / "libconvoy").iterdir()}
