"""Criteria as JSON files: the package ships one for each target; `convoy study` writes the user's beside the database."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, cast

from convoy.errors import InputError
from convoy.perfdb import default_path
from convoy.perfdb.shipped import shipped_folder
from convoy.target import Target
from convoy.tune.criteria import FEATURES, MAX_REGRET, Criteria, TreeLeaf, TreeNode, TreeSplit
from convoy.untrusted import parse_json, read_text

SCHEMA: Final = 1
SUFFIX: Final = ".criteria.json"
MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 16


def criteria_json(criteria: Criteria) -> str:
    """The file's text; equal criteria give equal texts."""
    data = {
        "schema": SCHEMA,
        "target": criteria.target.to_dict(),
        "protocol": criteria.protocol,
        "date": criteria.date,
        "commit": criteria.commit,
        "problems": criteria.problems,
        "engines": dict(criteria.engines),
        "kinds": list(criteria.kinds),
        "root": _node_json(criteria.root),
    }
    return json.dumps(data, indent=1) + "\n"


def _node_json(node: TreeNode) -> dict[str, Any]:
    if isinstance(node, TreeLeaf):
        return {"problems": node.problems, "regret": {e: round(r, 4) for e, r in node.regret.items()}}
    return {
        "feature": node.feature, "at_most": node.at_most, "yes": _node_json(node.yes), "no": _node_json(node.no),
    }  # fmt: skip


def read_criteria(text: str, source: str) -> Criteria:
    """Inverse of `criteria_json`. Every field is checked; InputError names the field, with `source` as the file's name."""
    if len(text) > MAX_BYTES:
        raise InputError(source, len(text), f"at most {MAX_BYTES} characters")
    data = parse_json(text, source)
    fields = _object(
        data, source, ("schema", "target", "protocol", "date", "commit", "problems", "engines", "kinds", "root")
    )
    if fields["schema"] != SCHEMA:
        raise InputError(f"{source}: schema", fields["schema"], str(SCHEMA), "Run `convoy study` to learn them again.")
    try:
        target = Target.from_dict(fields["target"])
    except InputError as error:
        raise InputError(
            f"{source}: target", fields["target"], "a target's fields", f"Reading it failed: {error}"
        ) from None
    engines = {
        _engine(name, f"{source}: engines"): _integer(version, f"{source}: engines.{name}", 0)
        for name, version in _object(fields["engines"], f"{source}: engines").items()
    }
    kinds = fields["kinds"]
    if not isinstance(kinds, list) or not all(
        isinstance(k, str) and 0 < len(k) < 100 for k in cast("list[Any]", kinds)
    ):
        raise InputError(f"{source}: kinds", cast("object", kinds), "a list of kinds of layers")
    return Criteria(
        target=target,
        protocol=_text(fields["protocol"], f"{source}: protocol"),
        engines=engines,
        kinds=tuple(cast("list[str]", kinds)),
        root=_node(fields["root"], f"{source}: root", engines, 0),
        problems=_integer(fields["problems"], f"{source}: problems", 1),
        date=_text(fields["date"], f"{source}: date"),
        commit=_text(fields["commit"], f"{source}: commit"),
    )


def _node(data: object, where: str, engines: Mapping[str, int], depth: int) -> TreeNode:
    if depth > MAX_DEPTH:
        raise InputError(where, depth, f"a tree of at most {MAX_DEPTH} levels")
    if isinstance(data, dict) and "regret" in data:
        fields = _object(cast("object", data), where, ("problems", "regret"))
        regret = {
            _engine(name, f"{where}.regret", engines): _number(value, f"{where}.regret.{name}", 0.0, MAX_REGRET)
            for name, value in _object(fields["regret"], f"{where}.regret").items()
        }
        if not regret:
            raise InputError(f"{where}.regret", regret, "at least one engine")
        return TreeLeaf(_integer(fields["problems"], f"{where}.problems", 1), regret)
    fields = _object(cast("object", data), where, ("feature", "at_most", "yes", "no"))
    if not isinstance(fields["feature"], str) or fields["feature"] not in FEATURES:
        raise InputError(f"{where}.feature", fields["feature"], "one of " + ", ".join(FEATURES))
    return TreeSplit(
        fields["feature"],
        _number(fields["at_most"], f"{where}.at_most", -math.inf, math.inf),
        _node(fields["yes"], f"{where}.yes", engines, depth + 1),
        _node(fields["no"], f"{where}.no", engines, depth + 1),
    )


