"""Hooks and steps of a fit generate the same tokens in every layout as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatron import (
    GPT,
    CausalLM,
    GenerationSettings,
    GPTConfig,
    HuggingFaceCausalLM,
    MegatronStrategy,
    UnsupportedError,
    generate,
    generated_tokens,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.side_calls import SideCalls
from lightning_megatron.models.stage import StageCursor
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.pipeline.step_plans import Trial
from lightning_megatron.plan.layout import ParallelLayout
from tests.generation.test_generated_tokens import SIZES
from tests.swap.parts import mesh_of
from tests.sweeps import chosen
from tests.world import run_world

VOCAB = 61
PROMPTS = [[5, 6, 7, 8, 9], [20, 21]]
SETTINGS = GenerationSettings(4)
#: Generated tokens of each call, by the name of the hook.
Generated = dict[str, list[Any]]
LAYOUTS: dict[str, dict[str, Any]] = chosen(
    {
        "pp2 tp2": {"pp": 2, "tp": 2, "sequence_parallel": True},
        "pp2 vpp2 tp2": {"pp": 2, "vpp": 2, "tp": 2},
        "pp2 tp2, zb-v": {"pp": 2, "vpp": 2, "tp": 2, "schedule": "zb-v"},
        "pp2 cp2": {"pp": 2, "cp": 2},
        "pp4": {"pp": 4},
        "pp2 dp2": {"pp": 2},
        "pp2 ep2": {"pp": 2, "ep": 2},
        "tp4": {"tp": 4},
    },
    "pp2 tp2",
)


#: Models of a layout. Layouts that are not named run the GPT.
KINDS = {"pp2 tp2": chosen(("gpt", "llama"), "llama"), "pp2 ep2": ("experts",)}


class Generating:
    """Mixin for language models whose hooks and steps generate tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generated: Generated = {}

    def generate_at(self, place: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        tokens = generate(self.model, prompts, SETTINGS)  # type: ignore[attr-defined]
        self.generated.setdefault(place, []).append(tokens)
        return tokens

    def on_fit_start(self) -> None:
        self.generate_at("on_fit_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.generate_at("on_train_batch_end")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.generate_at("on_validation_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.generate_at("on_validation_epoch_end")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prompts = [row[:4].tolist() for row in batch["tokens"]]
        self.log("training_score", self.score(generate(self.model, prompts, SETTINGS)))  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)  # type: ignore[misc]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().validation_step(batch, batch_idx)  # type: ignore[misc]
        # All batches but one generate after the call of the model, without reading its results.
        if batch_idx != 1:
            prompts = [row[: 3 + batch_idx].tolist() for row in batch["tokens"]]
            beams = GenerationSettings(3, beams=2)
            generated = [generate(self.model, prompts, settings) for settings in (SETTINGS, beams)]  # type: ignore[attr-defined]
            score = sum(self.score(tokens) for tokens in generated)
            self.log("validation_score", score, batch_size=len(prompts))  # type: ignore[attr-defined]
        return output

    @staticmethod
    def score(generated: list[list[int]]) -> torch.Tensor:
        """Return a number that depends on every generated token."""
        rows = torch.tensor(generated, dtype=torch.float64)
        return (rows * torch.arange(1, rows.shape[1] + 1)).sum(1).mean()


class GeneratingGPT(Generating, CausalLM):
    """GPT of this package."""


class GeneratingLlama(Generating, HuggingFaceCausalLM):
    """Replaced model whose own ``generate`` is also called."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.generated.setdefault("own_score", []).append(self.generate_itself())

    def generate_itself(self, tokens: torch.Tensor | None = None) -> list[list[int]]:
        rows = torch.tensor([PROMPTS[0]]) if tokens is None else tokens
        generated = self.model.generate(rows, max_new_tokens=3, do_sample=False)
        return generated.tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().validation_step(batch, batch_idx)
        self.log("own_score", self.score(self.generate_itself(batch["tokens"][:, :5])))
        return output


class Logged(Callback):
    """Callback that collects the values that steps log."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer, "training_score", "train_loss")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer, "validation_score", "own_score", "val_loss")

    def note(self, trainer: Trainer, *names: str) -> None:
        for name in names:
            if name in trainer.callback_metrics:
                self.values.setdefault(name, []).append(float(trainer.callback_metrics[name]))


def make_module(kind: str, folder: str) -> GeneratingGPT | GeneratingLlama:
    if kind == "llama":
        return GeneratingLlama(folder, learning_rate=0.05, schedule="constant")
    experts = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": 0.0}
    config = GPTConfig.llama(
        vocab_size=VOCAB, max_seq_length=32, num_layers=4, hidden_size=16, num_heads=4,
        init_std=0.5, experts=experts if kind == "experts" else None,
    )  # fmt: skip
    return GeneratingGPT(config, learning_rate=0.05, schedule="constant")


def trainer_of(strategy: Any, devices: int, *callbacks: Callback) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, precision="64-true", strategy=strategy, max_steps=1,
        callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
        val_check_interval=1, limit_val_batches=2, log_every_n_steps=1,
        # All data ranks train on the same rows, so that their mean is the mean of one rank.
        use_distributed_sampler=False,
    )  # fmt: skip


