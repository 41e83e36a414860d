"""Replace torch.nn blocks and whole models by tensor-parallel ones, with their weights."""

from lightning_megatron.swap.apply import parallelize as parallelize
from lightning_megatron.swap.pretrained import building_on_meta as building_on_meta
from lightning_megatron.swap.record import SwapRecord as SwapRecord
