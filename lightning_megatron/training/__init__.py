"""Gradient sums, clipping, loss scaling and main parameters."""

from lightning_megatron.training.buffer_planner import (
    DistributedOptimizerConfig as DistributedOptimizerConfig,
)
from lightning_megatron.training.clip import clip_by_norm_ as clip_by_norm_
from lightning_megatron.training.clip import clip_by_value_ as clip_by_value_
from lightning_megatron.training.clip import grad_norm as grad_norm
from lightning_megatron.training.gradients import GradientReducer as GradientReducer
from lightning_megatron.training.loss_scale import DynamicLossScale as DynamicLossScale
from lightning_megatron.training.main_parameters import MainParameters as MainParameters
