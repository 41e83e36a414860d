"""Planning of parallel training with integers alone: layouts, shards, schedules and memory."""

from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.custom_schedule import custom_schedule
from lightning_megatron.plan.graph_slots import GraphSlots
from lightning_megatron.plan.layout import ParallelLayout, read_stage_string
from lightning_megatron.plan.live_microbatches import live_microbatches
from lightning_megatron.plan.partition import LayerCosts, partition_of
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.schedule import Schedule, build_schedule
from lightning_megatron.plan.shards import (
    ShardRange,
    attention_ranges,
    even_range,
    padded_vocab_size,
    vocab_range,
)
from lightning_megatron.plan.simulate import simulate
from lightning_megatron.plan.stage_costs import StageCosts
from lightning_megatron.plan.transfers import (
    Compute,
    Program,
    TransferBatch,
    plan_transfers,
)

__all__ = [
    "Action",
    "Compute",
    "TransferBatch",
    "CudaGraphs",
    "GraphSlots",
    "LayerCosts",
    "ParallelLayout",
    "PipelineUnit",
    "Placement",
    "Program",
    "Schedule",
    "ShardRange",
    "StageCosts",
    "TrainingShape",
    "attention_ranges",
    "build_schedule",
    "estimate_memory",
    "even_range",
    "live_microbatches",
    "custom_schedule",
    "padded_vocab_size",
    "partition_of",
    "plan_transfers",
    "read_stage_string",
    "simulate",
    "vocab_range",
]
