"""Configurations of the scaling studies of Megatron-LM, in full and reduced sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_megatron import GPTConfig
from lightning_megatron.errors import UnsupportedError

Size = Literal["paper", "small", "tiny"]
Study = Literal["model", "model+data", "strong", "heads"]
STUDIES: tuple[Study, ...] = ("model", "model+data", "strong", "heads")
#: Title of each study, with the table and figure of the paper.
TITLES: dict[Study, str] = {
    "model": "weak scaling, model parallel (table 1, figure 5)",
    "model+data": "weak scaling, model and data parallel (table 1, figure 5)",
    "strong": "strong scaling of the first model (table 8)",
    "heads": "attention heads of the largest model (table 7)",
}

#: Rows of table 1: hidden size, heads, layers, and tensor parallel size.
_TABLE_1 = ((1536, 16, 40, 1), (1920, 20, 54, 2), (2304, 24, 64, 4), (3072, 32, 72, 8))
_HEADS = (16, 24, 32)
#: Number of model replicas in the paper's study of model and data parallelism.
PAPER_REPLICAS = 64


@dataclass(frozen=True)
class Sizes:
    """Reduction of the paper's models to one size of the study.

    Args:
        seq_length: Length of a sequence (tokens).
        vocab_size: Size of the vocabulary (tokens).
    """

    width: int
    depth: int
    seq_length: int
    vocab_size: int


#: 51,200 is the vocabulary of GPT-2, padded as in the paper.
SIZES: dict[Size, Sizes] = {
    "paper": Sizes(1, 1, 1024, 51200),
    "small": Sizes(2, 4, 1024, 51200),
    "tiny": Sizes(16, 20, 64, 512),
}


@dataclass(frozen=True)
class ScalingCase:
    """One configuration: a model, its layout and its batch.

    Args:
        hidden_size: Hidden size of the model (elements).
        batch_size: Samples per step over all replicas (samples).
        seq_length: Length of a sequence (tokens).
        vocab_size: Size of the vocabulary (tokens).
    """

    hidden_size: int
    num_heads: int
    num_layers: int
    tp: int
    dp: int
    batch_size: int
    seq_length: int
    vocab_size: int

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tp * self.dp

    @property
    def tokens(self) -> int:
        """Number of tokens per step over all replicas (tokens)."""
        return self.batch_size * self.seq_length

    @property
    def config(self) -> GPTConfig:
        """Configuration of the model, a GPT-2 without dropout."""
        return GPTConfig.gpt2(
            vocab_size=self.vocab_size,
            max_seq_length=self.seq_length,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, embeddings included (elements)."""
        width = self.hidden_size
        # A layer has four attention and two MLP projections with biases, and two norms.
        layer = 12 * width**2 + 13 * width
        return self.num_layers * layer + (self.vocab_size + self.seq_length + 2) * width

    @property
    def label(self) -> str:
        """Name of the configuration in messages and files."""
        return (
            f"hidden{self.hidden_size}_heads{self.num_heads}_layers{self.num_layers}_tp{self.tp}_"
            f"dp{self.dp}_batch{self.batch_size}"
        )


def cases_of(study: Study, size: Size, replicas: int, batch_size: int) -> list[ScalingCase]:
    """Return the configurations of a study; the first one is the baseline of the others.

    Args:
        replicas: Replicas of each model in the study of model and data parallelism.
        batch_size: Samples per replica and step (samples).
    """
    table = [_case(row, size, batch_size) for row in _TABLE_1]
    first = table[0]
    if study == "model":
        return table
    if study == "model+data":
        replicated = [
            replace(case, dp=replicas, batch_size=batch_size * replicas) for case in table
        ]
        return [first, *replicated]
    if study == "strong":
        return [replace(first, tp=tp) for *_, tp in _TABLE_1]
    return [first, *(replace(table[-1], num_heads=heads) for heads in _HEADS)]


def found_in_paper(study: Study, case: ScalingCase) -> str:
    """Return the paper's result for a configuration: an efficiency, or a speed-up for ``strong``.

    Returns:
        The result as text; empty if the text of the paper gives none
    """
    numbers: dict[Study, dict[Any, str]] = {
        "model": {8: "77 %"},
        "model+data": {8: "74 %"},
        "strong": {1: "1.0 x", 2: "1.64 x", 4: "2.34 x", 8: "2.98 x"},
        "heads": {16: "82 %", 24: "80 %", 32: "77 %"},
    }
    if study == "heads":
        return numbers[study].get(case.num_heads, "") if case.tp == 8 else ""
    return numbers[study].get(case.tp, "")


def check_replicas(replicas: int) -> None:
    """Refuse a study of data parallelism with fewer than two replicas."""
    if replicas < 2:
        raise UnsupportedError(
            f"--replicas must be at least 2, because one replica is the study `model`: it is "
            f"{replicas}. Use 2 or more, or leave out the study model+data."
        )


def _case(row: tuple[int, int, int, int], size: Size, batch_size: int) -> ScalingCase:
    width, heads, layers, tp = row
    sizes = SIZES[size]
    return ScalingCase(
        hidden_size=width // sizes.width,
        num_heads=heads,
        num_layers=-(-layers // sizes.depth),
        tp=tp,
        dp=1,
        batch_size=batch_size,
        seq_length=sizes.seq_length,
        vocab_size=sizes.vocab_size,
    )
