"""Context parallelism splits the sequences of decoders alone, and refuses modules that it cannot
split.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import (
    GPT,
    BERTPretraining,
    GPTConfig,
    ParallelPlanError,
    UnsupportedError,
    position_wise,
)
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig
from tests.fits import Job, trainer_of
from tests.world import run_world

SIZES = {"vocab_size": 32, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
ENCODER = SIZES | {"num_positions": 16, "ffn_hidden_size": 16}
ROWS = torch.randint(32, (12, 9), generator=torch.Generator().manual_seed(1))


def decoder() -> GPT:
    return GPT(GPTConfig.llama(**SIZES, max_seq_length=16))


def encoder(part: nn.Module) -> Encoder:
    model = Encoder(EncoderConfig(**ENCODER))
    model.layers["1"].mlp = part
    return model


class Plain(LightningModule):
    """Hold modules as attributes, as users do."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise AssertionError("no step may run")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


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


OTHER = "is not a language model of a supported family"
REFUSED: dict[str, tuple[Any, str]] = {
    "attention of torch": (lambda: {"mix": nn.MultiheadAttention(16, 2)}, "'mix' (MultiheadAttention) attends to all"),
    "encoder of torch": (
        lambda: {"mix": nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1)},
        "'mix.layers.0' (TransformerEncoderLayer) attends to all positions",
    ),
    "convolution": (lambda: {"mix": nn.Conv1d(16, 16, 3)}, "'mix' (Conv1d) reads neighbouring positions"),
    "recurrence": (lambda: {"mix": nn.LSTM(16, 16)}, "'mix' (LSTM) carries a state from position to position"),
    "pooling": (lambda: {"mix": nn.AdaptiveAvgPool1d(1)}, "'mix' (AdaptiveAvgPool1d) pools over positions"),
    "statistics": (lambda: {"mix": nn.BatchNorm1d(16)}, "'mix' (BatchNorm1d) takes statistics over positions"),
    "own attention": (lambda: {"mix": OwnAttention()}, "'mix' (OwnAttention) calls scaled_dot_product_attention"),
    "no mixing at all": (lambda: {"mix": nn.Linear(16, 16)}, "Plain has none."),
    "other architecture": (
        lambda: {"model": hugging_face("OPTForCausalLM", ffn_dim=16, word_embed_proj_dim=16)}, f"(OPTForCausalLM) {OTHER}",
    ),
    "other head": (lambda: {"model": hugging_face("LlamaForSequenceClassification")}, OTHER),
    "setting": (
        lambda: {"model": hugging_face("LlamaForCausalLM", hidden_act="quick_gelu")},
        "'model' (LlamaForCausalLM) has a setting that its family does not support",
    ),
    "other head of an encoder": (lambda: {"model": hugging_face("BertForNextSentencePrediction")}, OTHER),
    "attention inside an encoder": (
        lambda: {"model": decoder(), "other": encoder(OwnAttention())},
        "'other.layers.1.mlp' (OwnAttention) calls scaled_dot_product_attention",
    ),
    "attention inside a decoder": (
        lambda: {"model": replaced_mlp(OwnAttention())}, "'model.layers.1.mlp' (OwnAttention) calls scaled_dot_product",
    ),
    "unknown code inside a decoder": (
        lambda: {"model": replaced_mlp(nn.Sequential(Gate()))},
        "'model.layers.1.mlp.0' (Gate) has code of its own. Declare it with lightning_megatron.position_wise",
    ),
}  # fmt: skip


