"""BERT and RoBERTa encoders with the heads of Hugging Face's classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import (
    ConfigTable,
    Field,
    Values,
    padding_id,
    translate_values,
)
from lightning_megatron.swap.tensors.mapping import Source, TensorMap

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
#: This package's name of the weight that computes the logits of classes.
CLASSIFIER = "head.output.weight"
_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
#: Fields that only the first releases of BERT read, or that no model of these classes reads.
_IRRELEVANT = frozenset(
    {
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
    }
    | {"pooler_type", "tie_word_embeddings"}
)
_OLD_NORM_NAMES = (
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
)


@dataclass(frozen=True)
class EncoderNames:
    """Tensor names of BERT-like encoders.

    Args:
        prefix: Prefix of the names of all tensors except the head's.
        head: Names of the head's layers in the class, by their names in this package.
    """

    prefix: str = ""
    head: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, config: EncoderConfig) -> tuple[TensorMap, ...]:
        """List the sources of a model's full tensors."""
        size = config.hidden_size
        start = f"{self.prefix}embeddings"
        tables = {
            "word": config.vocab_size,
            "position": config.num_positions,
            "token_type": config.num_token_types,
        }
        tensors = [
            _joined(
                f"embedding.{name}.weight", (rows, size), (f"{start}.{name}_embeddings.weight",)
            )
            for name, rows in tables.items()
        ]
        tensors += _norm("embedding.norm", f"{start}.LayerNorm", config)
        tensors += [
            tensor for layer in range(config.num_layers) for tensor in self._layer(config, layer)
        ]
        return (*tensors, *self._head(config))

    def _layer(self, config: EncoderConfig, layer: int) -> list[TensorMap]:
        size = config.hidden_size
        inner = config.ffn_hidden_size
        prefix = f"layers.{layer}"
        source = f"{self.prefix}encoder.layer.{layer}"
        parts = tuple(f"{source}.attention.self.{part}" for part in ("query", "key", "value"))
        return [
            *_linear(f"{prefix}.attention.qkv", (3 * size, size), *parts),
            *_linear(
                f"{prefix}.attention.output", (size, size), f"{source}.attention.output.dense"
            ),
            *_norm(f"{prefix}.attention_norm", f"{source}.attention.output.LayerNorm", config),
            *_linear(f"{prefix}.mlp.up", (inner, size), f"{source}.intermediate.dense"),
            *_linear(f"{prefix}.mlp.down", (size, inner), f"{source}.output.dense"),
            *_norm(f"{prefix}.mlp_norm", f"{source}.output.LayerNorm", config),
        ]

    def _head(self, config: EncoderConfig) -> list[TensorMap]:
        size = config.hidden_size
        if config.head == "none":
            return []
        if config.head == "span":
            return _linear("head.output", (2, size), self.head["output"])
        tensors = _linear("head.dense", (size, size), self.head["dense"])
        if config.head == "classifier":
            tensors += _linear("head.output", (config.num_labels, size), self.head["output"])
        if config.head == "masked_lm":
            tensors += _norm("head.norm", self.head["norm"], config)
            tensors.append(_joined("head.bias", (config.vocab_size,), (self.head["bias"],)))
        return tensors


