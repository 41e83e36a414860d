"""What Lightning sees: the strategy, its command line, callbacks. Its import registers the strategy "megatron"."""

from lightning_megatron.strategy.megatron_strategy import MegatronStrategy as MegatronStrategy
