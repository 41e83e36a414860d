"""Small Hugging Face encoders of every class, with random numbers in all their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

V, LAYERS, HEADS, PADDING = 53, 2, 12, 3
_SIZES = {"vocab_size": V, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": LAYERS}
_SIZES |= {"num_attention_heads": HEADS, "max_position_embeddings": 20, "type_vocab_size": 3}
_SIZES |= {"pad_token_id": PADDING}

#: Name of a case: class of the model, and the settings that differ from its defaults.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {**_SIZES, "hidden_act": "relu"}),
    "bert masked": ("BertForMaskedLM", {**_SIZES, "hidden_act": "gelu_new"}),
    "bert classes": ("BertForSequenceClassification", {**_SIZES, "num_labels": 5}),
    "bert choices": ("BertForMultipleChoice", {**_SIZES, "classifier_dropout": 0.2}),
    "bert spans": ("BertForQuestionAnswering", _SIZES),
    "roberta": ("RobertaModel", _SIZES),
    "roberta masked": ("RobertaForMaskedLM", {**_SIZES, "hidden_act": "relu"}),
    "roberta classes": ("RobertaForSequenceClassification", {**_SIZES, "num_labels": 5}),
    "roberta choices": ("RobertaForMultipleChoice", _SIZES),
    "roberta spans": ("RobertaForQuestionAnswering", _SIZES),
}


def encoder_of(case: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Return a model of a case with random values, so that no two elements are equal by design."""
    architecture, settings = CASES[case]
    kind = getattr(transformers, architecture)
    generator = torch.Generator().manual_seed(0)
    model: nn.Module = kind(kind.config_class(**{**settings, **changes})).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model
