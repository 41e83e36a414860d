"""Tables of refusals: what a call is given, and one phrase of the message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_megatron.errors import ParallelPlanError, UnsupportedError


def check_refusals(
    call: Callable[..., Any],
    cases: Iterable[tuple[tuple | Mapping[str, Any], str]],
    error: type[Exception] | tuple[type[Exception], ...] = (ParallelPlanError, UnsupportedError),
) -> None:
    """Check that a call refuses the arguments of every case, which are a tuple or a mapping, with
    its phrase.
    """
    for given, phrase in cases:
        outcome = "it is not refused"
        try:
            call(**given) if isinstance(given, Mapping) else call(*given)
        except error as refusal:
            outcome = str(refusal)
        assert phrase in outcome, f"{given}: {outcome}"
