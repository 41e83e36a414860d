"""Checks and conversions of user settings: of sizes against ranges, and of values against the
annotations of a dataclass or a function.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import timedelta
from functools import cache
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.option_errors import nearest

#: Largest count; products of two counts fit into 64 bits.
MOST = 2**31 - 1


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def join_or(values: Sequence[object]) -> str:
    """Return the values as "1, 3 or 9"."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def require_positive(name: str, value: int) -> None:
    """Check that a size is an integer of at least 1."""
    coerced(name, value, Count)


@dataclass(frozen=True)
class Range:
    """Range of a number, or of a duration in seconds."""

    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether a number is in the range."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.maximum is None or value <= self.maximum)
        )

    def __str__(self) -> str:
        # The limit of an integer type is no rule that users need to know.
        is_plain = self.maximum is not None and self.maximum >= MOST
        bounds = (
            ("of at least", self.minimum),
            ("above", self.above),
            ("below", self.below),
            ("at most", None if is_plain else self.maximum),
        )
        return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)

    # Help texts show annotations.
    __repr__ = __str__


@dataclass(frozen=True)
class Pattern:
    """Texts that a regular expression matches as a whole, and their description in errors."""

    regex: str
    words: str

    def holds(self, value: str) -> bool:
        """Return whether a text matches."""
        return re.fullmatch(self.regex, value, re.DOTALL) is not None

    def __str__(self) -> str:
        return self.words


#: A number of items, at least one.
Count = Annotated[int, Range(minimum=1, maximum=MOST)]
#: An index, counted from 0.
Index = Annotated[int, Range(minimum=0, maximum=MOST)]
#: A number of elements, limited only by memory.
Elements = Annotated[int, Range(minimum=1, maximum=2**63 - 1)]
#: A finite number of at least 0.
NotNegative = Annotated[float, Range(minimum=0)]
#: A finite number above 0.
Positive = Annotated[float, Range(above=0)]
#: A probability below 1, because its complement is a divisor.
Probability = Annotated[float, Range(minimum=0, below=1)]


def coerce_fields(record: Any, prefix: str = "") -> None:
    """Convert every field of a frozen dataclass to the type of its annotation, or raise.

    An integer may have any integral type of Python or NumPy, except bool. A number must be finite.
    A list is converted to a tuple, a path to a string, and a mapping to a dataclass with these
    fields.

    Args:
        prefix: Prefix of its field names in errors, such as ``experts.``.
    """
    kinds = _kinds_of(record.__class__)
    for field in fields(record):
        value = coerced(prefix + field.name, getattr(record, field.name), kinds[field.name])
        object.__setattr__(record, field.name, value)


@cache
def _kinds_of(record: Hashable) -> Mapping[str, Any]:
    """Return the annotations of a dataclass, which are slow to resolve."""
    return get_type_hints(record, include_extras=True)


def coerced_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a function, converted to the types of its annotations.

    Args:
        values: Arguments by name, such as ``locals()`` at the start of the function; names without
            an annotation are omitted.
    """
    kinds = get_type_hints(function, include_extras=True)
    return {
        name: coerced(name, value, kinds[name]) for name, value in values.items() if name in kinds
    }


def coerced(name: str, value: Any, kind: Any) -> Any:
    """Return a value, converted to a type.

    Args:
        kind: Annotation: bool, int, float, str, None, timedelta, ``Literal``, ``Annotated`` with a
            :class:`Range` or a :class:`Pattern`, ``tuple[T, ...]``, ``list[T]``, ``dict[str, T]``,
            ``Callable``, a dataclass, a ``TypedDict``, whose mapping may have further names, any
            other class, ``Any``, or a union of these.
    """
    for bare, bounds in _alternatives(kind):
        if not _is_of(value, bare):
            continue
        converted = _converted(name, value, bare)
        measured: Any = converted
        if isinstance(converted, timedelta):
            measured = converted.total_seconds()
        if bounds is None or bounds.holds(measured):
            return converted
        most = bounds.maximum if isinstance(bounds, Range) else None
        is_beyond = most is not None and most >= MOST and measured > most
        rule = f"at most {most}" if is_beyond else describe(kind)
        raise ParallelPlanError(f"{name} must be {rule}: it is {shown(value)}.")
    literals = [bare for bare, _ in _alternatives(kind) if get_origin(bare) is Literal]
    names = [str(name) for literal in literals for name in get_args(literal)]
    hint = nearest(value, names) if isinstance(value, str) else ""
    raise ParallelPlanError(f"{name} must be {describe(kind)}: it is {shown(value)}.{hint}")


def describe(kind: Any) -> str:
    """Describe the legal values of an annotation, as "a whole number of at least 1 or None"."""
    return join_or([word for bare, bounds in _alternatives(kind) for word in _words(bare, bounds)])


def shown(value: object) -> str:
    """Return the ``repr`` of a value, shortened if it is long."""
    return _ShortRepr().repr(value)


class _ShortRepr(reprlib.Repr):
    """Shortened ``repr`` of values, at most about a line long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python raises ValueError for the text of very long integers.
        digits = int(x.bit_length() * math.log10(2)) + 1
        return repr(x) if digits <= 40 else f"a whole number of {digits} digits"


