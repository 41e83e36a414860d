"""Tests that calls of Hugging Face models train under tp and in stages as on one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ReplicaMismatchError, UnsupportedError
from tests.proof.fine_tuning import trainer_of
from tests.proof.test_calls import LENGTH, SIZES, Answers, Texts, Train
from tests.world import run_world

transformers = pytest.importorskip("transformers")


GEMMA: dict[str, Any] = {
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "vocab_size_per_layer_input": 31,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 0,
    "layer_types": ["full_attention"] * 4,
}


class Positions(Train):
    """Give positions, which cut rows only in calls without a cache."""

    caches: tuple[bool | None, ...] = (None, True, False)

    def loss_of(self, tokens: Tensor) -> Tensor:
        gaps = (2 * torch.arange(LENGTH)).expand_as(tokens)
        restarting = torch.arange(LENGTH).remainder(4).expand_as(tokens)
        loss = torch.zeros(())
        for number, positions in enumerate((gaps, restarting)):
            for cache in self.caches:
                call = {"input_ids": tokens, "position_ids": positions, "use_cache": cache}
                loss = loss + (1 + number) * self.model(**call, labels=tokens).loss
        return loss


class Checkpointed(Positions):
    """Recompute blocks, so that Hugging Face's models fill no cache."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.gradient_checkpointing_enable()
        self.model.train()


