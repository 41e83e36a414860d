"""The walk of a value: the files that a reader opens who follows a parameter through a room.

``python -m tests.walk swap/apply.py parallelize module`` prints a walk. It is read from the syntax
trees: calls in the order of the text, all branches included. The walk follows the parameter, its
parts and what is made of them into every function of the room that gets one of these, except for

* a function that answers with a number, a text, or yes or no: its name says what it asks;
* a parameter whose annotation holds only numbers, texts, process groups and the like;
* a stored function, a property, and a method of a Protocol, for which the running program chooses
  among functions that are subjects of their own;
* other rooms, whose docstrings are enough for a reader of this one.

A stay is a sequence of calls into one file. A return is a stay in a file that the walk had left.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_megatron"

#: Words of the annotations of answers: numbers, texts, and yes or no.
ANSWERS = frozenset({"str", "int", "float", "bool", "None"})
#: Words of the annotations of values that hold no part of a module.
PLAIN = ANSWERS | {
    *("object", "type", "range", "Literal", "Path", "torch", "device", "dtype"),
    *("Mapping", "Sequence", "Iterable", "Collection", "Set", "set", "frozenset", "dict"),
    *("list", "tuple", "ParallelMesh", "ParallelLayout", "MeshAxis"),
}
#: Built-in functions that only answer a question.
QUESTIONS = {
    *("all", "any", "bool", "hasattr", "id", "isinstance", "issubclass", "len", "repr", "str"),
    *("sum", "type"),
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


@dataclass(frozen=True)
class Definition:
    """Function or class, and its file as a path in the package."""

    file: str
    node: ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Sources:
    """Files of a room.

    Args:
        package: Folder of the package.
        room: Folder in it.
    """

    package: Path
    room: str

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Return the syntax trees of the files, by their paths in the package."""
        return {
            path.relative_to(self.package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted((self.package / self.room).rglob("*.py"))
        }

    @cached_property
    def classes(self) -> dict[str, Definition]:
        """Return the classes at the top of files, by name."""
        return {
            node.name: Definition(file, node)
            for file, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }

    def definition(self, file: str, name: str) -> Definition | None:
        """Find the function or class of the room by its name in a file; None if there is none."""
        for node in self.trees[file].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return Definition(file, node)
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            root, *parts = node.module.split(".")
            path = "/".join(parts)
            for alias in node.names if root == self.package.name else ():
                if (alias.asname or alias.name) == name:
                    files = {f"{path}.py", f"{path}/__init__.py"} & set(self.trees)
                    return self.definition(files.pop(), alias.name) if files else None
        return None

    def members(self, owner: str) -> dict[str, ast.FunctionDef | ast.AnnAssign]:
        """Return the methods and fields of a class, by name."""
        members: dict[str, ast.FunctionDef | ast.AnnAssign] = {}
        for node in self.classes[owner].node.body:
            if isinstance(node, ast.FunctionDef):
                members[node.name] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                members[node.target.id] = node
        return members

    def is_protocol(self, owner: str) -> bool:
        """Return whether a class is a Protocol."""
        node = self.classes[owner].node
        return isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)

    def class_in(self, annotation: ast.expr | None) -> str:
        """Return the first class of the room in an annotation; "" if there is none."""
        return next((word for word in words_of(annotation) if word in self.classes), "")