class Gate(nn.Module):
    """Compute every position by itself without a declaration."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gate(hidden).sigmoid()


def trainer(devices: int, layout: dict[str, Any], **options: Any) -> Trainer:
    options = {"gradient_clip_val": None, **options}
    return trainer_of(Job(strategy=layout, steps=-1, trainer=options), devices)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("too late: the Trainer has begun to start processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_cannot_be_split_by_positions_are_refused_before_a_launch(case: str) -> None:
    make, message = REFUSED[case]
    module = Plain(**make())
    with pytest.raises(UnsupportedError) as caught:
        trainer(2, {"cp": 2}, max_steps=1).fit(module, DataLoader(ROWS))
    assert message in str(caught.value)
    assert "cp (2)" in str(caught.value)
    assert "se cp=1" in str(caught.value), "the remedy"


@pytest.mark.usefixtures("no_processes")
def test_berts_that_cannot_be_split_by_positions_are_refused_before_a_launch() -> None:
    dropping = {"attention_dropout": 0.1, "head": "pretraining"}
    for changes, options, message in (
        (dropping, {"cp": 2, "cp_transport": "ring"}, r"cannot be used with attention dropout"),
        (
            {"head": "masked_lm"},
            {"cp": 2, "tp": 4},
            r"num_attention_heads \(2\) must be a multiple of tp",
        ),
    ):
        module = BERTPretraining(EncoderConfig(**ENCODER | changes))
        with pytest.raises((ParallelPlanError, UnsupportedError), match=message):
            trainer(8, options, max_steps=1).fit(module, DataLoader(ROWS))


class MixesAroundDecoder(LightningModule):
    """Mix positions before and after a decoder, and compute each position by itself inside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.tokens = nn.Embedding(32, 16)
        self.before = nn.Conv1d(16, 16, 3, padding=1)
        self.state = nn.GRU(16, 16, batch_first=True)
        self.statistics = nn.BatchNorm1d(16)
        self.after = nn.MultiheadAttention(32, 2, batch_first=True)
        self.projection = nn.Linear(32, 16)
        self.attention = OwnAttention()
        self.model: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            config = GPTConfig.llama(**SIZES, max_seq_length=16)
            self.model = GPT(config, mesh=self.device_mesh, seed=5)
            self.model.layers["1"].mlp = self.inner
            del self.inner

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        vectors = self.before(self.tokens(batch[:, :-1]).transpose(1, 2))
        vectors = self.state(self.statistics(vectors).transpose(1, 2))[0]
        logits = self.model(None, embeddings=vectors)
        mixed = self.after(logits, logits, logits, need_weights=False)[0]
        pooled = F.max_pool1d(self.attention(self.projection(mixed)).transpose(1, 2), 3, 1, 1)
        losses = F.cross_entropy((logits + mixed).transpose(1, 2), batch[:, 1:])
        loss = losses + pooled.square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@position_wise
class DeclaredGate(Gate):
    """Declare correctly that every position is computed by itself."""


@position_wise
class WronglyDeclared(OwnAttention):
    """Declare falsely that every position is computed by itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(0, 1)).transpose(0, 1)


def train(inner: nn.Module, devices: int, **layout: Any) -> tuple[list[float], list[Tensor]]:
    runner = trainer(devices, {"microbatch_size": "batch", **layout}, max_steps=2)
    torch.manual_seed(4)
    module = MixesAroundDecoder(inner)
    runner.fit(module, DataLoader(ROWS[:, :9], batch_size=4))
    return module.losses, [p.detach().clone() for p in module.parameters()]


def declared(devices: int, **layout: Any) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(2)
    return train(DeclaredGate(), devices, **layout)


class SentenceClassifier(LightningModule):
    """Classify sentences of unequal lengths by a Hugging Face model, as users do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.model = hugging_face(
            "BertForSequenceClassification",
            **{"num_hidden_layers": 2, "num_labels": 3, "attn_implementation": "eager"},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        )
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, batch_size=len(batch["labels"]), sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def make_sentence_loader() -> DataLoader:
    rows = [
        {
            "input_ids": row,
            "attention_mask": (torch.arange(9) < 3 + index % 7).long(),
            "labels": torch.tensor(index % 3),
        }
        for index, row in enumerate(ROWS)
    ]
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def classify(devices: int, **layout: Any) -> list[float]:
    module = SentenceClassifier()
    runner = trainer(devices, layout, max_epochs=1)
    runner.fit(module, make_sentence_loader())
    return module.losses


def four_ranks(rank: int, size: int) -> tuple[list[Any], list[list[float]], str]:
    layouts: tuple[dict[str, Any], ...] = (
        {"cp": 4, "cp_transport": "ring"},
        {"cp": 2, "tp": 2},
        {"cp": 2, "pp": 2, "cp_transport": "all_gather"},
    )
    classified = [classify(size, **layout) for layout in layouts]
    mixed = [declared(size, cp=4), declared(size, cp=2, tp=2, sequence_parallel=False)]
    with pytest.raises(UnsupportedError, match="lightning_megatron.position_wise"):
        train(Gate(), size, cp=4)
    with pytest.raises(UnsupportedError) as caught:
        train(WronglyDeclared(), size, cp=4)
    return mixed, classified, str(caught.value)


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[Any], list[list[float]], str]]:
    return run_world(four_ranks, 4)


def test_modules_around_a_decoder_compute_on_full_sequences(ranks: list[Any]) -> None:
    losses, weights = declared(1)
    for mixed, _, refusal in ranks:
        for actual, _ in mixed:
            assert actual == pytest.approx(losses, rel=1e-12)
        # With tp a rank holds parts of the weights.
        for actual, expected in zip(mixed[0][1], weights, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        assert "the result of 'layers.1.mlp' (WronglyDeclared) for" in refusal
    assert len(set(losses)) == 2


def test_an_unchanged_hugging_face_encoder_matches_a_plain_training_loop(ranks: list[Any]) -> None:
    module = SentenceClassifier().double()
    optimizer: Any = module.configure_optimizers()
    losses = []
    for batch in make_sentence_loader():
        optimizer.zero_grad()
        loss = module.model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(set(losses)) == 3
    for _, classified, _ in ranks:
        assert classified == [pytest.approx(losses, rel=0, abs=1e-10)] * 3
