"""What every Python that the tests start does first, because most of what it then does is to import
Lightning.

It looks for garbage rarely, since nearly all that imports make stays: with the usual thresholds
that is a fifth of the seconds. And torchmetrics does not import transformers and matplotlib, as it
would wherever they are installed, for metrics that nobody here asks for: another fifth. Programs
that use these import them.

The shapes of tensors are checked as in the process of the tests. Ranks that a program of the tests
starts share one GPU if its environment says so.
"""

import gc
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from shape_checks import install

gc.set_threshold(1_000_000)


class WithoutExtras(MetaPathFinder):
    """Tell torchmetrics that transformers and matplotlib are not there."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Find the module that says what is there, and correct it when it has run."""
        if fullname != "torchmetrics.utilities.imports":
            return None
        spec = PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for name in vars(module):
                if name.startswith(("_TRANSFORMERS_", "_MATPLOTLIB_")):
                    setattr(module, name, False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, WithoutExtras())
install()
if os.environ.get("SHARED_GPU") == "1" and "RANK" in os.environ:
    from tests.gpu.shared_gpu import is_shared, share

    if is_shared():
        share(int(os.environ["WORLD_SIZE"]))
