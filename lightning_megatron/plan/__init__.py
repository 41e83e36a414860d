"""Plan parallel training with integers alone: who holds what, and who does what when."""

from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import (
    ShardRange,
    attention_ranges,
    even_range,
    gated_ranges,
    padded_vocab_size,
    vocab_range,
    whole_range,
)
from lightning_megatron.plan.stages import split_layers

__all__ = [
    "ParallelLayout",
    "ShardRange",
    "attention_ranges",
    "even_range",
    "gated_ranges",
    "padded_vocab_size",
    "split_layers",
    "vocab_range",
    "whole_range",
]
