"""libconvoy, the C runtime: its sources, and its compilation with the host's compiler."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from convoy.engines.compilers.host_compiler import compiler, compiler_support, run_limited
from convoy.errors import CompileError, InputError

SOURCES: Final = Path(__file__).with_name("runtime")
"""C11 sources and the header."""

FLAGS: Final = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
LINKS: Final = ("-pthread", "-ldl", "-lm")
TIMEOUT_S: Final = 120.0


def write_runtime(folder: str | Path) -> Path:
    """Write `convoy.h`, the sources and the compiled `libconvoy.so` into a folder, which is made where it is missing.

    Returns:
        The library's path.

    Raises:
        InputError: the folder cannot be written.
        CompileError: there is no C compiler, or it fails.
    """
    target = Path(folder)
    support = compiler_support()
    if not support:
        raise CompileError("libconvoy", support.reason)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted(SOURCES.iterdir()):
            if source.suffix in (".c", ".h"):
                shutil.copyfile(source, target / source.name)
        with tempfile.TemporaryDirectory(dir=target, prefix=".building-") as building:
            made = Path(building) / "libconvoy.so"
            files = [str(path) for path in sorted(SOURCES.glob("*.c"))]
            code, said = run_limited([compiler(), *FLAGS, *files, "-o", str(made), *LINKS], "libconvoy", TIMEOUT_S)
            if code:
                raise CompileError("libconvoy", "the C compiler refused its sources", said)
            return made.replace(target / made.name)
    except (OSError, ValueError) as error:
        raise InputError("folder", str(folder), "a folder that can be written", str(error)) from error
