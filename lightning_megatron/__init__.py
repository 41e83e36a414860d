"""Train Transformers that are too large or too slow for one GPU, with an ordinary LightningModule.

Public names are imported at first use, so ``from lightning_megatron import ParallelLayout`` needs
neither torch nor Lightning. The stub of this file, ``__init__.pyi``, lists them.
"""

import sys
from importlib import import_module

from lightning_megatron.public_names import PublicNames
from lightning_megatron.version import __version__ as __version__

__getattr__ = PublicNames(__name__, __file__)
__all__ = sorted(__getattr__.homes.keys() - {"__version__"})


def __dir__() -> list[str]:
    return [*globals(), *__all__]


# Register the strategy's name if Lightning was imported first: `Trainer(strategy="megatron")` then
# needs no further import. Otherwise importing this package stays cheap.
if "lightning.pytorch" in sys.modules:
    import_module("lightning_megatron.strategy")
