"""BERT and RoBERTa encoders with the heads of Hugging Face's classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import (
    UNGATED,
    ConfigTable,
    Field,
    Values,
    only,
    padding_id,
    translate_values,
)
from lightning_megatron.swap.tensors.mapping import TensorMap, joined, joined_layers

#: This package's name of the weight that computes the logits of classes.
CLASSIFIER = "head.output.weight"
_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
#: Fields that only the first releases of BERT read, or that no model of these classes reads.
_IRRELEVANT = frozenset(
    """
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type tie_word_embeddings
    """.split()
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
            joined(f"embedding.{name}.weight", (rows, size), f"{start}.{name}_embeddings.weight")
            for name, rows in tables.items()
        ]
        tensors += _norm("embedding.norm", f"{start}.LayerNorm", config)
        for layer in range(config.num_layers):
            tensors += self._layer(config, layer)
        return (*tensors, *self._head(config))

    def _layer(self, config: EncoderConfig, layer: int) -> list[TensorMap]:
        size = config.hidden_size
        inner = config.ffn_hidden_size
        prefix = f"layers.{layer}"
        source = f"{self.prefix}encoder.layer.{layer}"
        parts = tuple(f"{source}.attention.self.{part}" for part in ("query", "key", "value"))
        output = f"{source}.attention.output"
        return [
            *_linear(f"{prefix}.attention.qkv", (3 * size, size), *parts),
            *_linear(f"{prefix}.attention.output", (size, size), f"{output}.dense"),
            *_norm(f"{prefix}.attention_norm", f"{output}.LayerNorm", config),
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
            tensors.append(joined("head.bias", (config.vocab_size,), self.head["bias"]))
        return tensors


def _linear(target: str, shape: tuple[int, int], *sources: str) -> list[TensorMap]:
    return joined_layers(target, shape, *sources, has_bias=True)


def _norm(target: str, source: str, config: EncoderConfig) -> list[TensorMap]:
    return joined_layers(target, (config.hidden_size,), source, has_bias=True)


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
        Field("hidden_act", "gelu", translate_values("hidden_act", "activation", UNGATED)),
        Field("hidden_dropout_prob", 0.1, "hidden_dropout"),
        Field("attention_probs_dropout_prob", 0.1, "attention_dropout"),
        Field("max_position_embeddings", 512, "num_positions"),
        Field("type_vocab_size", 2, "num_token_types"),
        Field("initializer_range", 0.02, "init_std"),
        Field("layer_norm_eps", 1e-12, "norm_eps"),
        Field("pad_token_id", padding, padding_id),
        only("position_embedding_type", "absolute", reason, None),
        only("is_decoder", False, "every position attends to all others", None),
    )


_MASKED = only("tie_word_embeddings", True, "the output layer uses the weight of the embedding")
_CHOICES = Field("classifier_dropout", None, _head_dropout)
_CLASSES = (
    Field("id2label", None, _labels),
    Field("num_labels", None),
    _CHOICES,
    Field("problem_type", None, allowed=_PROBLEM_TYPES, reason="only these losses are implemented"),
)
_BERT = _fields(30522, 0)
_ROBERTA = _fields(50265, 1)


def _bert(
    architecture: str, fields: tuple[Field, ...], names: Mapping[str, str], **fixed: Any
) -> Family:
    return _family("bert", "BERT", architecture, fields, names, fixed)


def _roberta(
    architecture: str, fields: tuple[Field, ...], names: Mapping[str, str], **fixed: Any
) -> Family:
    return _family(
        "roberta", "RoBERTa", architecture, fields, names, fixed | {"positions": "tokens"}
    )


def _family(
    model_type: str,
    called: str,
    architecture: str,
    fields: tuple[Field, ...],
    names: Mapping[str, str],
    fixed: Mapping[str, Any],
) -> Family:
    """Return the family of a class with a head, or of one without, which has no prefix in names."""
    base = f"{model_type}."
    optional = rf"({model_type}\.)?"
    masked_head = "cls" if model_type == "bert" else "lm_head"
    family = Family(
        model_type,
        architecture,
        ConfigTable(
            called, fields, fixed, _IRRELEVANT - {rule.name for rule in fields}, EncoderConfig
        ),
        EncoderNames(base, names),
        base=base,
        ignored=(rf"{optional}embeddings\.(position_ids|token_type_ids)",),
        renamed=_OLD_NORM_NAMES,
        heads=(
            rf"{optional}pooler\..*",
            rf"{masked_head}\..*",
            r"classifier\..*",
            r"qa_outputs\..*",
        ),
    )
    if not architecture.endswith("Model"):
        return family
    renamed = ((rf"^{model_type}\.", ""), *_OLD_NORM_NAMES)
    return replace(family, tensors=EncoderNames(head=names), base="", renamed=renamed)


def _with_tie(family: Family, decoder: str, bias: str) -> Family:
    """Return a family whose head ends with a layer that has the embedding's weight."""
    return replace(
        family,
        copies=((f"{decoder}.bias", bias),),
        head=f"{decoder}.weight",
        embedding=f"{family.base}embeddings.word_embeddings.weight",
    )