@dataclass
class Walk:
    """Walk of a parameter through a room.

    Args:
        sources: Files of the room.
        calls: File and name of each function on the way, once for each call.
        entered: Functions that the walk has been through.
    """

    sources: Sources
    calls: list[tuple[str, str]] = field(default_factory=list)
    entered: set[Definition] = field(default_factory=set)

    @property
    def stays(self) -> list[tuple[str, list[str]]]:
        """List the files on the way, each with the functions that are called there."""
        stays: list[tuple[str, list[str]]] = []
        for file, name in self.calls:
            if not stays or stays[-1][0] != file:
                stays.append((file, []))
            stays[-1][1].append(name)
        return stays

    @property
    def files(self) -> list[str]:
        """List the files on the way in the order of their first stay."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def num_returns(self) -> int:
        """Count the stays in files that the walk had left."""
        return len(self.stays) - len(self.files)

    def enter(self, function: Definition, parts: dict[str, str]) -> None:
        """Walk through a function, unless the walk has been there.

        Args:
            function: Function or method.
            parts: Parameters that are followed, each with its class in the room, or "".
        """
        self.calls.append((function.file, function.node.name))
        if function not in self.entered:
            self.entered.add(function)
            self._through(function.node.body, Followed(self.sources, function.file, parts))

    def _through(self, body: Iterable[ast.stmt], followed: Followed) -> None:
        for statement in body:
            # A function inside is stored, and a refusal ends the walk.
            if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Raise):
                continue
            children = list(ast.iter_child_nodes(statement))
            for child in children:
                if isinstance(child, ast.expr | ast.withitem):
                    self._calls_in(child, followed)
            followed.bind_targets(statement)
            for child in children:
                if isinstance(child, ast.stmt):
                    self._through([child], followed)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    self._through(child.body, followed)

    def _calls_in(self, node: ast.AST, followed: Followed) -> None:
        """Enter the functions that an expression calls, inner calls first."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, COMPREHENSIONS):
            followed = followed.inside(node)
            for part in (*node.generators, *results_of(node)):
                self._calls_in(part, followed)
            return
        for child in ast.iter_child_nodes(node):
            self._calls_in(child, followed)
        if isinstance(node, ast.Call):
            self._call(node, followed)

    def _call(self, call: ast.Call, followed: Followed) -> None:
        callee = followed.callee(call.func)
        if callee is None or isinstance(callee.node, ast.ClassDef) or is_question(callee.node):
            return
        function = callee.node
        parameters = [*function.args.posonlyargs, *function.args.args]
        arguments: list[tuple[ast.arg, ast.expr]] = []
        if isinstance(call.func, ast.Attribute):
            arguments.append((parameters.pop(0), call.func.value))
        arguments += zip(parameters, call.args, strict=False)
        named = {argument.arg: argument for argument in (*parameters, *function.args.kwonlyargs)}
        arguments += [
            (named[keyword.arg], keyword.value) for keyword in call.keywords if keyword.arg in named
        ]
        parts: dict[str, str] = {}
        for parameter, value in arguments:
            part = followed.part(value)
            if part is not None and can_hold_parts(parameter.annotation):
                parts[parameter.arg] = self.sources.class_in(parameter.annotation) or part
        if parts:
            self.enter(callee, parts)


