"""Planning of parallel training with integers alone: layouts, shards, schedules and memory."""

from lightning_megatron.plan.actions import Action as Action
from lightning_megatron.plan.actions import PipelineUnit as PipelineUnit
from lightning_megatron.plan.budget import TrainingShape as TrainingShape
from lightning_megatron.plan.cuda_graphs import CudaGraphs as CudaGraphs
from lightning_megatron.plan.custom_schedule import custom_schedule as custom_schedule
from lightning_megatron.plan.graph_slots import GraphSlots as GraphSlots
from lightning_megatron.plan.layout import ParallelLayout as ParallelLayout
from lightning_megatron.plan.layout import read_stage_string as read_stage_string
from lightning_megatron.plan.live_microbatches import live_microbatches as live_microbatches
from lightning_megatron.plan.partition import LayerCosts as LayerCosts
from lightning_megatron.plan.partition import partition_of as partition_of
from lightning_megatron.plan.placement import Placement as Placement
from lightning_megatron.plan.schedule import Schedule as Schedule
from lightning_megatron.plan.schedule import build_schedule as build_schedule
from lightning_megatron.plan.shards import ShardRange as ShardRange
from lightning_megatron.plan.shards import attention_ranges as attention_ranges
from lightning_megatron.plan.shards import even_range as even_range
from lightning_megatron.plan.shards import padded_vocab_size as padded_vocab_size
from lightning_megatron.plan.shards import vocab_range as vocab_range
from lightning_megatron.plan.simulate import StageCosts as StageCosts
from lightning_megatron.plan.simulate import simulate as simulate
from lightning_megatron.plan.transfers import TransferBatch as TransferBatch
from lightning_megatron.plan.transfers import plan_transfers as plan_transfers
