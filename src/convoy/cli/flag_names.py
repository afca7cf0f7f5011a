"""Errors name options as they were typed. The names come from the options' own declarations and from the typed words."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer

from convoy.errors import ConvoyError, InputError, PlanError
from convoy.settings import variable_of

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What click raises for words that are no command line; typer has a copy of click in some versions."""


class _Nothing:
    """Stands for a value that was not given; in messages it reads "got nothing"."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


class CommandLineError(ConvoyError):
    """A command line that is refused before the command runs; the message begins with the word that is wrong."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Typed:
    """An option as the user wrote it.

    Attributes:
        flag: the name that was typed: the present one, a short one or a former one.
        value: the word behind it; None where there is none.
    """

    flag: str
    value: str | None


class FlagNames:
    """Names of one command's options and arguments in one command line.

    Args:
        parameters: as click declares them.
        words: the command line behind the command's name.
        renamed: former name of an option → its name.
    """

    def __init__(self, parameters: Sequence[Any], words: Sequence[str], renamed: Mapping[str, str]) -> None:
        self._parameters = list(parameters)
        self._typed = _typed(self._parameters, words, renamed)
        self._by_word = {p.name: p for p in self._parameters}
        for parameter in self._parameters:  # a flag's name goes before the name of a function's parameter
            self._by_word |= {_word(flag): parameter for flag in _flags(parameter)}

    def of(self, parameter: Any) -> str:
        """The name that the user typed; for an option that was not typed its long name, for an argument its word in the help."""
        if parameter.name in self._typed:
            return self._typed[parameter.name].flag
        flags = _flags(parameter)
        return next((flag for flag in flags if flag.startswith("--")), "") or _argument(parameter)

    def renamed(self, error: InputError, values: Mapping[str, Any]) -> InputError:
        """The same error; its argument is the option or argument of the command line that holds the value.

        Args:
            error: raised by the command; it names an argument of a Python call, an option or a file.
            values: the command's parameters by name, as click read them.
        """
        name = self._name(error, values)
        value = NOTHING if error.value is None else error.value
        return InputError(name or error.argument, value, self.in_text(error.expected), self.in_text(error.todo))

    def in_text(self, text: str) -> str:
        """A message with options for the names of arguments that it begins with, or that are in backticks."""

        def option(match: re.Match[str]) -> str:
            parameter = self._by_word.get(match[2])
            return match[0] if parameter is None else f"{match[1]}{self.of(parameter)}{match[3]}"

        return re.sub(r"(`)(\w+)(`)", option, re.sub(r"^()(\w+)(: )", option, text))

    def _name(self, error: InputError, values: Mapping[str, Any]) -> str | None:
        word = _word(error.argument)
        parameter = self._by_word.get(word)
        variable = variable_of(word, os.environ)
        if variable and (parameter is None or parameter.name not in self._typed):
            return variable
        if parameter is not None:
            return self.of(self._file(error, values) or parameter)
        lines = self._lines(error, values)
        if lines:
            return lines
        head, field = _parts(error.argument)
        parameter = self._by_word.get(_word(head))
        if parameter is None and isinstance(error, PlanError):
            parameter, field = self._by_word.get("plan"), error.argument
        if parameter is not None:
            return f"{self.of(parameter)} ({field})"
        found = [p for p in self._parameters if str(error.value) in self._given(p, values.get(p.name))]
        return self.of(found[0]) if len(found) == 1 else None

    def _file(self, error: InputError, values: Mapping[str, Any]) -> Any:
        """The only parameter that was given the file of the error: two options may name files of one kind."""
        files = [p for p in self._parameters if error.value in _paths(p, values.get(p.name))]
        return files[0] if len(files) == 1 else None

    def _lines(self, error: InputError, values: Mapping[str, Any]) -> str:
        """For an error that names a place in a file: the option that named the file, and the place."""
        for parameter in self._parameters:
            for path in self._given(parameter, values.get(parameter.name)):
                names = f"({re.escape(path)}|{re.escape(Path(path).name)})"
                place = re.match(rf"(?:\w+ )?(?P<place>{names}(?![\w.]).*)", error.argument) if path else None
                if place is not None:
                    return f"{self.of(parameter)} {place['place']}"
        return ""

    def _given(self, parameter: Any, value: object) -> set[str]:
        """The words that a parameter was given on the command line."""
        if parameter.param_type_name == "option" and parameter.name not in self._typed:
            return set()
        items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
        return {str(item) for item in items if isinstance(item, str | Path | int | float) and str(item)}

    def refusal(self, error: Any, command: str) -> ConvoyError:
        """What click says of a command line, in the form of all other errors.

        Args:
            error: click's UsageError.
            command: the words that start the command, such as `convoy db list`.
        """
        see = f"`{command} --help` lists what there is."
        parameter = getattr(error, "param", None)
        if parameter is not None:
            name = self.of(parameter)
            if type(error).__name__ == "MissingParameter":
                return CommandLineError(f"{name} is missing: {(parameter.help or '').rstrip('.')}. {see}")
            typed = self._typed.get(parameter.name)
            expected = _expected(parameter)
            if typed is not None and expected:
                return InputError(name, typed.value or NOTHING, expected)
            return CommandLineError(f"{name}: {error.message}")
        flag = str(getattr(error, "option_name", ""))
        if not flag:
            surplus = re.search(r"extra argument.*\((.*)\)", error.message)
            said = f"{surplus[1]}: `{command}` takes no such word" if surplus else error.format_message().rstrip(".")
            return CommandLineError(f"{said}. {see}")
        own = self._by_word.get(_word(flag))
        if own is None or type(error).__name__ == "NoSuchOption":
            near = getattr(error, "possibilities", None) or ()
            suggestion = f"Did you mean {' or '.join(sorted(near))}? " if near else ""
            return CommandLineError(f"{flag}: `{command}` has no such option. {suggestion}{see}")
        typed = self._typed.get(own.name, Typed(flag, None))
        return InputError(
            typed.flag, typed.value or NOTHING, "no value" if own.is_flag else _expected(own) or "a value behind it"
        )


