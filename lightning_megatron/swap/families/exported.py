"""Hugging Face configurations of models that were configured as a GPT of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable
from lightning_megatron.swap.families.known import FAMILIES


def exported_form(config: GPTConfig) -> tuple[Family, dict[str, Any]]:
    """Return the family whose Hugging Face class computes a GPT, and the class's configuration.

    It is the first family whose own rules give all fields of the GPT back.

    Raises:
        UnsupportedError: If no class computes this GPT; the message names the fields in which the
            nearest one differs.
        MissingExtraError: If transformers is not installed.
    """
    known = import_extra("transformers", "hf").CONFIG_MAPPING
    expected = asdict(_resolved(config))
    differing: dict[str, list[str]] = {}
    for family in FAMILIES:
        table = family.config
        if not isinstance(table, ConfigTable) or table.build is not GPTConfig:
            continue
        settings: dict[str, Any] = known[family.model_type]().to_dict()
        settings |= _settings(config, table)
        try:
            found = asdict(_resolved(family.config(settings)))
        except (CheckpointMismatchError, UnsupportedError):
            continue
        other = [name for name, value in expected.items() if found[name] != value]
        if not other:
            return family, settings
        differing[family.architecture] = other
    nearest = min(differing, key=lambda name: len(differing[name]), default="a GPT2LMHeadModel")
    raise UnsupportedError(
        "a GPT can be a Hugging Face folder only if a class of transformers computes it: the "
        f"nearest one, {nearest}, differs in {', '.join(differing.get(nearest, ['all fields']))}.\n"
        "Use the checkpoint itself (lightning-megatron generate, evaluate), or train with other "
        "values of these fields."
    )


def _resolved(config: GPTConfig) -> GPTConfig:
    """Return the configuration with all defaults filled in, and without what only trains."""
    return replace(
        config,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        ffn_hidden_size=config.ffn_size,
        qkv_bias=config.has_qkv_bias,
        output_bias=config.has_output_bias,
        mlp_bias=config.has_mlp_bias,
        # Of the norms, only LayerNorm has a bias.
        bias=config.bias and config.norm == "layernorm",
        rotary_base=config.rotary_base if config.position == "rotary" else 1.0,
        vocab_multiple=1,
        padding_id=None,
    )


def _settings(config: GPTConfig, table: ConfigTable) -> dict[str, Any]:
    """Return the fields of a family's configuration that have the values of a GPT."""
    resolved = asdict(_resolved(config))
    windows = [config.window_of(layer) is not None for layer in range(config.num_layers)]
    settings: dict[str, Any] = {
        "head_dim": config.head_size,
        "attention_bias": config.has_qkv_bias and config.has_output_bias,
        "attention_dropout": config.attention_dropout,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_size / config.head_size,
        },
        "sliding_window": config.sliding_window,
        "use_sliding_window": any(windows),
        "layer_types": ["sliding_attention" if has else "full_attention" for has in windows],
    }
    settings = {name: value for name, value in settings.items() if name in table.names}
    for rule in table.fields:
        if isinstance(rule.target, str):
            value = resolved[rule.target]
            names = rule.allowed if isinstance(rule.allowed, Mapping) else {}
            settings[rule.name] = next((n for n, ours in names.items() if ours == value), value)
    # Those of the class's own vocabulary.
    return settings | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
