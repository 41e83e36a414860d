"""Data module of rows of tokens that resumes at any sample, whatever the rows come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.data.balance import RowBalance
from lightning_megatron.data.loader import TokenLoader
from lightning_megatron.data.sampler import TokenBatchSampler, check_position, excess_line
from lightning_megatron.data.samples import Samples
from lightning_megatron.data.stream_loader import PassSampler
from lightning_megatron.data.streamed_samples import SectionStart, StreamedSamples
from lightning_megatron.data.train_position import position_after, samples_of_steps, stops_by_steps
from lightning_megatron.plan.global_batch import GlobalBatch, RampUp


class RowDataModule(LightningDataModule):
    """Batches of rows of tokens for one data-parallel rank, resumable within an epoch.

    A subclass provides the samples. An epoch of training is ``max_steps`` batches if the Trainer
    stops by steps alone, and otherwise one pass over the data, or ``train_samples``. The state
    counts samples over all data-parallel ranks, so that training resumes under another number of
    ranks without repeating or skipping samples.

    Args:
        seq_length: Tokens of a row.
        batch_size: Samples per data-parallel rank and batch; 1 if no size is given.
        global_batch_size: Samples of each optimizer step over all data-parallel ranks, in place of
            ``batch_size``.
        ramp_up: Growth of ``global_batch_size`` at the start.
        num_workers: Worker processes per rank that prefetch batches.
        seed: Seed of the order of training samples.
        train_samples: Training samples per epoch over all ranks; None derives it as above.
        balance_attention: Whether to balance the attention work of the rows of each global batch.
        pin_memory: Whether to pin batches in memory; None pins them if a GPU is available.

    Raises:
        UnsupportedError: If both sizes of a batch are given.
    """

    #: Settings that determine the order of samples, for a warning.
    order_settings = "seq_length or seed"

    #: Names of the sets of each part that has named ones, in the order of their loaders.
    set_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def __init__(
        self,
        seq_length: int,
        batch_size: int | None,
        global_batch_size: int | None,
        ramp_up: RampUp | None,
        num_workers: int,
        seed: int,
        train_samples: int | None,
        balance_attention: bool,
        pin_memory: bool | None,
    ) -> None:
        super().__init__()
        self.seq_length = seq_length
        #: Samples per data-parallel rank and batch; None if the number of ranks decides it.
        self.batch_size = batch_size
        #: Samples of each step over all ranks; None if ``batch_size`` and their number decide it.
        self.global_batch = GlobalBatch.of(global_batch_size, ramp_up, batch_size)
        if self.batch_size is None and self.global_batch is None:
            self.batch_size = 1
        self.num_workers = num_workers
        self.seed = seed
        self.train_samples = train_samples
        self.balance_attention = balance_attention
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._restored: dict[str, Any] = {}
        self._train_loader: TokenLoader | None = None

    @abstractmethod
    def training_samples(self, num_samples: int | None) -> Samples:
        """Return the training samples in their order.

        Args:
            num_samples: Samples over as many passes as needed; None makes one pass (samples).
        """

    @abstractmethod
    def loader_of(self, samples: Samples, sampler: TokenBatchSampler) -> TokenLoader:
        """Return the loader of samples in the order of a sampler.

        Args:
            samples: Samples of one part of the data.
            sampler: Order of the samples on this rank.
        """

    def training_sampler(self, samples: Samples, **options: Any) -> TokenBatchSampler:
        """Return the order of training samples on this rank.

        Args:
            samples: Training samples.
            options: Arguments of ``TokenBatchSampler`` but the number of samples.
        """
        if not isinstance(samples, StreamedSamples):
            return TokenBatchSampler(len(samples), **options)
        # A stream has shuffled its samples already.
        options |= {"seed": None}
        if options["stream"]:
            return TokenBatchSampler(len(samples), **options)
        return PassSampler(samples, **(options | {"stream": True}))

    @property
    def tokens_shape(self) -> tuple[int | None, int]:
        """Shape (B, S) of a data-parallel rank's full batch, known before any file is opened.

        B is None with a global batch size.
        """
        return self.batch_size, self.seq_length

    def train_dataloader(self) -> TokenLoader:
        """Build the loader of training batches, starting at the restored position."""
        if self._train_loader is not None and self._train_loader.sampler.stream:
            # `reload_dataloaders_every_n_epochs` goes on where the last loader stopped.
            self._restored = self._restored or self.state_dict()
        self._train_loader = self._build_train_loader()
        if self._train_loader.sampler.balance is not None:
            rank_zero_info(excess_line(self._train_loader.sampler))
        return self._train_loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data after the batches that the Trainer finished."""
        trainer = self.trainer
        loader = self._train_loader
        if loader is None or trainer is None:
            return dict(self._restored)
        return position_after(loader, self._progress(), trainer.global_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position in the training data, also from a run with another batch size.

        Raises:
            CheckpointMismatchError: If the state was not returned by ``state_dict`` of this class.
        """
        check_position(state_dict)
        if "stream" in state_dict:
            SectionStart.of(state_dict["stream"])
        self._restored = dict(state_dict)
        if self._train_loader is not None and state_dict:
            # A strategy that restores late already refers to the loader, but does not iterate yet.
            vars(self._train_loader).update(vars(self._build_train_loader()))

    def teardown(self, stage: str | None = None) -> None:
        """Drop the training state of a checkpoint that was loaded for validation or test.

        A stream tells what it has read, and ends its workers.
        """
        if stage != "fit":
            self._restored = {}
        stream = self._stream()
        if stream is not None and stage == "fit":
            line = stream.rest_line(self.state_dict().get("consumed", 0))
            if line is not None:
                tell_of_rows(line, False)
            stream.close()

    def evaluation_loader(self, samples: Samples) -> TokenLoader:
        """Return a loader that yields every sample once.

        Args:
            samples: Samples of one part of the data.
        """
        dp_rank, dp_size = self.data_parallel()
        sampler = TokenBatchSampler(
            len(samples), self._rows_of_rank(dp_size), dp_rank, dp_size, drop_last=False
        )
        return self.loader_of(samples, sampler)

    def restart(self) -> None:
        """Forget the loader of an earlier stage."""
        self._train_loader = None

    def data_parallel(self) -> tuple[int, int]:
        """Return the rank of this process among the data-parallel ranks, and their number."""
        # Lightning builds its own samplers from the same property.
        strategy = None if self.trainer is None else self.trainer.strategy
        given = getattr(strategy, "distributed_sampler_kwargs", None)
        return (given["rank"], given["num_replicas"]) if given else (0, 1)

    def _stream(self) -> StreamedSamples | None:
        """Return the samples of the training loader if they are a stream."""
        samples = None if self._train_loader is None else self._train_loader.batches.samples
        return samples if isinstance(samples, StreamedSamples) else None

    def _build_train_loader(self) -> TokenLoader:
        state = self._restored
        self._restored = {}
        former = self._stream()
        if former is not None:
            former.close()
        dp_rank, dp_size = self.data_parallel()
        by_steps = self.train_samples is None and stops_by_steps(self.trainer)
        num_samples = self._num_step_samples(dp_size, state) if by_steps else self.train_samples
        samples = self.training_samples(num_samples)
        if state and state["order"] != samples.order_key:
            rank_zero_warn(
                f"The checkpoint was written with other training data ({self.order_settings}), so "
                "its position does not apply: training starts at the beginning of the new data."
            )
            return self._build_train_loader()
        sampler = self.training_sampler(
            samples,
            batch_size=self._rows_of_rank(dp_size),
            dp_rank=dp_rank,
            dp_size=dp_size,
            seed=self._shuffle_seed(),
            stream=by_steps,
            finished=self._num_finished,
            balance=self._balance(samples, dp_size),
            ramp_up=None if self.global_batch is None else self.global_batch.ramp_up,
        )
        before = state.get("global_batch_size", sampler.global_batch_size)
        trainer: Any = self.trainer
        sizes = {before, *sampler.global_batch.sizes}
        if trainer is not None and not sampler.stream and len(sizes) > 1:
            # Later epochs have another length than this one, which mixes batches of several sizes.
            trainer.reload_dataloaders_every_n_epochs = 1
        if state:
            sampler.load_state_dict(state)
            if isinstance(samples, StreamedSamples):
                samples.restore(state.get("stream"))
        elif trainer is not None and not sampler.stream:
            sampler.set_epoch(trainer.current_epoch)
        return self.loader_of(samples, sampler)

    def _balance(self, samples: Samples, dp_size: int) -> RowBalance | None:
        if not self.balance_attention:
            return None
        strategy = None if self.trainer is None else self.trainer.strategy
        # Other strategies compute a batch at once.
        cut = getattr(strategy, "samples_per_microbatch", None)
        rows = self._rows_of_rank(dp_size)
        return RowBalance(samples, dp_size, rows if cut is None else cut(rows))

    def _rows_of_rank(self, dp_size: int) -> int:
        """Return the samples of a rank in a full batch."""
        if self.global_batch is None:
            assert self.batch_size is not None, "one of both sizes is known"
            return self.batch_size
        self.global_batch.check_accumulation(
            getattr(self.trainer, "accumulate_grad_batches", 1) > 1
        )
        self.global_batch.check(dp_size)
        return self.global_batch.size // dp_size

    def _num_step_samples(self, dp_size: int, state: Mapping[str, Any]) -> int:
        trainer = self.trainer
        assert trainer is not None, "only a Trainer counts steps"
        num_batches = trainer.accumulate_grad_batches
        batch = self.global_batch or GlobalBatch(
            num_batches * self._rows_of_rank(dp_size) * dp_size
        )
        return samples_of_steps(state, trainer.max_steps, batch)

    def _num_finished(self) -> int:
        return 0 if self.trainer is None else self._progress().total.processed

    def _progress(self) -> Any:
        assert self.trainer is not None, "only a Trainer counts batches"
        return self.trainer.fit_loop.epoch_loop.batch_progress

    def _shuffle_seed(self) -> int | None:
        # `overfit_batches` trains on the same batches in every epoch.
        return None if getattr(self.trainer, "overfit_batches", 0) else self.seed


def tell_of_rows(line: str, has_loss: bool) -> None:
    """Tell on rank 0 what was read of files: as a warning if something was cut or left out.

    Args:
        line: Line about what was read.
        has_loss: Whether something was cut or left out.
    """
    tell = rank_zero_warn if has_loss else rank_zero_info
    tell(line)
