"""Tests that a model called several times in a step trains in pipeline stages as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import GPT, GPTConfig, UnsupportedError
from lightning_megatron.models.stage import StageCursor
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from tests.proof.fine_tuning import trainer_of
from tests.swap.parts import mesh_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")

V, SAMPLES, LENGTH = 31, 8, 6
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
SIZES |= {"pad_token_id": 0, "max_position_embeddings": 16}


class Train(LightningModule):
    """Train a model that a subclass calls in its own way."""

    tolerance = 1e-9
    model_class, extra = "LlamaForCausalLM", {"intermediate_size": 24}

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        torch.manual_seed(3)
        model_class = getattr(transformers, self.model_class)
        self.model: Any = model_class(model_class.config_class(**SIZES, **self.extra)).double()

    def loss_of(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Preference(Train):
    """Prefer chosen answers to rejected answers of another length, as DPO does."""

    def log_probability(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[:, :-1]
        log_probabilities = torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:, None])
        return log_probabilities.squeeze(2).sum(-1)

    def loss_of(self, tokens: Tensor) -> Tensor:
        chosen, rejected = self.log_probability(tokens), self.log_probability(tokens[:, :4].flip(1))
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class InALoop(Train):
    """Sum the losses of three calls; Hugging Face's are computed in float32."""

    tolerance = 1e-6
    model_class, extra = (
        "GPT2LMHeadModel",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    )

    def loss_of(self, tokens: Tensor) -> Tensor:
        total = 0.0
        for shift in range(3):
            out = self.model(input_ids=tokens.roll(shift, 1), labels=tokens)
            total = total + out.loss / (shift + 1) + out["logits"].pow(2).mean()
        return total


class Contrast(Train):
    """Compare the outputs of an encoder for two texts."""

    model_class = "BertModel"
    extra = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "intermediate_size": 24,
    }

    def loss_of(self, tokens: Tensor) -> Tensor:
        first, second = self.model(input_ids=tokens), self.model(input_ids=tokens[:, :3])
        mean = first.last_hidden_state.mean(1) * second.last_hidden_state[:, 0]
        return (first.pooler_output - second.pooler_output + mean).pow(2).mean()


class Answers(Train):
    """Call a model with Hugging Face's code twice; its norms and loss are computed in float32."""

    tolerance = 1e-6
    model_class, extra = "Olmo2ForCausalLM", {"intermediate_size": 24, "hidden_act": "tanh"}

    def loss_of(self, tokens: Tensor) -> Tensor:
        first, second = (
            self.model(input_ids=tokens, labels=tokens),
            self.model(input_ids=tokens.flip(1)[:, :5]),
        )
        return first.loss + second.logits.pow(2).mean()


class Masked(Train):
    """Find masked tokens in a text and its reverse."""

    model_class, extra = "BertForMaskedLM", Contrast.extra

    def loss_of(self, tokens: Tensor) -> Tensor:
        first, second = (
            self.model(input_ids=text, labels=tokens) for text in (tokens, tokens.flip(1))
        )
        return first.loss + second.loss + (first.logits - second.logits).pow(2).mean()


class Dropped(InALoop):
    """Compare two runs of a text with different dropout masks, as R-Drop does."""

    extra = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}

    def loss_of(self, tokens: Tensor) -> Tensor:
        self.model.train()
        first, second = (self.model(input_ids=tokens).logits for _ in range(2))
        return (first - second).pow(2).mean()


EQUAL = (Preference, InALoop, Contrast, Masked, Answers)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(2, V, (LENGTH,), generator=torch.Generator().manual_seed(index))


def fit(
    kind: type[Train], layout: dict[str, Any] | None, devices: int
) -> tuple[list[float], float]:
    seed_everything(1, verbose=False)
    module = kind()
    trainer = trainer_of(layout, devices, 2, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(Texts(), batch_size=4), DataLoader(Texts(), batch_size=4))
    return module.losses, float(trainer.callback_metrics["val_loss"])


def fit_all(rank: int, size: int) -> dict[str, Any]:
    results = {kind.__name__: fit(kind, {"pp": 2}, size) for kind in EQUAL}
    results |= {str(layout): fit(Dropped, layout, size) for layout in DROPPED}
    return results


#: Layouts without and with recomputation of every layer in the backward pass.
DROPPED: tuple[dict[str, Any], ...] = ({"pp": 2}, {"pp": 2, "recompute": "full"})


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return run_world(fit_all, 2)


@pytest.mark.parametrize("kind", EQUAL)
def test_several_calls_of_a_model_in_stages_train_as_on_one_process(
    kind: type[Train], reports: list[Any]
) -> None:
    losses, val_loss = fit(kind, None, 1)
    assert losses[-1] < losses[0]
    for report in reports:
        actual, val_actual = report[kind.__name__]
        assert actual == pytest.approx(losses, abs=kind.tolerance)
        assert val_actual == pytest.approx(val_loss, abs=kind.tolerance)


def test_dropout_masks_of_two_calls_are_the_same_in_every_layout(reports: list[Any]) -> None:
    losses, _ = fit(Dropped, {}, 1)
    assert losses[0] > 1e-3
    for report in reports:
        for layout in DROPPED:
            assert report[str(layout)][0] == pytest.approx(losses, abs=1e-9), layout


def test_steps_with_another_number_of_calls_are_refused() -> None:
    config = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=V, max_seq_length=8)
    model, tokens = GPT(config, mesh_of(pp=2, pp_rank=1)), torch.ones(2, 4, dtype=torch.long)
    hidden = torch.zeros(model.boundary(tokens)[0])
    model.cursor = StageCursor(0, [hidden])
    model(tokens)
    with pytest.raises(UnsupportedError, match="at least 2 calls were made, 1 expected"):
        model(tokens)
    executor = PipelineExecutor(model.mesh, model)
    batch = [Microbatch(tokens, 2)]
    with pytest.raises(UnsupportedError, match="0 calls were made, 1 expected"):
        executor.run(lambda tokens: tokens.sum(), batch, backward=False)
    with pytest.raises(
        UnsupportedError, match=r"the logits of an earlier call.*the first stage would read it"
    ):
        executor.run(lambda tokens: model(model(tokens).argmax(-1)), batch, backward=False)
