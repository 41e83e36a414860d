"""Conversion between Lightning's checkpoint dictionary and sharded checkpoint directories."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron.checkpoint import (
    CheckpointWriter,
    is_sharded_checkpoint,
    load_metadata,
    load_model,
    load_optimizer,
    load_rank_state,
    model_tensors,
    optimizer_metadata,
    optimizer_tensors,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.consolidate import ONE_PROCESS, OPTIMIZERS
from lightning_megatron.checkpoint.directory import checkpoint_path_of
from lightning_megatron.checkpoint.hugging_face import HUGGING_FACE, describe_models
from lightning_megatron.checkpoint.plain_file import read_file
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.checkpoints import plain_checkpoint
from lightning_megatron.strategy.checkpoints.last_checkpoint import find_last, verify_any
from lightning_megatron.strategy.checkpoints.one_process import describe_for_one_process
from lightning_megatron.strategy.checkpoints.plain_states import check_entries
from lightning_megatron.strategy.checkpoints.rank_state_checks import (
    check_rank_state,
    naming_damaged_states,
)
from lightning_megatron.strategy.checkpoints.saved_weights import weights_to_save
from lightning_megatron.strategy.checkpoints.weight_averaging import (
    averaging_callback,
    current_weights,
    load_averages,
)
from lightning_megatron.strategy.process.random_states import random_states, restore_random_states
from lightning_megatron.training.main_parameters import MainParameters


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
        self._verified: str | None = None
        #: The argument of ``fit``, ``validate``, ``test`` or ``predict``.
        self.weights_only: bool | None = None
        #: Whether the last loaded checkpoint is a file of another strategy.
        self._loaded_from = ""
        self.is_plain = False

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
            path: The directory or URL.
            checkpoint: Lightning's checkpoint dictionary. Tensors come from the module and the
                optimizers, except weights that ``on_save_checkpoint`` removed, changed or added.
            module: The module that is saved.
            optimizers: Its optimizers, which train main parameters.
            main: Main parameters of the module.
            mesh: The groups of this rank.
            dataloaders: States of this rank's resumable dataloaders.
            background: Whether to return after copying the tensors, and write in the background.

        Raises:
            CheckpointSaveError: On all ranks, if one cannot write; with ``background``,
                :meth:`poll` raises it.
            UnsupportedError: On all ranks, if changed weights cannot be saved.

        Communication: collective over all ranks.
        """
        main.user_writes.adopt_in_place()
        weights = weights_to_save(checkpoint.pop("state_dict", {}), module, main, mesh)
        tensors = dict(weights.tensors)
        if "averaging_state" in checkpoint:
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
        one_process = describe_for_one_process(module, optimizers if trains else (), main, mesh)
        names = [name for name in one_process["order"] if name not in weights.removed]
        models = describe_models(module, one_process)
        if models:
            checkpoint[HUGGING_FACE] = models
        checkpoint[ONE_PROCESS] = {**one_process, "order": [*names, *weights.added]}
        rank_state = {
            "random": mesh.random.state_dict(),
            "generators": random_states(mesh.device),
            "dataloaders": dataloaders,
        }
        self._writer_on(mesh).save(path, tensors, checkpoint, rank_state, background=background)

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
        # Lightning imports this at its first checkpoint, which would delay a later step by 0.1 s.
        importlib.import_module("omegaconf")
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
        """Finish a background save if all ranks have written; all ranks call it between batches.

        Raises:
            CheckpointSaveError: If it failed on any rank.
        """
        if self._writer is not None:
            self._writer.poll()

    def wait(self) -> None:
        """Wait for the background save to finish; called on all ranks.

        Raises:
            CheckpointSaveError: If it failed on any rank.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self, abandon: bool = False) -> None:
        """Finish or abandon a background save, on all ranks, before the run's groups are destroyed.

        Args:
            abandon: Whether to skip waiting for other ranks, because one has failed.
        """
        writer, self._writer = self._writer, None
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
        self._verified = find_last(trainer, mesh, self.weights_only)
        return self._verified

    def load(
        self,
        path: str | os.PathLike[str],
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        main: MainParameters,
        mesh: ParallelMesh,
        before_optimizers: Callable[[Mapping[str, Any]], None] = lambda checkpoint: None,
    ) -> dict[str, Any]:
        """Load module and optimizers from a checkpoint; return the entries left for Lightning.

        Args:
            path: A directory of :meth:`save`, or a file of another strategy. A file is returned
                with its tensors, for :func:`plain_checkpoint.load_state_dict` and
                :func:`plain_checkpoint.load_optimizer`.
            module: The module to load into.
            optimizers: Its optimizers, which train main parameters; empty outside of a fit.
            main: Main parameters of the module.
            mesh: The groups of this rank.
            before_optimizers: Function that receives Lightning's entries before optimizers are
                loaded, to create missing parameter groups.

        Raises:
            CheckpointMismatchError: If the path is no checkpoint, or is one of another model.
            CorruptDataError: If a file is damaged; the message names it.
            UnsupportedError: If it has other objects than tensors and plain values, unless
                ``weights_only`` is False.

        Communication: collective over all ranks.
        """
        self._random_states = None
        self.is_plain = not is_sharded_checkpoint(path)
        if self.is_plain:
            checkpoint = _read_plain(path, optimizers, self.weights_only)
            # Files of torch before 1.6 are not zip archives and have no checksums.
            if os.fspath(path) != self._verified and zipfile.is_zipfile(path):
                verify_any(os.fspath(path), mesh)
            return checkpoint
        if os.fspath(path) != self._verified:
            verify_checkpoint(path, mesh=mesh)
        metadata = load_metadata(path, self.weights_only)
        load_model(path, module, main, mesh, strict=module.strict_loading)
        if optimizers and averaging_callback(module.trainer) is not None:
            load_averages(path, metadata, module, main, mesh)
        saved, one_process = metadata.pop(OPTIMIZERS, None), metadata.pop(ONE_PROCESS, None)
        if not optimizers:
            return metadata
        if saved is None or one_process is None:
            raise _no_optimizers(path)
        before_optimizers({**metadata, OPTIMIZERS: saved})
        for index, optimizer in enumerate(optimizers):
            load_optimizer(path, index, optimizer, main, mesh, saved[index])
        self._restore_rank(path, mesh, metadata)
        return metadata

    def _restore_rank(
        self, path: str | os.PathLike[str], mesh: ParallelMesh, metadata: dict[str, Any]
    ) -> None:
        state = load_rank_state(path, mesh, self.weights_only)
        self._loaded_from = f"rank {state.rank} in {os.fspath(path)}"
        check_rank_state(state.values, self._loaded_from)
        mesh.random.load_state_dict(state.values["random"])
        if state.same_data:
            self._random_states = state.values["generators"]
        else:
            rank_zero_info(
                "The checkpoint was saved with another number of data-parallel ranks: what the "
                "training draws from torch's, numpy's and Python's default generators goes on from "
                "the seed of this run."
            )
        fit_loop = metadata.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" not in fit_loop:
            return
        if state.same_data:
            fit_loop["combined_loader"] = state.values["dataloaders"]
            return
        # With another number of data ranks, saved dataloader states fit no rank.
        del fit_loop["combined_loader"]
        if any(state.values["dataloaders"]):
            rank_zero_warn(
                "The checkpoint was saved with another number of data-parallel ranks, among which "
                "its dataloaders had divided the samples: their states are left out, and they "
                "start at the beginning of the epoch. TokenDataModule counts samples and goes on "
                "exactly."
            )

    def restore_random_states(self, device: torch.device) -> None:
        """Restore the default generators from the loaded checkpoint, before the first batch."""
        if self._random_states is not None:
            with naming_damaged_states(self._loaded_from):
                restore_random_states(self._random_states, device)
        self._random_states = None


def _read_plain(
    path: str | os.PathLike[str], optimizers: Sequence[Optimizer], weights_only: bool | None
) -> dict[str, Any]:
    if os.path.isdir(path) or not ("://" in os.fspath(path) or os.path.exists(path)):
        raise CheckpointMismatchError(
            "a checkpoint must be a directory that this strategy saved, or a file of another "
            f"strategy: {os.fspath(path)!r} is neither. A save that was interrupted leaves "
            "nothing. Check the path, or pass ckpt_path='last'."
        )
    checkpoint = read_file(path, weights_only)
    if optimizers and "optimizer_states" not in checkpoint:
        raise _no_optimizers(path)
    check_entries(checkpoint, os.fspath(path), is_resumed=bool(optimizers))
    plain_checkpoint.translate_precision(checkpoint)
    return checkpoint


def _no_optimizers(path: str | os.PathLike[str]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"a checkpoint to continue training from must hold optimizer states: {os.fspath(path)!r} "
        "was saved with save_weights_only=True. Load it with validate, test or predict, or "
        "continue from a full one."
    )
