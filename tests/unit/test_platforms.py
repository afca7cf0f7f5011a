"""Windows and macOS, on which Convoy was never run: modules import, PyTorch answers, and `doctor` says so."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import convoy
from convoy.engines.compilers.clear_compiled import compiled_code
from convoy.engines.compilers.host_compiler import compiler_support
from convoy.measurement.device import doctor
from convoy.measurement.processes.builders import max_builders
from convoy.target import Target, usable_cores

SOURCE = Path(convoy.__file__).parent
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix", "spwd", "crypt"}
POSIX_NAMES = {
    "os": {
        "sched_getaffinity", "geteuid", "getuid", "killpg", "fork", "sysconf", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC",
        "O_NONBLOCK", "RTLD_LOCAL", "RTLD_NOW", "memfd_create", "setsid", "getpgid", "uname",
    },
    "signal": {"SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGWINCH", "SIGHUP", "SIGPIPE", "setitimer", "alarm"},
}  # fmt: skip
"""What Python has on POSIX systems alone."""

GPU = Target("cuda", "a GPU that is not there", "sm_90", 132, 80 << 30, 50 << 20)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: all but the bodies of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield node
        yield from at_import(node)


def posix_only(text: str) -> list[str]:
    found: list[str] = []
    for node in at_import(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in POSIX_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in POSIX_MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [node.attr] if node.attr in POSIX_NAMES.get(node.value.id, ()) else []
    return found


def test_no_module_needs_a_posix_system_to_be_imported() -> None:
    assert posix_only("import fcntl\nX = os.O_NOFOLLOW\ndef f(): return os.fork()") == ["fcntl", "O_NOFOLLOW"]
    wrong = {path.name: found for path in SOURCE.rglob("*.py") if (found := posix_only(path.read_text("utf-8")))}
    assert not wrong


@pytest.fixture(params=["win32", "darwin"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This process as on another system, as far as Convoy asks; what is asked once for a process was asked before."""
    compiler_support()
    doctor.findings()
    monkeypatch.setattr(sys, "platform", request.param)
    monkeypatch.delattr(os, "sched_getaffinity")
    if request.param == "win32":
        for name in ("geteuid", "killpg", "O_NOFOLLOW", "O_DIRECTORY"):
            monkeypatch.delattr(os, name)
    return str(request.param)


def test_cores_are_counted_without_the_systems_help(system: str) -> None:
    assert usable_cores() == os.cpu_count()
    assert max_builders(GPU, on_device=False) >= 1


def test_c_kernels_are_refused_on_windows_with_the_reason(system: str) -> None:
    support = compiler_support()
    if system == "win32":
        assert "not on Windows" in support.reason
        assert compiled_code().files == 0
    else:
        assert support or "Windows" not in support.reason


def test_doctor_says_that_convoy_was_never_run_there(system: str) -> None:
    (row,) = doctor._system()
    assert "never run" in row.found


def test_a_model_is_answered_by_pytorch(system: str, tmp_path: Path) -> None:
    settings = convoy.Settings(effort="none", isolate=False, db=tmp_path / "p.db")
    x = torch.randn(1, 4)
    model = torch.nn.Linear(4, 2).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export finds no Windows here
        fast = convoy.optimize(model, (x,), settings=settings)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(("arch", "words"), [("sm_80", "but those by TMA"), ("sm_120", "all Triton kernels")])
def test_doctor_says_which_kernels_never_ran_on_a_gpu(arch: str, words: str) -> None:
    (row,) = doctor._never_run(Target("cuda", "a GPU", arch, 100, 1 << 30, 1 << 20))
    assert "never run on compute capability" in row.found
    assert words in row.means
    assert not doctor._never_run(GPU)
