"""The package's files as syntax trees, each read once, and what imports what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_megatron"


@dataclass(frozen=True)
class Import:
    """An import: the absolute name of a module or of a name in it, and where it stands."""

    name: str
    line: int
    is_for_types: bool
    is_in_function: bool


@dataclass(frozen=True)
class SourceFile:
    """A file of Python.

    Args:
        path: Absolute path.
    """

    path: Path

    @cached_property
    def text(self) -> str:
        """The file's text."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The file's syntax tree."""
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def num_code_lines(self) -> int:
        """The number of lines without blank lines, comments and docstrings."""
        texts = set[int]()
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(map(str.strip, self.text.splitlines()), 1)
        return sum(bool(line) and line[0] != "#" for number, line in lines if number not in texts)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def place(self) -> str:
        """The path within the package, such as ``plan/layout.py``; for tests, within the project."""
        base = PACKAGE if self.path.is_relative_to(PACKAGE) else ROOT
        return self.path.relative_to(base).as_posix()

    @property
    def has_stub(self) -> bool:
        """Whether a stub beside the file lists what it imports at first use."""
        return self.path.with_suffix(".pyi").is_file()

    @cached_property
    def room(self) -> str:
        """The first folder below the package, or the stem of a file that lies in none."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else self.path.stem

    @cached_property
    def module(self) -> str:
        """The name of the file's module."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return [node for node in self.nodes if isinstance(node, kinds)]

    @cached_property
    def imports(self) -> list[Import]:
        """All imports; of ``from a import b`` the name ``a.b``. A stub beside the file adds its own."""
        stub = self.path.with_suffix(".pyi")
        trees = [self.tree, *([ast.parse(stub.read_text("utf-8"))] if self.has_stub else [])]
        return [one for tree in trees for one in self._imports_in(tree, False, False)]

    def _imports_in(
        self, node: ast.AST, is_for_types: bool, is_in_function: bool
    ) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{self._source_of(node)}.{alias.name}" for alias in node.names]
        else:
            is_for_types = is_for_types or is_type_checking(node)
            is_in_function = is_in_function or isinstance(node, ast.FunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from self._imports_in(child, is_for_types, is_in_function)
            return
        for name in names:
            yield Import(name, node.lineno, is_for_types, is_in_function)

    def _source_of(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        folder = self.path.relative_to(ROOT).with_suffix("").parts[: -node.level]
        return ".".join((*folder, node.module or "")).rstrip(".")


def is_type_checking(node: ast.AST) -> bool:
    """Return whether a node is ``if TYPE_CHECKING``."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def files_of(folder: Path) -> tuple[SourceFile, ...]:
    """Return all files of Python below a folder, in order."""
    return tuple(SourceFile(path) for path in sorted(folder.rglob("*.py")))


def imported_files(file: SourceFile, modules: dict[str, SourceFile]) -> set[SourceFile]:
    """Return the files that a file imports, those for types included.

    Args:
        file: The file.
        modules: Files by the names of their modules.
    """
    found = {_home_of(one.name, modules) for one in file.imports}
    return {home for home in found if home is not None} - {file}


def _home_of(name: str, modules: dict[str, SourceFile]) -> SourceFile | None:
    # `from a import b` imports the module a.b or a name of the module a, which may re-export it.
    if name in modules:
        return modules[name]
    module, _, last = name.rpartition(".")
    home = modules.get(module)
    if home is not None and (home.path.name == "__init__.py" or home.has_stub):
        sources = [one.name for one in home.imports if one.name.endswith(f".{last}")]
        if sources and sources[0] != name:
            return _home_of(sources[0], modules)
    return home
