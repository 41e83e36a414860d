"""Steps that call a Hugging Face model in their own way, once or several times, train under tp and
in stages as on one process, or are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron import GPT, GPTConfig
from lightning_megatron.errors import ReplicaMismatchError, UnsupportedError
from lightning_megatron.models.stage import StageCursor
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import Microbatch
from tests.fits import Job, Module, Report, run_job
from tests.swap.parts import mesh_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")

V, LENGTH, BATCH = 31, 6, 4
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "pad_token_id": 0, "max_position_embeddings": 16,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
    "vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0,
    "layer_types": ["full_attention"] * 4,
}  # fmt: skip
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def texts() -> Any:
    """Return three equal batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(2, V, (BATCH, LENGTH), generator=generator)) * 3


class Call(Module):
    """Train a model that a subclass calls in its own way."""

    model_class, extra = "LlamaForCausalLM", {"intermediate_size": 24}
    #: Further options with stages.
    stages: dict[str, Any] = {}

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        torch.manual_seed(3)
        model_class = getattr(transformers, self.model_class)
        self.model: Any = model_class(model_class.config_class(**SIZES, **self.extra)).double()

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Preference(Call):
    """Prefer chosen answers to rejected answers of another length, as DPO does."""

    def log_probability(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum((1, 2))

    def loss(self, tokens: Tensor) -> Tensor:
        chosen, rejected = self.log_probability(tokens), self.log_probability(tokens[:, :4].flip(1))
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class Contrast(Call):
    """Compare the outputs of an encoder for two texts."""

    model_class = "BertModel"
    extra = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "intermediate_size": 24,
    }

    def loss(self, tokens: Tensor) -> Tensor:
        first, second = self.model(input_ids=tokens), self.model(input_ids=tokens[:, :3])
        mean = first.last_hidden_state.mean(1) * second.last_hidden_state[:, 0]
        return (first.pooler_output - second.pooler_output + mean).pow(2).mean()


class InALoop(Call):
    """Sum the losses of three calls."""

    model_class, extra = "GPT2LMHeadModel", dict.fromkeys(DROPOUTS, 0.0)

    def loss(self, tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        for shift in range(3):
            out = self.model(input_ids=tokens.roll(shift, 1), labels=tokens)
            total = total + out.loss / (shift + 1) + out["logits"].pow(2).mean()
        return total


class Positions(Call):
    """Give positions, which cut rows only in calls without a cache."""

    def loss(self, tokens: Tensor) -> Tensor:
        positions, loss = torch.arange(LENGTH).remainder(4).expand_as(tokens), torch.zeros(())
        for is_cached in (None, True, False):
            call = {"input_ids": tokens, "position_ids": positions, "use_cache": is_cached}
            loss = loss + self.model(**call, labels=tokens).loss
        return loss


class Checkpointed(Positions):
    """Recompute blocks, so that Hugging Face's models fill no cache."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.gradient_checkpointing_enable()
        self.model.train()


class Compiled(Call):
    """Compile every block; blocks of other stages are compiled there."""

    def on_fit_start(self) -> None:
        torch.compiler.reset()
        for block in self.model.model.layers:
            block.compile(backend="aot_eager")


class Pictures(Call):
    """Train a model of pictures and text, whose own code reads hidden states through hooks."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        pictures = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2,
            image_size=8, patch_size=4, projection_dim=16,
        )  # fmt: skip
        config = transformers.LlavaConfig(
            vision_config=pictures,
            text_config=transformers.LlamaConfig(**SIZES, intermediate_size=24),
            image_token_id=1,
            image_seq_length=4,
        )
        torch.manual_seed(3)
        self.model = transformers.LlavaForConditionalGeneration(config).double()

    def loss(self, tokens: Tensor) -> Tensor:
        pixels = tokens.double().sin()[:, :3, None, None] * torch.linspace(0, 1, 64).view(8, 8)
        text = torch.cat((torch.ones_like(tokens[:, :4]), tokens), 1)
        return self.model(input_ids=text, labels=text, pixel_values=pixels.double()).loss


