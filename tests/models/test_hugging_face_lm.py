"""HuggingFaceCausalLM trains on shifted labels, with and without MegatronStrategy."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import HuggingFaceCausalLM, MegatronStrategy
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CorruptDataError,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM
from tests.world import run_world

transformers = pytest.importorskip("transformers")

V, B, S, STEPS = 31, 4, 9, 4
#: The loss of a router has the weight of its microbatch; equal weights of all microbatches make runs
#: comparable.
BALANCED = {
    "expert_settings": {"aux_loss": 0.5, "aux_loss_scope": "global"},
    "token_weighted": False,
}


class Batches(L.LightningDataModule):
    """The same four sequences in every step, distributed over the ranks; rows have unequal numbers
    of ignored labels.
    """

    vocab_size = V

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        sampler_settings = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {
            "rank": 0,
            "num_replicas": 1,
        }
        rows = [
            row
            for row in range(B)
            if row % sampler_settings["num_replicas"] == sampler_settings["rank"]
        ]
        samples = [
            {name: part[row] for name, part in make_batch().items()}
            for _ in range(STEPS)
            for row in rows
        ]
        return DataLoader(samples, batch_size=len(rows))

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.train_dataloader()


def make_batch() -> dict[str, Tensor]:
    text = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(4))
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    labels[0, 3:] = -100
    return {"tokens": tokens, "labels": labels}


def save_model(folder: Path, kind: str = "llama") -> str:
    sizes: dict[str, Any] = {
        "vocab_size": V,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
    }
    sizes |= {"num_local_experts": 4, "num_key_value_heads": 2} if kind == "mixtral" else {}
    sizes |= (
        {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}
        if kind == "opt"
        else {"intermediate_size": 24}
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "model")


def train(
    module: HuggingFaceCausalLM, layout: dict[str, Any] | None = None, devices: int = 1
) -> dict[str, float]:
    """Train a few steps and return the last logged validation loss; without a layout, by ordinary
    Lightning.
    """
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if layout is None else MegatronStrategy(**layout),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, Batches())
    # The logged training loss is a mean over microbatches with unequal numbers of tokens.
    return {"val_loss": float(trainer.callback_metrics["val_loss"])}


def build_module(folder: str, **options: Any) -> HuggingFaceCausalLM:
    return HuggingFaceCausalLM(folder, learning_rate=1e-2, schedule="constant", **options)


def test_the_mean_loss_equals_cross_entropy_of_shifted_labels(folder: str) -> None:
    module = HuggingFaceCausalLM(folder)
    module.configure_model()
    batch = make_batch()
    count = (batch["labels"] != -100).sum()
    expected = F.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    assert torch.allclose(module.mean_loss(batch, count, is_trained=True), expected)
    batch_without_labels = {"tokens": batch["tokens"], "labels": torch.full((B, S), -100)}
    assert module.mean_loss(batch_without_labels, torch.tensor(0), is_trained=True).item() == 0.0


def test_the_strategy_trains_like_ordinary_lightning(folder: str) -> None:
    plain, swapped = build_module(folder), build_module(folder)
    expected, actual = train(plain), train(swapped, {})
    assert type(plain.model).__name__ == "LlamaForCausalLM"
    assert isinstance(swapped.model, HuggingFaceLM)
    assert expected["val_loss"] < 3.0
    assert actual == pytest.approx(expected, abs=1e-4)


def train_layouts(rank: int, size: int, folder: str) -> list[dict[str, float]]:
    """Train in every layout of four ranks, from the folder and from random weights."""
    layouts: list[dict[str, Any]] = [{"tp": 2, "pp": 2}, {}, {"tp": 2, "microbatch_size": 2}]
    return [
        train(build_module(folder, from_scratch=from_scratch), layout, size)
        for from_scratch in (False, True)
        for layout in layouts
    ]


def test_every_layout_has_the_losses_of_one_process(folder: str) -> None:
    loaded = train(build_module(folder), {"microbatch_size": B})
    drawn = train(build_module(folder, from_scratch=True), {"microbatch_size": B})
    assert abs(loaded["val_loss"] - drawn["val_loss"]) > 1e-3
    for losses_of_layouts in run_world(train_layouts, 4, folder):
        for losses, expected in zip(losses_of_layouts, [loaded] * 3 + [drawn] * 3, strict=True):
            assert losses == pytest.approx(expected, abs=1e-4)


def train_unknown_family(rank: int, size: int, folder: str) -> tuple[dict[str, float], str]:
    """Train a model of an unknown family with a plan for tp, and try it without and with pp."""
    with pytest.raises(
        UnsupportedError, match="needs exactly one model that can be cut into stages"
    ):
        train(build_module(folder), {"pp": 2}, size)
    with pytest.raises(UnsupportedError, match="layers.*fc1': 'column'"):
        train(build_module(folder), {"tp": 2}, size)
    module = build_module(folder)
    plan = {"model.model.decoder.layers.*.fc1": "column", "model.model.decoder.layers.*.fc2": "row"}
    layout = {"tp": 2, "tensor_parallel_plan": plan}
    return train(module, layout, size), type(module.model).__name__


def test_an_unknown_family_trains_with_a_plan_for_tp_and_is_refused_without(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "opt", "opt")
    expected = train(build_module(folder))
    assert expected["val_loss"] < 3.0
    for losses, name in run_world(train_unknown_family, 2, folder):
        assert name == "OPTForCausalLM"
        assert losses == pytest.approx(expected, abs=1e-4)


def test_weights_have_the_requested_dtype(folder: str) -> None:
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "from_scratch": True}):
        module = HuggingFaceCausalLM(folder, **options)
        module.configure_model()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    module_of_auto_dtype = HuggingFaceCausalLM(folder, dtype="auto", from_scratch=True)
    module_of_auto_dtype.configure_model()
    assert module_of_auto_dtype.model is not None
    assert module_of_auto_dtype.model.training
    assert {parameter.dtype for parameter in module_of_auto_dtype.parameters()} == {torch.float32}


def test_a_checkpoint_restores_settings_and_weights(folder: str, tmp_path: Path) -> None:
    module = build_module(folder, betas=(0.8, 0.9))
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, default_root_dir=tmp_path
    )
    trainer.fit(module, Batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = HuggingFaceCausalLM.load_from_checkpoint(tmp_path / "one.ckpt")
    assert (loaded.path, loaded.betas, loaded.learning_rate) == (folder, (0.8, 0.9), 1e-2)
    assert loaded.model is not None
    assert torch.equal(loaded.model.lm_head.weight, module.model.lm_head.weight)


def test_a_consolidated_checkpoint_loads_into_the_hugging_face_model(
    folder: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
    }
    module, resumed = build_module(folder), build_module(folder)
    trainer = L.Trainer(strategy=MegatronStrategy(), max_steps=1, **options)
    trainer.fit(module, Batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    L.Trainer(strategy=MegatronStrategy(), max_steps=1, **options).fit(
        resumed, Batches(), ckpt_path=tmp_path / "one.ckpt"
    )
    for parameter, expected in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    tokens = make_batch()["tokens"]
    for name, weights_only in {"plain.ckpt": False, "weights.ckpt": True}.items():
        consolidate(tmp_path / "one.ckpt", tmp_path / name, weights_only=weights_only)
        plain = HuggingFaceCausalLM.load_from_checkpoint(tmp_path / name)
        assert type(plain.model).__name__ == "LlamaForCausalLM"
        assert torch.allclose(plain.eval()(tokens), module.eval()(tokens), atol=1e-5)


def test_ordinary_lightning_resumes_from_a_consolidated_checkpoint(
    folder: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
    }
    module, resumed, plain = build_module(folder), build_module(folder), build_module(folder)
    trainer = L.Trainer(strategy=MegatronStrategy(), max_steps=1, **options)
    trainer.fit(module, Batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    consolidate(tmp_path / "one.ckpt", tmp_path / "plain.ckpt")
    L.Trainer(strategy=MegatronStrategy(), max_steps=3, **options).fit(
        resumed, Batches(), ckpt_path=tmp_path / "one.ckpt"
    )
    L.Trainer(max_steps=3, **options).fit(plain, Batches(), ckpt_path=tmp_path / "plain.ckpt")
    for (name, parameter), (_, expected) in zip(
        resumed.named_parameters(), plain.named_parameters(), strict=True
    ):
        # In the replaced model, rows of the vocabulary beyond V are padding.
        assert torch.allclose(parameter[: len(expected)], expected, atol=1e-6), name


def test_a_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="Use a folder written by save_pretrained or `hf download`"
    ):
        HuggingFaceCausalLM(str(tmp_path / "gone"))


@pytest.mark.parametrize("path", ["x" * 5000, "no\0thing", "\ud800", ""])
def test_a_path_that_no_file_system_accepts_raises(path: str) -> None:
    with pytest.raises(
        UnsupportedError, match="path must be a local folder with config.json"
    ) as caught:
        HuggingFaceCausalLM(path)
    assert len(str(caught.value)) < 400


NO_CONFIGURATION = (b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b"null", b"3")


@pytest.mark.parametrize(
    "content", [*NO_CONFIGURATION, b'{"model_type": [1]}', b'{"model_type": "none_such"}', b"{}"]
)
def test_a_damaged_configuration_is_refused_with_the_name_of_its_folder(
    content: bytes, folder: str
) -> None:
    Path(folder, "config.json").write_bytes(content)
    with pytest.raises((CorruptDataError, CheckpointMismatchError)) as caught:
        HuggingFaceCausalLM(folder)
    assert folder in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": "2"},
        {"use_cache": "yes"},
        {"rope_parameters": 1.5},
        {"vocab_size": 10**30},
        {"hidden_act": "none_such"},
        {"tie_word_embeddings": []},
        {"auto_map": {"AutoConfig": "trap.Trap"}, "model_type": "trap"},
    ],
)
@pytest.mark.parametrize("from_scratch", [False, True])
def test_illegal_configuration_fields_are_refused_with_the_name_of_the_folder(
    folder: str, change: dict[str, Any], from_scratch: bool
) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    Path(folder, "trap.py").write_text("raise AssertionError('code of the folder must not run')")
    with pytest.raises((CorruptDataError, CheckpointMismatchError)) as caught:
        HuggingFaceCausalLM(folder, from_scratch=from_scratch).configure_model()
    assert folder in str(caught.value)


@pytest.mark.parametrize("strategy", ["auto", "megatron"])
def test_missing_weights_of_a_folder_raise(tmp_path: Path, strategy: str) -> None:
    folder = save_model(tmp_path / "opt", "opt")
    weights = Path(folder, "model.safetensors")
    tensors = load_file(weights)
    del tensors["model.decoder.layers.1.fc1.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    layout = None if strategy == "auto" else {}
    with pytest.raises(
        CheckpointMismatchError,
        match=r"lacks 1 tensor\(s\) of OPTForCausalLM, such as 'model\..*fc1\.weight'",
    ):
        train(build_module(folder), layout)


def test_an_error_names_a_damaged_weights_file(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "opt", "opt")
    Path(folder, "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CorruptDataError, match=r"opt/model\.safetensors"):
        train(build_module(folder), {})


def test_a_damaged_generation_configuration_is_ignored(
    folder: str,
) -> None:
    expected = train(build_module(folder), {})
    Path(folder, "generation_config.json").write_text("{")
    assert train(build_module(folder), {}) == expected


def test_data_with_a_larger_vocabulary_than_the_model_raise(folder: str) -> None:
    module, data = HuggingFaceCausalLM(folder), Batches()
    data.vocab_size = V + 1
    with pytest.raises(
        ParallelPlanError,
        match=r"vocab_size \(31\) of the model must be at least the vocab_size",
    ):
        L.Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, barebones=True).fit(
            module, data
        )


def train_with_experts(rank: int, size: int, folder: str) -> tuple[dict[str, float], float, bool]:
    """Train expert-parallel with a balance loss and without; return the losses, the mean balance
    loss of the last step, and whether both runs have the same losses.
    """
    module = build_module(folder, **BALANCED)
    losses = train(module, {"ep": 2, "microbatch_size": 1, "check_microbatches": False}, size)
    statistics = module.trainer.strategy.expert_statistics
    losses_without_balance = train(
        build_module(folder, token_weighted=False),
        {"ep": 2, "microbatch_size": 1, "check_microbatches": False},
        size,
    )
    return losses, float(statistics[0].balance_loss), losses == losses_without_balance


def test_expert_parallel_training_has_the_balance_loss_of_one_process(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "mixtral", "mixtral")
    module = build_module(folder, **BALANCED)
    # Sequences have equal weight, whatever their numbers of labels.
    expected = train(module, {"microbatch_size": 1, "check_microbatches": False})
    for losses, balance, is_same in run_world(train_with_experts, 2, folder):
        assert losses == pytest.approx(expected, abs=1e-4)
        assert balance == pytest.approx(
            float(module.trainer.strategy.expert_statistics[0].balance_loss), abs=1e-4
        )
        assert not is_same
    with pytest.raises(
        UnsupportedError,
        match="expert_settings .* need MegatronStrategy, because other strategies",
    ):
        train(build_module(folder, expert_settings={"aux_loss": 0.5}))


class ModuleInEvaluationMode(HuggingFaceCausalLM):
    """Module whose ``configure_model`` leaves the model in evaluation mode."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.eval()


def test_a_warning_names_routers_without_load_balancing(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "mixtral", "mixtral")
    with pytest.warns(UserWarning, match=r"layers with experts are in evaluation mode \(0, 1\)"):
        train(ModuleInEvaluationMode(folder, **BALANCED), {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*layers with experts are in evaluation mode")
        train(ModuleInEvaluationMode(folder), {})


def test_expert_settings_are_refused_for_a_family_without_experts(folder: str) -> None:
    with pytest.raises(UnsupportedError, match="expert_settings of a Llama configuration must be"):
        train(build_module(folder, expert_settings={"aux_loss": 0.5}), {})
