"""Building blocks of data, modules and metrics of your own: what ``lightning_megatron.tasks`` uses.

They are public like the names of ``lightning_megatron``, and as stable. The stub of this file,
``building_blocks.pyi``, lists them; each is imported at first use.
"""

from lightning_megatron.public_names import PublicNames

__getattr__ = PublicNames(__name__, __file__)
__all__ = sorted(__getattr__.homes)
