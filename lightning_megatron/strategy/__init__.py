"""Lightning integration: the strategy, its command line and its callbacks.

The import registers the strategy "megatron". It also adds an error message to
``load_from_checkpoint`` for checkpoints that are directories.
"""

from lightning_megatron.strategy.checkpoints.source import install_directory_check
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy as MegatronStrategy

install_directory_check()
