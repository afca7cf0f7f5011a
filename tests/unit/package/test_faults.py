"""Faults of packages: one line names each, nothing runs, and no half file stays."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.compilers import host_compiler
from convoy.package import archive as archives
from convoy.package import bind_package, kernels, opening
from convoy.package.archive import read_archive, write_archive
from convoy.package.manifest import CudaNeeds
from convoy.package.runtime_library import SOURCES
from tests.unit.package import libconvoy as codes
from tests.unit.package.conftest import X
from tests.unit.package.libconvoy import Libconvoy


def rewritten(path: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a member of JSON, with a right archive around it."""
    found = read_archive(path)
    members = {member: bytes(found.view(member)) for member in found.members}
    data = json.loads(members[name])
    change(data)
    members[name] = json.dumps(data).encode()
    write_archive(path, [(member, [content]) for member, content in members.items()])


def refused(path: Path, libconvoy: Libconvoy, status: int, text: str) -> None:
    """Python and C refuse a package with one line that holds the text."""
    for trust in (False, True):
        with pytest.raises(convoy.PackageError, match=text) as error:
            convoy.open(path, trust=trust)
        assert "\n" not in str(error.value)
    assert libconvoy.status(path) == status, libconvoy.error()


def test_a_cut_package_is_refused(damaged: Path, libconvoy: Libconvoy) -> None:
    whole = damaged.read_bytes()
    for size in (0, 1, 21, 100, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:size])
        refused(damaged, libconvoy, codes.DAMAGED, "whole .convoy package")


