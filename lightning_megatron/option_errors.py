"""Short messages about wrong options, settings and names, with the nearest legal ones."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from ast import literal_eval
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lightning_megatron.once import say_once
from lightning_megatron.public_names import PublicNames

_PACKAGE = "lightning_megatron"

#: What parsers say about an option or a setting that they do not know.
_UNKNOWN = re.compile(
    r"(?:unrecognized arguments: (?P<arguments>.+)"
    r"|(?:(?:Subcommand|Group) '(?P<owner>[^']*)' does not accept o|O)ption '(?P<setting>[^']+)'"
    r"(?: is not accepted)?)$"
)
_NO_SUBCOMMAND = re.compile(r'expected "subcommand" to be one of \{(.*)\}, .*')
_MISSING = "the following arguments are required: "
_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_CHOICE = re.compile(r"argument (\w+): invalid choice: '(.*?)' \(choose from (.*)\)")
_CLASS = re.compile(r"^( *)(?:- )?Problem with given class_path '([^']+)':\n( *)", re.MULTILINE)
_KEY = re.compile(r'^[ -]*Parser key "([^"]+)":\s*', re.MULTILINE)
_RESTRICTION = re.compile(r"(\S+) does not conform to restriction v(\S+)")
_LITERAL = re.compile(r"typing\.Literal(\[[^\]]*\])")
_TYPE = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_WIDTH = 100


def nearest(given: str, legal: Iterable[str]) -> str:
    """Return a sentence with the legal name that is most like the given one; empty without any."""
    # Names have as few as two letters, of which one may be wrong.
    close = get_close_matches(given, list(legal), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def underscored(argument: str) -> str:
    """Return an argument whose option, if it is one, is written with underscores, as in Python."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class OptionParser(argparse.ArgumentParser):
    """Parser that takes options by their full names, and explains an error in few lines.

    A wrong option is answered with the nearest legal one and its legal neighbours, instead of the
    usage of all options. Parsers of classes, which jsonargparse creates from the type of this one,
    explain the settings of their class in the same way.
    """

    #: Where else to look, printed behind the errors.
    more = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | options))

    def error(self, message: str, ex: BaseException | None = None) -> NoReturn:
        """End with a message, or raise it in the parser of a class."""
        parser = getattr(ex, "subcommand_parser", None) or self
        explained = explain(message, parser.option_names(), is_class=not self.exit_on_error)
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, explained) from ex
        command = parser.prog.replace(" [options]", "")
        text = f"{command}: error: {explained}\nAll options: {command} --help{self.more}\n"
        say_once(text, partial(sys.stderr.write, text))
        self.exit(2)

    def option_names(self) -> list[str]:
        """Return the full names of the options, without dashes."""
        names = [name.removeprefix("--") for name in self._option_string_actions if "--" in name]
        hidden = re.compile(r"help|print_shtab|.*\.help|.*\+|no_.*")
        return [name for name in names if not hidden.fullmatch(name)]


def explain(message: str, legal: list[str], *, is_class: bool = False) -> str:
    """Return the message of a parser in few lines, the symptom first.

    Args:
        message: What argparse or jsonargparse says.
        legal: Names of the parser's options.
        is_class: Whether the options are settings of a class, which have no dashes.
    """
    if choice := _CHOICE.match(message):
        name, given, text = choice.groups()
        choices = re.findall(r"[\w.-]+", text)
        name = name.lower()
        return f"{given!r} is no {name}.{nearest(given, choices)}\n{_listed(f'{name}s', choices)}"
    if missing := _NO_SUBCOMMAND.fullmatch(message):
        return f"a subcommand is missing.\n{_listed('subcommands', missing[1].split(','))}"
    if unknown := _UNKNOWN.fullmatch(message):
        argument = (unknown["arguments"] or f"--{unknown['setting']}").split(" ")[0]
        if not argument.startswith("--"):
            recipe = argument.endswith((".yaml", ".yml")) or argument.startswith("recipe:")
            remedy = f" Did you mean -c {argument}?" if recipe else " Options begin with --."
            return f"{argument!r} is not expected here.{remedy}"
        name = argument.removeprefix("--").partition("=")[0]
        is_group = unknown["owner"] is not None and unknown["owner"] in _heads(legal)
        return _unknown(f"{unknown['owner']}.{name}" if is_group else name, legal, is_class)
    return _brief(message)


