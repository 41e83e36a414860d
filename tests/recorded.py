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
    """Let the functions ``start_NAME`` of a module add "NAME starts" and "NAME ends" to events."""
    for name in names:
        start = getattr(module, f"start_{name}")
        patch.setattr(module, f"start_{name}", _recorded(name, start, events))


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