class Smoothed(Call):
    """Read outputs as dictionaries, as Hugging Face's label smoother does, and as tuples."""

    def loss(self, tokens: Tensor) -> Tensor:
        call = {"input_ids": tokens, "labels": tokens}
        output = self.model(**call)
        loss, logits = self.model(**call, return_dict=False, use_cache=False)
        smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
        smoothed = smoother(output, tokens, shift_labels=True)
        return smoothed + {**output}["logits"].square().mean() + logits.abs().mean() + loss


class Returned(Call):
    """Return the output of the model from the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = self.model(input_ids=batch, labels=batch)
        self.log("loss", output.loss)
        return output

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("squares", outputs["logits"].detach().square().mean())


class Kept(Call):
    """Keep the logits of some positions."""

    def loss(self, tokens: Tensor) -> Tensor:
        each = torch.stack((tokens[:, 0] % LENGTH, tokens[:, 1] % LENGTH), 1)
        loss = torch.zeros(())
        for number, part in enumerate((2, torch.tensor([1, -2]), each)):
            logits = self.model(input_ids=tokens, logits_to_keep=part).logits
            loss = loss + (1 + number) * logits.square().mean()
        return loss


class Prompted(Call):
    """Train vectors before an odd number of tokens."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "prompt"):
            self.prompt = torch.nn.Parameter(torch.ones(3, 16, dtype=torch.float64))

    def loss(self, tokens: Tensor) -> Tensor:
        words = self.model.get_input_embeddings()(tokens[:, 1:])
        vectors = torch.cat((self.prompt.expand(len(tokens), -1, -1), words), 1)
        labels = torch.cat((tokens.new_full((len(tokens), 3), -100), tokens[:, 1:]), 1)
        return self.model(inputs_embeds=vectors, labels=labels).loss


class Taught(Call):
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

    def loss(self, tokens: Tensor) -> Tensor:
        expected = self.expected(tokens) if self.asks_first else None
        output = self.model(input_ids=tokens, labels=tokens)
        expected = self.expected(tokens) if expected is None else expected
        return output.loss - (expected * output.logits.log_softmax(-1)).sum(-1).mean()


class OwnTaught(Taught):
    """Call a model with Hugging Face's code twice, and the frozen one after it."""

    model_class, extra = "Olmo2ForCausalLM", {"intermediate_size": 24, "hidden_act": "tanh"}
    asks_first = False

    def loss(self, tokens: Tensor) -> Tensor:
        return (
            super().loss(tokens) + self.model(input_ids=tokens.flip(1)[:, :5]).logits.pow(2).mean()
        )


class PerLayer(Call):
    """Give every layer vectors of the tokens, as Gemma 4 does."""

    model_class, extra = "Gemma4ForCausalLM", GEMMA


class SharedKeys(PerLayer):
    """Read keys and values of an earlier layer in later ones, on one stage."""

    extra = {**GEMMA, "num_kv_shared_layers": 2}
    stages = {"pipeline.stage_layers": [1, 3]}


class Divided(SharedKeys):
    """Divide the layers that share keys and values."""

    stages = {}


class TwoTrained(Taught):
    """Train both models."""

    def configure_model(self) -> None:
        super().configure_model()
        self.teacher.requires_grad_(True)