def test_a_changed_member_is_refused(damaged: Path, libconvoy: Libconvoy) -> None:
    whole = damaged.read_bytes()
    for name, member in read_archive(damaged).members.items():
        changed = bytearray(whole)
        changed[member.offset + member.size_bytes // 2] ^= 4
        damaged.write_bytes(changed)
        refused(damaged, libconvoy, codes.DAMAGED, name if name != "manifest.json" else "manifest")


def test_any_other_flipped_bit_is_refused(damaged: Path, libconvoy: Libconvoy) -> None:
    whole, draw = damaged.read_bytes(), random.Random(1)
    inside = [(one.offset, one.offset + one.size_bytes) for one in read_archive(damaged).members.values()]
    padding = archives._LOCAL.size + len("weights.safetensors") + 64  # bytes of an extra field mean nothing
    outside = [at for at in range(len(whole)) if not any(begin - padding <= at < end for begin, end in inside)]
    for at in draw.sample(outside, 60):
        changed = bytearray(whole)
        changed[at] ^= 1 << draw.randrange(8)
        damaged.write_bytes(changed)
        refused(damaged, libconvoy, codes.DAMAGED, "package")


def test_other_files_are_refused(tmp_path: Path, libconvoy: Libconvoy) -> None:
    path = tmp_path / "net.convoy"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
    refused(path, libconvoy, codes.DAMAGED, "package")
    shutil.rmtree(path, ignore_errors=True)
    path.unlink()
    refused(path, libconvoy, codes.CANNOT_READ, "No such file")
    path.mkdir()
    refused(path, libconvoy, codes.CANNOT_READ, "regular file")
    path.rmdir()
    os.mkfifo(path)
    refused(path, libconvoy, codes.CANNOT_READ, "regular file")


def test_another_version_is_refused(damaged: Path, libconvoy: Libconvoy) -> None:
    rewritten(damaged, "manifest.json", lambda data: data.update(version=2))
    refused(damaged, libconvoy, codes.OTHER_VERSION, "got 2, expected version 1")


def test_a_function_that_stands_for_two_kernels_is_refused(damaged: Path, libconvoy: Libconvoy) -> None:
    """Packages for bf16 once had such libraries: one kernel ran with the sizes of the other."""

    def change(data: Any) -> None:
        data["kernels"][1]["function"] = data["kernels"][0]["function"]

    rewritten(damaged, "manifest.json", change)
    refused(damaged, libconvoy, codes.DAMAGED, "each function of the library once")


def test_code_for_another_machine_does_not_run(damaged: Path, libconvoy: Libconvoy) -> None:
    changes = ({"machine": "riscv64"}, {"flags": ["avx1024"]}, {"system": "plan9"})
    for change in changes:
        rewritten(damaged, "manifest.json", lambda data, change=change: data["needs"].update(change))
        with pytest.raises(convoy.PackageError, match=r"code for this machine, but it was compiled for"):
            convoy.open(damaged, trust=True)
        assert libconvoy.status(damaged) == codes.OTHER_MACHINE
    assert "plan9" in libconvoy.error()
    convoy.open(damaged)(X)  # kernels that are built here run anywhere


def test_weights_packed_for_other_registers_are_refused(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "lanes", lambda: 32)
    with pytest.raises(convoy.PackageError, match=r"packed for \d+ floats a register .* have 32"):
        convoy.open(portable)
    convoy.open(portable, trust=True)(X)


def test_without_a_compiler_only_trusted_code_runs(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = convoy.open(portable)(X)
    bind_package.why_not.__globals__["_why_not"].cache_clear()
    monkeypatch.setattr(host_compiler, "compiler", lambda: "")
    try:
        with pytest.raises(convoy.PackageError, match="needs a C compiler"):
            convoy.open(portable)
    finally:
        bind_package.why_not.__globals__["_why_not"].cache_clear()
    assert torch.equal(convoy.open(portable, trust=True)(X), expected)


def test_a_package_for_a_gpu_says_why_it_cannot_run(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = opening.read_manifest

    def on_gpu(archive: Any) -> Any:
        return dataclasses.replace(real(archive), cuda=CudaNeeds(capability=10, driver=13000))

    monkeypatch.setattr(opening, "read_manifest", on_gpu)
    with pytest.raises(convoy.PackageError, match="a GPU for which it was made, but"):
        convoy.open(portable, trust=True)


def test_a_full_disk_leaves_the_old_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.convoy"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(convoy.InputError, match="No space left on device"):
        write_archive(path, [("manifest.json", [b"{}"])])
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["net.convoy"]


def test_export_names_the_users_path_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path, model = tmp_path / "net.convoy", nn.Conv2d(3, 4, 3).eval()
    settings = convoy.Settings(effort="none", db=tmp_path / "perf.db")
    with pytest.raises(convoy.InputError, match="No space left on device") as caught:
        convoy.export(model, path, (torch.ones(1, 3, 8, 8),), portable=True, settings=settings)
    assert caught.value.value == str(path)
    assert not [one.name for one in tmp_path.iterdir() if "convoy" in one.name]


def test_a_path_that_cannot_be_written_is_an_error_before_the_work(tmp_path: Path) -> None:
    model, x = nn.Conv2d(3, 4, 3).eval(), torch.ones(1, 3, 8, 8)
    for path in (tmp_path, tmp_path / "none" / "net.convoy", Path("a\0b")):
        with pytest.raises(convoy.InputError, match="output"):
            convoy.export(model, path, (x,), portable=True, settings=convoy.Settings(effort="none"))
    with pytest.raises(convoy.InputError, match="Nothing was written"):
        write_archive(Path("/proc/net.convoy"), [("manifest.json", [b"{}"])])


def test_a_package_that_is_replaced_while_open_stays_as_it_was(damaged: Path, libconvoy: Libconvoy) -> None:
    expected, y = convoy.open(damaged)(X), torch.empty(2, 7)
    net = convoy.open(damaged, trust=True)
    with libconvoy.opened(damaged) as other:
        write_archive(damaged, [("manifest.json", [b"{}"])])
        assert torch.equal(net(X), expected)
        assert other.run([X], [y]) == 0
        assert torch.equal(y, expected)
        damaged.unlink()
        assert torch.equal(net(X), expected)


DRIVER = """
#include <stdio.h>
#include "convoy.h"
int main(int count, char **words) {
    for (int i = 1; i < count; i++) {
        convoy_net *net;
        printf("%d\\n", convoy_open(words[i], 0, &net));
        convoy_close(net);
    }
    return 0;
}
"""


def test_two_hundred_damaged_files_under_sanitizers(portable: Path, tmp_path: Path) -> None:
    """The runtime opens files without running their code: no read outside, no leak, and none of them passes for whole."""
    from tests.fuzz.mutations import mutated

    driver, program = tmp_path / "driver.c", tmp_path / "driver"
    driver.write_text(DRIVER)
    sanitize = ("-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    links = ("-pthread", "-ldl", "-lm", "-o", str(program))
    command = [host_compiler.compiler(), *sanitize, str(driver), *sources, f"-I{SOURCES}", *links]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the compiler has no sanitizers")
    draw, found = random.Random(7), read_archive(portable)
    members = {name: bytes(found.view(name)) for name in found.members}
    files: list[Path] = []
    for index in range(200):
        path = tmp_path / f"{index}.convoy"
        if index % 2:
            path.write_bytes(mutated(portable.read_bytes(), draw, [b"PK\x03\x04" * 20]))
        else:  # a sound archive with a damaged manifest
            changed = {**members, "manifest.json": mutated(members["manifest.json"], draw, [b"{}"])}
            write_archive(path, [(name, [content]) for name, content in changed.items()])
        files.append(path)
    done = subprocess.run([program, *files, portable], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    statuses = [int(line) for line in done.stdout.split()]
    assert len(statuses) == 201
    assert 0 not in statuses
    assert statuses[-1] == codes.NOT_TRUSTED
    assert statuses.count(codes.DAMAGED) > 100
