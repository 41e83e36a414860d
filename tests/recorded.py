"""Collectives that record when they start and when a rank has waited for them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from lightning_megatron.groups.pending import Pending


def record_starts(
    patch: pytest.MonkeyPatch, module: ModuleType, names: tuple[str, ...], events: list[str]
) -> None:
    """Let the functions of a module that start collectives add "NAME starts" and "NAME ends" to
    events.

    Args:
        patch: Removes the recording after the test.
        module: Module in which ``start_NAME`` is replaced.
        names: Names of the collectives.
        events: List to which the events are appended.
    """
    for name in names:
        patch.setattr(
            module, f"start_{name}", _recorded(name, getattr(module, f"start_{name}"), events)
        )


def _recorded(
    name: str, start: Callable[..., Pending], events: list[str]
) -> Callable[..., Pending]:
    def start_and_record(*args: Any) -> Pending:
        events.append(f"{name} starts")
        pending = start(*args)

        def end() -> None:
            pending.wait()
            events.append(f"{name} ends")

        return Pending(None, end)

    return start_and_record
