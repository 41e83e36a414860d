"""Context parallelism splits the sequences of decoders alone, and refuses modules that it cannot
split.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import GPT, BERTPretraining, GPTConfig, position_wise
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from tests.fits import VOCABULARY, Job, Module, Regress, Report, check_equal, run_job, trainer_of
from tests.world import run_world

SIZES = {"vocab_size": 32, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
ENCODER = SIZES | {"num_positions": 16, "ffn_hidden_size": 16}
ROWS = torch.randint(32, (12, 9), generator=torch.Generator().manual_seed(1))


def decoder(**changes: Any) -> GPT:
    return GPT(GPTConfig.llama(**SIZES, max_seq_length=16, **changes))


def encoder(part: nn.Module) -> Encoder:
    model = Encoder(EncoderConfig(**ENCODER))
    model.layers["1"].mlp = part
    return model


class OwnAttention(nn.Module):
    """Attend by torch's ``scaled_dot_product_attention``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(hidden).chunk(3, -1), is_causal=True)


def hugging_face(name: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(vocab_size=32, hidden_size=16, **(sizes | settings)))
    return model


def replaced_mlp(part: nn.Module) -> GPT:
    model = decoder()
    model.layers["1"].mlp = part
    return model


class Gate(nn.Module):
    """Compute every position by itself without a declaration."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gate(hidden).sigmoid()


OTHER = "is not a language model of a supported family"
#: Modules, and what the error says.
REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.MultiheadAttention(16, 2), "(MultiheadAttention) attends to all"),
    (lambda: nn.Conv1d(16, 16, 3), "(Conv1d) reads neighbouring positions"),
    (lambda: nn.LSTM(16, 16), "(LSTM) carries a state from position to position"),
    (lambda: nn.AdaptiveAvgPool1d(1), "(AdaptiveAvgPool1d) pools over positions"),
    (lambda: nn.BatchNorm1d(16), "(BatchNorm1d) takes statistics over positions"),
    (OwnAttention, "'net' (OwnAttention) calls scaled_dot_product_attention"),
    (lambda: nn.Linear(16, 16), "Regress has none."),
    (lambda: hugging_face("OPTForCausalLM", ffn_dim=16, word_embed_proj_dim=16), OTHER),
    (lambda: hugging_face("BertForNextSentencePrediction"), OTHER),
    (
        lambda: hugging_face("LlamaForCausalLM", hidden_act="quick_gelu"),
        "has a setting that its family does not support",
    ),
    (lambda: nn.ModuleList([decoder(), encoder(OwnAttention())]), "'net.1.layers.1.mlp' (OwnA"),
    (lambda: replaced_mlp(OwnAttention()), "'net.layers.1.mlp' (OwnAttention) calls"),
    (lambda: replaced_mlp(nn.Sequential(Gate())), "'net.layers.1.mlp.0' (Gate) has code of its"),
]


def test_modules_that_cannot_be_split_by_positions_are_refused_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_late = partial(pytest.fail, "the Trainer has begun to start processes")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: too_late())
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: too_late())
    for make, message in REFUSED:
        with pytest.raises(UnsupportedError) as caught:
            trainer_of(Job(strategy={"cp": 2}), 2).fit(Regress(make), DataLoader(ROWS))
        assert message in str(caught.value)
        assert "cp (2)" in str(caught.value)
        assert "se cp=1" in str(caught.value), "the remedy"
    ring, dropout = {"cp": 2, "context.transport": "ring"}, {"attention_dropout": 0.1}
    without_ring = "cannot be used with attention dropout"
    heads = r"attention_heads \(2\) must be a multiple of tp"
    cut_heads = {"cp": 2, "tp": 4}

    def bert(**changes: Any) -> BERTPretraining:
        return BERTPretraining(EncoderConfig(**ENCODER | changes))

    for module, options, message in (
        (bert(head="pretraining", **dropout), ring, without_ring),
        (bert(head="masked_lm"), cut_heads, heads),
        (Regress(partial(decoder, **dropout)), ring, without_ring),
        (Regress(decoder), cut_heads, heads),
    ):
        with pytest.raises((ParallelPlanError, UnsupportedError), match=message):
            trainer_of(Job(strategy=options), 8).fit(module, DataLoader(ROWS))


@position_wise
class DeclaredGate(Gate):
    """Declare correctly that every position is computed by itself."""


@position_wise
class WronglyDeclared(OwnAttention):
    """Declare falsely that every position is computed by itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(0, 1)).transpose(0, 1)


class MixesAroundDecoder(Module):
    """Mix positions before and after a decoder, and compute each position by itself inside it."""

    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner: Any = inner()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.before = nn.Conv1d(16, 16, 3, padding=1)
        self.state = nn.GRU(16, 16, batch_first=True)
        self.statistics = nn.BatchNorm1d(16)
        self.after = nn.MultiheadAttention(32, 2, batch_first=True)
        self.projection = nn.Linear(32, 16)
        self.attention = OwnAttention()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            config = GPTConfig.llama(**SIZES, max_seq_length=16)
            self.model = GPT(config, mesh=self.device_mesh, seed=5)
            self.model.layers["1"].mlp = self.inner
            del self.inner

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.before(self.tokens(batch["tokens"]).transpose(1, 2))
        vectors = self.state(self.statistics(vectors).transpose(1, 2))[0]
        logits = self.model(None, embeddings=vectors)
        mixed = self.after(logits, logits, logits, need_weights=False)[0]
        pooled = F.max_pool1d(self.attention(self.projection(mixed)).transpose(1, 2), 3, 1, 1)
        losses = F.cross_entropy((logits + mixed).transpose(1, 2), batch["labels"] % 32)
        return losses + pooled.square().mean()


def job_of(inner: type[nn.Module], layout: dict[str, Any]) -> Job:
    return Job(partial(MixesAroundDecoder, inner), {"microbatch_size": "batch", **layout})


def four_ranks(rank: int, size: int) -> list[Report]:
    for inner, message in (
        (Gate, "lightning_megatron.position_wise"),
        (WronglyDeclared, r"the result of 'layers.1.mlp' \(WronglyDeclared\) for"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            run_job(job_of(inner, {"cp": 4}), size)
    layouts: tuple[dict[str, Any], ...] = (
        {"cp": 4},
        {"cp": 2, "tp": 2, "sequence_parallel": False},
    )
    return [run_job(job_of(DeclaredGate, layout), size) for layout in layouts]


def test_modules_around_a_decoder_compute_on_full_sequences() -> None:
    twin = run_job(job_of(DeclaredGate, {}).twin())
    for reports in zip(*run_world(four_ranks, 4), strict=True):
        check_equal(reports, twin)