_HEAD_ACTIVATION = translate_values("hidden_act", "head_activation", UNGATED)
BERT_MASKED = _with_tie(
    _bert(
        "BertForMaskedLM",
        (*_BERT, _MASKED, Field("hidden_act", "gelu", _HEAD_ACTIVATION)),
        {
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            "bias": "cls.predictions.bias",
        },
        head="masked_lm",
    ),
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
BERT_CLASSES = _bert(
    "BertForSequenceClassification",
    (*_BERT, *_CLASSES),
    {"dense": "bert.pooler.dense", "output": "classifier"},
    head="classifier",
)
BERT_CHOICES = _bert(
    "BertForMultipleChoice",
    (*_BERT, _CHOICES),
    {"dense": "bert.pooler.dense", "output": "classifier"},
    head="classifier",
    num_labels=1,
)
BERT_SPANS = _bert("BertForQuestionAnswering", _BERT, {"output": "qa_outputs"}, head="span")
BERT = _bert("BertModel", _BERT, {"dense": "pooler.dense"}, head="pooler")

ROBERTA_MASKED = _with_tie(
    _roberta(
        "RobertaForMaskedLM",
        (*_ROBERTA, _MASKED),
        {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head.bias"},
        head="masked_lm",
        # Its head has the exact GELU regardless of hidden_act.
        head_activation="gelu",
    ),
    "lm_head.decoder",
    "lm_head.bias",
)
ROBERTA_CLASSES = _roberta(
    "RobertaForSequenceClassification",
    (*_ROBERTA, *_CLASSES),
    {"dense": "classifier.dense", "output": "classifier.out_proj"},
    head="classifier",
    drops_first=True,
)
ROBERTA_CHOICES = _roberta(
    "RobertaForMultipleChoice",
    # Its classifier has the dropout of the hidden states, regardless of classifier_dropout.
    (*_ROBERTA, Field("hidden_dropout_prob", 0.1, "head_dropout")),
    {"dense": "roberta.pooler.dense", "output": "classifier"},
    head="classifier",
    num_labels=1,
)
ROBERTA_SPANS = _roberta(
    "RobertaForQuestionAnswering", _ROBERTA, {"output": "qa_outputs"}, head="span"
)
ROBERTA = _roberta("RobertaModel", _ROBERTA, {"dense": "pooler.dense"}, head="pooler")

BERTS = (BERT_MASKED, BERT_CLASSES, BERT_CHOICES, BERT_SPANS, BERT)
ROBERTAS = (ROBERTA_MASKED, ROBERTA_CLASSES, ROBERTA_CHOICES, ROBERTA_SPANS, ROBERTA)
