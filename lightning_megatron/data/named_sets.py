"""Named sets of a part of the data, each evaluated by itself."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.errors import UnsupportedError

#: Paths of one set, or of several by their names; None means none.
SetPaths = str | list[str] | dict[str, str | list[str]] | None


def named_sets(part: str, given: SetPaths) -> dict[str, list[str]]:
    """Return the paths of each named set of a part; empty if the part has no names.

    Args:
        part: Name of the part in errors, ``val`` or ``test``.
        given: Paths of one set, or of several by their names; None means none.

    Raises:
        UnsupportedError: If there is no set, or one has no name or no path.
    """
    if not isinstance(given, Mapping):
        return {}
    found = {
        name: [paths] if isinstance(paths, str) else list(paths) for name, paths in given.items()
    }
    if not found or not all(name and paths for name, paths in found.items()):
        raise UnsupportedError(
            f"{part} must give each set a name and at least one path: it is {given!r}. Write "
            f"{part}={{'news': 'my_news', 'code': ['my_c', 'my_python']}}, or one path without a "
            "name."
        )
    return found


def all_paths(given: SetPaths) -> list[str]:
    """Return the paths of all sets of a part, in their order.

    Args:
        given: Paths of one set, or of several by their names; None means none.
    """
    sets = given.values() if isinstance(given, Mapping) else [given or []]
    return [path for paths in sets for path in ([paths] if isinstance(paths, str) else paths)]