def _paths(parameter: Any, value: object) -> list[str]:
    """The paths among the values of a parameter; older versions of typer make them `Path` only for the command's function."""
    items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
    kind = getattr(getattr(parameter, "type", None), "name", "")
    kinds = (Path, str) if kind in ("path", "file", "directory") else (Path,)
    return [str(item) for item in items if isinstance(item, kinds)]


def _flags(parameter: Any) -> list[str]:
    """The names of an option, with their dashes; none of an argument."""
    return [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]


def value_word(parameter: Any) -> str:
    """A word for the value of an option in the help: its own metavar, or its type's, alike in all versions of typer."""
    if parameter.metavar:
        return str(parameter.metavar)
    kind = str(getattr(getattr(parameter, "type", None), "name", ""))
    kind = (kind or str(parameter.type_descriptor.annotation)).lower()
    words = (("path", "PATH"), ("file", "PATH"), ("int", "N"), ("float", "X"))
    return next((word for name, word in words if name in kind), "WORD")


def _argument(parameter: Any) -> str:
    """The word that stands for an argument in the help."""
    return str(parameter.metavar or parameter.name.upper())


def _word(name: str) -> str:
    """`--tune-s` as the argument of a Python call: `tune_s`."""
    return name.lstrip("-").replace("-", "_")


def _parts(argument: str) -> tuple[str, str]:
    """`plan.target` as `plan` and `target`."""
    head, *rest = re.split(r"[.\[:,]", argument, maxsplit=1)
    return head, rest[0].strip() if rest else ""


def _typed(parameters: Sequence[Any], words: Sequence[str], renamed: Mapping[str, str]) -> dict[str, Typed]:
    """Options among the typed words, by the parameter's name; of one that is repeated the last."""
    declared = {flag: parameter for parameter in parameters for flag in _flags(parameter)}
    found: dict[str, Typed] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:  # -oFILE
            flag, equals, value = word[:2], "=", word[2:]
        parameter = declared.get(renamed.get(flag, flag))
        if parameter is None:
            continue
        takes = not parameter.is_flag
        found[parameter.name] = Typed(flag, value if equals else next(rest, None) if takes else None)
    return found


def _expected(parameter: Any) -> str:
    """What an option takes, by its declared type; empty where any text may be read."""
    kind = str(getattr(getattr(parameter, "type", None), "name", ""))
    kind = kind or str(parameter.type_descriptor.annotation)
    return next((words for name, words in (("int", "an integer"), ("float", "a number")) if name in kind), "")
