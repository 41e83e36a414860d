"""What processes of a world are forked from: the imports that each would spend six seconds on, and nothing else."""

import gc

import lightning.pytorch

import lightning_megatron

__all__ = ["lightning", "lightning_megatron"]

# Collections in the forked processes need not look at all of this, nor copy its memory.
gc.freeze()