def make_loader() -> DataLoader:
    draws = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCAB, (24, 9), generator=draws)
    items = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    return DataLoader(items, batch_size=4)


def fit(
    module: LightningModule, strategy: Any, devices: int
) -> tuple[Generated, dict[str, list[float]]]:
    """Train, and return the tokens that hooks generate and the values that steps log."""
    seed_everything(1, verbose=False)
    logged = Logged()
    with warnings.catch_warnings():
        # Lightning recommends workers.
        warnings.simplefilter("ignore")
        trainer = trainer_of(strategy, devices, logged)
        trainer.fit(module, make_loader(), make_loader())
    return module.generated, logged.values


def fit_layouts(rank: int, size: int, folder: str) -> dict[str, Any]:
    outcomes = {}
    for name, layout in LAYOUTS.items():
        for kind in KINDS.get(name, ("gpt",)):
            strategy = MegatronStrategy(microbatch_size=2, **layout)
            outcomes[f"{name}, {kind}"] = fit(make_module(kind, folder), strategy, size)
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=32, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def test_hooks_and_steps_generate_the_tokens_of_one_process(folder: str) -> None:
    kinds = {kind for name in LAYOUTS for kind in KINDS.get(name, ("gpt",))}
    references = {
        kind: fit(make_module(kind, folder), MegatronStrategy(microbatch_size=2), 1)
        for kind in kinds
    }
    for generated, logged in references.values():
        # The first epoch is the sanity check.
        assert len(generated["on_validation_epoch_end"]) == 2
        assert len(generated["on_validation_batch_end"]) == 1 + 2
        assert generated["on_fit_start"] != generated["on_train_batch_end"], (
            "training changes the generated tokens"
        )
        assert len(logged["training_score"]) == 1
        assert len(set(logged["validation_score"])) == 2
    assert references["llama"][0]["own_score"]
    for outcomes in run_world(fit_layouts, 4, folder):
        assert outcomes
        for name, (generated, logged) in outcomes.items():
            expected_tokens, expected = references[name.split(", ")[-1]]
            assert generated == expected_tokens, name
            assert logged.keys() == expected.keys(), name
            for key, values in expected.items():
                assert logged[key] == pytest.approx(values, rel=0, abs=1e-9), (name, key)


def check_refusals(rank: int, size: int) -> None:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2))
    gpt = GPT(GPTConfig.gpt2(**SIZES), mesh=mesh, seed=0)
    executor = PipelineExecutor(mesh, gpt)
    batch = split_batch(torch.arange(4).reshape(2, 2), 1)

    def run(step: Callable[[Tensor], Any], name: str) -> list[Any]:
        with torch.no_grad():
            return executor.run(step, batch, backward=False, trial=Trial(name))

    def step(tokens: Tensor, generates: bool) -> Any:
        generated = generate(gpt, tokens.tolist(), SETTINGS) if generates else None
        gpt(tokens)
        return generated

    run(partial(step, generates=False), "later")
    with pytest.raises(UnsupportedError, match="must be called in the first step of its kind"):
        run(partial(step, generates=True), "later")
    generated_in_step = run(partial(step, generates=True), "first")
    expected = [generate(gpt, microbatch.data.tolist(), SETTINGS) for microbatch in batch]
    assert generated_in_step == (expected if mesh.pp.is_last else [])
    # A later step does not have to generate.
    assert run(partial(step, generates=False), "first") == [None, None][: len(generated_in_step)]

    def iterate_over_tokens(tokens: Tensor) -> Any:
        return list(generated_tokens(gpt, tokens.tolist(), SETTINGS)), gpt(tokens)

    with pytest.raises(UnsupportedError, match="generated_tokens cannot run inside a step"):
        run(iterate_over_tokens, "iterates")
    mesh.destroy()


def test_calls_that_stages_cannot_make_together_raise() -> None:
    run_world(check_refusals, 2)
    # Only the last stage knows prompts that depend on results.
    gpt = GPT(GPTConfig.gpt2(**SIZES), mesh_of(pp=2, pp_rank=1))
    tokens = torch.ones(2, 4, dtype=torch.long)
    gpt.cursor = StageCursor(0, [torch.zeros(gpt.boundary(tokens)[0])])
    gpt.side_calls = SideCalls([])
    prompts = gpt(tokens).argmax(-1).tolist()
    with pytest.raises(UnsupportedError, match="before any line that reads a value"):
        generate(gpt, prompts, SETTINGS)
