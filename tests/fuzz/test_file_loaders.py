"""Mutated files for every loader: what is damaged is refused by a ConvoyError, and nothing else comes out."""

from __future__ import annotations

import random
import zlib

import pytest

from tests.fuzz.file_loaders import made, names
from tests.fuzz.mutate_files import mutation, try_file

MUTATIONS = 200


@pytest.mark.parametrize("name", names())
def test_mutated_files_are_loaded_or_refused(name, tmp_path):
    loader = made(name)
    path = tmp_path / f"file{loader.suffix}"
    for data in loader.seeds:
        assert try_file(loader, path, data) == ("loaded", "")
    draw = random.Random(zlib.crc32(name.encode()))
    refused = 0
    for _ in range(MUTATIONS):
        word, why = try_file(loader, path, mutation(loader, draw))
        assert word != "failed", why
        refused += word == "refused"
    assert refused > MUTATIONS // 10
