"""Lightning integration: the strategy, its command line and its callbacks.

Its import registers the strategy "megatron", and lets ``load_from_checkpoint`` say what to do with a directory.
"""

from lightning_megatron.strategy.class_loading import explain_directories
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy as MegatronStrategy

explain_directories()