def _unknown(name: str, legal: list[str], is_class: bool) -> str:
    """Say that there is no such option, and which options are beside it."""
    room = name.rpartition(".")[0]
    while room and not any(one.startswith(f"{room}.") for one in legal):
        room = room.rpartition(".")[0]
    start = f"{room}." if room else ""
    depth = start.count(".") + 1
    beside = {".".join(one.split(".")[:depth]) for one in legal if one.startswith(start)}
    dashes = "" if is_class else "--"
    # Of a path that is wrong near its beginning, only this part is compared.
    close = nearest(".".join(name.split(".")[:depth]), sorted(beside))
    close = close.replace("mean ", f"mean {dashes}")
    kind = "setting" if is_class else "option"
    names = sorted(one.removeprefix(start) for one in beside)
    what = f"legal after {dashes}{start}" if start else "legal"
    return f"there is no {kind} {dashes}{name}.{close}\n{_listed(what, names)}"


def _heads(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _listed(what: str, names: Iterable[str]) -> str:
    return textwrap.fill(
        f"{what}: {', '.join(names)}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False
    )


def _brief(message: str) -> str:
    """Keep of the alternatives of a type the one that the value was meant for."""
    places: list[str] = []
    while found := _CLASS.search(message):
        places += _KEY.findall(message[: found.start()])
        indent = found[3]
        lines = (indent + message[found.end() :]).splitlines()
        inside = [line.startswith(indent) for line in lines] + [False]
        message = textwrap.dedent("\n".join(lines[: inside.index(False)]))
        places.append(f"{found[2]}:")
    places += _KEY.findall(message)
    message = _of_type(textwrap.dedent(_KEY.sub("", message)).strip())
    place = ".".join(one for one in places if not one.endswith(":"))
    classes = [one.removesuffix(":") for one in places if one.endswith(":")]
    where = f"{place} ({classes[-1]})" if classes else place
    return f"{where}: {message}" if where else message


def _of_type(message: str) -> str:
    """Say which values are legal, if the message is about a value that is not."""
    if message.startswith(_MISSING):
        return f"a value is missing: {message.removeprefix(_MISSING)}"
    if attribute := _ATTRIBUTE.match(message):
        return _no_class(*attribute.groups())
    given = re.search(r"(?:Got value|Given value): (.*)$", message)
    if limit := _RESTRICTION.search(message):
        return f"expected a number {limit[2]}: {(given or limit)[1]} is given."
    if given is None:
        return message
    if module := re.search(r"No module named '[^']+'", message):
        return f"{given[1]} is given. {module[0]}"
    names = [str(name) for text in _LITERAL.findall(message) for name in literal_eval(text)]
    if names:
        choices = list(dict.fromkeys(names))
        return f"{given[1]} is given.{nearest(given[1], choices)}\n{_listed('legal', choices)}"
    if "Expected a dot import path" in message:
        return _no_class(_PACKAGE, given[1])
    types = re.search(r"Subtypes: \[(.*)\]|Expected an? (.*)\. Got", message)
    expected = _TYPE.sub(r"\1", (types[1] or types[2]) if types else "another type")
    expected = expected.replace("NoneType", "null").replace(", ", " or ")
    return f"expected {expected}: {given[1]} is given."


def _no_class(module: str, name: str) -> str:
    """Say that a module has no class of a name, and which ones it has."""
    if module != _PACKAGE:
        return f"{module} has no {name}.{nearest(name, vars(sys.modules.get(module, sys)))}"
    homes = PublicNames(_PACKAGE, str(Path(__file__).with_name("__init__.py"))).homes
    names = sorted(homes.keys() - {"__version__"})
    close = nearest(name, names).replace("mean ", f"mean {module}.")
    return f"there is no class {name}.{close}\n{_listed(f'legal after {module}.', names)}"
