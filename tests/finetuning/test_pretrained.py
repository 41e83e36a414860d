"""Fine-tuning starts from Hugging Face folders and from checkpoints of BERTPretraining, resumes
exactly, and refuses sources that it does not support.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron import (
    BERTClassifier,
    BERTPretraining,
    BERTQuestionAnswering,
    EncoderConfig,
    GlueDataModule,
)
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.errors import (
    CheckpointMismatchError,
    ParallelPlanError,
    UnsupportedError,
)
from tests.finetuning.fits import Record, module_and_data, trainer_of
from tests.finetuning.folders import PIECES, save_encoder, save_tokenizer, write_mnli
from tests.world import run_world

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")


def pretraining(head: str = "pretraining") -> BERTPretraining:
    config = EncoderConfig.bert(
        vocab_size=len(PIECES), num_positions=32, num_layers=2, hidden_size=16, num_heads=2,
        init_std=0.3, head=head,
    )  # fmt: skip
    return BERTPretraining(config, learning_rate=0.01, schedule="constant")


class PairDataset(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(16) % 11 + index
        return {
            "tokens": tokens, "labels": tokens, "token_types": tokens % 2,
            "valid": torch.ones(16, dtype=torch.bool), "lengths": torch.tensor(16), "order": torch.tensor(index % 2),
        }  # fmt: skip


def pretrain(path: str, layout: dict[str, Any], size: int, **options: Any) -> None:
    pl.seed_everything(5, verbose=False)
    trainer = trainer_of(layout, size, **{"max_steps": 1, **options})
    loader = torch.utils.data.DataLoader(PairDataset(), batch_size=4)
    trainer.fit(pretraining(), loader)
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()


def tensors_of(path: str) -> dict[str, Tensor]:
    saved = OpenCheckpoint.open(path)
    prefix = "state_dict.model."
    names = [name for name in saved.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensor for name, tensor in saved.read_full(names).items()}


def expected_of(pretrained: dict[str, Tensor], has_pooler: bool) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of pre-training gives a model with another head."""
    body = {name: tensor for name, tensor in pretrained.items() if not name.startswith("head.")}
    pooler = {
        name.replace("head.pooler.", "head."): tensor
        for name, tensor in pretrained.items()
        if name.startswith("head.pooler.")
    }
    return {**body, **(pooler if has_pooler else {})}


