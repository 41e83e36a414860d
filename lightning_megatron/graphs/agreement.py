"""Agreement of the ranks on graphs: all of them replay a step, or none does."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import torch

from lightning_megatron.errors import CaptureError, RankMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_, gather_some
from lightning_megatron.plan.cuda_graphs import CudaGraphs

#: Longest part of an error's text in a message about all ranks (characters).
_LONGEST = 400


def failure_of_any(failure: str | None, world: MeshAxis, settings: CudaGraphs) -> str | None:
    """Return the failure of any rank's captures; None if every rank has its graphs.

    Graphs may hold collectives, which wait forever if another rank runs without them.

    Args:
        failure: What this rank could not capture, and why; None if it captured everything.
        world: Axis with all ranks, on the CPU.

    Raises:
        CaptureError: If a rank has failed, and the user asked for an error.

    Communication: one all-reduce of a flag over ``world``, and after a failure a gather of texts.
    """
    failures = gather_some(failure, world)
    if not failures:
        return None
    (rank, text), *others = ((world.ranks[place], text) for place, text in failures.items())
    shown = f"{text.rstrip('.')}." if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    words = f"rank {rank} could not capture {shown}"
    if others:
        words += f" Ranks that failed, too: {', '.join(str(other) for other, _ in others)}."
    if settings.on_failure == "error":
        raise CaptureError(
            f"CUDA graphs must be captured on every rank with on_failure='error': {words} Use "
            "on_failure='eager' to train without them, or another mode or other scopes."
        )
    return words


class KeyAgreement:
    """Agreement of ranks with different data on what they replay in a step.

    Graphs that hold collectives can be replayed only if all ranks of these collectives replay the
    same ones. What a rank replays follows from the shapes of its microbatches.

    Args:
        axis: Ranks of the collectives, on the CPU.
        is_promised: Whether the user has promised that all steps of all ranks have the shapes of
            the first one. Then no message is sent, and the rank that breaks the promise raises.
    """

    def __init__(self, axis: MeshAxis, is_promised: bool = False) -> None:
        self._axis = axis
        self._is_promised = is_promised
        self._promised: int | None = None

    def agree(self, keys: Sequence[Hashable]) -> bool:
        """Return whether all ranks have the same keys in this step, and may replay.

        Args:
            keys: Shapes and dtypes of each microbatch, and what else decides what a rank replays;
                with the same ``repr`` on all ranks if they are equal.

        Raises:
            RankMismatchError: On the rank whose keys are not those of its first step, if equal
                shapes are promised.

        Communication: one all-reduce of two numbers on the CPU over the axis, unless equal shapes
            are promised.
        """
        digest = _digest(keys)
        if self._is_promised:
            self._check_promise(digest, keys)
            return True
        if self._axis.size == 1:
            return True
        # The largest of a number and of its negation give both the largest and the smallest one.
        extremes = all_reduce_(torch.tensor([digest, -digest]), self._axis, "max").tolist()
        return bool(extremes[0] == -extremes[1])

    def _check_promise(self, digest: int, keys: Sequence[Hashable]) -> None:
        if self._promised is None:
            self._promised = digest
        if digest != self._promised:
            raise RankMismatchError(
                "with fixed_shapes=True every step must have the shapes of the first one, because "
                "the ranks no longer compare them: this step has "
                f"{len(keys)} microbatches, {_shown(keys)}. The other ranks may wait forever. "
                "Use drop_last=True and one length for all sequences, or fixed_shapes=False."
            )


def _shown(keys: Sequence[Hashable]) -> str:
    kinds = [str(key) for key in dict.fromkeys(keys)]
    rest = f" and {len(kinds) - 3} others" if len(kinds) > 3 else ""
    return "; ".join(kinds[:3]) + rest


def _digest(keys: Sequence[Hashable]) -> int:
    text = hashlib.sha1(repr(tuple(keys)).encode(), usedforsecurity=False)
    return int.from_bytes(text.digest()[:7], "little")
