"""Activation recomputation that replays the random streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import checkpoint

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.plan.settings import shown

#: ``none`` keeps all activations; ``selective`` recomputes the attention core, ``experts`` what experts make of their
#: rows; ``full`` keeps the input of each block.
Recompute = Literal["none", "selective", "experts", "full"]


def check_recompute(value: str) -> None:
    """Refuse an unknown recomputation mode.

    Raises:
        UnsupportedError: If ``value`` is not one of the modes.
    """
    if value not in get_args(Recompute):
        raise UnsupportedError(f"recompute must be one of {', '.join(get_args(Recompute))}: {shown(value)}.")


def replayed(function: Callable[..., Any], random: RandomStreams, layer: int, *args: Any) -> Any:
    """Run ``function(*args)`` now and again in the backward pass, instead of keeping what it computes.

    Equal to ``function(*args)``, gradients included, also when it draws random numbers: the second run seeks the
    streams to where the first one was, although other microbatches may have run since. The draws of ``function`` must
    be the first of their streams in ``layer``, because seeking returns to the start of a layer.

    Args:
        function: What to run; it must not depend on state that changes before the backward pass.
        random: The streams that it draws from.
        layer: The layer whose draws it makes, as given to ``RandomStreams.seek``.
        args: Tensors and plain values; tensors reachable only in other ways are kept alive.

    Communication: that of ``function``, a second time in the backward pass.
    Source: Chen et al. 2016; Korthikanti et al. 2022, section 5 (selective).
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(_Replay(function, random, layer), *args, use_reentrant=False, preserve_rng_state=False)


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function that draws no random numbers now and again in the backward pass, instead of keeping what it makes.

    Equal to ``function(*args)``, gradients included.

    Args:
        function: What to run; it must not depend on state that changes before the backward pass.
        args: Tensors and plain values.

    Communication: that of ``function``, a second time in the backward pass.
    Source: Chen et al. 2016.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class _Replay:
    """Call a function; from the second call on, with the streams where they were at the first."""

    def __init__(self, function: Callable[..., Any], random: RandomStreams, layer: int) -> None:
        self.function, self.random, self.layer = function, random, layer
        self.position = random.position
        self.ran = False

    def __call__(self, *args: Any) -> Any:
        if not self.ran:
            self.ran = True
            result = self.function(*args)
            # The function may have begun the layer.
            self.position = self.random.position
            return result
        interrupted = self.random.position
        self.random.seek(self.layer, replace(self.position, is_replay=True))
        try:
            return self.function(*args)
        finally:
            self.random.seek(interrupted.layer, interrupted)
