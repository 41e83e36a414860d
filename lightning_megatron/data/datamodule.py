"""Data module of token files, data-parallel and resumable within an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.data.balance import RowBalance
from lightning_megatron.data.blended_samples import blend_samples
from lightning_megatron.data.corpora import (
    bytes_per_token,
    check_sources,
    check_split,
    has_share,
    list_prefixes,
)
from lightning_megatron.data.corpus_parts import PARTS, CorpusParts, Part
from lightning_megatron.data.loader import TokenLoader, WindowBatches
from lightning_megatron.data.sampler import TokenBatchSampler, check_position, excess_line
from lightning_megatron.data.samples import Order, SampleOptions, Samples, check_rows
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.data.train_position import position_after, samples_of_steps
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.settings import (
    Count,
    Elements,
    Index,
    NotNegative,
    Range,
    coerced_arguments,
)


class TokenDataModule(LightningDataModule):
    """Batches of fixed-length token windows from token files, for pretraining a language model.

    An epoch of training is ``max_steps`` batches if the Trainer stops by steps alone, and one pass
    over the corpus otherwise. Validation and test use every token once, in a fixed shuffled order.
    The state counts samples over all data-parallel ranks: training resumes under another number of
    ranks without repeating or skipping samples.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S)}: shifted labels, of which -100 is ignored.
        Separate documents add {"lengths": (B, L)}.

    Args:
        train: Prefix of a token file (path without .bin), a list of them, or prefixes with weights.
        val: Prefixes of the validation corpora; None disables validation.
        test: Prefixes of the test corpora.
        split: Weights such as "980,15,5" to divide ``train`` into train, val and test.
        corpus: Name of a bundled corpus. "speeches" is the State of the Union corpus: speeches
            before 2000 are the training part, later ones serve as val and test.
        tokenizer: Tokenizer "bytes", "gpt2", or a path. None uses the one recorded with the corpus
            ("bytes" for ``corpus``).
        seq_length: Tokens per window.
        batch_size: Samples per data-parallel rank and batch.
        num_workers: Worker processes per rank that prefetch batches.
        seed: Seed of the order of training samples.
        order: Order of training samples. "passes" shuffles each pass over the documents
            separately, and computes splits and blends in exact integers. "megatron" reproduces the
            samples of Megatron-Core for the same seed, number of samples, weights and split: it
            shuffles and splits sequences (a document may have several), rounds doubles the same
            way, and ends a blend without weights after one pass.
        train_samples: Training samples per epoch over all ranks; None derives it as above.
        mask_after_eod: Whether to ignore the label that follows an end-of-document token.
        documents: "joined" lets attention and positions run over the ends of documents in a window.
            "separate" restarts both at each document, and ignores the labels across the ends.
            "whole" does so too, and packs whole documents into samples by best fit: only those that
            are longer than a sample are cut. Samples of each pass have all tokens of it, except
            documents of one token, and are nearly full.
        balance_attention: Whether to assign the samples of each global batch to data ranks and
            microbatches so that these have about equal attention work, the sum of the squares of
            documents' lengths. Which samples a global batch has, the loss and the position in the
            data do not change; only with separate documents.
        data_dir: Directory to which the bundled ``corpus`` is written.
        cache_dir: Directory of the index cache; None uses ``index_cache`` next to the first corpus.
        checksums: Whether to compare each token file with the checksum written by ``preprocess``.
            One process reads the files while the others wait; ``cache_dir`` stores the result until
            the size or times of a file change.
        pin_memory: Whether to pin batches in memory; None pins them if a GPU is available.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
        UnsupportedError: If data sources conflict, or none is given, or joined documents are to be
            balanced.
    """

    def __init__(
        self,
        train: str | list[str] | dict[str, NotNegative] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        split: str | None = None,
        corpus: Literal["speeches"] | None = None,
        tokenizer: str | None = None,
        seq_length: Count = 1024,
        batch_size: Count = 1,
        num_workers: Index = 0,
        seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 1234,
        order: Literal["passes", "megatron"] = "passes",
        train_samples: Elements | None = None,
        mask_after_eod: bool = False,
        documents: Literal["joined", "separate", "whole"] = "joined",
        balance_attention: bool = False,
        data_dir: str = "data",
        cache_dir: str | None = None,
        pin_memory: bool | None = None,
        checksums: bool = True,
    ) -> None:
        given = coerced_arguments(TokenDataModule.__init__, locals())
        super().__init__()
        check_sources(train, val, test, split, corpus)
        check_rows(documents == "whole", order)
        if balance_attention and documents == "joined":
            raise UnsupportedError(
                "balance_attention cannot be used with documents='joined', because attention over "
                "whole rows has equal work in each of them. Use documents='separate', or leave it "
                "out."
            )
        if split is not None:
            check_split(given["split"], given["order"])
        self._parts = CorpusParts(
            {part: list_prefixes(given[part]) for part in PARTS},
            split=given["split"],
            order=given["order"],
            corpus=given["corpus"],
            tokenizer_spec=given["tokenizer"],
            data_dir=given["data_dir"],
            cache_dir=given["cache_dir"],
            checksums=checksums,
        )
        self.weights = list(given["train"].values()) if isinstance(given["train"], dict) else None
        self.split: str | None = given["split"]
        self.seq_length: int = given["seq_length"]
        self.batch_size: int = given["batch_size"]
        self.num_workers: int = given["num_workers"]
        self.seed: int = given["seed"]
        self.train_samples: int | None = given["train_samples"]
        self.order: Literal["passes", "megatron"] = given["order"]
        self.mask_after_eod = mask_after_eod
        self.documents: Literal["joined", "separate", "whole"] = given["documents"]
        self.balance_attention = balance_attention
        self.data_dir: str = given["data_dir"]
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._restored: dict[str, Any] = {}
        self._train_loader: TokenLoader | None = None

    @property
    def prefixes(self) -> dict[Part, list[str]]:
        """Prefixes of the token files of each part."""
        return self._parts.prefixes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer given by name or path; None if none was given and no bundled corpus is used."""
        return self._parts.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._parts.tokenizer = tokenizer

    @property
    def tokens_shape(self) -> tuple[int, int]:
        """Shape (B, S) of a data-parallel rank's full batch, known before any file is opened."""
        return self.batch_size, self.seq_length

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer, or of the tokenizer recorded with the corpus."""
        return self._parts.tokenizer_fact("vocab_size")

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token; None if the tokenizer has none."""
        return self._parts.tokenizer_fact("eod")

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per token of the validation corpus, else of the test corpus."""
        return self.bytes_per_token_of("val") or self.bytes_per_token_of("test")

    def bytes_per_token_of(self, part: Part) -> float | None:
        """Return UTF-8 bytes per token of a part's corpora; None if not recorded."""
        return bytes_per_token([corpus for corpus, _ in self._corpora(part)])

    def prepare_data(self) -> None:
        """Write the bundled corpus unless it exists; called in one process per node."""
        self._parts.locate()

    def setup(self, stage: str | None = None) -> None:
        """Open and check the corpora of a stage, so that faults raise before the first step."""
        self._train_loader = None
        self._parts.locate()
        parts: dict[str | None, tuple[Part, ...]] = {
            "fit": ("train", "val"),
            "validate": ("val",),
            "test": ("test",),
        }
        for part in parts.get(stage, PARTS):
            self._corpora(part)

    def train_dataloader(self) -> TokenLoader:
        """Build the loader of training batches, starting at the restored position."""
        self._train_loader = self._build_train_loader()
        if self._train_loader.sampler.balance is not None:
            rank_zero_info(excess_line(self._train_loader.sampler))
        return self._train_loader

    def val_dataloader(self) -> TokenLoader | list:
        """Build the loader that yields every validation token once, in a fixed shuffled order."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> TokenLoader | list:
        """Build the loader that yields every test token once, in a fixed shuffled order."""
        return self._evaluation_loader("test")

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
        self._restored = dict(state_dict)
        if self._train_loader is not None and state_dict:
            # A strategy that restores late already refers to the loader, but does not iterate yet.
            vars(self._train_loader).update(vars(self._build_train_loader()))

    def teardown(self, stage: str | None = None) -> None:
        """Drop the training state of a checkpoint that was loaded for validation or test."""
        if stage != "fit":
            self._restored = {}

    def _build_train_loader(self) -> TokenLoader:
        state = self._restored
        self._restored = {}
        dp_rank, dp_size = self._data_parallel()
        by_steps = self.train_samples is None and self._stops_by_steps()
        num_samples = self._num_step_samples(dp_size, state) if by_steps else self.train_samples
        # Megatron-Core ignores the weight of a single corpus unless it splits the corpus.
        weights = None if len(self.prefixes["train"]) == 1 and self.split is None else self.weights
        samples = blend_samples(
            self._corpora("train"), weights, self._options(self.order), num_samples
        )
        if state and state["order"] != samples.order_key:
            rank_zero_warn(
                "The checkpoint was written with other training data (corpus, split, weights, "
                "tokenizer, seq_length, seed or order), so its position does not apply: training "
                "starts at the beginning of the new data."
            )
            return self._build_train_loader()
        sampler = TokenBatchSampler(
            len(samples),
            self.batch_size,
            dp_rank,
            dp_size,
            seed=self._shuffle_seed(),
            stream=by_steps,
            finished=self._num_finished,
            balance=self._balance(samples, dp_size),
        )
        if state:
            sampler.load_state_dict(state)
            trainer: Any = self.trainer
            if (
                trainer is not None
                and not by_steps
                and state["global_batch_size"] != sampler.global_batch_size
            ):
                # Later epochs have another length than this one, which mixes batches of two sizes.
                trainer.reload_dataloaders_every_n_epochs = 1
        elif self.trainer is not None and not by_steps:
            sampler.set_epoch(self.trainer.current_epoch)
        return self._loader(samples, sampler)

    def _balance(self, samples: Samples, dp_size: int) -> RowBalance | None:
        if not self.balance_attention:
            return None
        strategy = None if self.trainer is None else self.trainer.strategy
        # Other strategies compute a batch at once.
        cut = getattr(strategy, "samples_per_microbatch", None)
        return RowBalance(
            samples, dp_size, self.batch_size if cut is None else cut(self.batch_size)
        )

    def _stops_by_steps(self) -> bool:
        return (
            self.trainer is not None
            and self.trainer.max_steps != -1
            and self.trainer.max_epochs == -1
        )

    def _num_step_samples(self, dp_size: int, state: Mapping[str, Any]) -> int:
        trainer = self.trainer
        assert trainer is not None, "only a Trainer counts steps"
        per_step = trainer.accumulate_grad_batches * self.batch_size * dp_size
        return samples_of_steps(state, trainer.max_steps, per_step)

    def _num_finished(self) -> int:
        return 0 if self.trainer is None else self._progress().total.processed

    def _progress(self) -> Any:
        assert self.trainer is not None, "only a Trainer counts batches"
        return self.trainer.fit_loop.epoch_loop.batch_progress

    def _shuffle_seed(self) -> int | None:
        # `overfit_batches` trains on the same batches in every epoch.
        return None if getattr(self.trainer, "overfit_batches", 0) else self.seed

    def _evaluation_loader(self, part: Part) -> TokenLoader | list:
        corpora = [
            (corpus, documents)
            for corpus, documents in self._corpora(part)
            if documents is None or documents
        ]
        if not corpora and self.split is not None and has_share(self.split, PARTS.index(part)):
            raise UnsupportedError(
                f"split {self.split!r} leaves no document of {', '.join(self.prefixes['train'])} "
                f"for {part}. Give {part} a larger weight, or a weight of 0."
            )
        if not corpora:
            return []
        # Fixed seed: `limit_val_batches` then compares runs on the same text.
        samples = blend_samples(corpora, None, replace(self._options("spread"), seed=0))
        dp_rank, dp_size = self._data_parallel()
        sampler = TokenBatchSampler(
            len(samples), self.batch_size, dp_rank, dp_size, drop_last=False
        )
        return self._loader(samples, sampler)

    def _loader(self, samples: Samples, sampler: TokenBatchSampler) -> TokenLoader:
        if self.mask_after_eod and self.eod is None:
            raise UnsupportedError(
                "mask_after_eod needs an end-of-document token: the tokenizer has none. Leave "
                "mask_after_eod out, or use a tokenizer with such a token."
            )
        ignored = self.eod if self.mask_after_eod else None
        batches = WindowBatches(samples, ignored, self.documents != "joined")
        return TokenLoader(batches, sampler, self.num_workers, self.pin_memory)

    def _data_parallel(self) -> tuple[int, int]:
        # Lightning builds its own samplers from the same property.
        strategy = None if self.trainer is None else self.trainer.strategy
        given = getattr(strategy, "distributed_sampler_kwargs", None)
        return (given["rank"], given["num_replicas"]) if given else (0, 1)

    def _options(self, order: Order) -> SampleOptions:
        return SampleOptions(
            seq_length=self.seq_length,
            seed=self.seed,
            order=order,
            tokenizer=self._parts.fingerprint,
            vocab_size=self._parts.known_vocab_size,
            cache_dir=str(self._parts.cache_folder),
            by_sequence=self.order == "megatron",
            whole=self.documents == "whole",
        )

    def _corpora(self, part: Part) -> list[tuple[TokenFile, range | None]]:
        # If checksums cannot be stored, one process of each node reads the files.
        return self._parts.of(part, in_charge=getattr(self.trainer, "local_rank", 0) == 0)
