"""States of a process that a run changes: the default random generators, whose states are plain
values for checkpoints, and the objects that garbage collection skips.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: Objects that Python itself may have excluded when it started (375 in Python 3.12); a program that
#: has imported torch and calls ``gc.freeze`` excludes more than 100,000.
_MAX_FROZEN_BY_PYTHON = 5_000


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's default generators.

    The states consist of tensors and plain values, so a checkpoint loads without unpickling other
    classes.

    Args:
        device: Device of this rank; the state of its generator is included on CUDA.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {
            "version": version,
            "internal": torch.tensor(internal),
            "next_gauss": next_gauss,
        },
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that :func:`random_states` has returned."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy_state = states["numpy"]
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (
            numpy_state["kind"],
            keys,
            numpy_state["position"],
            numpy_state["has_gauss"],
            numpy_state["gauss"],
        )
    )
    python_state = states["python"]
    random.setstate(
        (
            python_state["version"],
            tuple(python_state["internal"].tolist()),
            python_state["next_gauss"],
        )
    )


@dataclass(frozen=True)
class DefaultGenerators:
    """States of torch's, numpy's and Python's default generators, to undo the draws of a step.

    Unlike :func:`random_states`, this class converts nothing, because every step records states.

    Args:
        of_device: State of the GPU's generator; None on a CPU.
    """

    device: torch.device
    states: tuple[torch.Tensor, Any, Any]
    of_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> DefaultGenerators:
        """Return the current states."""
        of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
        return cls(device, states, of_device)

    def restore(self) -> None:
        """Restore the states."""
        torch_state, numpy_state, python_state = self.states
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if self.of_device is not None:
            torch.cuda.set_rng_state(self.of_device, self.device)


def exclude_garbage(undo: ExitStack) -> None:
    """Exclude the objects that exist when training starts from collections of garbage.

    A full collection visits every object of torch, Lightning and the model. It stops all Python
    code for about a quarter of a second. Collections run at different steps on each rank, and all
    ranks wait for each of them. Nothing changes if the program has already called ``gc.freeze``.
    """
    if gc.get_freeze_count() <= _MAX_FROZEN_BY_PYTHON:
        gc.collect()
        gc.freeze()
        undo.callback(gc.unfreeze)
