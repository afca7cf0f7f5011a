"""A handler that catches everything says why: it has a comment on its line."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "convoy"
BROAD = {"Exception", "BaseException"}


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches every exception."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def uncommented(text: str) -> list[int]:
    """Lines of the handlers in a module that catch everything and have no comment."""
    lines = text.splitlines()
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    return [handler.lineno for handler in handlers if is_broad(handler) and "#" not in lines[handler.lineno - 1]]


def test_handlers_of_everything_say_why() -> None:
    found = {path.relative_to(SOURCE).as_posix(): uncommented(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_handler_without_a_comment_is_found() -> None:
    text = "try:\n    f()\nexcept ValueError:\n    pass\nexcept (OSError, Exception):\n    pass\n"
    assert uncommented(text) == [5]
    assert uncommented("try:\n    f()\nexcept:  # why\n    pass\n") == []
    assert uncommented("try:\n    f()\nexcept:\n    pass\n") == [3]
