"""The database's path: in the user's cache folder, unless the user sets another one."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from convoy.errors import InputError
from convoy.settings import database_from_environment

FILE_NAME: Final = "perf.db"

_SHARED_BETWEEN_MACHINES: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "panfs"}
    | {"smb2", "smb3", "smbfs", "virtiofs"}
)


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """`CONVOY_DB`, or `convoy/perf.db` in the user's cache folder (platformdirs; without it, the XDG rule)."""
    return database_from_environment(environment) or cache_folder(environment) / FILE_NAME


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's cache folder for Convoy; it need not exist. Raises RuntimeError if there is no home folder."""
    try:
        import platformdirs
    except ImportError:
        named = environment.get("XDG_CACHE_HOME", "")
        # The XDG rule: a relative path is to be ignored.
        base = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
        return base / "convoy"
    return Path(platformdirs.user_cache_dir("convoy"))


def checked_path(path: Path) -> Path:
    """Expand `~` and make the path absolute; raises InputError if it exists and is no regular file."""
    try:
        full = path.expanduser().absolute()
        try:
            ordinary = stat.S_ISREG(full.stat().st_mode)  # one call: another process may be creating the file
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return full  # missing or not accessible: opening reports it, and continues in memory
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user, a name that is too long, a NUL character
        raise InputError("db", str(path), "the path of a database file", f"Reason: {error}.") from None
    if not ordinary:
        raise InputError("db", str(path), "the path of a database file", "It is a folder or a device.")
    return full


def on_shared_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether other machines may write to the file system of `path`. False if that cannot be found out.

    SQLite's write-ahead log needs memory shared by all writers, so it must not be used there (https://sqlite.org/wal.html).
    """
    try:
        lines = mounts.read_text(errors="replace").splitlines()
        resolved = path.resolve()
    except OSError:
        return False
    best, kind = -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " "))
        # The last of several mounts on one point hides the others.
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind in _SHARED_BETWEEN_MACHINES or (kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs")
