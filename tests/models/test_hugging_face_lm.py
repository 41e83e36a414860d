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
#: The losses of routers weigh as much as those of their microbatch, so that all must weigh alike to
#: be compared.
BALANCED = {
    "expert_settings": {"aux_loss": 0.5, "aux_loss_scope": "global"},
    "token_weighted": False,
}


class Batches(L.LightningDataModule):
    """The same four sequences in every step, dealt out to the ranks; some labels are ignored,
    unequally many.
    """

    vocab_size = V

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {
            "rank": 0,
            "num_replicas": 1,
        }
        rows = [row for row in range(B) if row % place["num_replicas"] == place["rank"]]
        samples = [
            {name: part[row] for name, part in batch().items()}
            for _ in range(STEPS)
            for row in rows
        ]
        return DataLoader(samples, batch_size=len(rows))

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.train_dataloader()


def batch() -> dict[str, Tensor]:
    text = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(4))
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    labels[0, 3:] = -100
    return {"tokens": tokens, "labels": labels}


def save(folder: Path, kind: str = "llama") -> str:
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
    return save(tmp_path / "model")


def train(
    module: HuggingFaceCausalLM, layout: dict[str, Any] | None = None, devices: int = 1
) -> dict[str, float]:
    """Train a few steps and return the last logged losses; without a layout as ordinary Lightning
    does.
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
    # What a training step logs is a mean over microbatches, of its own part of the tokens each.
    return {"val_loss": float(trainer.callback_metrics["val_loss"])}


def learning(folder: str, **options: Any) -> HuggingFaceCausalLM:
    return HuggingFaceCausalLM(folder, learning_rate=1e-2, schedule="constant", **options)


def test_the_loss_is_that_of_logits_and_shifted_labels(folder: str) -> None:
    module = HuggingFaceCausalLM(folder)
    module.configure_model()
    given = batch()
    count = (given["labels"] != -100).sum()
    expected = F.cross_entropy(module(given["tokens"]).flatten(0, 1), given["labels"].flatten())
    assert torch.allclose(module.mean_loss(given, count, is_trained=True), expected)
    nothing = {"tokens": given["tokens"], "labels": torch.full((B, S), -100)}
    assert module.mean_loss(nothing, torch.tensor(0), is_trained=True).item() == 0.0


def test_the_strategy_trains_as_ordinary_lightning(folder: str) -> None:
    plain, swapped = learning(folder), learning(folder)
    expected, found = train(plain), train(swapped, {})
    assert type(plain.model).__name__ == "LlamaForCausalLM"
    assert isinstance(swapped.model, HuggingFaceLM)
    assert expected["val_loss"] < 3.0
    assert found == pytest.approx(expected, abs=1e-4)


def train_layouts(rank: int, size: int, folder: str) -> list[dict[str, float]]:
    """Train in every layout of four ranks, from the folder and from random weights."""
    layouts: list[dict[str, Any]] = [{"tp": 2, "pp": 2}, {}, {"tp": 2, "microbatch_size": 2}]
    return [
        train(learning(folder, from_scratch=from_scratch), layout, size)
        for from_scratch in (False, True)
        for layout in layouts
    ]


def test_every_layout_weights_all_tokens_equally(folder: str) -> None:
    loaded = train(learning(folder), {"microbatch_size": B})
    drawn = train(learning(folder, from_scratch=True), {"microbatch_size": B})
    assert abs(loaded["val_loss"] - drawn["val_loss"]) > 1e-3
    for found in run_world(train_layouts, 4, folder):
        for losses, expected in zip(found, [loaded] * 3 + [drawn] * 3, strict=True):
            assert losses == pytest.approx(expected, abs=1e-4)


def train_unknown(rank: int, size: int, folder: str) -> tuple[dict[str, float], str]:
    """Train a model of an unknown family with tp, and try it with pp."""
    with pytest.raises(
        UnsupportedError, match="needs exactly one model that can be cut into stages"
    ):
        train(learning(folder), {"pp": 2}, size)
    module = learning(folder)
    return train(module, {"tp": 2}, size), type(module.model).__name__


def test_an_unknown_family_trains_unchanged_but_not_in_stages(tmp_path: Path) -> None:
    folder = save(tmp_path / "opt", "opt")
    expected = train(learning(folder))
    assert expected["val_loss"] < 3.0
    for losses, name in run_world(train_unknown, 2, folder):
        assert name == "OPTForCausalLM"
        assert losses == pytest.approx(expected, abs=1e-4)


def test_weights_have_the_requested_dtype(folder: str) -> None:
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "from_scratch": True}):
        module = HuggingFaceCausalLM(folder, **options)
        module.configure_model()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    whole = HuggingFaceCausalLM(folder, dtype="auto", from_scratch=True)
    whole.configure_model()
    assert whole.model is not None
    assert whole.model.training
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}


def test_a_checkpoint_restores_settings_and_weights(folder: str, tmp_path: Path) -> None:
    module = learning(folder, betas=(0.8, 0.9))
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, default_root_dir=tmp_path
    )
    trainer.fit(module, Batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = HuggingFaceCausalLM.load_from_checkpoint(tmp_path / "one.ckpt")
    assert (loaded.path, loaded.betas, loaded.learning_rate) == (folder, (0.8, 0.9), 1e-2)
    assert loaded.model is not None
    assert torch.equal(loaded.model.lm_head.weight, module.model.lm_head.weight)


def test_a_checkpoint_of_a_replaced_model_gives_hugging_faces_own_its_weights(
    folder: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
    }
    module, again = learning(folder), learning(folder)
    trainer = L.Trainer(strategy=MegatronStrategy(), max_steps=1, **options)
    trainer.fit(module, Batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    L.Trainer(strategy=MegatronStrategy(), max_steps=1, **options).fit(
        again, Batches(), ckpt_path=tmp_path / "one.ckpt"
    )
    for parameter, expected in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    tokens = batch()["tokens"]
    for name, weights_only in {"plain.ckpt": False, "weights.ckpt": True}.items():
        consolidate(tmp_path / "one.ckpt", tmp_path / name, weights_only=weights_only)
        plain = HuggingFaceCausalLM.load_from_checkpoint(tmp_path / name)
        assert type(plain.model).__name__ == "LlamaForCausalLM"
        assert torch.allclose(plain.eval()(tokens), module.eval()(tokens), atol=1e-5)


def test_ordinary_lightning_continues_a_training_of_a_replaced_model(
    folder: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
    }
    module, again, plain = learning(folder), learning(folder), learning(folder)
    trainer = L.Trainer(strategy=MegatronStrategy(), max_steps=1, **options)
    trainer.fit(module, Batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    consolidate(tmp_path / "one.ckpt", tmp_path / "plain.ckpt")
    L.Trainer(strategy=MegatronStrategy(), max_steps=3, **options).fit(
        again, Batches(), ckpt_path=tmp_path / "one.ckpt"
    )
    L.Trainer(max_steps=3, **options).fit(plain, Batches(), ckpt_path=tmp_path / "plain.ckpt")
    for (name, parameter), (_, expected) in zip(
        again.named_parameters(), plain.named_parameters(), strict=True
    ):
        # The rows of the replaced model's vocabulary beyond V are padding.
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


NO_JSON = (b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b"null", b"3")


@pytest.mark.parametrize(
    "content", [*NO_JSON, b'{"model_type": [1]}', b'{"model_type": "none_such"}', b"{}"]
)
def test_a_damaged_configuration_is_refused_with_its_folder(content: bytes, folder: str) -> None:
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
def test_wrong_fields_are_refused_with_their_folder(
    folder: str, change: dict[str, Any], from_scratch: bool
) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    Path(folder, "trap.py").write_text("raise AssertionError('code of the folder must not run')")
    with pytest.raises((CorruptDataError, CheckpointMismatchError)) as caught:
        HuggingFaceCausalLM(folder, from_scratch=from_scratch).configure_model()
    assert folder in str(caught.value)


@pytest.mark.parametrize("strategy", ["auto", "megatron"])
def test_missing_weights_of_a_folder_are_not_drawn_at_random(tmp_path: Path, strategy: str) -> None:
    folder = save(tmp_path / "opt", "opt")
    weights = Path(folder, "model.safetensors")
    tensors = load_file(weights)
    del tensors["model.decoder.layers.1.fc1.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    layout = None if strategy == "auto" else {}
    with pytest.raises(
        CheckpointMismatchError,
        match=r"lacks 1 tensor\(s\) of OPTForCausalLM, such as 'model\..*fc1\.weight'",
    ):
        train(learning(folder), layout)


def test_a_damaged_file_of_a_model_without_a_table_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "opt", "opt")
    Path(folder, "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CorruptDataError, match=r"opt/model\.safetensors"):
        train(learning(folder), {})


def test_a_damaged_generation_configuration_is_ignored_as_by_transformers(
    folder: str,
) -> None:
    expected = train(learning(folder), {})
    Path(folder, "generation_config.json").write_text("{")
    assert train(learning(folder), {}) == expected


def test_data_with_a_larger_vocabulary_raise(folder: str) -> None:
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
    """Train with experts that two ranks share, and without a balancing loss; return also its mean
    in the last step.
    """
    module = learning(folder, **BALANCED)
    losses = train(module, {"ep": 2, "microbatch_size": 1, "check_microbatches": False}, size)
    statistics = module.trainer.strategy.expert_statistics
    without = train(
        learning(folder, token_weighted=False),
        {"ep": 2, "microbatch_size": 1, "check_microbatches": False},
        size,
    )
    return losses, float(statistics[0].balance_loss), losses == without


def test_experts_are_balanced_as_the_settings_say(tmp_path: Path) -> None:
    folder = save(tmp_path / "mixtral", "mixtral")
    module = learning(folder, **BALANCED)
    # Sequences weigh alike, whatever number of labels they have.
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
        train(learning(folder, expert_settings={"aux_loss": 0.5}))


class Evaluated(HuggingFaceCausalLM):
    """Module whose ``configure_model`` leaves the model in evaluation mode."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.eval()


def test_a_warning_names_routers_without_load_balancing(tmp_path: Path) -> None:
    folder = save(tmp_path / "mixtral", "mixtral")
    with pytest.warns(UserWarning, match=r"layers with experts are in evaluation mode \(0, 1\)"):
        train(Evaluated(folder, **BALANCED), {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*layers with experts are in evaluation mode")
        train(Evaluated(folder), {})


def test_settings_of_experts_are_refused_of_a_family_without_any(folder: str) -> None:
    with pytest.raises(UnsupportedError, match="expert_settings of a Llama configuration must be"):
        train(learning(folder, expert_settings={"aux_loss": 0.5}), {})
