"""Replacement of torch.nn blocks and whole models by parallel ones with the same weights."""

from lightning_megatron.swap.apply import parallelize as parallelize
from lightning_megatron.swap.decide.kinds import SwapRecord as SwapRecord
from lightning_megatron.swap.pretrained.from_pretrained import build_on_meta as build_on_meta
