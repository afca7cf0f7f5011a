"""CaseInputFolders: a folder of inputs for the frameworks of each case, made once by a child process."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from convoy.compare.case import Case
from convoy.compare.child_processes import ChildProcesses


class CaseInputFolders:
    """Folders with weights, input and exact results (`convoy.compare.case_inputs`), and the ONNX file where one is wanted.

    Args:
        root: the folder that they are made in.
        pool: threads that wait for the children.
        children: starts the processes that make them.
        begun: told which case's exact results are being made.
    """

    def __init__(self, root: Path, pool: Executor, children: ChildProcesses, begun: Callable[[Case], None]) -> None:
        self._root, self._pool, self._children, self._begun = root, pool, children, begun
        self._folders: dict[Case, Future[Path]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Guards the folders: several cases may be prepared side by side."""
        self._exporting = threading.Lock()

    def folder(self, case: Case) -> Path:
        """A case's folder, when it is made; raises ChildFailedError."""
        known = self._folders.get(case)
        if known is not None and known.exception() is not None:
            self.remove(case)  # made beside others it may have lacked memory that there is now
        return self.begin(case).result()

    def begin(self, case: Case) -> Future[Path]:
        """A case's folder, made or being made."""
        with self._lock:
            if case not in self._folders:
                self._folders[case] = self._pool.submit(self._make, case, self._root / str(next(self._numbers)))
            return self._folders[case]

    def remove(self, case: Case) -> None:
        """Delete a case's folder, if it was made; it can be made again."""
        with self._lock:
            made = self._folders.pop(case, None)
        if made is not None and made.done() and made.exception() is None:
            shutil.rmtree(made.result(), ignore_errors=True)

    def _make(self, case: Case, folder: Path) -> Path:
        self._begun(case)
        folder.mkdir()
        with self._children.one(case, folder, {"role": "material"}) as child:
            child.wait_for("material")
        return folder

    def export_s(self, case: Case, folder: Path) -> float:
        """Seconds that the ONNX export into a case's folder took; 0 where it was there. Raises ChildFailedError."""
        with self._exporting:
            if (folder / "model.onnx").exists():
                return 0.0
            with self._children.one(case, folder, {"role": "export"}) as child:
                return float(child.wait_for("exported"))
