"""Loading of the built library, and the check whether a GPU can run its kernels."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_megatron.errors import UnsupportedError

#: Compute capability of the kernels. Code for sm_90a runs on no other.
CAPABILITY = (9, 0)
#: Compute capability of the sm_100a kernels, which have been compiled but never run.
_UNTESTED_CAPABILITY = (10, 0)


def load_library(path: Path) -> None:
    """Register the operators of a library as ``torch.ops.lm_kernels``.

    Loading a library again has no effect.
    """
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise UnsupportedError(
            f"the library must be loadable: {path} is not ({error}). It was built for another "
            "system or another version of torch. Delete its folder and run: lightning-megatron "
            "kernels build."
        ) from error


def reason_not_runnable(device: int = 0) -> str | None:
    """Return the reason why a GPU cannot run the kernels; None if it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        never_run = (
            "; those for 10.0 were compiled but have never been run"
            if capability == _UNTESTED_CAPABILITY
            else ""
        )
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, and the kernels are compiled for "
            f"{CAPABILITY[0]}.{CAPABILITY[1]}{never_run}"
        )
    return None
