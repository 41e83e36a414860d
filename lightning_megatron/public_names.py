"""Public names, listed once in a stub beside their module and imported at first use."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


class PublicNames:
    """Names that a module offers from other modules, which are imported when a name is first used.

    Type checkers read the same list: the statements ``from HOME import NAME as NAME`` of the stub.

    Args:
        module: Name of the module.
        file: File of the module; its stub has the same name and the ending ``.pyi``.
    """

    def __init__(self, module: str, file: str) -> None:
        self._module = module
        text = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
        statements = [one for one in ast.parse(text).body if isinstance(one, ast.ImportFrom)]
        #: The module that defines each name.
        self.homes = {one.names[0].name: one.module or "" for one in statements}

    def __call__(self, name: str) -> Any:
        """Return a name's value, as ``__getattr__`` of the module.

        Raises:
            AttributeError: If the module does not offer the name.
        """
        if name not in self.homes:
            raise AttributeError(
                f"module {self._module!r} has no attribute {name!r}; its names are "
                f"{', '.join(sorted(self.homes))}"
            )
        return getattr(import_module(self.homes[name]), name)
