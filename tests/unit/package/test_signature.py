"""Signed packages: their code runs if an allowed signer signed these very bytes, and nothing else runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import convoy
from convoy.package import opening, signature
from convoy.package.archive import read_archive, write_archive
from tests.unit.package.conftest import X

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def keygen(*words: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of `ann` and `eve`; Ann is an allowed signer."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ann", "eve"):
        keygen("-t", "ed25519", "-N", "", "-C", name, "-f", folder / name)
    public = (folder / "ann.pub").read_text()
    (folder / "signers").write_text(f"ann@example.org,ann {public}")
    return folder


def sign(path: Path, key: Path, namespace: str = "convoy") -> None:
    Path(f"{path}.sig").unlink(missing_ok=True)
    keygen("-Y", "sign", "-n", namespace, "-f", key, path)


def refused(path: Path, keys: Path, text: str) -> None:
    """One line, and nothing ran: no library was loaded."""
    with pytest.raises(convoy.PackageError, match=text) as error:
        convoy.open(path, signers=keys / "signers")
    assert "\n" not in str(error.value)


def test_a_signed_package_runs_its_own_code(damaged: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign(damaged, keys / "ann")
    expected = convoy.open(damaged)(X)
    monkeypatch.setattr("convoy.package.bind_package._built", None)  # nothing is built here
    net = convoy.open(damaged, signers=keys / "signers")
    assert torch.equal(net(X), expected)
    assert signature.check_signature(read_archive(damaged).buffer, str(damaged), keys / "signers") == "ann@example.org"


def test_what_is_not_signed_by_an_allowed_signer_is_refused(
    damaged: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "read_manifest", None)  # it is refused before anything else is read
    refused(damaged, keys, r"a signature in .*copy\.convoy\.sig.*ssh-keygen -Y sign -n convoy -f KEY")
    sign(damaged, keys / "eve")
    refused(damaged, keys, r"a signature of one of .*signers.*ssh-keygen")
    sign(damaged, keys / "ann", "file")
    refused(damaged, keys, r"content that ann@example.org signed.*ssh-keygen")
    Path(f"{damaged}.sig").write_bytes(b"\x00")
    refused(damaged, keys, "a signature of one of")


def test_a_change_after_signing_is_refused(damaged: Path, keys: Path) -> None:
    sign(damaged, keys / "ann")
    found = read_archive(damaged)
    members = [(name, [bytes(found.view(name))]) for name in found.members]
    write_archive(damaged, [*members[:-1], ("kernels/more.c", [b"more"]), members[-1]])
    refused(damaged, keys, "content that ann@example.org signed")


def test_the_signed_bytes_are_those_that_are_used(damaged: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes into the file right after the signature was checked."""
    sign(damaged, keys / "ann")
    expected, check = convoy.open(damaged)(X), signature.check_signature

    def checked_and_overwritten(*args: object) -> str:
        name = check(*args)  # type: ignore[arg-type]
        with damaged.open("r+b") as file:
            file.write(bytes(damaged.stat().st_size))
        return name

    monkeypatch.setattr(signature, "check_signature", checked_and_overwritten)
    assert torch.equal(convoy.open(damaged, signers=keys / "signers")(X), expected)


def test_wrong_arguments_are_named(damaged: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(convoy.InputError, match=r"signers: .*nothing with trust"):
        convoy.open(damaged, trust=True, signers=keys / "signers")
    with pytest.raises(convoy.InputError, match=r"signers: .*a file of allowed signers"):
        convoy.open(damaged, signers=keys / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(convoy.InputError, match=r"ssh-keygen on the PATH\. Install OpenSSH"):
        convoy.open(damaged, signers=keys / "signers")
