"""Commands as functions: signature and docstring of a function are its options and its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse
from jsonargparse import ActionYesNo, ArgumentParser, DefaultHelpFormatter

from lightning_megatron.option_errors import OptionParser, underscored

Function = Callable[..., None]
#: Parameter that takes the recipe, and the options of ``fit`` behind it, as they are.
_FIT_OPTIONS = "fit_options"


class _Parser(OptionParser, ArgumentParser):
    """Parser in which a truth value is a switch: ``--overwrite``, or ``--no_overwrite``."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        if options.get("type") is bool:
            del options["type"]
            options["action"] = ActionYesNo(no_prefix="no_")
        return super().add_argument(*names, **options)


class _Format(DefaultHelpFormatter):
    """Help that keeps the lines of descriptions and examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text


def run_command(
    name: str, command: Function | Mapping[str, Function], args: Sequence[str], examples: str
) -> None:
    """Call the function of a command with the options that arguments give.

    A parameter without a default is given by its place, others by name, with dashes or
    underscores, also behind a recipe. A tuple takes one or more words, and may be given again. The
    fields of a record are options of their own.

    Args:
        command: A function, or functions by the names of subcommands; that of an empty name is
            called without any.
        examples: Example command lines, for the help.
    """
    if isinstance(command, Mapping):
        if not args and "" in command:
            command[""]()
            return
        parser = _Parser(prog=name, epilog=examples, formatter_class=_Format)
        choices = parser.add_subcommands(dest="subcommand")
        for choice, function in filter(itemgetter(0), command.items()):
            summary = parse(function.__doc__ or "").short_description
            inner = _parser(f"{name} {choice}", function)
            choices.add_subcommand(choice, inner, help=summary)
            inner.prog = f"{name} {choice}"
        chosen = parser.parse_args(list(map(underscored, args)))
        _call(command[chosen.subcommand], chosen[chosen.subcommand].as_dict())
        return
    num_own = len(args)
    takes_recipe = _FIT_OPTIONS in inspect.signature(command).parameters
    if takes_recipe:
        recipes = [one.partition("=")[0] in ("-c", "--config") for one in args]
        num_own = recipes.index(True) if any(recipes) else num_own
    behind, rest = _own_options(command, args[num_own:])
    own = list(map(underscored, [*args[:num_own], *behind]))
    values = _parser(name, command, examples).parse_args(own).as_dict()
    _call(command, values | ({_FIT_OPTIONS: rest} if takes_recipe else {}))


def _own_options(command: Function, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide arguments behind a recipe into options of the command and those of ``fit``."""
    hints = get_type_hints(command)
    for record in _records(command).values():
        hints |= get_type_hints(record)
    own: list[str] = []
    rest: list[str] = []
    is_value = False
    for one in args:
        name = underscored(one).removeprefix("--").partition("=")[0]
        is_own = one.startswith("--") and name.removeprefix("no_") in hints
        (own if is_own or is_value else rest).append(one)
        is_value = is_own and "=" not in one and hints.get(name, bool) is not bool
    return own, rest


def _parser(name: str, function: Function, examples: str = "") -> _Parser:
    text = parse(function.__doc__ or "")
    description = "\n\n".join(filter(None, (text.short_description, text.long_description)))
    parser = _Parser(prog=name, description=description, epilog=examples, formatter_class=_Format)
    for owner in (function, *_records(function).values()):
        helps = {one.arg_name: one.description for one in parse(owner.__doc__ or "").params}
        hints = get_type_hints(owner, include_extras=True)
        for one, parameter in inspect.signature(owner).parameters.items():
            if not (is_dataclass(hints[one]) or one == _FIT_OPTIONS):
                _add(parser, parameter, hints[one], helps.get(one))
    return parser


def _add(parser: _Parser, parameter: inspect.Parameter, hint: Any, text: str | None) -> None:
    is_required = parameter.default is inspect.Parameter.empty
    options: dict[str, Any] = {"type": hint, "help": text}
    if not is_required:
        options["default"] = parameter.default
    if get_origin(hint) is tuple:
        options |= {"type": get_args(hint)[0], "nargs": "+"}
        if not is_required:
            options |= {"action": "extend", "default": []}
        if get_origin(options["type"]) is Literal:
            options |= {"type": str, "choices": get_args(options["type"])}
    parser.add_argument(parameter.name if is_required else f"--{parameter.name}", **options)


def _records(function: Function) -> dict[str, Any]:
    hints = get_type_hints(function)
    return {name: hint for name, hint in hints.items() if is_dataclass(hint)}


def _call(function: Function, values: dict[str, Any]) -> None:
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    for name, record in _records(function).items():
        values[name] = record(**{field.name: values.pop(field.name) for field in fields(record)})
    function(**values)