class Labelled(Train):
    """Return the loss of the model."""

    def loss_of(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Compiled(Labelled):
    """Compile every block; blocks of other stages are compiled there."""

    def on_fit_start(self) -> None:
        torch.compiler.reset()
        for block in self.model.model.layers:
            block.compile(backend="aot_eager")


class OwnPositions(Positions):
    """Give positions to a model with Hugging Face's code, which fills no cache in stages."""

    model_class, extra = Answers.model_class, Answers.extra
    caches = (None, False)


class Pictures(Train):
    """Train a model of pictures and text, whose own code reads hidden states through hooks."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
        }
        pictures: dict[str, Any] = {
            "image_size": 8,
            "patch_size": 4,
            "projection_dim": 16,
            "num_hidden_layers": 2,
        }
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**sizes, **pictures),
            text_config=transformers.LlamaConfig(**SIZES, intermediate_size=24),
            image_token_id=1,
            image_seq_length=4,
        )
        torch.manual_seed(3)
        self.model = transformers.LlavaForConditionalGeneration(config).double()

    def loss_of(self, tokens: Tensor) -> Tensor:
        pixels = tokens.double().sin()[:, :3, None, None] * torch.linspace(0, 1, 64).view(8, 8)
        text = torch.cat((torch.ones_like(tokens[:, :4]), tokens), 1)
        return self.model(input_ids=text, labels=text, pixel_values=pixels.double()).loss


class Smoothed(Train):
    """Read outputs as dictionaries, as Hugging Face's label smoother does, and as tuples."""

    def loss_of(self, tokens: Tensor) -> Tensor:
        smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
        output = self.model(input_ids=tokens, labels=tokens)
        assert isinstance(output, transformers.modeling_outputs.CausalLMOutputWithPast)
        loss, logits = self.model(
            input_ids=tokens, labels=tokens, return_dict=False, use_cache=False
        )
        named = {**output}
        penalty = named["logits"].square().mean() + dict(output)["loss"] + logits.abs().mean()
        return smoother(output, tokens, shift_labels=True) + penalty + loss


class Returned(Train):
    """Return the output of the model from the step."""

    def training_step(self, batch: Tensor, _: int) -> Any:
        output = self.model(input_ids=batch, labels=batch)
        self.log("loss", output.loss)
        return output

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end()
        self.losses.append(float(outputs["logits"].detach().square().mean()))


class Kept(Train):
    """Keep the logits of some positions."""

    def loss_of(self, tokens: Tensor) -> Tensor:
        each = torch.stack((tokens[:, 0] % LENGTH, tokens[:, 1] % LENGTH), 1)
        kept: tuple[Any, ...] = (2, torch.tensor([1, -2]), each)
        calls = [self.model(input_ids=tokens, logits_to_keep=part).logits for part in kept]
        return sum(
            ((1 + i) * part.square().mean() for i, part in enumerate(calls)), tokens.new_zeros(())
        )


class Prompted(Train):
    """Train vectors before an odd number of tokens."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "prompt"):
            self.prompt = torch.nn.Parameter(torch.ones(3, 16, dtype=torch.float64))

    def loss_of(self, tokens: Tensor) -> Tensor:
        words = self.model.get_input_embeddings()(tokens[:, 1:])
        vectors = torch.cat((self.prompt.expand(len(tokens), -1, -1), words), 1)
        labels = torch.cat((tokens.new_full((len(tokens), 3), -100), tokens[:, 1:]), 1)
        return self.model(inputs_embeds=vectors, labels=labels).loss


class Taught(Train):
    """Learn from a frozen model beside the trained one, called before or after it."""

    asks_first = True

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "teacher"):
            torch.manual_seed(5)
            sizes = {**SIZES, "num_hidden_layers": 3, "hidden_size": 8}
            config = transformers.LlamaConfig(**sizes, intermediate_size=24)
            self.teacher = transformers.LlamaForCausalLM(config).double()
            self.teacher.requires_grad_(False).eval()

    @torch.no_grad()
    def expected(self, tokens: Tensor) -> Tensor:
        return self.teacher(input_ids=tokens).logits.softmax(-1)

    def loss_of(self, tokens: Tensor) -> Tensor:
        expected = self.expected(tokens) if self.asks_first else None
        output = self.model(input_ids=tokens, labels=tokens)
        expected = self.expected(tokens) if expected is None else expected
        return output.loss - (expected * output.logits.log_softmax(-1)).sum(-1).mean()


class TaughtAfter(Taught):
    """Call the frozen model after the trained one."""

    asks_first = False


class OwnTaught(Taught):
    """Train a model with Hugging Face's code."""

    model_class, extra = Answers.model_class, Answers.extra


class PerLayer(Labelled):
    """Give every layer vectors of the tokens, as Gemma 4 does."""

    model_class, extra = "Gemma4ForCausalLM", GEMMA


class SharedKeys(PerLayer):
    """Read keys and values of an earlier layer in later ones, on one stage."""

    extra = {**GEMMA, "num_kv_shared_layers": 2}
    stages = {"stage_layers": [1, 3]}


class Divided(SharedKeys):
    """Divide the layers that share keys and values."""

    stages = {}


class TwoTrained(Taught):
    """Train both models."""

    def configure_model(self) -> None:
        super().configure_model()
        self.teacher.requires_grad_(True)


class Averaged(Taught):
    """Average the trained weights in a frozen model."""

    def configure_model(self) -> None:
        Train.configure_model(self)
        if not hasattr(self, "teacher"):
            self.teacher = deepcopy(self.model).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        averages = dict(self.teacher.named_parameters())
        for name, parameter in self.model.named_parameters():
            averages[name].data.lerp_(parameter.data, 0.5)


class Thawed(Taught):
    """Train the second model from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.teacher.requires_grad_(self.current_epoch > 0)


KINDS = (Smoothed, Returned, Kept, Positions, Checkpointed, Compiled, OwnPositions, Pictures)
KINDS += (Taught, TaughtAfter, OwnTaught, PerLayer, SharedKeys)
#: Steps that are refused in stages.
UNSTAGED = (Prompted,)
LAYOUTS: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}


def fit(kind: type[Train], layout: dict[str, Any] | None, devices: int) -> list[float]:
    seed_everything(1, verbose=False)
    module = kind()
    if layout == LAYOUTS["pp2"]:
        layout = {**layout, **getattr(kind, "stages", {})}
    trainer_of(layout, devices, 2, max_epochs=2).fit(module, DataLoader(Texts(), batch_size=4))
    return module.losses


def fit_all(rank: int, size: int) -> dict[tuple[str, str], list[float]]:
    return {
        (kind.__name__, name): fit(kind, layout, size)
        for name, layout in LAYOUTS.items()
        for kind in (*KINDS, *(() if name == "pp2" else UNSTAGED))
    }


@pytest.fixture(scope="module")
def reports() -> list[dict[tuple[str, str], list[float]]]:
    return run_world(fit_all, 2)


@pytest.mark.parametrize("kind", [*KINDS, *UNSTAGED])
def test_calls_train_under_tp_and_in_stages_as_on_one_process(
    kind: type[Train], reports: list[Any]
) -> None:
    losses = fit(kind, None, 1)
    assert losses[-1] < losses[0]
    for report in reports:
        for layout in (name for name in LAYOUTS if (kind.__name__, name) in report):
            # Hugging Face's code computes norms and losses in float32.
            assert report[kind.__name__, layout] == pytest.approx(losses, rel=1e-6), layout


def refuse_all(rank: int, size: int) -> None:
    for kind, message in (
        (Divided, r"layers 2 to 3 of .* other pipeline stages than layers 1 to 1.*=\[1, 3\]"),
        (TwoTrained, r"has model, teacher\. .* Freeze the others in configure_model"),
        (
            Thawed,
            "that several pipeline stages have cannot be trained: 'teacher.model.embed_tokens",
        ),
    ):
        with pytest.raises((UnsupportedError, ReplicaMismatchError), match=message):
            fit(kind, LAYOUTS["pp2"], size)


def test_second_models_and_shared_keys_that_stages_cannot_train_are_refused() -> None:
    run_world(refuse_all, 2)
