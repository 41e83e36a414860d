"""BERT and RoBERTa encoders with the heads of Hugging Face's classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import (
    UNGATED,
    ConfigTable,
    Field,
    Values,
    only,
    padding_id,
)
from lightning_megatron.swap.tensors.mapping import TensorMap, joined, joined_layers

#: This package's name of the weight that computes the logits of classes.
CLASSIFIER = "head.output.weight"
_PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
#: Fields that only the first releases of BERT read, or that no model of these classes reads.
_IRRELEVANT = (
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type tie_word_embeddings"
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


def _head_dropout(values: Values) -> Mapping[str, Any]:
    dropout = values["classifier_dropout"]
    return {"head_dropout": values["hidden_dropout_prob"] if dropout is None else dropout}


_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("hidden_act", "activation", UNGATED),
    Field("hidden_dropout_prob", "hidden_dropout"),
    Field("attention_probs_dropout_prob", "attention_dropout"),
    Field("max_position_embeddings", "num_positions"),
    Field("type_vocab_size", "num_token_types"),
    Field("initializer_range", "init_std"),
    Field("layer_norm_eps", "norm_eps"),
    Field("pad_token_id", padding_id),
    only(
        "position_embedding_type", "position vectors are added to token vectors", "absolute", None
    ),
    only("is_decoder", "every position attends to all others", False, None),
)
_MASKED = only("tie_word_embeddings", "the output layer uses the weight of the embedding", True)
_CHOICES = Field("classifier_dropout", _head_dropout)
_CLASSES = (
    Field("id2label", lambda values: {"num_labels": len(values["id2label"])}),
    _CHOICES,
    only("problem_type", "only these losses are implemented", *_PROBLEM_TYPES),
)


def _family(
    architecture: str,
    fields: tuple[Field, ...],
    names: Mapping[str, str],
    decoder: str = "",
    **fixed: Any,
) -> Family:
    """Return the family of a class with a head, or of one without, which has no prefix in names.

    Args:
        decoder: Last layer of the head, which has the embedding's weight, if there is one.
    """
    model_type = "bert" if architecture.startswith("Bert") else "roberta"
    positions = {} if model_type == "bert" else {"positions": "tokens"}
    masked_head = "cls" if model_type == "bert" else "lm_head"
    prefix = f"{model_type}."
    optional = rf"({model_type}\.)?"
    is_headless = architecture.endswith("Model")
    base = "" if is_headless else prefix
    unprefixed = ((rf"^{model_type}\.", ""),) if is_headless else ()
    family = Family(
        model_type,
        architecture,
        ConfigTable((*_FIELDS, *fields), {**positions, **fixed}, _IRRELEVANT, EncoderConfig),
        EncoderNames(base, names),
        base=base,
        ignored=(rf"{optional}embeddings\.(position_ids|token_type_ids)",),
        renamed=(*unprefixed, *_OLD_NORM_NAMES),
        embedding=f"{base}embeddings.word_embeddings.weight",
        heads=(
            rf"{optional}pooler\..*",
            rf"{masked_head}\..*",
            r"classifier\..*",
            r"qa_outputs\..*",
        ),
    )
    if not decoder:
        return family
    copies = ((f"{decoder}.bias", names["bias"]),)
    return replace(family, head=f"{decoder}.weight", copies=copies)


_POOLED = {"dense": "bert.pooler.dense", "output": "classifier"}
BERT_MASKED = _family(
    "BertForMaskedLM",
    (_MASKED, Field("hidden_act", "head_activation", UNGATED)),
    {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
    },
    "cls.predictions.decoder",
    head="masked_lm",
)
BERT_CLASSES = _family("BertForSequenceClassification", _CLASSES, _POOLED, head="classifier")
BERT_CHOICES = _family(
    "BertForMultipleChoice", (_CHOICES,), _POOLED, head="classifier", num_labels=1
)
BERT_SPANS = _family("BertForQuestionAnswering", (), {"output": "qa_outputs"}, head="span")
BERT = _family("BertModel", (), {"dense": "pooler.dense"}, head="pooler")

ROBERTA_MASKED = _family(
    "RobertaForMaskedLM",
    (_MASKED,),
    {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head.bias"},
    "lm_head.decoder",
    head="masked_lm",
    # Its head has the exact GELU regardless of hidden_act.
    head_activation="gelu",
)
ROBERTA_CLASSES = _family(
    "RobertaForSequenceClassification",
    _CLASSES,
    {"dense": "classifier.dense", "output": "classifier.out_proj"},
    head="classifier",
    drops_first=True,
)
ROBERTA_CHOICES = _family(
    "RobertaForMultipleChoice",
    # Its classifier has the dropout of the hidden states, regardless of classifier_dropout.
    (Field("hidden_dropout_prob", "head_dropout"),),
    {"dense": "roberta.pooler.dense", "output": "classifier"},
    head="classifier",
    num_labels=1,
)
ROBERTA_SPANS = _family("RobertaForQuestionAnswering", (), {"output": "qa_outputs"}, head="span")
ROBERTA = _family("RobertaModel", (), {"dense": "pooler.dense"}, head="pooler")

BERTS = (BERT_MASKED, BERT_CLASSES, BERT_CHOICES, BERT_SPANS, BERT)
ROBERTAS = (ROBERTA_MASKED, ROBERTA_CLASSES, ROBERTA_CHOICES, ROBERTA_SPANS, ROBERTA)
