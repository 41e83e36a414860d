"""Helpers for error messages about sizes: lists of legal values and checks of ranges."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.errors import ParallelPlanError


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def join_or(values: Sequence[object]) -> str:
    """Return the values as "1, 3 or 9"."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def powers_of_two_around(number: int) -> list[int]:
    """Return the largest power of two up to a number of at least 1, and the next larger one."""
    below = 1 << (number.bit_length() - 1)
    return [below, 2 * below]


def require_positive(name: str, value: int) -> None:
    """Check that a size is an integer of at least 1.

    Raises:
        ParallelPlanError: For zero, negative numbers and values that are not integers.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ParallelPlanError(
            f"{name} must be a whole number of at least 1: it is {value!r}. Use {name} of 1 or "
            "more."
        )


def require_index(name: str, index: int, size_name: str, size: int) -> None:
    """Check that 0 <= index < size.

    Raises:
        ParallelPlanError: For an index out of range.
    """
    if not 0 <= index < size:
        raise ParallelPlanError(
            f"{name} must be a position on its axis: it is {index}, {size_name} is {size}. Use "
            f"{name} of 0 to {size - 1}."
        )
