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

    def recorded(name: str, start: Callable[..., Pending]) -> Callable[..., Pending]:
        def start_and_record(*args: Any) -> Pending:
            events.append(f"{name} starts")
            pending = start(*args)
            return Pending(None, lambda: (pending.wait(), events.append(f"{name} ends")))

        return start_and_record

    for name in names:
        start = f"start_{name}"
        patch.setattr(module, start, recorded(name, getattr(module, start)))