def _joined(target: str, shape: tuple[int, ...], sources: tuple[str, ...]) -> TensorMap:
    return TensorMap(
        target, shape, tuple(Source(name, shape[0] // len(sources)) for name in sources)
    )


def _linear(target: str, shape: tuple[int, int], *sources: str) -> list[TensorMap]:
    weights = tuple(f"{name}.weight" for name in sources)
    biases = tuple(f"{name}.bias" for name in sources)
    return [
        _joined(f"{target}.weight", shape, weights),
        _joined(f"{target}.bias", shape[:1], biases),
    ]


def _norm(target: str, source: str, config: EncoderConfig) -> list[TensorMap]:
    return [
        _joined(f"{target}.{kind}", (config.hidden_size,), (f"{source}.{kind}",))
        for kind in ("weight", "bias")
    ]


def _labels(values: Values) -> Mapping[str, Any]:
    named = values["id2label"]
    counted = values["num_labels"]
    if named is not None and counted is not None and len(named) != counted:
        raise UnsupportedError(
            f"num_labels ({counted}) must equal the number of labels in id2label ({len(named)}), "
            "because the classifier has one output for each label. Correct the configuration."
        )
    return {"num_labels": len(named) if named is not None else counted or 2}


def _head_dropout(values: Values) -> Mapping[str, Any]:
    dropout = values["classifier_dropout"]
    return {"head_dropout": values["hidden_dropout_prob"] if dropout is None else dropout}


def _fields(vocab_size: int, padding: int) -> tuple[Field, ...]:
    reason = "position vectors are added to token vectors"
    return (
        Field("vocab_size", vocab_size, "vocab_size"),
        Field("hidden_size", 768, "hidden_size"),
        Field("num_hidden_layers", 12, "num_layers"),
        Field("num_attention_heads", 12, "num_heads"),
        Field("intermediate_size", 3072, "ffn_hidden_size"),
        Field("hidden_act", "gelu", translate_values("hidden_act", "activation", _ACTIVATIONS)),
        Field("hidden_dropout_prob", 0.1, "hidden_dropout"),
        Field("attention_probs_dropout_prob", 0.1, "attention_dropout"),
        Field("max_position_embeddings", 512, "num_positions"),
        Field("type_vocab_size", 2, "num_token_types"),
        Field("initializer_range", 0.02, "init_std"),
        Field("layer_norm_eps", 1e-12, "norm_eps"),
        Field("pad_token_id", padding, padding_id),
        Field("position_embedding_type", "absolute", allowed=("absolute", None), reason=reason),
        Field(
            "is_decoder",
            False,
            allowed=(False, None),
            reason="every position attends to all others",
        ),
    )


_MASKED = (
    Field(
        "tie_word_embeddings",
        True,
        allowed=(True,),
        reason="the output layer uses the weight of the embedding",
    ),
)
_CLASSES = (
    Field("id2label", None, _labels),
    Field("num_labels", None),
    Field("classifier_dropout", None, _head_dropout),
    Field("problem_type", None, allowed=_PROBLEM_TYPES, reason="only these losses are implemented"),
)
_CHOICE_DROPOUT = Field("classifier_dropout", None, _head_dropout)
_BERT = _fields(30522, 0)
_BERT_HEADS = (r"(bert\.)?pooler\..*", r"cls\..*", r"classifier\..*", r"qa_outputs\..*")
_BERT_BUFFERS = (r"(bert\.)?embeddings\.(position_ids|token_type_ids)",)
_ROBERTA = _fields(50265, 1)
_ROBERTA_HEADS = (r"(roberta\.)?pooler\..*", r"lm_head\..*", r"classifier\..*", r"qa_outputs\..*")
_ROBERTA_BUFFERS = (r"(roberta\.)?embeddings\.(position_ids|token_type_ids)",)
_COUNTED = {"positions": "tokens"}


def _table(name: str, fields: tuple[Field, ...], **fixed: Any) -> ConfigTable:
    known = {rule.name for rule in fields}
    return ConfigTable(name, fields, fixed, _IRRELEVANT - known, EncoderConfig)


BERT_MASKED = Family(
    "bert",
    "BertForMaskedLM",
    _table(
        "BERT",
        (
            *_BERT,
            *_MASKED,
            Field(
                "hidden_act",
                "gelu",
                translate_values("hidden_act", "head_activation", _ACTIVATIONS),
            ),
        ),
        head="masked_lm",
    ),
    EncoderNames(
        "bert.",
        {
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            "bias": "cls.predictions.bias",
        },
    ),
    base="bert.",
    ignored=_BERT_BUFFERS,
    copies=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    renamed=_OLD_NORM_NAMES,
    head="cls.predictions.decoder.weight",
    embedding="bert.embeddings.word_embeddings.weight",
    heads=_BERT_HEADS,
)

BERT_CLASSES = Family(
    "bert",
    "BertForSequenceClassification",
    _table("BERT", (*_BERT, *_CLASSES), head="classifier"),
    EncoderNames("bert.", {"dense": "bert.pooler.dense", "output": "classifier"}),
    base="bert.",
    ignored=_BERT_BUFFERS,
    renamed=_OLD_NORM_NAMES,
    heads=_BERT_HEADS,
)

BERT_CHOICES = Family(
    "bert",
    "BertForMultipleChoice",
    _table("BERT", (*_BERT, _CHOICE_DROPOUT), head="classifier", num_labels=1),
    EncoderNames("bert.", {"dense": "bert.pooler.dense", "output": "classifier"}),
    base="bert.",
    ignored=_BERT_BUFFERS,
    renamed=_OLD_NORM_NAMES,
    heads=_BERT_HEADS,
)

BERT_SPANS = Family(
    "bert",
    "BertForQuestionAnswering",
    _table("BERT", _BERT, head="span"),
    EncoderNames("bert.", {"output": "qa_outputs"}),
    base="bert.",
    ignored=_BERT_BUFFERS,
    renamed=_OLD_NORM_NAMES,
    heads=_BERT_HEADS,
)

BERT = Family(
    "bert",
    "BertModel",
    _table("BERT", _BERT, head="pooler"),
    EncoderNames(head={"dense": "pooler.dense"}),
    base="",
    ignored=_BERT_BUFFERS,
    renamed=((r"^bert\.", ""), *_OLD_NORM_NAMES),
    heads=_BERT_HEADS,
)

ROBERTA_MASKED = Family(
    "roberta",
    "RobertaForMaskedLM",
    # Its head has the exact GELU regardless of hidden_act.
    _table("RoBERTa", (*_ROBERTA, *_MASKED), head="masked_lm", head_activation="gelu", **_COUNTED),
    EncoderNames(
        "roberta.", {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head.bias"}
    ),
    base="roberta.",
    ignored=_ROBERTA_BUFFERS,
    copies=(("lm_head.decoder.bias", "lm_head.bias"),),
    renamed=_OLD_NORM_NAMES,
    head="lm_head.decoder.weight",
    embedding="roberta.embeddings.word_embeddings.weight",
    heads=_ROBERTA_HEADS,
)

ROBERTA_CLASSES = Family(
    "roberta",
    "RobertaForSequenceClassification",
    _table("RoBERTa", (*_ROBERTA, *_CLASSES), head="classifier", drops_first=True, **_COUNTED),
    EncoderNames("roberta.", {"dense": "classifier.dense", "output": "classifier.out_proj"}),
    base="roberta.",
    ignored=_ROBERTA_BUFFERS,
    renamed=_OLD_NORM_NAMES,
    heads=_ROBERTA_HEADS,
)

ROBERTA_CHOICES = Family(
    "roberta",
    "RobertaForMultipleChoice",
    _table(
        "RoBERTa",
        # Its classifier has the dropout of the hidden states, regardless of classifier_dropout.
        (*_ROBERTA, Field("hidden_dropout_prob", 0.1, "head_dropout")),
        head="classifier",
        num_labels=1,
        **_COUNTED,
    ),
    EncoderNames("roberta.", {"dense": "roberta.pooler.dense", "output": "classifier"}),
    base="roberta.",
    ignored=_ROBERTA_BUFFERS,
    renamed=_OLD_NORM_NAMES,
    heads=_ROBERTA_HEADS,
)

ROBERTA_SPANS = Family(
    "roberta",
    "RobertaForQuestionAnswering",
    _table("RoBERTa", _ROBERTA, head="span", **_COUNTED),
    EncoderNames("roberta.", {"output": "qa_outputs"}),
    base="roberta.",
    ignored=_ROBERTA_BUFFERS,
    renamed=_OLD_NORM_NAMES,
    heads=_ROBERTA_HEADS,
)

ROBERTA = Family(
    "roberta",
    "RobertaModel",
    _table("RoBERTa", _ROBERTA, head="pooler", **_COUNTED),
    EncoderNames(head={"dense": "pooler.dense"}),
    base="",
    ignored=_ROBERTA_BUFFERS,
    renamed=((r"^roberta\.", ""), *_OLD_NORM_NAMES),
    heads=_ROBERTA_HEADS,
)
