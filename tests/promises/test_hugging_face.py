"""README: a LightningModule that wraps a Hugging Face decoder trains in any layout; losses, weights,
generated tokens and exported files are those of Hugging Face's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from tests.fits import STEPS, Job, Module, Report, run_job, run_jobs_on
from tests.oracles import assert_equal, float32_as_float64

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

VOCABULARY, LENGTH, BATCH = 61, 12, 4
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 32, "pad_token_id": 1, "eos_token_id": None},
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=1, eos_token_id=None,
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama with adapters": lambda: transformers.LlamaConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, pad_token_id=1,
        eos_token_id=None,
    ),
    "bert": lambda: transformers.BertConfig(
        **{**SIZES, "num_key_value_heads": None}, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
}  # fmt: skip
#: Layouts of two processes.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, tp2": ("gpt2", {"tp": 2}),
    "llama, tp2 without sequence parallelism": ("llama", {"tp": 2, "sequence_parallel": False}),
    "llama, pp2": ("llama", {"pp": 2}),
    "mixtral, ep2": ("mixtral", {"ep": 2, "microbatch_size": 2}),
    "bloom, tp2": ("bloom", {"tp": 2}),
    "bert, tp2": ("bert", {"tp": 2}),
    "llama with adapters, tp2": ("llama with adapters", {"tp": 2}),
}


#: Searches: number of beams, length penalty, and number of tokens that end a text.
SEARCHES = ((1, 1.0, 0), (3, 2.0, 0), (4, 1.0, 2), (3, 2.5, 1), (5, -1.0, 3))


class Texts(Dataset):
    """Tokens with padding at one end; every step has the same samples."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % BATCH)
        tokens = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
        positions = torch.arange(LENGTH)
        mask = (positions < LENGTH - 2 if index % 2 else positions > 1).long()
        # A decoder has no context for the first token behind padding.
        is_label = (mask == 1) & ((positions != 2) | (mask[0] == 1))
        return {
            "input_ids": tokens.masked_fill(mask == 0, 1),
            "attention_mask": mask,
            "labels": tokens.masked_fill(~is_label, -100),
        }


class FineTune(Module):
    """Fine-tune a local folder, without code for this library, and save it in the end."""

    def __init__(self, folder: Path, saved: Path) -> None:
        super().__init__()
        self.folder, self.saved = folder, saved

    def configure_model(self) -> None:
        config = transformers.AutoConfig.from_pretrained(self.folder)
        is_decoder = config.model_type != "bert"
        kind = "AutoModelForCausalLM" if is_decoder else "AutoModelForMaskedLM"
        # Hugging Face's products of experts need float32, but for its loop.
        self.model = getattr(transformers, kind).from_pretrained(
            self.folder, dtype="float32", experts_implementation="eager"
        )
        if "adapters" in self.folder.name:
            self.model = peft.PeftModel.from_pretrained(
                self.model, self.folder / "adapter", is_trainable=True
            )

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        # Hugging Face's norms and routers compute in float32, even in a float64 model.
        is_plain = isinstance(self.trainer.strategy, SingleDeviceStrategy)
        with float32_as_float64() if is_plain else nullcontext():
            return self.model(**batch).loss

    def on_train_end(self) -> None:
        self.outcomes["is_replaced"] = any(isinstance(m, ReplacedModel) for m in self.modules())
        if self.model.config.model_type != "bert":
            prompt = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 4]])
            found: list[Any] = []
            for beams, penalty, num_ends in SEARCHES:
                ends = sorted({token for row in found[0] for token in row[4:]} if found else ())
                tokens = self.model.generate(
                    input_ids=prompt,
                    max_new_tokens=8,
                    do_sample=False,
                    num_beams=beams,
                    length_penalty=penalty,
                    eos_token_id=ends[:num_ends] or None,
                )
                found.append(tokens.tolist())
            self.outcomes["texts"] = found
        self.model.save_pretrained(self.saved)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small model of every family as Hugging Face does."""
    path = tmp_path_factory.mktemp("models")
    for kind, config in CONFIGS.items():
        torch.manual_seed(0)
        builder = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
        model = getattr(transformers, builder).from_config(config())
        model.save_pretrained(path / kind)
        if "adapters" in kind:
            settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
            adapted = peft.get_peft_model(model, settings)
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.3)
            adapted.save_pretrained(path / kind / "adapter")
    return path


def job_of(name: str, folder: Path) -> Job:
    kind, layout = LAYOUTS[name]
    module = partial(FineTune, folder / kind, folder / name)
    return Job(module, layout, data=Texts, batch=BATCH)


def plain_job(kind: str, folder: Path) -> Job:
    return Job(partial(FineTune, folder / kind, folder / f"{kind}, plain"), data=Texts, batch=BATCH)


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, list[Report]]:
    return run_jobs_on(2, {name: job_of(name, folder) for name in LAYOUTS})


@pytest.fixture(scope="module")
def twins(folder: Path) -> dict[str, Report]:
    """Train every family by Lightning and Hugging Face alone."""
    return {kind: run_job(plain_job(kind, folder)) for kind in CONFIGS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_the_code_of_hugging_face(name, reports, twins, folder):
    kind, _ = LAYOUTS[name]
    twin = twins[kind]
    assert twin.losses[-1] < twin.losses[0]
    for report in reports[name]:
        torch.testing.assert_close(report.losses, twin.losses, rtol=0.0, atol=1e-9)
        torch.testing.assert_close(report.norms, twin.norms, rtol=0.0, atol=1e-8)
        assert report.outcomes == twin.outcomes | {"is_replaced": True}
    file = "adapter_model" if "adapters" in kind else "model"
    saved, expected = (
        safetensors.load_file(folder / path / f"{file}.safetensors")
        for path in (name, f"{kind}, plain")
    )
    assert saved.keys() == expected.keys()
    for key, tensor in saved.items():
        assert_equal(tensor, expected[key], key, 1e-8)
