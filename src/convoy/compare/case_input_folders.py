"""CaseInputFolders: a folder of inputs for the frameworks of each case, made once by a child process."""

from __future__ import annotations

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
        self._exporting = threading.Lock()

    def folder(self, case: Case) -> Path:
        """A case's folder, when it is made; raises ChildFailedError."""
        if case in self._folders and self._folders[case].exception() is not None:
            del self._folders[case]  # made beside others it may have lacked memory that there is now
        return self.begin(case).result()

    def begin(self, case: Case) -> Future[Path]:
        """A case's folder, made or being made."""
        if case not in self._folders:
            self._folders[case] = self._pool.submit(self._make, case, self._root / str(len(self._folders)))
        return self._folders[case]

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
