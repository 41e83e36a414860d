"""Base class of data modules whose batches are rows of tokens, and which resume at any sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.data.balance import RowBalance
from lightning_megatron.data.loader import PassSampler, SampleBatches, TokenLoader
from lightning_megatron.data.sampler import TokenBatchSampler, check_position, imbalance_line
from lightning_megatron.data.samples import Samples, Windows
from lightning_megatron.data.streamed_samples import SectionStart, StreamedSamples
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.plan.global_batch import GlobalBatch, RampUp
from lightning_megatron.plan.settings import Count, Elements, Index, Range, coerced_arguments

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")
#: Parts of the data that a stage of the Trainer reads; other stages read all of them.
PARTS_OF_STAGES: dict[str | None, tuple[Part, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
}


def position_after(loader: TokenLoader, progress: Any, num_steps: int) -> dict[str, Any]:
    """Return the position in the training data after the Trainer's last finished batch.

    Args:
        num_steps: Number of optimizer steps so far (steps).
    """
    sampler = loader.sampler
    state: dict[str, Any] = sampler.state_dict()
    batches = sampler.num_before
    if sampler.num_finished:
        batches = progress.current.processed
        if progress.is_last_batch and batches == progress.current.ready:
            # `limit_train_batches` may end an epoch before all of its samples are used.
            batches = 0
            if not sampler.stream:
                state = {"epoch": state["epoch"] + 1, "consumed": 0}
    samples = loader.batches.samples
    if isinstance(samples, StreamedSamples):
        state = {**state, "stream": samples.state_at(state["consumed"])}
    return {
        **state,
        "batches": batches,
        "num_samples": sampler.num_samples,
        "global_batch_size": sampler.global_batch_size,
        "steps": num_steps,
        "order": samples.order_key,
    }


def samples_of_steps(state: Mapping[str, Any], max_steps: int, batch: GlobalBatch) -> int:
    """Return the number of training samples of a run that ends after a number of steps (samples).

    Args:
        state: Restored position; empty for a run from the start.
        max_steps: Number of optimizer steps of the whole training (steps).
    """
    if state.get("epoch", 0):
        # The first epoch is over. The order of later epochs depends on the same number of samples.
        return state["num_samples"]
    steps = max(max_steps - state.get("steps", 0), 1)
    return batch.after(state.get("consumed", 0), steps)


def steps_of_epochs(trainer: Any, sampler: TokenBatchSampler) -> int | None:
    """Return the number of optimizer steps of a Trainer with a limit of epochs (steps).

    Epochs with growing batches have different numbers of them.

    Returns:
        Number of steps; None if the Trainer has no limit of epochs.
    """
    if trainer.max_epochs in (None, -1):
        return None
    limit = trainer.limit_train_batches
    batches = map(sampler.batches_of_epoch, range(trainer.max_epochs))
    steps = sum(
        min(limit, count) if isinstance(limit, int) else int(limit * count) for count in batches
    )
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def stops_by_steps(trainer: Any) -> bool:
    """Return whether only ``max_steps`` limits a Trainer.

    Args:
        trainer: The Trainer; None without a Trainer.
    """
    return trainer is not None and trainer.max_steps != -1 and trainer.max_epochs == -1


class RowDataModule(LightningDataModule):
    """Batches of rows of tokens for one data-parallel rank, resumable within an epoch.

    A subclass provides the samples. An epoch of training is ``max_steps`` batches if only
    ``max_steps`` limits the Trainer, and otherwise one pass over the data, or ``train_samples``.
    The state counts samples over all data-parallel ranks, so training resumes with another number
    of ranks without repeating or skipping samples.

    Args:
        seq_length: Tokens of a row.
        batch_size: Samples per data-parallel rank and batch; 1 if no size is given.
        global_batch_size: Samples of each optimizer step over all data-parallel ranks; replaces
            ``batch_size``. The batch of a rank is an equal share of them, which ``microbatch_size``
            of the strategy divides into microbatches. Losses do not depend on the number of ranks,
            so a run that loses hosts continues with the same losses on the remaining ones.
        ramp_up: Growth of ``global_batch_size`` at the start of training: ``start`` is the first
            size, ``increment`` is the number of samples that each growth adds, and ``samples`` is
            the number of samples after which the size is full.
        num_workers: Worker processes per rank that prefetch batches.
        seed: Seed of the order of training samples.
        train_samples: Training samples per epoch over all ranks; None uses the default above.
        pin_memory: Whether to pin batches in memory; None pins them if a GPU is available.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If both ``batch_size`` and ``global_batch_size`` are given.
    """

    #: Names of the settings that determine the order of samples, for a warning.
    order_settings = "seq_length or seed"
    #: Files of each part with data, or of each named set of a part (such as "val/news").
    files: Mapping[str, Sequence[Any]]
    #: Whether to balance the attention work of the rows of each global batch.
    balance_attention = False

    def __init__(
        self,
        seq_length: Count = 1024,
        batch_size: Count | None = None,
        global_batch_size: Count | None = None,
        ramp_up: RampUp | None = None,
        num_workers: Index = 0,
        seed: Annotated[int, Range(minimum=0, maximum=2**32 - 1)] = 1234,
        train_samples: Elements | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        given = coerced_arguments(RowDataModule.__init__, locals())
        super().__init__()
        self.seq_length: int = given["seq_length"]
        #: Samples per data-parallel rank and batch; None with a global batch size.
        self.batch_size: int | None = given["batch_size"]
        #: Samples of each step over all ranks; None with ``batch_size``.
        self.global_batch = GlobalBatch.of(
            given["global_batch_size"], given["ramp_up"], self.batch_size
        )
        if self.batch_size is None and self.global_batch is None:
            self.batch_size = 1
        self.num_workers: int = given["num_workers"]
        self.seed: int = given["seed"]
        self.train_samples: int | None = given["train_samples"]
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._restored: dict[str, Any] = {}
        self._train_loader: TokenLoader | None = None

    @abstractmethod
    def training_samples(self, num_samples: int | None) -> Samples:
        """Return the training samples in order.

        Args:
            num_samples: Number of samples, over as many passes as needed; None makes one pass
                (samples).
        """

    @abstractmethod
    def batches_of(self, samples: Samples) -> SampleBatches:
        """Return the batches of samples."""

    @abstractmethod
    def evaluation_samples(self, set_name: str) -> Samples | None:
        """Return the samples of a set, in an order that is the same in every run; None without any.

        Args:
            set_name: ``val`` or ``test``, or a named set such as ``val/news``.
        """

    @abstractmethod
    def read(self, set_name: str) -> None:
        """Read the files of a set, and raise an error if one is damaged.

        Args:
            set_name: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """

    def loader_of(self, samples: Samples, sampler: TokenBatchSampler) -> TokenLoader:
        """Return a loader of samples in the order of a sampler.

        Args:
            sampler: Order of the samples on this rank.
        """
        return TokenLoader(self.batches_of(samples), sampler, self.num_workers, self.pin_memory)

    @staticmethod
    def vocab_size_of(tokenizer: str) -> int:
        """Return the vocabulary size of a tokenizer, which a recipe may take from here (tokens).

        Args:
            tokenizer: Name or path, as for ``lightning-megatron preprocess``.
        """
        return load_tokenizer(tokenizer).vocab_size

    @property
    def vocab_size_before_launch(self) -> int | None:
        """Vocabulary size of the data; None if only a download or other processes know it."""
        return None

    def check_before_launch(self, stage: str | None) -> None:
        """Refuse missing files and damaged headers before the strategy starts other processes.

        Overrides read no whole file of data, and download nothing: names on the Hub pass.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """

    def setup(self, stage: str | None = None) -> None:
        """Read the files of a stage, so that errors occur before the first step."""
        self._train_loader = None
        for part in PARTS_OF_STAGES.get(stage, PARTS):
            for set_name in self.sets_of(part):
                self.read(set_name)

    def sets_of(self, part: str) -> list[str]:
        """Return the named sets of a part, such as ``val/news``, or the part if it has no names.

        Args:
            part: ``train``, ``val`` or ``test``; without files there are no sets.
        """
        return [name for name in self.files if name == part or name.startswith(f"{part}/")]

    @property
    def set_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the named sets of each part, in the order of their loaders."""
        names: dict[str, tuple[str, ...]] = {"val": (), "test": ()}
        for set_name in self.files:
            part, _, name = set_name.partition("/")
            if name:
                names[part] += (name,)
        return names

    def val_dataloader(self) -> TokenLoader | list:
        """Build a loader that yields every validation row once, or a list of one for each set."""
        return self.evaluation_loaders("val")

    def test_dataloader(self) -> TokenLoader | list:
        """Build a loader that yields every test row once, or a list of one for each set."""
        return self.evaluation_loaders("test")

    def evaluation_loaders(self, part: str) -> TokenLoader | list:
        """Return a loader that yields every row of a part once, or a list of one for each set.

        Args:
            part: ``val`` or ``test``.
        """
        samples = map(self.evaluation_samples, self.sets_of(part))
        loaders = [self.evaluation_loader(found) for found in samples if found is not None]
        return loaders if part not in self.files or not loaders else loaders[0]

    def training_sampler(self, samples: Samples, **options: Any) -> TokenBatchSampler:
        """Return the order of training samples on this rank.

        Args:
            samples: Training samples.
            options: Arguments of ``TokenBatchSampler`` except the number of samples.
        """
        if not isinstance(samples, StreamedSamples):
            return TokenBatchSampler(len(samples), **options)
        # A stream shuffles its samples itself.
        options |= {"seed": None}
        if options["stream"]:
            return TokenBatchSampler(len(samples), **options)
        return PassSampler(samples, **(options | {"stream": True}))

    @property
    def tokens_shape(self) -> tuple[int | None, int]:
        """Shape (B, S) of a full batch of a data-parallel rank; B is None with a global batch size.

        It is known before any file is opened.
        """
        return self.batch_size, self.seq_length

    def train_dataloader(self) -> TokenLoader:
        """Build a loader of training batches that starts at the restored position."""
        loader = self._train_loader
        if loader is not None and (loader.sampler.stream or not loader.sampler.has_started):
            # After `reload_dataloaders_every_n_epochs`, continue where the last loader stopped. One
            # that has not started may have a restored position, since `configure_optimizers` can
            # build it to count steps, before the Trainer knows its epoch.
            self._restored = self._restored or self.state_dict()
        self._train_loader = self._build_train_loader()
        if self._train_loader.sampler.balance is not None:
            rank_zero_info(imbalance_line(self._train_loader.sampler))
        return self._train_loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data after the Trainer's last finished batch."""
        trainer = self.trainer
        loader = self._train_loader
        if loader is None or trainer is None:
            return dict(self._restored)
        return position_after(loader, self._progress(), trainer.global_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position in the training data, even from a run with another batch size.

        Args:
            state_dict: State that ``state_dict`` returned.

        Raises:
            CheckpointMismatchError: If ``state_dict`` of this class did not return the state.
        """
        check_position(state_dict)
        if "stream" in state_dict:
            SectionStart.of(state_dict["stream"])
        self._restored = dict(state_dict)
        if self._train_loader is not None and state_dict:
            # A strategy that restores after the loaders were built holds this loader, but has not
            # started to iterate over it.
            vars(self._train_loader).update(vars(self._build_train_loader()))

    def teardown(self, stage: str | None = None) -> None:
        """Discard the training state of a checkpoint that was loaded for validation or test.

        A stream logs how many rows it has read, and stops its workers.
        """
        if stage != "fit":
            self._restored = {}
        stream = self._stream()
        if stream is not None and stage == "fit":
            line = stream.end_summary(self.state_dict().get("consumed", 0))
            if line is not None:
                log_row_counts(line, False)
            stream.close()

    def evaluation_loader(self, samples: Samples) -> TokenLoader:
        """Return a loader that yields every sample once, or those of a stream's first pass."""
        dp_rank, dp_size = self.data_parallel()
        rows = self._rows_of_rank(dp_size)
        if isinstance(samples, StreamedSamples):
            once = PassSampler(samples, rows, dp_rank, dp_size, drop_last=False)
            return self.loader_of(samples, once)
        sampler = TokenBatchSampler(len(samples), rows, dp_rank, dp_size, drop_last=False)
        return self.loader_of(samples, sampler)

    def data_parallel(self) -> tuple[int, int]:
        """Return the data-parallel rank of this process, and the data-parallel size."""
        # Lightning builds its distributed samplers from the same property.
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
        previous = self._stream()
        if previous is not None:
            previous.close()
        dp_rank, dp_size = self.data_parallel()
        by_steps = self.train_samples is None and stops_by_steps(self.trainer)
        num_samples = self._num_step_samples(dp_size, state) if by_steps else self.train_samples
        samples = self.training_samples(num_samples)
        if state and state["order"] != samples.order_key:
            rank_zero_warn(
                f"The checkpoint was written with other training data ({self.order_settings}), so "
                "its position is ignored: training starts at the beginning of the new data."
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
            # This epoch has batches of several sizes, so later epochs have another length.
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
        # Other strategies do not divide a batch into microbatches.
        cut = getattr(strategy, "samples_per_microbatch", None)
        rows = self._rows_of_rank(dp_size)
        return RowBalance(cast(Windows, samples), dp_size, rows if cut is None else cut(rows))

    def _rows_of_rank(self, dp_size: int) -> int:
        """Return the number of samples of a rank in a full batch."""
        if self.global_batch is None:
            assert self.batch_size is not None, "one of the two batch sizes is known"
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

    def steps_of_epochs(self) -> int | None:
        """Return the optimizer steps of all epochs of the Trainer if batches grow (steps).

        Epochs then differ in their number of batches. Without growth, or if the Trainer stops by
        steps alone, the result is None: the Trainer's own estimate holds.
        """
        trainer: Any = self.trainer
        loader = self._train_loader
        if loader is None or loader.sampler.stream or loader.sampler.global_batch.ramp_up is None:
            return None
        return steps_of_epochs(trainer, loader.sampler)

    def _num_finished(self) -> int:
        return 0 if self.trainer is None else self._progress().total.processed

    def _progress(self) -> Any:
        assert self.trainer is not None, "only a Trainer counts batches"
        return self.trainer.fit_loop.epoch_loop.batch_progress

    def _shuffle_seed(self) -> int | None:
        # `overfit_batches` trains on the same batches in every epoch.
        return None if getattr(self.trainer, "overfit_batches", 0) else self.seed


def log_row_counts(line: str, is_warning: bool) -> None:
    """Log on rank 0 how many rows of files were read, cut and left out.

    Args:
        is_warning: Whether to log a warning, because rows were cut or left out.
    """
    log = rank_zero_warn if is_warning else rank_zero_info
    log(line)