@dataclass
class Followed:
    """Names in a function that hold parts of the value.

    Args:
        sources: Files of the room.
        file: File of the function.
        names: Names, each with the class of its value or of the items in it; "" if it is unknown.
    """

    sources: Sources
    file: str
    names: dict[str, str]

    def inside(self, node: ast.expr) -> Followed:
        """Return the names inside a comprehension."""
        inner = Followed(self.sources, self.file, dict(self.names))
        for generator in getattr(node, "generators", ()):
            inner._bind(generator.target, inner.part(generator.iter))
        return inner

    def bind_targets(self, statement: ast.stmt) -> None:
        """Follow the names to which a statement gives parts."""
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._bind(target, self.part(statement.value))
        elif isinstance(statement, ast.AugAssign | ast.AnnAssign) and statement.value is not None:
            self._bind(statement.target, self.part(statement.value))
        elif isinstance(statement, ast.For):
            self._bind(statement.target, self.part(statement.iter))

    def _bind(self, target: ast.expr, part: str | None) -> None:
        if part is not None:
            names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
            self.names |= dict.fromkeys(names, part if isinstance(target, ast.Name) else "")

    def part(self, node: ast.AST) -> str | None:
        """Return the class of an expression that holds a part, "" if unknown; None without one."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.JoinedStr | ast.Compare | ast.Lambda | ast.UnaryOp):
            return None
        if isinstance(node, COMPREHENSIONS):
            return first_of(map(self.inside(node).part, results_of(node)))
        if isinstance(node, ast.Attribute):
            return self._part_of_member(node)
        if isinstance(node, ast.Call):
            return self._part_of_result(node)
        return first_of(map(self.part, ast.iter_child_nodes(node)))

    def _part_of_member(self, node: ast.Attribute) -> str | None:
        owner = self.part(node.value)
        member = self.sources.members(owner).get(node.attr) if owner else None
        if member is None:
            return None if owner is None else ""
        annotation = member.returns if isinstance(member, ast.FunctionDef) else member.annotation
        return self.sources.class_in(annotation) if can_hold_parts(annotation) else None

    def _part_of_result(self, call: ast.Call) -> str | None:
        if isinstance(call.func, ast.Name) and call.func.id in QUESTIONS:
            return None
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        arguments += [call.func.value] if isinstance(call.func, ast.Attribute) else []
        part = first_of(map(self.part, arguments))
        callee = self.callee(call.func)
        if part is None or callee is None:
            return part
        if isinstance(callee.node, ast.ClassDef):
            return callee.node.name
        returns = callee.node.returns
        return self.sources.class_in(returns) if can_hold_parts(returns) else None

    def callee(self, function: ast.expr) -> Definition | None:
        """Return the function or class that a call enters; None if the running program chooses
        it.
        """
        if isinstance(function, ast.Name):
            return self.sources.definition(self.file, function.id)
        owner = self.part(function.value) if isinstance(function, ast.Attribute) else None
        if not owner or self.sources.is_protocol(owner):
            return None
        method = self.sources.members(owner).get(function.attr)  # type: ignore[attr-defined]
        file = self.sources.classes[owner].file
        return Definition(file, method) if isinstance(method, ast.FunctionDef) else None


def results_of(node: ast.expr) -> list[ast.expr]:
    """Return the expressions whose values a comprehension collects."""
    return [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]  # type: ignore[attr-defined]


def first_of(parts: Iterable[str | None]) -> str | None:
    """Return the first known class; "" if there are only unknown ones; None if there is none."""
    known = [part for part in parts if part is not None]
    return next(filter(None, known), "") if known else None


def words_of(annotation: ast.expr | None) -> list[str]:
    """Return the names in an annotation."""
    return [] if annotation is None else re.findall(r"\w+", ast.unparse(annotation))


def can_hold_parts(annotation: ast.expr | None) -> bool:
    """Return whether a value of an annotation can hold a part of a module."""
    return annotation is None or not PLAIN.issuperset(words_of(annotation))


def is_question(function: ast.FunctionDef) -> bool:
    """Return whether a function answers with a number, a text, or yes or no."""
    words = words_of(function.returns)
    return words not in ([], ["None"]) and ANSWERS.issuperset(words)


def walk(file: str, function: str, parameter: str, package: Path = PACKAGE) -> Walk:
    """Return the walk of a parameter through the room of a function.

    Args:
        file: Path in the package.
        function: Name of the function.
        parameter: Name of the parameter.
        package: Folder of the package.
    """
    sources = Sources(package, file.partition("/")[0])
    start = sources.definition(file, function)
    assert start is not None, f"{file} has no {function}"
    result = Walk(sources)
    result.enter(start, {parameter: ""})
    return result


if __name__ == "__main__":
    printed = walk(*sys.argv[1:])  # type: ignore[arg-type]
    print(f"{len(printed.files)} files, {printed.num_returns} returns")
    for number, (file, names) in enumerate(printed.stays, 1):
        print(f"{number:3} {file}: {', '.join(dict.fromkeys(names))}")
