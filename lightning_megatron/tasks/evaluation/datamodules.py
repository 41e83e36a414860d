"""Data modules for evaluation: token rows and metrics of each task."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.building_blocks import Count, Tokenizer, coerced_arguments, load_tokenizer
from lightning_megatron.tasks.evaluation.lambada import ClozeRows, read_passages
from lightning_megatron.tasks.evaluation.metrics import ClozeAccuracy, WordPerplexity
from lightning_megatron.tasks.evaluation.wikitext import SlidingWindows, empty_row, read_wikitext


class _FullBatches(Dataset):
    """Dataset of a task's rows, padded with empty rows to a multiple of a number of rows.

    With a multiple of ranks times batch size, every rank has the same number of full batches, and
    no row occurs twice.

    Args:
        rows: Dataset with the property ``window``, the length of a row (tokens).
        multiple: Divisor of the padded number of rows (rows).
    """

    def __init__(self, rows: Any, multiple: int) -> None:
        self._rows = rows
        self._size = -(-len(rows) // multiple) * multiple

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row: dict[str, Tensor] = (
            self._rows[index] if index < len(self._rows) else empty_row(self._rows.window)
        )
        return row


class EvaluationData(LightningDataModule):
    """Test data of one task for an :class:`EvaluatedLM`.

    Shapes: A batch is {"tokens": (B, S), "labels": (B, S)}. Labels are already shifted; labels
        of -100 are not scored.
    """

    #: Whether the metrics need hits: for each label, whether it is the most probable token.
    needs_hits = False
    batch_size: int

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self._tokenizer.vocab_size

    @abstractmethod
    def metrics(self) -> dict[str, Metric]:
        """Return new metrics by their logged names; ``setup`` must have run."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the sizes on which the results depend, for reports; ``setup`` must have run.

        The names of the sizes give their units: tokens, words or passages.
        """

    @abstractmethod
    def read(self) -> Any:
        """Read the rows of the task, as a dataset with the property ``window``."""

    def __init__(self, tokenizer: str) -> None:
        super().__init__()
        self._tokenizer: Tokenizer = load_tokenizer(tokenizer)
        self._rows: Any = None

    @override
    def setup(self, stage: str | None = None) -> None:
        if self._rows is None:
            self._rows = self.read()

    @override
    def test_dataloader(self) -> DataLoader:
        strategy = None if self.trainer is None else self.trainer.strategy
        sampler = getattr(strategy, "distributed_sampler_kwargs", None)
        num_ranks = sampler["num_replicas"] if sampler else 1
        return DataLoader(
            _FullBatches(self._rows, num_ranks * self.batch_size), batch_size=self.batch_size
        )


class WikiTextData(EvaluationData):
    """WikiText, or another long text, in overlapping windows.

    The metrics are ``word_perplexity``, normalised by the number of words of the original text, and
    ``token_perplexity``.

    Args:
        path: Text file, such as ``wiki.test.tokens`` or ``wiki.test.raw``.
        window: Length of the windows that the model reads (tokens).
        stride: Number of tokens by which windows advance. All tokens after the first window are
            scored with at least ``window - stride`` tokens of context. The published figures use
            32; a stride of ``window`` takes ``window / stride`` times less work and gives higher
            perplexities (tokens).
        is_plain: Whether the text is plain text, which is not detokenized.
        batch_size: Windows per data-parallel rank and batch (windows).
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        window: Count = 1024,
        stride: Count = 32,
        is_plain: bool = False,
        batch_size: Count = 1,
    ) -> None:
        arguments = coerced_arguments(WikiTextData.__init__, locals())
        super().__init__(arguments["tokenizer"])
        self.path: str = arguments["path"]
        self.window: int = arguments["window"]
        self.stride: int = arguments["stride"]
        self.is_plain = is_plain
        self.batch_size = arguments["batch_size"]
        self._num_words = 0

    @override
    def read(self) -> SlidingWindows:
        text = read_wikitext(self.path, is_plain=self.is_plain)
        self._num_words = text.num_words
        return SlidingWindows(self._tokenizer.encode(text.text), self.window, self.stride)

    @override
    def sizes(self) -> dict[str, int]:
        return {
            "window": self.window,
            "stride": self.stride,
            "words": self._num_words,
            "tokens": len(self._rows.tokens),
        }

    @override
    def metrics(self) -> dict[str, Metric]:
        return {
            "word_perplexity": WordPerplexity(self._num_words),
            "token_perplexity": WordPerplexity(),
        }


class LambadaData(EvaluationData):
    """LAMBADA, or other passages whose last word is predicted.

    The metrics are ``accuracy``, the fraction of last words whose tokens are all the most probable
    ones, and ``perplexity``, the perplexity of the last words.

    Args:
        path: File of JSON lines, ``{"text": ...}`` each.
        window: Maximum number of tokens that the model reads; None means any number (tokens).
        batch_size: Passages per data-parallel rank and batch (passages).
    """

    needs_hits = True

    def __init__(
        self, path: str, tokenizer: str, window: Count | None = None, batch_size: Count = 1
    ) -> None:
        arguments = coerced_arguments(LambadaData.__init__, locals())
        super().__init__(arguments["tokenizer"])
        self.path: str = arguments["path"]
        self.window: int | None = arguments["window"]
        self.batch_size = arguments["batch_size"]
        self._num_passages = 0

    @override
    def read(self) -> ClozeRows:
        rows = ClozeRows(read_passages(self.path), self._tokenizer.encode, self.window)
        self._num_passages = len(rows)
        return rows

    @override
    def sizes(self) -> dict[str, int]:
        return {"passages": self._num_passages}

    @override
    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": ClozeAccuracy(), "perplexity": WordPerplexity(self._num_passages)}
