"""TokenDataModule: token files as batches for a Trainer, with or without data parallelism, resumable in mid-epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron.data.corpora import (
    check_corpus_once,
    check_one_tokenizer,
    check_split,
    has_share,
    split_corpus,
)
from lightning_megatron.data.description import CorpusDescription
from lightning_megatron.data.loader import TokenLoader, WindowBatches
from lightning_megatron.data.sampler import TokenBatchSampler, check_position
from lightning_megatron.data.samples import Order, SampleOptions, Samples, blend_samples
from lightning_megatron.data.speeches import prepare_speeches
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.data.tokenizer import Tokenizer, load_tokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.settings import Count, Elements, Index, NotNegative, Range, settled_arguments

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")


class TokenDataModule(LightningDataModule):
    """Feed windows of token files: batches are {"tokens": (B, S), "labels": (B, S)}, labels shifted, -100 = ignored.

    Training takes `max_steps` batches as one epoch if the Trainer stops by steps alone, else one pass over the corpus
    per epoch. Validation and test take every token once, in a fixed order that is shuffled, so that a few batches are a
    fair sample. The state counts samples over all data-parallel ranks, so a checkpoint continues under another number
    of them without repeating or skipping any.

    Args:
        train: Prefix of a token file (path without .bin and .idx), a list of them, or prefixes with weights.
        val: Prefixes for validation; none means no validation.
        test: Prefixes for test.
        split: Weights such as "980,15,5" that divide the documents of `train` into train, val and test instead.
        corpus: "speeches" is the State of the Union corpus: before 2000 to train, 2000 and later for val and test.
        tokenizer: "bytes", "gpt2", or a path. None takes what the corpus says about itself ("bytes" for `corpus`).
        seq_length: Tokens per window.
        batch_size: Samples of one data-parallel rank in one batch, which is its share of one optimizer step.
        num_workers: Processes per rank that read ahead.
        seed: Of the order of training samples.
        order: "passes" shuffles each pass over the documents by itself, and computes splits and blends in exact
            integers; "megatron" gives the samples of Megatron-Core for the same seed, number of samples, weights and
            split: it shuffles and splits sequences (of which a document may have several), rounds as its doubles do,
            and a blend without weights ends after one pass. Validation and test keep the order said above.
        train_samples: Training samples of one epoch over all ranks; None chooses as said above.
        mask_after_eod: Ignore the label that follows an end of document.
        data_dir: Where `corpus` is written.
        cache_dir: Where sample indices are kept; None is `index_cache` beside the first corpus.
        checksums: Compare each token file with the checksum that `preprocess` wrote: once, by one process that the
            others wait for; `cache_dir` remembers the result as long as size and times of the files stay.
        pin_memory: Pin batches in memory; None does if there is a GPU.

    Raises:
        ParallelPlanError: For a value of another type or outside of its range.
        UnsupportedError: If data are named in two ways, or not at all.
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
        data_dir: str = "data",
        cache_dir: str | None = None,
        pin_memory: bool | None = None,
        checksums: bool = True,
    ) -> None:
        given = settled_arguments(TokenDataModule.__init__, locals())
        super().__init__()
        if not (train or val or test or corpus):
            raise UnsupportedError("no data are named: give prefixes of token files, or corpus 'speeches'.")
        if corpus is not None and (train or val or test or split):
            raise UnsupportedError(f"corpus {corpus!r} brings its own parts: leave train, val, test and split out.")
        if split is not None and (val or test or train is None):
            raise UnsupportedError("split divides `train` into all parts: give train, and leave val and test out.")
        if split is not None:
            check_split(given["split"], given["order"])
        self.prefixes: dict[Part, list[str]] = {
            "train": _prefixes(given["train"]),
            "val": _prefixes(given["val"]),
            "test": _prefixes(given["test"]),
        }
        self.weights = list(given["train"].values()) if isinstance(given["train"], dict) else None
        self.split: str | None = given["split"]
        self.corpus: Literal["speeches"] | None = given["corpus"]
        self.tokenizer_spec: str | None = given["tokenizer"]
        self.seq_length: int = given["seq_length"]
        self.batch_size: int = given["batch_size"]
        self.num_workers: int = given["num_workers"]
        self.seed: int = given["seed"]
        self.train_samples: int | None = given["train_samples"]
        self.order: Literal["passes", "megatron"] = given["order"]
        self.mask_after_eod, self.checksums = mask_after_eod, checksums
        self.data_dir: str = given["data_dir"]
        self.cache_dir: str | None = given["cache_dir"]
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._restored: dict[str, Any] = {}
        self._files: dict[str, TokenFile] = {}
        self._checked: set[Part] = set()
        self._train_loader: TokenLoader | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer; None if none was named and the corpus is not written by name."""
        if self.tokenizer_spec is None and self.corpus is None:
            return None
        return load_tokenizer(self.tokenizer_spec or "bytes")

    @property
    def tokens_shape(self) -> tuple[int, int]:
        """Give the shape of the tokens of a full batch of one data-parallel rank, known before any file is opened."""
        return self.batch_size, self.seq_length

    @property
    def vocab_size(self) -> int:
        """Count the tokens of the tokenizer, or of the one that the corpus says it was written with."""
        return self._tokenizer_fact("vocab_size")

    @property
    def eod(self) -> int | None:
        """Give the token that ends a document."""
        return self._tokenizer_fact("eod")

    @property
    def bytes_per_token(self) -> float | None:
        """Give UTF-8 bytes per token of the validation corpus (else test): nats / ln 2 / this = bits per byte."""
        return self.bytes_per_token_of("val") or self.bytes_per_token_of("test")

    def bytes_per_token_of(self, part: Part) -> float | None:
        """Divide text bytes by tokens of a part's whole corpora; None if they do not say how much text they hold."""
        written = [corpus.description for corpus, _ in self._corpora(part)]
        known = [one for one in written if one is not None and one.tokenizer is not None]
        if not known or len(known) < len(written) or not sum(one.num_tokens for one in known):
            return None
        return sum(one.num_bytes for one in known) / sum(one.num_tokens for one in known)

    def prepare_data(self) -> None:
        """Write the named corpus unless it is there; Lightning calls this in one process per node."""
        self._locate()

    def setup(self, stage: str | None = None) -> None:
        """Open the corpora of a stage, so that damaged files and wrong tokenizers are refused before any step."""
        self._train_loader = None
        self._locate()
        parts: dict[str | None, tuple[Part, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
        for part in parts.get(stage, PARTS):
            self._corpora(part)

    def train_dataloader(self) -> TokenLoader:
        """Give the training batches, from where a restored state says."""
        self._train_loader = self._build_train_loader()
        return self._train_loader

    def val_dataloader(self) -> TokenLoader | list:
        """Give every validation token once; the first batches are a fair sample of all."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> TokenLoader | list:
        """Give every test token once; the first batches are a fair sample of all."""
        return self._evaluation_loader("test")

    def state_dict(self) -> dict[str, Any]:
        """Return how far training has come, counted from the batches that the Trainer has finished."""
        loader, trainer = self._train_loader, self.trainer
        if loader is None or trainer is None:
            return dict(self._restored)
        sampler = loader.sampler
        state = sampler.state_dict()
        progress = self._progress()
        batches = sampler.num_before
        if sampler.num_finished:
            batches = progress.current.processed
            if progress.is_last_batch and batches == progress.current.ready:
                # limit_train_batches ends an epoch before its samples do
                batches = 0
                state = state if sampler.stream else {"epoch": state["epoch"] + 1, "consumed": 0}
        return {
            **state,
            "batches": batches,
            "num_samples": sampler.num_samples,
            "global_batch_size": sampler.global_batch_size,
            "steps": trainer.global_step,
            "order": loader.batches.samples.order_key,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training after the samples of `state_dict`; the batches may have had other sizes.

        Raises:
            CheckpointMismatchError: It is no state of this class.
        """
        check_position(state_dict)
        self._restored = dict(state_dict)
        if self._train_loader is not None and state_dict:
            # a strategy that restores late holds the loader already, but has not begun to iterate over it
            vars(self._train_loader).update(vars(self._build_train_loader()))

    def teardown(self, stage: str | None = None) -> None:
        """Forget a training state that a checkpoint brought to a run that does not train."""
        if stage != "fit":
            self._restored = {}

    def _build_train_loader(self) -> TokenLoader:
        state, self._restored = self._restored, {}
        dp_rank, dp_size = self._data_parallel()
        by_steps = self.train_samples is None and self._stops_by_steps()
        num_samples = self._num_step_samples(dp_size, state) if by_steps else self.train_samples
        # Megatron-Core passes over the weight of a single corpus, unless it splits it
        weights = None if len(self.prefixes["train"]) == 1 and self.split is None else self.weights
        samples = blend_samples(self._corpora("train"), weights, self._options(self.order), num_samples)
        if state and state["order"] != samples.order_key:
            rank_zero_warn(
                "The checkpoint was written with other training data (corpus, split, weights, tokenizer, seq_length, "
                "seed or order), where its position has no meaning: training takes the new data from their beginning."
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
        )
        if state:
            sampler.load_state_dict(state)
            trainer: Any = self.trainer
            if trainer is not None and not by_steps and state["global_batch_size"] != sampler.global_batch_size:
                # the epoch under way mixes batches of two sizes: the length of later ones has to be asked for again
                trainer.reload_dataloaders_every_n_epochs = 1
        elif self.trainer is not None and not by_steps:
            sampler.set_epoch(self.trainer.current_epoch)
        return self._loader(samples, sampler)

    def _stops_by_steps(self) -> bool:
        return self.trainer is not None and self.trainer.max_steps != -1 and self.trainer.max_epochs == -1

    def _num_step_samples(self, dp_size: int, state: Mapping[str, Any]) -> int:
        trainer = self.trainer
        assert trainer is not None, "only a Trainer counts steps"
        if state.get("epoch", 0):
            # steps without progress have used up the first epoch; its size decides the order of the next
            return state["num_samples"]
        steps = max(trainer.max_steps - state.get("steps", 0), 1)
        return state.get("consumed", 0) + steps * trainer.accumulate_grad_batches * self.batch_size * dp_size

    def _num_finished(self) -> int:
        return 0 if self.trainer is None else self._progress().total.processed

    def _progress(self) -> Any:
        assert self.trainer is not None, "only a Trainer counts batches"
        return self.trainer.fit_loop.epoch_loop.batch_progress

    def _shuffle_seed(self) -> int | None:
        # the batches to which a Trainer shall overfit must stay the same
        return None if getattr(self.trainer, "overfit_batches", 0) else self.seed

    def _evaluation_loader(self, part: Part) -> TokenLoader | list:
        corpora = [(corpus, documents) for corpus, documents in self._corpora(part) if documents is None or documents]
        if not corpora and self.split is not None and has_share(self.split, PARTS.index(part)):
            raise UnsupportedError(
                f"split {self.split!r} leaves no document of {', '.join(self.prefixes['train'])} for {part}: there are "
                f"too few. Give {part} a larger weight, or a weight of 0."
            )
        if not corpora:
            return []
        # one seed for all runs: under `limit_val_batches` they are compared on the same part of the text
        samples = blend_samples(corpora, None, replace(self._options("spread"), seed=0))
        dp_rank, dp_size = self._data_parallel()
        sampler = TokenBatchSampler(len(samples), self.batch_size, dp_rank, dp_size, drop_last=False)
        return self._loader(samples, sampler)

    def _loader(self, samples: Samples, sampler: TokenBatchSampler) -> TokenLoader:
        if self.mask_after_eod and self.eod is None:
            raise UnsupportedError(
                "mask_after_eod needs a token that ends documents: the tokenizer names none. Leave mask_after_eod out, "
                "or use a tokenizer that has one."
            )
        batches = WindowBatches(samples, self.eod if self.mask_after_eod else None)
        return TokenLoader(batches, sampler, self.num_workers, self.pin_memory)

    def _data_parallel(self) -> tuple[int, int]:
        # the same property from which Lightning builds its own samplers
        strategy = None if self.trainer is None else self.trainer.strategy
        places = getattr(strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
        return places["rank"], places["num_replicas"]

    def _options(self, order: Order) -> SampleOptions:
        written = self._description()
        known = self.tokenizer or written
        fingerprint = None if written is None else written.tokenizer_fingerprint
        return SampleOptions(
            seq_length=self.seq_length,
            seed=self.seed,
            order=order,
            tokenizer=self.tokenizer.fingerprint if self.tokenizer else fingerprint,
            vocab_size=known.vocab_size if known else None,
            cache_dir=str(self._cache_dir()),
            by_sequence=self.order == "megatron",
        )

    def _cache_dir(self) -> Path:
        return Path(self.cache_dir or Path(self._all_prefixes()[0]).parent / "index_cache")

    def _corpora(self, part: Part) -> list[tuple[TokenFile, range | None]]:
        self._locate()
        self._check(part)
        if self.split is None:
            return [(self._open(prefix), None) for prefix in self.prefixes[part]]
        found: list[tuple[TokenFile, range | None]] = []
        for prefix in self.prefixes["train"]:
            corpus = self._open(prefix)
            # all parts are cut by one rule, so that none reads what another has
            found.append((corpus, split_corpus(corpus, self.split, self.order)[PARTS.index(part)]))
        return found

    def _open(self, prefix: str) -> TokenFile:
        if prefix not in self._files:
            # checksums are compared by one process, when all tokenizers have been
            self._files[prefix] = TokenFile(prefix, check=False)
        return self._files[prefix]

    def _locate(self) -> None:
        if self.corpus is not None and not self.prefixes["train"]:
            assert self.tokenizer is not None, "a named corpus always has a tokenizer"
            written = prepare_speeches(self.data_dir, self.tokenizer)
            heldout = [written["heldout"]]
            self.prefixes = {"train": [written["train"]], "val": heldout, "test": heldout}

    def _all_prefixes(self) -> list[str]:
        self._locate()
        return [prefix for part in PARTS for prefix in self.prefixes[part]]

    def _description(self) -> CorpusDescription | None:
        found = (self._open(prefix).description for prefix in self._all_prefixes())
        return next((one for one in found if one is not None and one.tokenizer is not None), None)

    def _tokenizer_fact(self, name: Literal["vocab_size", "eod"]) -> Any:
        known = self.tokenizer or self._description()
        if known is None:
            raise UnsupportedError(
                f"{name} is not known: {self._all_prefixes()[0]} does not say which tokenizer wrote it. "
                f"Name the tokenizer."
            )
        return getattr(known, name)

    def _check(self, part: Part) -> None:
        if part in self._checked:
            return
        names = self.prefixes["train" if self.split else part]
        corpora = [self._open(prefix) for prefix in names]
        check_one_tokenizer(corpora, self.tokenizer)
        if self.checksums:
            # where nothing can be remembered, one process of each node reads the files
            in_charge = getattr(self.trainer, "local_rank", 0) == 0
            for corpus in corpora:
                check_corpus_once(corpus, self._cache_dir(), in_charge)
        self._checked.add(part)


def _prefixes(given: str | list[str] | dict[str, float] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())
