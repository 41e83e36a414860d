"""Fine-tuning starts from Hugging Face folders and from checkpoints of BERTPretraining, and refuses others."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError, UnsupportedError
from lightning_megatron.tasks.finetuning import (
    BERTClassifier,
    BERTQuestionAnswering,
    GlueDataModule,
)
from tests.fits import Job, run_job, trainer_of
from tests.tasks.finetuning.folders import save_encoder, write_mnli
from tests.worlds.test_tasks import Segments, pretraining

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")


def test_spans_start_from_a_checkpoint_of_plain_lightning(tmp_path):
    path = str(tmp_path / "pretrained.ckpt")
    run_job(Job(pretraining, steps=1, data=Segments, batch=4, save=path))
    module = BERTQuestionAnswering(path, dropout=0.0)
    assert module.config.norm_position == "pre"
    assert module.config.hidden_dropout == module.config.attention_dropout == 0.0
    module.configure_model()
    source = torch.load(path, weights_only=False)["state_dict"]
    parameters = dict(module.model.named_parameters())
    heads = {name for name in parameters if name.startswith("head.")}
    assert heads == {"head.output.weight", "head.output.bias"}
    for name in parameters.keys() - heads:
        value = source[f"model.{name}"]
        rows = min(len(value), len(parameters[name]))
        assert torch.equal(parameters[name][:rows], value[:rows].to(parameters[name].dtype)), name


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_folder_without_a_head_gets_a_new_head(tmp_path, kind):
    import transformers

    folder = save_encoder(tmp_path / "encoder", f"{kind}Model")
    module = BERTClassifier(str(folder), 3)
    module.configure_model()
    theirs, ours = (
        transformers.AutoModel.from_pretrained(folder),
        dict(module.model.named_parameters()),
    )
    # A RoBERTa that classifies does not take its dense layer from its pooler.
    is_pooler = torch.equal(ours["head.dense.weight"], theirs.pooler.dense.weight)
    assert is_pooler == (kind == "Bert")
    query = theirs.encoder.layer[1].attention.self.query.weight
    assert torch.equal(ours["layers.1.attention.qkv.weight"][:16], query)
    assert ours["head.output.weight"].shape == (3, 16)
    assert float(ours["head.output.weight"].detach().std()) == pytest.approx(0.02, rel=0.4)


def test_unsupported_sources_and_settings_are_refused(tmp_path):
    with pytest.raises(CheckpointMismatchError, match=r"neither config.json nor the header"):
        BERTClassifier(str(tmp_path))
    bert, roberta = (
        save_encoder(tmp_path / "bert"),
        save_encoder(tmp_path / "roberta", "RobertaModel"),
    )
    with pytest.raises(ParallelPlanError, match=r"warmup_share \(0.1\) must be 0 with warmup"):
        BERTClassifier(str(bert), warmup_share=0.1, warmup_steps=3)
    write_mnli(tmp_path / "mnli")
    for folder, labels, length, message in (
        (bert, 2, 16, r"num_labels \(2\) must be 3"),
        # Positions of a RoBERTa start after its padding.
        (roberta, 3, 63, r"seq_length \(63\) must not exceed .* \(62\)"),
    ):
        data = GlueDataModule("mnli", str(tmp_path / "mnli"), str(folder), seq_length=length)
        with pytest.raises(ParallelPlanError, match=message):
            trainer_of(Job(strategy={})).validate(BERTClassifier(str(folder), labels), data)
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"model_type": "electra"}))
    with pytest.raises(UnsupportedError, match="model_type bert or roberta, .* has 'electra'"):
        BERTClassifier(str(bert))
