"""Saving and loading of the checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    load_metadata,
    load_model,
    load_optimizer,
    load_rank_state,
    model_tensors,
    optimizer_metadata,
    optimizer_tensors,
)
from lightning_megatron.checkpoint.consolidate import ONE_PROCESS, OPTIMIZERS
from lightning_megatron.checkpoint.directory import checkpoint_path_of
from lightning_megatron.checkpoint.hugging_face import HUGGING_FACE, describe_models
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.strategy.checkpoints.delayed_scales import load_scales, scale_tensors
from lightning_megatron.strategy.checkpoints.saved_weights import weights_to_save
from lightning_megatron.strategy.checkpoints.single_file_loading import no_optimizers
from lightning_megatron.strategy.checkpoints.single_process_record import single_process_record
from lightning_megatron.strategy.checkpoints.source import (
    CheckpointSource,
    checkpoint_folders,
    find_last,
)
from lightning_megatron.strategy.checkpoints.weight_averaging import (
    current_weights,
    load_current_weights,
)
from lightning_megatron.strategy.private.callback_patches import averaging_callbacks
from lightning_megatron.strategy.process.random_states import random_states, restore_random_states


def refuse_storage_options(storage_options: object) -> None:
    """Refuse options of Lightning's file writers, which this package does not use."""
    if storage_options is not None:
        raise TypeError(
            "`Trainer.save_checkpoint(..., storage_options=...)` is not supported, because every "
            "rank writes its own files. Leave storage_options out."
        )


@contextmanager
def name_damaged_states(where: str) -> Iterator[None]:
    """Convert errors about invalid states of a rank into errors that name the checkpoint."""
    try:
        yield
    except (
        RuntimeError,
        ValueError,
        TypeError,
        OverflowError,
        LookupError,
        AttributeError,
    ) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CorruptDataError(
            "the state of a rank in a checkpoint must be unchanged since it was saved: that of "
            f"{where} is damaged: random or dataloader states are missing or invalid ({text}). The "
            "fit would continue with other random numbers or data. Use another checkpoint."
        ) from error