def _object(data: object, where: str, names: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(data, dict) or (names and set(cast("dict[str, Any]", data)) != set(names)):
        raise InputError(where, cast("object", data), "an object" + (" with " + ", ".join(names) if names else ""))
    return cast("dict[str, Any]", data)


def _text(data: object, where: str) -> str:
    if not isinstance(data, str) or len(data) > 200:
        raise InputError(where, data, "a text of at most 200 characters")
    return data


def _engine(name: str, where: str, known: Mapping[str, int] | None = None) -> str:
    if not re.fullmatch(r"[a-z0-9_.]{1,60}", name, re.ASCII) or (known is not None and name not in known):
        raise InputError(where, name, "an engine's id" + ("" if known is None else " listed in `engines`"))
    return name


def _integer(data: object, where: str, least: int) -> int:
    if isinstance(data, bool) or not isinstance(data, int) or not least <= data < 1 << 40:
        raise InputError(where, data, f"an integer of at least {least}")
    return data


def _number(data: object, where: str, least: float, most: float) -> float:
    if (
        isinstance(data, bool)
        or not isinstance(data, int | float)
        or not math.isfinite(data)
        or not least <= data <= most
    ):
        raise InputError(where, data, "a finite number" if math.isinf(least) else f"a number from {least} to {most}")
    return float(data)


def user_file(target: Target, database: Path | None) -> Path:
    """Path of a user's own criteria for a target: beside the database.

    Args:
        target: the device.
        database: the database's path; None for the default one.
    """
    path = (database or default_path()).expanduser()
    return path.with_name(f"{path.stem}-{target.digest}{SUFFIX}")


def user_criteria(database: Path | None) -> list[Path]:
    """Files of the user's own criteria beside a database; None: the default one."""
    path = (database or default_path()).expanduser()
    return sorted(path.parent.glob(f"{path.stem}-*{SUFFIX}")) if path.parent.is_dir() else []


def find_criteria(target: Target, database: Path | None = None, folder: Traversable | None = None) -> Criteria | None:
    """The criteria that fit a target best: its own, else its device's, else its architecture's; of CPUs else any other's.

    If both fit equally well, the user's criteria come before the shipped ones.

    Args:
        target: the device.
        database: the database's path; None for the default one.
        folder: the shipped files; by default the package's own.

    Raises:
        InputError: a file is damaged; the error names it.
    """
    found: list[tuple[int, Criteria]] = []
    for rank, path in enumerate((*user_criteria(database), *_shipped(folder))):
        try:
            criteria = read_criteria(_content(path), str(path))
        except InputError as error:
            todo = f"Reading it failed: {error} Remove it, or run `convoy study` to learn it again."
            raise InputError("criteria", str(path), "a criteria file", todo) from error
        fit = _match_rank(criteria.target, target)
        if fit is not None:
            found.append((10_000 * fit + rank, criteria))
    return min(found, key=lambda item: item[0], default=(0, None))[1]


def _content(path: Path | Traversable) -> str:
    """A file's text; raises InputError for a file that is not regular, too large or not UTF-8."""
    if isinstance(path, Path):
        return read_text(path, MAX_BYTES, "criteria")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1).decode("utf-8", "replace")


def _shipped(folder: Traversable | None) -> list[Traversable]:
    folder = folder or shipped_folder()
    entries = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((e for e in entries if e.name.endswith(SUFFIX)), key=lambda entry: entry.name)


def _match_rank(known: Target, target: Target) -> int | None:
    """0 for the same target, 1 for the same device, 2 for the same architecture, 3 for another CPU, None for any other."""
    if known.digest == target.digest:
        return 0
    if known.is_same_device(target):
        return 1
    if known.device != target.device:
        return None
    if known.arch == target.arch:
        return 2
    return 3 if known.device == "cpu" and known.predicts(target) else None
