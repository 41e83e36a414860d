"""Planning of parallel training with integers alone: layouts, shards, schedules and memory."""

from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.boxes import FlatBox, flat_range_boxes
from lightning_megatron.plan.buckets import (
    BufferPlan,
    FlatParameter,
    plan_by_elements,
    plan_by_parameters,
)
from lightning_megatron.plan.budget import StageMemory, TrainingShape, estimate_memory
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.custom_schedule import custom_schedule
from lightning_megatron.plan.graph_slots import GraphSlots
from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.live_microbatches import LiveMicrobatches, live_microbatches
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.partition import (
    LayerCosts,
    LayerPartition,
    lightest_partition,
    partition_of,
)
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.plan.schedule import Schedule, build_schedule
from lightning_megatron.plan.schedule_csv import format_schedule, parse_schedule, read_schedule
from lightning_megatron.plan.shards import (
    ShardRange,
    attention_ranges,
    even_range,
    full_range,
    gated_ranges,
    padded_vocab_size,
    vocab_range,
)
from lightning_megatron.plan.simulate import (
    ReductionPoint,
    Timeline,
    reduction_points,
    render,
    simulate,
)
from lightning_megatron.plan.stage_costs import StageCosts
from lightning_megatron.plan.stage_string import read_stage_string
from lightning_megatron.plan.transfers import (
    Compute,
    Program,
    Transfer,
    TransferBatch,
    one_by_one,
    plan_transfers,
)

__all__ = [
    "Action",
    "BufferPlan",
    "Compute",
    "TransferBatch",
    "CudaGraphs",
    "FlatBox",
    "GraphSlots",
    "KeptActivations",
    "LayerCosts",
    "LayerPartition",
    "LiveMicrobatches",
    "ModelShape",
    "ParallelLayout",
    "FlatParameter",
    "PipelineUnit",
    "Placement",
    "Program",
    "RotaryScaling",
    "ReductionPoint",
    "Schedule",
    "ShardRange",
    "StageCosts",
    "StageMemory",
    "Timeline",
    "TrainingShape",
    "Transfer",
    "attention_ranges",
    "build_schedule",
    "estimate_memory",
    "even_range",
    "flat_range_boxes",
    "format_schedule",
    "gated_ranges",
    "lightest_partition",
    "live_microbatches",
    "one_by_one",
    "custom_schedule",
    "padded_vocab_size",
    "parse_schedule",
    "partition_of",
    "plan_by_elements",
    "plan_by_parameters",
    "plan_transfers",
    "read_schedule",
    "read_stage_string",
    "reduction_points",
    "render",
    "simulate",
    "vocab_range",
    "full_range",
]
