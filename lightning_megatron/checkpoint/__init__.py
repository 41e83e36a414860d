"""Checkpoints: one entry per full tensor, saved by any layout and loaded by any other."""

from lightning_megatron.checkpoint.directory import is_sharded_checkpoint as is_sharded_checkpoint
from lightning_megatron.checkpoint.load import RankState as RankState
from lightning_megatron.checkpoint.load import copy_full_tensors as copy_full_tensors
from lightning_megatron.checkpoint.load import load_metadata as load_metadata
from lightning_megatron.checkpoint.load import load_rank_state as load_rank_state
from lightning_megatron.checkpoint.load import load_tensors as load_tensors
from lightning_megatron.checkpoint.load import read_full as read_full
from lightning_megatron.checkpoint.load import saved_tensors as saved_tensors
from lightning_megatron.checkpoint.model import load_model as load_model
from lightning_megatron.checkpoint.model import model_tensors as model_tensors
from lightning_megatron.checkpoint.optimizer import load_optimizer as load_optimizer
from lightning_megatron.checkpoint.optimizer import optimizer_metadata as optimizer_metadata
from lightning_megatron.checkpoint.optimizer import optimizer_tensors as optimizer_tensors
from lightning_megatron.checkpoint.save import save_checkpoint as save_checkpoint
