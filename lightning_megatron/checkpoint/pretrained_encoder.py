"""Pretrained encoders to start from: Hugging Face folders and checkpoints of BERTPretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from lightning_megatron.checkpoint import Entry, load_tensors
from lightning_megatron.checkpoint.load import saved_hyper_parameters
from lightning_megatron.checkpoint.open_checkpoint import FullTensors, OpenCheckpoint
from lightning_megatron.checkpoint.values import read_single_file
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.hub import local_folder
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.encoder_config import EncoderConfig, EncoderHead
from lightning_megatron.models.hugging_face_folder import read_config
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.plan.settings import coerced
from lightning_megatron.swap.families.bert import (
    BERT_CHOICES,
    BERT_CLASSES,
    BERT_SPANS,
    ROBERTA_CHOICES,
    ROBERTA_CLASSES,
    ROBERTA_SPANS,
)
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder

#: Kind of a task: scores of classes, of several options, or of the starts and ends of spans.
TaskKind = Literal["classes", "choices", "spans"]
#: Families of encoders with the head of each kind of task, by the model_type of the folder.
_FAMILIES: Mapping[str, Mapping[TaskKind, Family]] = {
    "bert": {"classes": BERT_CLASSES, "choices": BERT_CHOICES, "spans": BERT_SPANS},
    "roberta": {"classes": ROBERTA_CLASSES, "choices": ROBERTA_CHOICES, "spans": ROBERTA_SPANS},
}
_HEADS: Mapping[TaskKind, EncoderHead] = {
    "classes": "classifier",
    "choices": "classifier",
    "spans": "span",
}
#: Prefix of the model's parameters in a checkpoint of BERTPretraining.
_PREFIX = "state_dict.model."
_POOLER = "head.pooler.dense."


@dataclass(frozen=True)
class PretrainedEncoder:
    """Pretrained encoder from which fine-tuning starts; :meth:`fill` reads its weights.

    Args:
        path: Hugging Face folder, or checkpoint of ``BERTPretraining``.
        config: Configuration of the encoder as it was saved, with the head of a kind of task.
        family: Family of the Hugging Face folder; None for a checkpoint.
    """

    path: str
    config: EncoderConfig
    family: Family | None

    @classmethod
    def at(cls, path: str, kind: TaskKind) -> PretrainedEncoder:
        """Read the configuration at a path.

        Args:
            path: Hugging Face folder of a BERT or RoBERTa, its name on the Hub, checkpoint of
                ``BERTPretraining`` that this strategy saved, or single-file checkpoint of
                ``BERTPretraining``.

        Raises:
            CheckpointMismatchError: If the path holds neither a folder nor a checkpoint.
            CorruptDataError: If a file is damaged.
            UnsupportedError: If the model is neither a BERT nor a RoBERTa, or has settings that are
                not supported.
            MissingExtraError: If the folder needs transformers, which is not installed.
        """
        path = local_folder(path)
        if Path(path, "config.json").is_file():
            settings = read_config(path).to_dict()
            model_type = settings.get("model_type")
            if model_type not in _FAMILIES:
                raise UnsupportedError(
                    f"a folder to fine-tune must have the model_type {' or '.join(_FAMILIES)}, "
                    f"whose heads the tasks have: {path} has {model_type!r}. Use a BERT or a "
                    "RoBERTa, or fine-tune a module of your own under MegatronStrategy."
                )
            family = _FAMILIES[model_type][kind]
            return cls(path, family.config(settings), family)
        hyper_parameters = saved_hyper_parameters(path)
        if hyper_parameters is None:
            raise CheckpointMismatchError(
                "path must be a Hugging Face folder or a checkpoint of BERTPretraining: "
                f"{path!r} has neither config.json nor the header of a checkpoint. Check the path."
            )
        fields = hyper_parameters.get("config")
        if not isinstance(fields, Mapping):
            raise UnsupportedError(
                f"a checkpoint to fine-tune must be one of BERTPretraining: {path} has no "
                "hyperparameter config. Train a BERTPretraining first, or use a Hugging Face "
                "folder."
            )
        config: EncoderConfig = coerced("config", dict(fields), EncoderConfig)
        # BERT applies the dropout of hidden states before the classifier too.
        config = replace(config, head=_HEADS[kind], head_dropout=config.hidden_dropout)
        return cls(path, config, None)

    def config_with(self, num_labels: int, dropout: float | None) -> EncoderConfig:
        """Return the configuration with the outputs and the dropout of a task.

        Args:
            num_labels: Number of outputs of the head.
            dropout: Probability of all dropout layers; None keeps the probabilities of the encoder.
        """
        config = replace(self.config, num_labels=num_labels)
        if dropout is None:
            return config
        return replace(
            config, hidden_dropout=dropout, attention_dropout=dropout, head_dropout=dropout
        )

    def fill(self, model: Encoder) -> tuple[str, ...]:
        """Load this rank's part of the weights; parameters that the source lacks keep their values.

        Args:
            model: This rank's part of an encoder with the head of a task.

        Returns:
            Names of the parameters of the head that the source lacks, the same on every rank

        Raises:
            CheckpointMismatchError: If parameters of another part than the head are missing or
                have other shapes.
            CorruptDataError: If a file is damaged.

        Communication: for a checkpoint, one gather of names over tp x pp.
        """
        if self.family is None:
            return self._fill_from_checkpoint(model)
        return load_from(model, SafetensorsFolder(self.path), self.family, may_lack=True)

    def _fill_from_checkpoint(self, model: Encoder) -> tuple[str, ...]:
        source: OpenCheckpoint | FullTensors
        if Path(self.path).is_file():
            state = read_single_file(self.path)["state_dict"]
            full = {f"state_dict.{name}": tensor for name, tensor in state.items()}
            # The file of a single process includes the padding of the vocabulary.
            word = f"{_PREFIX}{WORD_EMBEDDING}"
            if word in full:
                full[word] = full[word][: self.config.vocab_size]
            source = FullTensors(full)
        else:
            source = OpenCheckpoint.open(self.path)
        entries = {}
        missing = []
        for name, parameter in model.named_parameters():
            entry = f"{_PREFIX}{name.replace('head.dense.', _POOLER)}"
            if name.startswith("head.") and (
                not name.startswith("head.dense.") or entry not in source.tensors
            ):
                missing.append(name)
                continue
            with torch.no_grad():
                parameter.zero_()  # The checkpoint has no values for the padding of the vocabulary.
            entries[entry] = Entry(parameter.detach(), shard_spec_of(parameter, model.mesh.tp.rank))
        matched = load_tensors(source, entries, model.mesh, strict=False, prefix=_PREFIX)
        if matched.missing:
            raise CheckpointMismatchError(
                f"a checkpoint must hold all layers of its encoder: {self.path} lacks "
                f"{', '.join(matched.missing[:5])}. Use a checkpoint of BERTPretraining."
            )
        return tuple(missing)
