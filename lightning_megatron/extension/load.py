"""Load the built library into this process, and say whether its kernels run on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_megatron.errors import UnsupportedError

#: sm_90a code runs on compute capability 9.0 alone.
CAPABILITY = (9, 0)
#: That of sm_100a code, which was compiled and has never been run.
_NEVER_RUN = (10, 0)


def load_library(path: Path) -> None:
    """Register the operators of a library as ``torch.ops.lm_kernels``; a library is loaded once.

    Args:
        path: The library.

    Raises:
        UnsupportedError: If it cannot be loaded.
    """
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise UnsupportedError(
            f"the library must be loadable: {path} is not ({error}). It was built for another system, or for a newer "
            "torch. Delete its folder and run: lightning-megatron kernels build."
        ) from error


def why_not_runnable(device: int = 0) -> str | None:
    """Return why the kernels cannot run on a GPU; None if they can.

    Args:
        device: Index of the GPU.
    """
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        never_run = "; those for 10.0 were compiled but have never been run" if found == _NEVER_RUN else ""
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, and the kernels are "
            f"compiled for {CAPABILITY[0]}.{CAPABILITY[1]}{never_run}"
        )
    return None