def start_in_layouts(rank: int, size: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """Pre-train under one layout; return the tensors with which fine-tuning starts under others."""
    source = os.path.join(folder, "pretrained")
    pretrain(source, {"tp": 2, "sequence_parallel": True}, size)
    tensors = {"source": tensors_of(source)}
    files = {
        "folder": os.path.join(folder, "mnli"), "tokenizer": os.path.join(folder, "tokenizer"),
        "seq_length": 16, "global_batch_size": 4,
    }  # fmt: skip
    for name, layout in {"tp2": {"tp": 2}, "pp2": {"pp": 2}}.items():
        pl.seed_everything(9, verbose=False)
        trainer = trainer_of(layout, size, max_steps=1, limit_val_batches=0)
        module = BERTClassifier(source, 3, learning_rate=0.0, schedule="constant", weight_decay=0.0)
        trainer.fit(module, datamodule=GlueDataModule("mnli", **files))
        path = os.path.join(folder, name)
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        tensors[name] = tensors_of(path)
    return tensors


def test_layouts_start_from_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    write_mnli(tmp_path / "mnli")
    tensors = run_world(start_in_layouts, 2, str(tmp_path))[0]
    expected = expected_of(tensors["source"], has_pooler=True)
    assert len(expected) > 20
    for name in ("tp2", "pp2"):
        new_keys = tensors[name].keys() - expected.keys()
        assert new_keys == {"head.output.weight", "head.output.bias"}
        for key, value in expected.items():
            assert torch.equal(tensors[name][key], value), key
    weight = tensors["tp2"]["head.output.weight"]
    assert torch.equal(weight, tensors["pp2"]["head.output.weight"])
    assert weight.std() > 0.1


@pytest.mark.parametrize("is_single_file", [False, True])
def test_spans_start_from_either_kind_of_checkpoint(tmp_path: Path, is_single_file: bool) -> None:
    path = str(tmp_path / "pretrained.ckpt")
    pretrain(path, {}, 1, **({"strategy": "auto"} if is_single_file else {}))
    assert Path(path).is_file() == is_single_file
    module = BERTQuestionAnswering(path, dropout=0.0)
    assert module.config.norm_position == "pre"
    assert module.config.hidden_dropout == module.config.attention_dropout == 0.0
    module.configure_model()
    assert module.model is not None
    source = (
        {
            name.removeprefix("model."): tensor
            for name, tensor in torch.load(path, weights_only=False)["state_dict"].items()
        }
        if is_single_file
        else tensors_of(path)
    )
    parameters = dict(module.model.named_parameters())
    for name, value in expected_of(source, has_pooler=False).items():
        rows = min(len(value), len(parameters[name]))
        assert torch.equal(parameters[name][:rows], value[:rows].to(parameters[name].dtype)), name
    assert {name for name in parameters if name.startswith("head.")} == {
        "head.output.weight", "head.output.bias",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_folder_without_a_head_gets_a_new_head(tmp_path: Path, kind: str) -> None:
    import transformers

    folder = save_encoder(tmp_path / "encoder", f"{kind}Model")
    module = BERTClassifier(str(folder), 3)
    module.configure_model()
    assert module.model is not None
    theirs = transformers.AutoModel.from_pretrained(folder)
    parameters = dict(module.model.named_parameters())
    # A RoBERTa that classifies does not take its dense layer from its pooler.
    is_pooler = torch.equal(parameters["head.dense.weight"], theirs.pooler.dense.weight)
    assert is_pooler == (kind == "Bert")
    query = theirs.encoder.layer[1].attention.self.query.weight
    assert torch.equal(parameters["layers.1.attention.qkv.weight"][:16], query)
    assert parameters["head.output.weight"].shape == (3, 16)
    assert float(parameters["head.output.weight"].detach().std()) == pytest.approx(0.02, rel=0.4)
    scratch = BERTClassifier(str(folder), 3, from_scratch=True)
    scratch.configure_model()
    assert scratch.model is not None
    random_weight = dict(scratch.model.named_parameters())["layers.1.attention.qkv.weight"]
    assert not torch.equal(random_weight[:16], query)


class SaveSecondStep(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def test_a_fit_resumes_exactly(tmp_path: Path) -> None:
    save_encoder(tmp_path / "classes", "BertForSequenceClassification", num_labels=3, dropout=0.1)
    write_mnli(tmp_path / "classes_files", num_train=24)
    # An epoch has three steps of eight rows, so the second run starts within an epoch.
    path = str(tmp_path / "second")
    losses = []
    for start, callbacks in ((None, [SaveSecondStep(path)]), (path, [])):
        pl.seed_everything(1, verbose=False)
        record = Record()
        limits = {"max_steps": -1, "max_epochs": 2, "limit_val_batches": 0}
        trainer = trainer_of({}, 1, callbacks=[record, *callbacks], **limits)
        module, data = module_and_data("classes", str(tmp_path))
        trainer.fit(module, datamodule=data, ckpt_path=start)
        losses.append(record.report.losses)
    uninterrupted, resumed = losses
    assert len(uninterrupted) == 6
    assert resumed == uninterrupted[2:]


def test_unsupported_sources_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"neither config.json nor the header"):
        BERTClassifier(str(tmp_path))
    folder = save_encoder(tmp_path / "bert")
    with pytest.raises(ParallelPlanError, match=r"warmup_share \(0.1\) must be 0 with warmup"):
        BERTClassifier(str(folder), warmup_share=0.1, warmup_steps=3)
    write_mnli(tmp_path / "mnli")
    data = GlueDataModule("mnli", str(tmp_path / "mnli"), str(folder), seq_length=16)
    with pytest.raises(ParallelPlanError, match=r"num_labels \(2\) must be 3"):
        trainer_of({}, 1).validate(BERTClassifier(str(folder)), data)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "electra"}))
    with pytest.raises(UnsupportedError, match="model_type bert or roberta, .* has 'electra'"):
        BERTClassifier(str(folder))
    # Positions of a RoBERTa start after its padding.
    folder = save_encoder(tmp_path / "roberta", "RobertaModel", num_labels=3)
    data = GlueDataModule("mnli", str(tmp_path / "mnli"), str(folder), seq_length=63)
    with pytest.raises(ParallelPlanError, match=r"seq_length \(63\) must not exceed .* \(62\)"):
        trainer_of({}, 1).validate(BERTClassifier(str(folder), 3), data)
