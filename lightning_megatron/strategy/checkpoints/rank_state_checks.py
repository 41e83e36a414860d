"""Validation of the per-rank values in a checkpoint: names and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from torch import Tensor

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan.settings import Range, coerced

_Number = Annotated[int, Range(minimum=0, maximum=2**63 - 1)]


class _Streams(TypedDict):
    seed: int
    position: dict[str, bool | _Number]


class _Numpy(TypedDict):
    kind: Literal["MT19937"]
    keys: Tensor
    position: _Number
    has_gauss: _Number
    gauss: float


class _Python(TypedDict):
    version: Literal[3]
    internal: Tensor
    next_gauss: float | None


class _Generators(TypedDict):
    torch: Tensor
    cuda: NotRequired[Tensor]
    numpy: _Numpy
    python: _Python


class _RankState(TypedDict):
    random: _Streams
    generators: _Generators
    dataloaders: list[Any]


def check_rank_state(values: Mapping[str, Any], where: str) -> None:
    """Refuse per-rank values that are missing or invalid."""
    try:
        coerced("rank_state", values, _RankState)
    except ParallelPlanError as error:
        raise _damaged(where, str(error)) from error


@contextmanager
def name_damaged_states(where: str) -> Iterator[None]:
    """Convert generators' errors about invalid states into errors that name the checkpoint."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())[:200]
        raise _damaged(where, f"a random generator does not accept its state ({text}).") from error


def _damaged(where: str, reason: str) -> CorruptDataError:
    return CorruptDataError(
        "the state of a rank in a checkpoint must be unchanged since it was saved: that of "
        f"{where} is damaged: {reason} The fit would continue with other random numbers or data. "
        "Use another checkpoint."
    )
