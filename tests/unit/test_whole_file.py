"""Result files: whole or not at all; links stay, and devices, pipes and folders are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.whole_file import replaceable_file, unfinished_files, whole_file


def test_the_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / ("名" * 84)
    path.write_text("old")
    with whole_file(path, "plan") as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert unfinished_files(path) == [temporary]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(IsADirectoryError), whole_file(path, "plan") as temporary:
        temporary.write_bytes(tmp_path.read_bytes())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link, file = tmp_path / "latest.json", tmp_path / "runs" / "3.json"
    link.symlink_to(file)
    for text in ("first", "second"):  # a new file, and one that is there
        with whole_file(link, "plan") as temporary:
            temporary.write_text(text)
        assert link.is_symlink()
        assert file.read_text() == text
    assert sorted(tmp_path.rglob("*")) == sorted([link, file, file.parent])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_not_replaced(tmp_path: Path, linked: bool) -> None:
    pipe = path = tmp_path / "pipe"
    os.mkfifo(pipe)
    if linked:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    with pytest.raises(InputError, match=r"plan: got .*, expected a regular file or a new one\. Devices, pipes"):
        replaceable_file(path, "plan")
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path(os.devnull).is_char_device(), reason="needs a device file")
def test_a_device_is_not_replaced() -> None:
    with pytest.raises(InputError, match=r"plan: got '/dev/null', expected a regular file"):
        replaceable_file(Path(os.devnull), "plan")


def test_paths_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "no" / "such")
    for path in (tmp_path, tmp_path / "no" / "such", tmp_path / "file" / "a", tmp_path / "dangling"):
        with pytest.raises(InputError, match=r"expected a file in a folder that exists"):
            replaceable_file(path, "plan")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "a\0b", tmp_path / ("n" * 300), tmp_path / "loop"):
        with pytest.raises(InputError, match=r"plan: got "):
            replaceable_file(path, "plan")
