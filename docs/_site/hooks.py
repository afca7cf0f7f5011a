"""Hooks of the site: pages made from files outside docs/, and links to such files.

`README.md` links to files by their paths, and so do the pages of `docs/`; on a code host every link works. The site holds `docs/`
and the four files of `PROJECT_FILES`. A link to any other file of the repository becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PROJECT_FILES = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
}
"""Files at the root of the repository, and their places in the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[\w-]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the project's own files to the site."""
    for name, place in PROJECT_FILES.items():
        source = f"../{name}"
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=relinked(text, PurePosixPath(source), PurePosixPath(place))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that lead out of `docs/`."""
    del config, files
    place = PurePosixPath(page.file.src_uri)
    return markdown if str(place) in PROJECT_FILES.values() else relinked(markdown, place, place)


def relinked(text: str, source: PurePosixPath, place: PurePosixPath) -> str:
    """A page's text with its links as the site needs them.

    Args:
        text: Markdown.
        source: the file that the links are relative to, relative to `docs/`.
        place: the page of the site, relative to `docs/`.
    """

    def link(found: re.Match[str]) -> str:
        mark, words, path, anchor = found[1], found[2], found[3], found[4] or ""
        target = os.path.normpath(source.parent / path)
        name = target.removeprefix("../")
        if name.startswith("docs/"):
            target = name.removeprefix("docs/")
        elif name in PROJECT_FILES:
            target = PROJECT_FILES[name]
        if target.startswith("../"):
            return words
        return f"{mark}[{words}]({os.path.relpath(target, place.parent)}{anchor})"

    return LINK.sub(link, text)


EXTERNAL = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc="?https?:|<link[^>]*rel="?(?:stylesheet|preconnect)[^>]*href="?https?:"""
)
"""Elements that make a browser fetch something from another host."""


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that fetches something from another host: the site works offline and tells nobody who reads it."""
    del config
    found = EXTERNAL.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri}: loads from another host: {found[0]}")
    return output
