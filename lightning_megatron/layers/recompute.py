"""Activation recomputation that replays the random streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.shapes import Shaped


def replayed(function: Callable[..., Any], random: RandomStreams, layer: int, *args: Any) -> Any:
    """Call ``function`` and recompute it in the backward pass, instead of keeping its activations.

    Equal to ``function(*args)``, gradients included, even if it draws random numbers: the
    recomputation moves the random streams back to the position of the first run, although other
    microbatches may have run since. The draws of ``function`` must be the first ones of their
    streams in ``layer``, because a seek returns to the start of a layer.

    Args:
        function: Function to recompute; it must not depend on state that changes before the
            backward pass.
        args: Tensors and plain values. Tensors that the function reads from elsewhere, such as a
            closure, stay in memory.

    Communication: that of ``function``, a second time in the backward pass.
    Source: Chen et al. 2016; Korthikanti et al. 2022, section 5 (selective).
    """
    return recomputed(_Replay(function, random, layer), *args)


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without random numbers and recompute it in the backward pass.

    Equal to ``function(*args)``, gradients included.

    Args:
        function: Function to recompute; it must not depend on state that changes before the
            backward pass.

    Communication: that of ``function``, a second time in the backward pass.
    Source: Chen et al. 2016.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def output_recomputed(output: Shaped[Tensor, "..."], again: Callable[[], Tensor]) -> Iterator[None]:
    """Recompute ``output`` in the backward pass of operators inside the block.

    Every operator that would save ``output``, the result of a cheap function without random
    numbers, recomputes it instead. Compiled operators save what their compiler decides.

    Args:
        again: Function that computes equal values from tensors that stay in memory anyway.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and output.requires_grad):
        yield
        return
    storage = output.untyped_storage()
    # Autograd keeps the functions alive, so they must not refer to the output.
    key = storage._cdata
    num_bytes = storage.nbytes()
    kind = output.device.type
    autocast_dtype = torch.get_autocast_dtype(kind)
    is_autocast = torch.is_autocast_enabled(kind)

    def pack(tensor: Tensor) -> Any:
        is_whole = tensor.numel() * tensor.itemsize == num_bytes and tensor.is_contiguous()
        if is_whole and tensor.untyped_storage()._cdata == key:
            return tensor.shape
        return tensor

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad(), torch.autocast(kind, autocast_dtype, is_autocast):
            return again().view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Replay:
    """Function whose later calls start from the stream position of the first call."""

    def __init__(self, function: Callable[..., Any], random: RandomStreams, layer: int) -> None:
        self.function = function
        self.random = random
        self.layer = layer
        self.position = random.position
        self.ran = False

    def __call__(self, *args: Any) -> Any:
        if not self.ran:
            self.ran = True
            result = self.function(*args)
            # The position belongs to the layer in which the function ran, which the function may
            # have entered by a seek.
            self.position = self.random.position
            return result
        interrupted = self.random.position
        self.random.seek(self.layer, replace(self.position, is_replay=True))
        try:
            return self.function(*args)
        finally:
            self.random.seek(interrupted.layer, interrupted)
