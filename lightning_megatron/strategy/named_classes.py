"""Classes of the model and data module that the command line and its config files name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import yaml


def named_class(arguments: Sequence[str], key: str) -> str | None:
    """Return the class path that the last file or option gives for a key; None without any.

    A class that cannot be imported also gives None.

    Args:
        arguments: Command-line arguments, with names of recipes resolved to paths.
        key: Name of the setting: ``model`` or ``data``.
    """
    class_path = None
    for option, value in _options(arguments):
        if option in ("-c", "--config"):
            class_path = _class_in(value, key) or class_path
        elif option in (f"--{key}", f"--{key}.class_path"):
            class_path = value
    return class_path if class_path is not None and _exists(class_path) else None


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if equals:
            yield option, value
        elif number + 1 < len(arguments):
            yield argument, arguments[number + 1]


def _class_in(path: str, key: str) -> str | None:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        # The parser reads the file again and reports the error.
        return None
    entry = content.get(key) if isinstance(content, dict) else None
    chosen = entry.get("class_path") if isinstance(entry, dict) else entry
    return chosen if isinstance(chosen, str) else None


def _exists(path: str) -> bool:
    module, _, name = path.rpartition(".")
    try:
        return hasattr(import_module(module), name)
    except (ImportError, ValueError):
        # The parser reports the missing class.
        return False
