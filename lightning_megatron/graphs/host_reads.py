"""Reads and random draws on the host, which a replay cannot repeat."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron.errors import UnsupportedError

# Methods that read the memory of a tensor on the CPU directly, without any operator.
_DIRECT_READS = ("tolist", "numpy")


def reads_host(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator reads values on the host, on the CPU or on a GPU.

    Args:
        function: The operator.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    tags = function.tags
    if torch.Tag.data_dependent_output in tags:
        return True
    if function.overloadpacket is torch.ops.aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
        # A mask is first turned into a list of positions, whose length the host reads.
        return any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in tree_leaves(args[1])
        )
    return torch.Tag.dynamic_output_shape in tags


def host_read_error(name: str) -> UnsupportedError:
    """Return the error of a captured computation that reads values on the host.

    Args:
        name: Operator or method that reads them.
    """
    return UnsupportedError(
        f"a captured computation must not read values of tensors on the host: it called {name}. A "
        "replay runs no Python, so that it would repeat the decision of the capture. Compute with "
        "tensors of fixed shapes, or set is_capturable = False on the module that does, which then "
        "runs eagerly in mode segments."
    )


@contextmanager
def direct_reads_pass(check: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Let methods that read a tensor's memory without an operator pass a check inside the block.

    Only calls of this thread pass it.

    Args:
        check: Receives the tensor and the name of the method; it may raise an error.
    """
    thread = threading.get_ident()

    def checked(name: str, read: Any) -> Any:
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                check(tensor, f"Tensor.{name}")
            return read(tensor, *args, **kwargs)

        return method

    methods = {name: vars(Tensor).get(name) for name in _DIRECT_READS}
    for name in _DIRECT_READS:
        setattr(Tensor, name, checked(name, getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, method in methods.items():
            if method is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


@contextmanager
def refuse_host_draws(device: torch.device) -> Iterator[None]:
    """Refuse draws of the host's generators inside the block, and undo them.

    These are Python's ``random``, the generator of ``numpy.random`` and, on a GPU, torch's
    generator of the CPU.

    Args:
        device: Device of the captured computation, whose own generators may draw.

    Raises:
        UnsupportedError: At the end of the block, if a generator of the host has drawn.
    """
    before = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    of_torch = torch.default_generator.get_state()
    drawn = []
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)
            drawn.append("Python's random")
        if repr(np.random.get_state(legacy=False)) != repr(of_numpy):
            np.random.set_state(of_numpy)
            drawn.append("numpy.random")
        if device.type != "cpu" and not torch.equal(torch.default_generator.get_state(), of_torch):
            torch.default_generator.set_state(of_torch)
            drawn.append("torch's generator of the CPU")
    if drawn:
        raise UnsupportedError(
            f"a captured computation must not draw random numbers on the host: {drawn[0]} has "
            "drawn. A replay runs no Python, so that it would repeat the numbers of the capture. "
            "Draw on the device, as in torch.rand(..., device=self.device), or in the dataset."
        )
