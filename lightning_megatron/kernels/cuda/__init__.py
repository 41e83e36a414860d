"""Building, packaging and loading of the bundled CUDA kernels.

The CUDA sources are in ``kernels/csrc`` of the project, which the package includes as
``kernels/cuda/csrc``.
"""

from lightning_megatron.kernels.cuda.build import build_library
from lightning_megatron.kernels.cuda.library import (
    BuiltLibrary,
    default_cache,
    find_library,
    reason_against_library,
)
from lightning_megatron.kernels.cuda.sources import read_sources
from lightning_megatron.kernels.cuda.toolchain import Toolchain, find_toolchain
from lightning_megatron.kernels.cuda.wheel import build_wheel

__all__ = [
    "BuiltLibrary",
    "Toolchain",
    "build_library",
    "build_wheel",
    "default_cache",
    "find_library",
    "find_toolchain",
    "read_sources",
    "reason_against_library",
]
