"""Which engines compete under a user's settings: those that the user names, else those that say so themselves."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine
from convoy.engines.manifest import BASELINE, LISTED_BY, RETIRED, engine_ids, load_engine
from convoy.errors import InputError, unknown_name
from convoy.settings import Settings


def load_competitor(engine: str, extra: tuple[str, ...]) -> Engine:
    """Import an engine; one of the user's that cannot be imported is the user's input."""
    try:
        return load_engine(engine, extra)
    except (ImportError, AttributeError) as error:
        expected = "an engine that can be imported"
        raise InputError("engine", engine, expected, f"{type(error).__name__}: {error}.") from error


def competing_engines(settings: Settings, *, published: bool = False) -> list[str]:
    """Ids of the engines that may compete, the baseline first: it always does.

    Args:
        settings: which engines the user names, and what they may do (`Engine.is_offered`).
        published: whether engines that are not offered by default compete too, as in `convoy study`.

    Raises:
        InputError: `check_engine_names`, or an engine of the user's own cannot be imported.
    """
    check_engine_names(settings)
    known = engine_ids(settings.engines)
    only, own = settings.only_engines, {entry.partition("=")[0] for entry in settings.engines}

    def competes(engine: str) -> bool:
        if engine in settings.deny_engines or (only and engine not in only):
            return False
        return (
            engine in only
            or engine in own
            or _is_offered(load_competitor(engine, settings.engines), settings, published)
        )

    return [engine for engine in dict.fromkeys(known) if engine == BASELINE or competes(engine)]


def check_engine_names(settings: Settings) -> None:
    """Refuse settings that name engines wrongly.

    Raises:
        InputError: `only_engines` or `deny_engines` names an engine that is not there, both name one, or the baseline is denied.
    """
    known = engine_ids(settings.engines)
    _check_names("only_engines", settings.only_engines, known)
    _check_names("deny_engines", settings.deny_engines, [*known, *RETIRED])
    if BASELINE in settings.deny_engines:
        raise InputError(
            "deny_engines",
            settings.deny_engines,
            f"ids without {BASELINE!r}",
            "It is PyTorch's own call: it computes all that no other engine supports, and runs wherever nothing is faster. A "
            "portable package (`convoy export --portable`) uses Convoy's kernels alone.",
        )
    both = [name for name in settings.only_engines if name in settings.deny_engines]
    if both:
        raise InputError(
            "deny_engines",
            settings.deny_engines,
            "ids that only_engines does not name",
            f"Both name {', '.join(both)}: leave it out of one of them.",
        )


def _is_offered(engine: Engine, settings: Settings, published: bool) -> bool:
    return engine.is_offered(settings) or (published and not engine.offered_by_default)


def _check_names(argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(
                argument, name, known, f"It was withdrawn: {RETIRED[name]}" if name in RETIRED else LISTED_BY
            )
