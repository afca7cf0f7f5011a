"""Weights and constants of a .pt2 file: raw bytes, each with sizes, strides and a type that stay inside them."""

from __future__ import annotations

import re
from typing import Any, Final

from convoy.zoo.pt2.archive import Archive
from convoy.zoo.pt2.fields import checked, read_json
from convoy.zoo.pt2.program_rules import check_path, device, tensor_meta
from convoy.zoo.pt2.refusal import RefusedError, shown

ITEM_BYTES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 9: 4, 10: 8, 11: 16, 12: 1, 13: 2, 28: 2} | {
    29: 1,
    30: 1,
    31: 1,
    32: 1,
    33: 1,
    34: 4,
    35: 8,
}
"""Bytes of an element by the schema's `ScalarType`."""

_FILES: Final = {
    "weights": re.compile(r"weight_\d{1,9}", re.ASCII),
    "constants": re.compile(r"tensor_\d{1,9}", re.ASCII),
}


def read_payloads(archive: Archive, folder: str) -> dict[str, bytes]:
    """The entries of `data/weights` or `data/constants` with their table; raises RefusedError."""
    import json

    from torch._export.serde import schema

    table = f"data/{folder}/model_{folder}_config.json"
    if table not in archive:
        raise RefusedError(f"It lacks {table}: it was written by an older PyTorch, as a pickle.")
    rules = {"Device": device, "TensorMeta": tensor_meta}
    config = checked(schema.PayloadConfig, read_json(archive[table], table), table, rules)
    entries: dict[str, bytes] = {table: json.dumps(config).encode()}
    for path, meta in config["config"].items():
        check_path(path)
        if meta["use_pickle"] is not False:
            raise RefusedError(f"Its {shown(path)} is a pickled object.")
        if _FILES[folder].fullmatch(meta["path_name"]) is None:
            raise RefusedError(f"Its {shown(path)} is stored as {shown(meta['path_name'])}, which is no plain tensor.")
        entry = f"data/{folder}/{meta['path_name']}"
        if entry not in archive:
            raise RefusedError(f"It lacks {entry}.", is_code=False)
        _check_inside(meta["tensor_meta"], archive.size(entry), path)
        if entry not in entries:
            entries[entry] = archive[entry]
    return entries


def _check_inside(meta: dict[str, Any] | None, size: int, path: str) -> None:
    item = None if meta is None else ITEM_BYTES.get(meta["dtype"])
    if meta is None or item is None:
        raise RefusedError(f"Its {shown(path)} has no known type.", is_code=False)
    sizes, strides = ([n["as_int"] for n in meta[field]] for field in ("sizes", "strides"))
    if 0 in sizes:
        if max(sizes, default=0) > 2**31:
            raise RefusedError(f"Its {shown(path)} has an impossible size.", is_code=False)
        return
    last = meta["storage_offset"]["as_int"] + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if (last + 1) * item > size or size % item:
        raise RefusedError(f"Its {shown(path)} is larger than its {size} bytes.", is_code=False)
