"""Gradients and parameters of the distributed optimizer: buckets, reduction, clip and update."""

from lightning_megatron.optimizer.clip import grad_norm as grad_norm
from lightning_megatron.optimizer.loss_scale import DynamicLossScale as DynamicLossScale
from lightning_megatron.optimizer.main_parameters import MainParameters as MainParameters
from lightning_megatron.optimizer.reduction import GradientReducer as GradientReducer
from lightning_megatron.optimizer.sharding import (
    DistributedOptimizerConfig as DistributedOptimizerConfig,
)