class RunCheckpoints:
    """Save, load and remove the checkpoints of one strategy.

    At most one background save runs at a time. The owner calls :meth:`poll` on all ranks between
    batches, :meth:`wait` before loading, and :meth:`close` before the run's groups are destroyed.
    """

    def __init__(self) -> None:
        self._writer: CheckpointWriter | None = None
        self._random_states: Mapping[str, Any] | None = None
        self._has_reserved = False
        #: Whether the owner calls :meth:`wait_for_snapshot` before saved tensors can change.
        self.defers_copies = False
        #: Checkpoint that :meth:`find_last` has found and verified.
        self._found_last: CheckpointSource | None = None
        #: The argument of ``fit``, ``validate``, ``test`` or ``predict``.
        self.weights_only: bool | None = None
        self._loaded_from = ""

    # ---- saving

    def save(
        self,
        path: str | os.PathLike[str],
        checkpoint: dict[str, Any],
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        main: MainParameters,
        mesh: ParallelMesh,
        dataloaders: list[Any],
        background: bool,
    ) -> None:
        """Write Lightning's checkpoint as a directory that any layout can load.

        Args:
            checkpoint: Lightning's checkpoint dictionary. Tensors come from the module and the
                optimizers, except weights that ``on_save_checkpoint`` removed, changed or added.

        Raises:
            CheckpointSaveError: On all ranks, if one cannot write; with ``background``,
                :meth:`poll` raises it.
            UnsupportedError: On all ranks, if changed weights cannot be saved.

        Communication: collective over all ranks.
        """
        main.user_writes.adopt_in_place()
        has_averages = "averaging_state" in checkpoint
        weights = weights_to_save(
            checkpoint.pop("state_dict", {}), module, main, mesh, all_changed=has_averages
        )
        tensors = {**weights.tensors, **scale_tensors(module)}
        if has_averages:
            # A callback has swapped averages into the model; resuming needs the current weights.
            current = weights_to_save(checkpoint.pop("current_model_state", {}), module, main, mesh)
            tensors |= current_weights(current.tensors)
        trains = checkpoint.pop("optimizer_states", None) is not None
        if trains:
            for index, optimizer in enumerate(optimizers):
                tensors |= optimizer_tensors(index, optimizer, main)
            checkpoint[OPTIMIZERS] = [
                optimizer_metadata(optimizer, main, mesh) for optimizer in optimizers
            ]
        record = single_process_record(module, optimizers if trains else (), main, mesh)
        names = [name for name in record["order"] if name not in weights.removed]
        if models := describe_models(module, record):
            checkpoint[HUGGING_FACE] = models
        checkpoint[ONE_PROCESS] = {**record, "order": [*names, *weights.added]}
        rank_state = {
            "random": mesh.random.state_dict(),
            "generators": random_states(mesh.device),
            "dataloaders": dataloaders,
        }
        folders = checkpoint_folders(module.trainer)
        self._writer_on(mesh).save(path, tensors, checkpoint, rank_state, background, folders)

    def reserve(
        self,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        main: MainParameters,
        mesh: ParallelMesh,
    ) -> None:
        """Allocate the memory of background saves once, after the optimizers' first step."""
        if self._has_reserved:
            return
        self._has_reserved = True
        tensors = dict(model_tensors(module, main))
        for index, optimizer in enumerate(optimizers):
            tensors |= optimizer_tensors(index, optimizer, main)
        self._writer_on(mesh).reserve(tensors)

    def wait_for_snapshot(self) -> None:
        """Delay weight updates on the GPU until a background save has copied the weights."""
        if self._writer is not None:
            self._writer.wait_for_snapshot()

    def _writer_on(self, mesh: ParallelMesh) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(mesh, defer_copies=self.defers_copies)
        return self._writer

    def poll(self) -> None:
        """Finish a background save if all ranks have written; all ranks call it between batches."""
        if self._writer is not None:
            self._writer.poll()

    def wait(self) -> None:
        """Wait for the background save to finish; called on all ranks."""
        if self._writer is not None:
            self._writer.wait()

    def close(self, abandon: bool = False) -> None:
        """Finish or abandon a background save, on all ranks, before the run's groups are destroyed.

        Args:
            abandon: Whether to skip waiting for other ranks, because one has failed.
        """
        writer = self._writer
        self._writer = None
        self._random_states = None
        self._has_reserved = self.defers_copies = False
        if writer is not None and not abandon:
            writer.close()

    def will_exist(self, path: str | os.PathLike[str]) -> bool | None:
        """Return whether a path will exist after the background save; None if it is unaffected."""
        return None if self._writer is None else self._writer.will_exist(path)

    def link(self, target: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
        """Schedule a symlink for the end of the background save; False if no save is running."""
        if self._writer is None or self._writer.pending is None:
            return False
        self._writer.link(path, target)
        return True

    def remove(self, path: str | os.PathLike[str], mesh: ParallelMesh | None) -> None:
        """Remove a checkpoint after any save in progress is complete; called on all ranks."""
        if self._writer is not None:
            self._writer.remove(path)
        elif mesh is None or mesh.rank == 0:
            checkpoint_path_of(path).remove()

    # ---- loading

    def find_last(self, trainer: Trainer, mesh: ParallelMesh) -> str | None:
        """Return the verified path for ``ckpt_path="last"``; called on all ranks."""
        self._found_last = find_last(trainer, mesh, self.weights_only)
        return None if self._found_last is None else self._found_last.path

    def was_found(self, path: str | os.PathLike[str]) -> bool:
        """Return whether :meth:`find_last` has found a path, so that the user did not name it."""
        return self._found_last is not None and self._found_last.path == os.fspath(path)

    def source_of(self, path: str, mesh: ParallelMesh) -> CheckpointSource:
        """Return the verified checkpoint at a path or URL; called on all ranks.

        Raises:
            CheckpointMismatchError: On all ranks, if there is neither a sharded checkpoint nor a
                file.
            CorruptDataError: On all ranks, if a file is damaged or cannot be read; the message
                names it.

        Communication: one broadcast and one gather over the world, unless :meth:`find_last` has
        verified the checkpoint.
        """
        if self._found_last is not None and self.was_found(path):
            return self._found_last
        source = CheckpointSource.find(path, mesh)
        source.verify(mesh, allow_unchecked=True)
        return source

    def load(
        self,
        stored: OpenCheckpoint,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        main: MainParameters,
        mesh: ParallelMesh,
        before_optimizers: Callable[[Mapping[str, Any]], None] = lambda checkpoint: None,
    ) -> dict[str, Any]:
        """Load module and optimizers from a sharded checkpoint; return the entries for Lightning.

        Args:
            before_optimizers: Function that receives Lightning's entries before optimizers are
                loaded, to create missing parameter groups.

        Communication: collective over all ranks.
        """
        self._random_states = None
        metadata = load_metadata(stored, self.weights_only)
        load_model(stored, module, main, mesh, strict=module.strict_loading)
        load_scales(stored, module, mesh)
        if optimizers and averaging_callbacks(module.trainer):
            load_current_weights(stored, metadata, module, main, mesh)
        saved = metadata.pop(OPTIMIZERS, None)
        single_process = metadata.pop(ONE_PROCESS, None)
        if not optimizers:
            return metadata
        if saved is None or single_process is None:
            raise no_optimizers(stored.checkpoint.path)
        before_optimizers({**metadata, OPTIMIZERS: saved})
        for index, optimizer in enumerate(optimizers):
            load_optimizer(stored, index, optimizer, main, mesh, saved[index])
        self._restore_rank(stored, mesh, metadata)
        return metadata

    def _restore_rank(
        self, stored: OpenCheckpoint, mesh: ParallelMesh, metadata: dict[str, Any]
    ) -> None:
        state = load_rank_state(stored, mesh, self.weights_only)
        self._loaded_from = f"rank {state.rank} in {stored.checkpoint.path}"
        with name_damaged_states(self._loaded_from):
            mesh.random.load_state_dict(state.values["random"])
            generators = dict(state.values["generators"])
            dataloaders = state.values["dataloaders"]
        if state.same_data:
            self._random_states = generators
        else:
            rank_zero_info(
                "The checkpoint was saved with another number of data-parallel ranks: the default "
                "generators of torch, numpy and Python continue from the seed of this run."
            )
        fit_loop = metadata.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" not in fit_loop:
            return
        if state.same_data:
            fit_loop["combined_loader"] = dataloaders
            return
        # With another number of data ranks, saved dataloader states fit no rank.
        del fit_loop["combined_loader"]
        if any(dataloaders):
            rank_zero_warn(
                "The checkpoint was saved with another number of data-parallel ranks, among which "
                "its dataloaders had divided the samples: dataloader states are ignored, and "
                "dataloaders start at the beginning of the epoch. TokenDataModule counts samples "
                "and continues at the exact position."
            )

    def restore_random_states(self, device: torch.device) -> None:
        """Restore the default generators from the loaded checkpoint, before the first batch."""
        if self._random_states is not None:
            with name_damaged_states(self._loaded_from):
                restore_random_states(self._random_states, device)
        self._random_states = None
