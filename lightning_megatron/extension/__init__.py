"""Find, build and load the bundled CUDA extension, whose sources are the project's folder ``kernels``.

Apart from ``load`` this room needs the standard library only.
"""

from lightning_megatron.extension.build import BuiltLibrary, build_library, find_library
from lightning_megatron.extension.sources import read_sources
from lightning_megatron.extension.toolchain import Toolchain, find_toolchain

__all__ = ["BuiltLibrary", "Toolchain", "build_library", "find_library", "find_toolchain", "read_sources"]
