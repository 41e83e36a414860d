"""What every Python that the tests start does first, because most of what it then does is to import
Lightning.

It looks for garbage rarely, since nearly all that imports make stays: with the usual thresholds
that is a fifth of the seconds. And torchmetrics does not import transformers, matplotlib and scipy, as it
would wherever they are installed, for metrics that nobody here asks for: two more fifths. Programs
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
    """Tell torchmetrics that transformers, matplotlib and scipy are not there."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Find a module that says what is there, and correct it when it has run."""
        correct = CORRECTIONS.get(fullname)
        if correct is None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            correct(module)

        spec.loader.exec_module = exec_module
        return spec


def without_extras(module: ModuleType) -> None:
    """Correct what torchmetrics looks up."""
    for name in vars(module):
        if name.startswith(("_TRANSFORMERS_", "_MATPLOTLIB_", "_SCIPY_", "_SCIPI_")):
            setattr(module, name, False)


def without_scipy(module: ModuleType) -> None:
    """Correct the function that torchmetrics asks for scipy, which nobody else asks for it."""
    is_there = module.package_available
    module.package_available = lambda name: name != "scipy" and is_there(name)


CORRECTIONS = {
    "torchmetrics.utilities.imports": without_extras,
    "lightning_utilities.core.imports": without_scipy,
}
sys.meta_path.insert(0, WithoutExtras())
install()
if os.environ.get("SHARED_GPU") == "1" and "RANK" in os.environ:
    from tests.gpu.shared_gpu import is_shared, share

    if is_shared():
        share(int(os.environ["WORLD_SIZE"]))