@cache
def _alternatives(kind: Any) -> list[tuple[Any, Range | Pattern | None]]:
    """List the types that an annotation allows, each with its range of values."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, types.UnionType):
        return [alternative for member in args for alternative in _alternatives(member)]
    if origin is Annotated:
        bounds = next((note for note in args[1:] if isinstance(note, Range | Pattern)), None)
        return [(bare, bounds) for bare, _ in _alternatives(args[0])]
    return [(kind, None)]


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type, without a check of its elements."""
    origin = get_origin(kind)
    if kind is Any:
        return True
    if kind in (None, type(None)):
        return value is None
    if origin is Literal:
        return _literal(value, kind) is not None
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    if origin is Callable:
        return callable(value)
    if origin in (tuple, list):
        return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    if is_dataclass(kind):
        return isinstance(value, Mapping | kind)
    if is_typeddict(kind):
        return isinstance(value, Mapping)
    return isinstance(value, Mapping if origin is dict else kind)


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _literal(value: Any, kind: Any) -> Any:
    """Return the legal constant that a value equals, or None; True does not equal 1."""
    for legal in get_args(kind):
        is_same_kind = (
            _is_of(value, type(legal)) if type(legal) in (int, str) else type(value) is type(legal)
        )
        if is_same_kind and value == legal:
            return legal
    return None


def _converted(name: str, value: Any, kind: Any) -> Any:
    """Return a value converted to a type, with its elements; :func:`_is_of` has accepted it."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        return _literal(value, kind)
    if kind in (int, float):
        return kind(value)
    if kind is str:
        return os.fsdecode(value)
    if origin in (tuple, list):
        if origin is tuple and args[-1] is not Ellipsis:
            return _fixed_tuple(name, value, args)
        return origin(
            coerced(f"{name}[{index}]", element, args[0]) for index, element in enumerate(value)
        )
    if origin is dict:
        return {
            coerced(f"a name in {name}", key, args[0]): coerced(
                f"{name}[{shown(key)}]", element, args[1]
            )
            for key, element in value.items()
        }
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _record(name, value, kind)
    if is_typeddict(kind):
        return _typed_mapping(name, value, kind)
    return value


def _fixed_tuple(name: str, value: Sequence[Any], kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(value) != len(kinds):
        raise ParallelPlanError(f"{name} must have {len(kinds)} elements: it is {shown(value)}.")
    return tuple(
        coerced(f"{name}[{index}]", element, kind)
        for index, (element, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _record(name: str, value: Mapping[Any, Any], kind: Any) -> Any:
    """Build a dataclass from a mapping, such as one in a settings file."""
    known = [field.name for field in fields(kind)]
    required = [
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    ]
    for key in value:
        if key not in known:
            raise ParallelPlanError(
                f"{name} has no setting {shown(key)}. Its settings are {', '.join(known)}."
                f"{nearest(str(key), known)}"
            )
    _check_has(name, value, required)
    return kind(**value)


def _typed_mapping(name: str, value: Mapping[Any, Any], kind: Any) -> dict[Any, Any]:
    """Return a mapping whose named values have the types that a ``TypedDict`` gives them."""
    kinds, required = _fields_of(kind)
    _check_has(name, value, required)
    converted = dict(value)
    for key in kinds.keys() & value.keys():
        converted[key] = coerced(f"{name}.{key}", value[key], kinds[key])
    return converted


# A header may list thousands of files of one kind, and annotations are evaluated slowly.
@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a ``TypedDict`` by name, and the names that every mapping has."""
    hints = get_type_hints(kind, include_extras=True)
    required = [key for key, hint in hints.items() if get_origin(hint) is not NotRequired]
    kinds = {key: hint if key in required else get_args(hint)[0] for key, hint in hints.items()}
    return kinds, required


def _check_has(name: str, value: Mapping[Any, Any], required: Sequence[str]) -> None:
    missing = [key for key in required if key not in value]
    if missing:
        present = ", ".join(map(str, value)) or "nothing"
        raise ParallelPlanError(f"{name} must have {', '.join(missing)}: it has {present[:200]}.")


def _words(kind: Any, bounds: Range | Pattern | None) -> tuple[str, ...]:
    """Return descriptions of the legal values of one type."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        return tuple(map(str, args))
    if origin in (tuple, list):
        if origin is tuple and args[-1] is not Ellipsis:
            return (f"a list of {len(args)} elements, each {describe(args[0])}",)
        return (f"a list with {describe(args[0])} for each element",)
    if origin is dict:
        if args[1] is Any:
            return ("a mapping",)
        return (f"a mapping with {describe(args[1])} for each name",)
    if origin is Callable:
        return ("a function",)
    if is_dataclass(kind):
        return (f"{_type_name(kind)} or a mapping of its settings",)
    if is_typeddict(kind):
        return (f"a mapping with {', '.join(_fields_of(kind)[1])}",)
    names = {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "text",
        Any: "anything",
    }
    if kind in names:
        return (names[kind] if bounds is None else f"{names[kind]} {bounds}",)
    return ("None" if kind in (None, type(None)) else _type_name(kind),)


def _type_name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