class Thawed(Taught):
    """Train the second model from the second step on."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.teacher.requires_grad_(self.trainer.global_step > 0)


class Dropped(InALoop):
    """Compare two runs of a text with different dropout masks, as R-Drop does."""

    extra = dict.fromkeys(DROPOUTS, 0.3)

    def loss(self, tokens: Tensor) -> Tensor:
        self.model.train()
        first, second = (self.model(input_ids=tokens).logits for _ in range(2))
        return (first - second).pow(2).mean()


#: What a call does matters in stages; tp changes the tokens of a call, and its outputs.
IN_STAGES = (
    InALoop, Positions, Checkpointed, Pictures, Smoothed, Kept, Taught, OwnTaught, PerLayer, SharedKeys,
    Preference, Contrast, Compiled, Returned,
)  # fmt: skip
UNDER_TP = (Smoothed, Returned, Kept, Positions, Pictures, PerLayer, Prompted)
FITS: list[tuple[type[Call], str]] = [(kind, "pp2") for kind in IN_STAGES]
FITS += [(kind, "tp2") for kind in UNDER_TP]
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}
REFUSED = (
    (Divided, r"layers 2 to 3 of .* other pipeline stages than layers 1 to 1.*=\[1, 3\]"),
    (TwoTrained, r"has model, teacher\. .* Freeze the others in configure_model"),
    (Thawed, "that several pipeline stages have cannot be trained: 'teacher.model.embed_tokens"),
)


def job_of(kind: Callable[[], Call], layout: dict[str, Any] | None) -> Job:
    return Job(
        kind, layout, data=texts, validation=texts, batch=BATCH, steps=2,
        trainer={"gradient_clip_val": 0.5, "num_sanity_val_steps": 0, "limit_val_batches": 1},
    )  # fmt: skip


def run_all(rank: int, size: int) -> dict[Any, Report]:
    found: dict[Any, Report] = {}
    for kind, name in FITS:
        layout = LAYOUTS[name] | (kind.stages if name == "pp2" else {})
        found[kind.__name__, name] = run_job(job_of(kind, layout), size)
    found["dropped"] = run_job(job_of(Dropped, {"pp": 2, "recompute": "full"}), size)
    for kind, message in REFUSED:
        with pytest.raises((UnsupportedError, ReplicaMismatchError), match=message):
            run_job(job_of(kind, LAYOUTS["pp2"]), size)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Report]]:
    return run_world(run_all, 2)


@cache
def twin(kind: type[Call]) -> Report:
    return run_job(job_of(kind, None))


@pytest.mark.parametrize(("kind", "name"), FITS)
def test_calls_train_under_tp_and_in_stages_as_on_one_process(kind, name, ranks):
    expected = twin(kind)
    assert expected.losses[-1] < expected.losses[0]
    for rank in ranks:
        report = rank[kind.__name__, name]
        # Hugging Face's code computes norms and losses in float32.
        close = {"rel": 1e-6, "abs": 1e-6}
        assert report.losses == pytest.approx(expected.losses, **close)
        assert report.norms == pytest.approx(expected.norms, **close)
        assert report.metrics == pytest.approx(expected.metrics, **close)


def test_dropout_masks_of_two_calls_are_the_same_in_every_layout(ranks: Any) -> None:
    expected = run_job(job_of(Dropped, {}))
    assert expected.losses[0] > 1e-3
    for rank in ranks:
        assert rank["dropped"].losses == pytest.approx(expected.losses, abs=1e-9)


def test_steps_with_another_number_of_calls_are_refused() -> None:
    config = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=V, max_seq_length=8)
    model, tokens = GPT(config, mesh_of(pp=2, pp_rank=1)), torch.ones(2, 4, dtype=torch.long)
    model.cursor = StageCursor(0, [torch.zeros(model.boundary(tokens)[0])])
    model(tokens)
    with pytest.raises(UnsupportedError, match="at least 2 calls were made, 1 expected"):
        model(tokens)
    executor = PipelineExecutor(model.mesh, model)
    batch = [Microbatch(tokens, 2)]
    with pytest.raises(UnsupportedError, match="0 calls were made, 1 expected"):
        executor.run(lambda tokens: tokens.sum(), batch)
    with pytest.raises(
        UnsupportedError, match=r"the logits of an earlier call.*the first stage would read it"
    ):
        executor.run(lambda tokens: model(model(tokens).argmax(-1)), batch)
