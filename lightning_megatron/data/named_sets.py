"""Named sets of a part of the data, which are evaluated separately."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.errors import UnsupportedError

#: Paths of one set, or paths of several sets by name; None means no set.
SetPaths = str | list[str] | dict[str, str | list[str]] | None


def named_sets(part: str, paths: SetPaths) -> dict[str, list[str]]:
    """Return the paths of each named set of a part; an empty mapping without named sets.

    Args:
        part: Name of the part in errors, ``val`` or ``test``.
        paths: Paths of one set, or paths of several sets by name; None means no set.

    Raises:
        UnsupportedError: If a mapping has no set, or a set has no name or no path.
    """
    if not isinstance(paths, Mapping):
        return {}
    sets = {
        name: [value] if isinstance(value, str) else list(value) for name, value in paths.items()
    }
    if not sets or not all(name and paths for name, paths in sets.items()):
        raise UnsupportedError(
            f"{part} must give each set a name and at least one path: it is {paths!r}. Write "
            f"{part}={{'news': 'my_news', 'code': ['my_c', 'my_python']}}, or one path without a "
            "name."
        )
    return sets


def all_paths(paths: SetPaths) -> list[str]:
    """Return the paths of all sets of a part, in order.

    Args:
        paths: Paths of one set, or paths of several sets by name; None means no set.
    """
    sets = paths.values() if isinstance(paths, Mapping) else [paths or []]
    return [path for paths in sets for path in ([paths] if isinstance(paths, str) else paths)]
