"""SSH signatures of packages, as git uses them: `ssh-keygen -Y sign -n convoy -f KEY net.convoy` writes `net.convoy.sig`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from convoy.errors import InputError, PackageError
from convoy.package.archive import Buffer

NAMESPACE: Final = "convoy"
"""The purpose that is signed with the content: a signature by the same key for another purpose is refused."""

SUFFIX: Final = ".sig"
TIMEOUT_S: Final = 120.0
_TOOL: Final = "ssh-keygen"


def check_signature(content: Buffer, path: str, signers: str | Path) -> str:
    """Check that one of the allowed signers signed a package.

    Args:
        content: the bytes of the package, as they will be used.
        path: its file; the signature lies beside it, with `.sig` at the end of the name.
        signers: a file of allowed signers, in the format of ssh-keygen(1): a line is a name and a public key.

    Returns:
        The name of the signer.

    Raises:
        InputError: there is no file of signers, or no ssh-keygen.
        PackageError: no signature, a signature of somebody else, or of other content.
    """
    tool, signature = shutil.which(_TOOL), path + SUFFIX
    if tool is None:
        raise InputError("signers", str(signers), f"{_TOOL} on the PATH", "Install OpenSSH 8.2 or newer.")
    if not Path(signers).is_file():
        raise InputError("signers", str(signers), "a file of allowed signers", "Each line is a name and a public key.")
    if not Path(signature).is_file():
        todo = f"Sign it with: {_TOOL} -Y sign -n {NAMESPACE} -f KEY {path}"
        raise PackageError("package", path, f"a signature in {signature}", todo)
    files = ("-f", str(signers), "-s", signature)
    found = _told(tool, ["-Y", "find-principals", *files], b"")
    names = found.stdout.decode("utf-8", "replace").splitlines()
    if found.returncode or not names:
        raise PackageError("package", path, f"a signature of one of {signers}", _words(found))
    name = names[0].partition(",")[0]
    checked = _told(tool, ["-Y", "verify", *files, "-n", NAMESPACE, "-I", name], content)
    if checked.returncode:
        raise PackageError("package", path, f"content that {name} signed", _words(checked))
    return name


def _told(tool: str, words: list[str], content: Buffer) -> subprocess.CompletedProcess[bytes]:
    """What ssh-keygen answers; it gets the content on its standard input."""
    command, environment = [tool, *words], {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(  # noqa: S603 - a known tool, no shell
            command, input=content, capture_output=True, check=False, timeout=TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError("signers", tool, f"a working {_TOOL}", str(error)) from error


def _words(answer: subprocess.CompletedProcess[bytes]) -> str:
    """Its last line."""
    lines = (answer.stderr + answer.stdout).decode("utf-8", "replace").split("\n")
    return next((f"{_TOOL}: {line.strip()}" for line in reversed(lines) if line.strip()), "")
