"""Checkpoints with one entry per full tensor, saved under any layout and loaded under any other."""

from lightning_megatron.checkpoint.directory import clean_unfinished as clean_unfinished
from lightning_megatron.checkpoint.directory import is_sharded_checkpoint as is_sharded_checkpoint
from lightning_megatron.checkpoint.directory import list_checkpoints as list_checkpoints
from lightning_megatron.checkpoint.entries import Entry as Entry
from lightning_megatron.checkpoint.header import Header as Header
from lightning_megatron.checkpoint.load import load_metadata as load_metadata
from lightning_megatron.checkpoint.load import load_rank_state as load_rank_state
from lightning_megatron.checkpoint.load import load_tensors as load_tensors
from lightning_megatron.checkpoint.load import read_full as read_full
from lightning_megatron.checkpoint.load import read_header as read_header
from lightning_megatron.checkpoint.load import saved_tensors as saved_tensors
from lightning_megatron.checkpoint.model import load_model as load_model
from lightning_megatron.checkpoint.model import model_placements as model_placements
from lightning_megatron.checkpoint.model import model_tensors as model_tensors
from lightning_megatron.checkpoint.open_checkpoint import verify_checkpoint as verify_checkpoint
from lightning_megatron.checkpoint.optimizer import load_optimizer as load_optimizer
from lightning_megatron.checkpoint.optimizer import optimizer_metadata as optimizer_metadata
from lightning_megatron.checkpoint.optimizer import optimizer_tensors as optimizer_tensors
from lightning_megatron.checkpoint.writer import CheckpointWriter as CheckpointWriter
from lightning_megatron.checkpoint.writer import save_checkpoint as save_checkpoint
