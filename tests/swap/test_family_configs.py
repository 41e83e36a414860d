"""Every field of a Hugging Face configuration is used, known to be irrelevant, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.families import families, family_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.swap.families.fields import IRRELEVANT, ConfigTable
from lightning_megatron.swap.weights.load import load_from
from tests.swap.families import CASES, config_of, transformers

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {"rope_type": "longrope", "short_factor": [1.5, 1.0], "long_factor": [2.5, 3.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def gpt_config_of(case: str, **changes: Any) -> GPTConfig:
    """Convert the configuration of a case, with further or changed fields, into ours."""
    return family_of(CASES[case][0]).config({**config_of(case).to_dict(), **changes})


def check_same_logits(theirs: Any, length: int = 40) -> None:
    torch.manual_seed(0)
    twin: nn.Module = transformers.AutoModelForCausalLM.from_config(
        theirs, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            # The values are large enough to make attention scores differ.
            parameter.copy_(
                torch.randn(parameter.shape) * 0.3 + float(name.endswith("norm.weight"))
            )
    family = family_of(type(twin).__name__)
    model = GPT(family.config(theirs.to_dict()), seed=0).eval()
    load_from(model, twin.state_dict(), family)
    tokens = torch.randint(0, theirs.vocab_size, (2, length))
    with torch.no_grad():
        expected, actual = twin(tokens).logits, model(tokens)
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert error < 2e-5, f"off by {error}"


@pytest.mark.parametrize("case", CASES)
def test_models_of_all_cases_have_the_logits_of_hugging_face(case: str) -> None:
    check_same_logits(config_of(case))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (
            "llama",
            {
                "hidden_act": "gelu_pytorch_tanh",
                "rope_parameters": {"rope_type": "linear", "factor": 3.0},
            },
        ),
        ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
        (
            "llama",
            {
                "rope_parameters": {
                    **YARN,
                    "attention_factor": 1.3,
                    "beta_fast": 8,
                    "truncate": False,
                }
            },
        ),
        (
            "llama",
            {"rope_parameters": {**LONG, "factor": 2.0, "original_max_position_embeddings": 16}},
        ),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("qwen2", {"use_sliding_window": False}),
        (
            "qwen3",
            {
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 3,
                "max_window_layers": 0,
            },
        ),
        ("gpt2", {"activation_function": "gelu", "scale_attn_weights": False, "n_inner": 31}),
        ("gpt2", {"activation_function": "relu", "tie_word_embeddings": False}),
        ("gemma", {"attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": False}),
        ("gpt_neox", {"hidden_act": "relu", "tie_word_embeddings": True, "layer_norm_eps": 1e-3}),
        ("mistral", {"sliding_window": None, "head_dim": 6, "rms_norm_eps": 1e-3}),
        ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma3", {"use_bidirectional_attention": True, "sliding_window": 6}),
        ("gemma3", {"final_logit_softcapping": 1.5, "layer_types": ["full_attention"] * 3}),
        ("glm4", {"attention_bias": True, "rope_parameters": {"partial_rotary_factor": 1.0}}),
        ("olmo3", {"attention_bias": True, "sliding_window": 64}),
        ("smollm3", {"use_sliding_window": False, "no_rope_layers": [0, 0, 1]}),
        ("starcoder2", {"hidden_act": "relu", "head_dim": 6, "tie_word_embeddings": False}),
        ("bloom", {"n_head": 6, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
        ("mpt", {"attn_config": {"softmax_scale": 0.2}, "n_heads": 3}),
        ("granite", {"attention_bias": True, "mlp_bias": False, "embedding_multiplier": 1.0}),
    ],
)
def test_models_with_changed_settings_have_the_logits_of_hugging_face(
    case: str, changes: dict[str, Any]
) -> None:
    check_same_logits(config_of(case, **changes))


def test_positions_beyond_the_original_length_use_the_long_factors() -> None:
    for length in (16, 17):
        check_same_logits(config_of("phi3"), length)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu2"}, "hidden_act must be silu, .*'relu2'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type must be .*'dynamic'",
        ),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type must be .*'ntk'"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"high_freq_factor": None}},
            r"high_freq_factor .* None",
        ),
        (
            "llama",
            {"rope_parameters": {"factor": 2.0}},
            r"rope_parameters.factor must be left out: it is 2.0",
        ),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "one mapping for all layers",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0: it is 0.5"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved of a Llama configuration .*True"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config .*bits"),
        ("llama", {"output_attentions": True}, "output_attentions .*True"),
        (
            "llama",
            {"sliding_window": 5},
            "sliding_window of a Llama configuration must be None or False: it is 5",
        ),
        (
            "llama",
            {"model_type": "unknown", "note": 1},
            "note of a Llama configuration must be None or False: it is 1",
        ),
        ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers .* '3'"),
        ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings .* None"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types of a Mistral"),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 3},
            r"layer_types\[0\].*'chunked_attention'",
        ),
        (
            "qwen2",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            "with use_sliding_window",
        ),
        ("qwen2", {"is_causal": 1}, "is_causal of a Qwen2 .*1"),
        ("gpt2", {"hidden_size": 64}, "hidden_size of a GPT-2 .*64"),
        ("gpt2", {"to_dict": 1}, "to_dict of a GPT-2 .*1"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention .*True"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation .*'silu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention .*True"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention must be of rope_type default",
        ),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "a mapping for full_attention and for sliding_attention",
        ),
        ("gemma3", {"attn_logit_softcapping": 1.5}, "attn_logit_softcapping .*1.5"),
        ("olmo3", {"layer_types": ["chunked"] * 3}, r"layer_types\[0\] of a OLMo 3 .*'chunked'"),
        ("starcoder2", {"use_bias": False}, "use_bias of a StarCoder2 .*False"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop .*0.1"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias .*True"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx .*True",
        ),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn .*True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention .*True"),
        (
            "gpt2",
            {"embd_pdrop": 0.2},
            "embd_pdrop must equal resid_pdrop: they are 0.2 and 0.1",
        ),
        ("gpt2", {"activation_function": "tanh"}, "activation_function must be .*'tanh'"),
        ("bloom", {"hidden_dropout": 0.1}, "hidden_dropout of a BLOOM .* 0.1"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm .*True"),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv of a MPT .* 6.0"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max of a MPT .* 16"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln of a MPT .*True"),
        ("mpt", {"attn_config": {"rope": True}}, "rope of a MPT .*True"),
        ("mpt", {"attn_config": 3}, "attn_config of a MPT configuration must be .* 3"),
        ("mpt", {"expansion_ratio": 3}, "expansion_ratio of a MPT .* 3"),
        (
            "gpt_neox",
            {"rope_parameters": {"partial_rotary_factor": 0.3}},
            "partial_rotary_factor .*0.3",
        ),
        (
            "gpt_neox",
            {"rope_parameters": None, "rotary_emb_base": 1e4, "rope_theta": 1e5},
            "rope_theta .*100000.0",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedError, CheckpointMismatchError), match=message):
        gpt_config_of(case, **changes)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.model_type)
def test_every_field_of_a_hugging_face_configuration_is_known(family: Any) -> None:
    assert isinstance(family.config, ConfigTable)
    theirs = getattr(transformers, family.architecture).config_class
    unknown = (
        {name for name in theirs().to_dict() if not name.startswith("_")}
        - family.config.names
        - IRRELEVANT
    )
    assert not unknown, f"{family.model_type} does not handle {sorted(unknown)}"


@pytest.mark.parametrize("family", families(), ids=lambda family: family.model_type)
def test_defaults_are_those_of_hugging_face(family: Any) -> None:
    # Files leave out fields with default values. One family has no default for this field.
    needed = {"num_experts_per_tok": 6} if family.model_type == "deepseek_v2" else {}
    theirs = getattr(transformers, family.architecture).config_class(**needed)
    config = family.config(needed)
    assert isinstance(config, (GPTConfig, EncoderConfig))
    assert config == family.config(theirs.to_dict())


def test_notations_of_earlier_files_are_read() -> None:
    assert gpt_config_of("llama", rope_parameters=None, rope_theta=5e5).rotary_base == 5e5
    scaling = {"type": "linear", "factor": 2.0}
    assert gpt_config_of("llama", rope_scaling=scaling).rotary_scaling == RotaryScaling(
        kind="linear", factor=2.0
    )
    earlier = gpt_config_of(
        "llama",
        rope_parameters=None,
        rope_theta=7e4,
        rope_scaling={**LLAMA3, "original_max_position_embeddings": 32},
    )
    assert earlier == gpt_config_of(
        "llama",
        rope_parameters={**LLAMA3, "rope_theta": 7e4, "original_max_position_embeddings": 32},
    )
    neox = gpt_config_of(
        "gpt_neox", rope_parameters=None, rotary_pct=0.5, rotary_emb_base=2e4, rope_theta=2e4
    )
    assert (neox.rotary_dim, neox.rotary_base) == (2, 2e4)
    phi = {
        "num_attention_heads": 6,
        "rope_parameters": None,
        "rope_scaling": {**LONG, "rope_type": None, "type": "su"},
        "rope_theta": 1e4,
    }
    phi_config = gpt_config_of("phi3", partial_rotary_factor=0.5, **phi)
    assert phi_config.rotary_dim == 4
    assert phi_config.rotary_scaling == RotaryScaling(
        kind="longrope",
        factor=4.0,
        original_length=16,
        short_factors=(1.5, 1.0),
        long_factors=(2.5, 3.0),
    )
    assert (
        gpt_config_of("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh").activation
        == "geglu_tanh"
    )


def test_configurations_of_published_models_are_read() -> None:
    for name, config in json.loads(
        (Path(__file__).parent / "published_configs.json").read_text()
    ).items():
        family = family_of(config["architectures"][0])
        assert family is family_of(config["model_type"])
        from_file, theirs = family.config(config), transformers.AutoConfig.for_model(**config)
        assert from_file == family.config(theirs.to_dict()), (
            f"{name}: the file and the object give the same configuration"
        )


#: Fields that earlier versions of transformers wrote in every configuration, with their defaults.
EARLIER_DEFAULTS = {
    **dict.fromkeys(
        ("torchscript", "use_bfloat16", "tf_legacy_loss", "is_decoder", "tie_encoder_decoder"),
        False,
    ),
    **dict.fromkeys(
        ("do_sample", "early_stopping", "output_scores", "remove_invalid_values"), False
    ),
    **dict.fromkeys(
        ("cross_attention_hidden_size", "bad_words_ids", "finetuning_task", "tokenizer_class"), None
    ),
    **dict.fromkeys(
        ("prefix", "sep_token_id", "decoder_start_token_id", "task_specific_params"), None
    ),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(
        ("temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"), 1.0
    ),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **{
        "max_length": 20,
        "top_k": 50,
        "diversity_penalty": 0.0,
        "pruned_heads": {},
        "torch_dtype": "float32",
    },
    **{
        "_attn_implementation_autoset": True,
        "return_dict_in_generate": False,
        "add_cross_attention": False,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_default_fields_of_earlier_versions_change_nothing(case: str) -> None:
    assert gpt_config_of(case, **EARLIER_DEFAULTS) == gpt_config_of(case)


def test_a_window_as_long_as_the_longest_sequence_is_dropped() -> None:
    assert gpt_config_of("mistral", sliding_window=64).sliding_window is None
    assert gpt_config_of("mistral", sliding_window=63).sliding_window == 63
    assert gpt_config_of("qwen2", use_sliding_window=False, layer_types=None).sliding_window is None
