"""Every field of a Hugging Face configuration is used, known to be irrelevant, or refused by name; every
value has a type and a range.
"""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.families import families, family_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.swap.families.fields import IRRELEVANT, ConfigTable
from lightning_megatron.swap.families.known import FAMILIES
from tests.swap.families import CASES, config_of, family_of_case, our_config_of, transformers

ROOT = Path(__file__).parents[2]
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
LONG = {"rope_type": "longrope", "short_factor": [1.5, 1.0], "long_factor": [2.5, 3.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
CHUNKED = ["chunked_attention"] * 3

#: Case, changes and the error. An error names the field and the value.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu2"}, "hidden_act of the configuration must be silu, .*'relu2'"),
    ("llama", {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}, "rope_type .* must be .*'dynamic'"),
    ("llama", {"rope_parameters": {**LINEAR, "rope_type": ["yarn"]}}, r"rope_type .* must be .*\['yarn'\]"),
    ("llama", {"rope_parameters": {**LINEAR, "factor": None}}, "rope_parameters.factor .* must be given: it is None"),
    ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers must be .*1000000. Correct the configuration"),
    ("llama", {"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor .* must be left out: it is 2.0"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "a mapping with no other mapping"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor .* must be 1.0: it is 0.5"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved of the configuration .*True"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config .*bits"),
    ("llama", {"sliding_window": 5}, "sliding_window of the configuration must be None or False: it is 5"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types .* this field is not known"),
    ("qwen2", {"layer_types": CHUNKED}, r"layer_types\[0\].*'chunked_attention'"),
    ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "the width of windows is None"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx .*True"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn .*True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention .*True"),
    ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop must equal resid_pdrop: they are 0.2 and 0.1"),
    ("gpt_bigcode", {"multi_query": False}, "multi_query of the .* False"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention .*True"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a finite number above 0: it is 0"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling must be a finite number above 0: it is 0.0"),
    ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}, "sliding_attention .* must be of rope_type default"),
    ("gemma3", {"attn_logit_softcapping": 1.5}, "attn_logit_softcapping .*1.5"),
    ("starcoder2", {"use_bias": False}, "use_bias of the .*False"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias .*True"),
    ("bloom", {"hidden_dropout": 0.1}, "hidden_dropout of the .* 0.1"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm .*True"),
    ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv of the .* 6.0"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max of the .* 16"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor .*0.3"),
    ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config .* 'awq'.* Here weights are floating-point"),
    ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit of the .* must be 7.0"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise of the .*0.1"),
    ("mixtral", {"output_router_logits": True}, "output_router_logits .*True"),
    ("mixtral", {"num_experts_per_tok": 6}, r"top_k \(6\) of experts must be at most num_experts \(5\)"),
    ("mixtral", {"expert_settings": 0.02}, "expert_settings .* must be a mapping with some of"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "or no layer has experts"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a finite number above 0: it is 0"),
    ("deepseek_v3", {"num_hidden_layers": 10**6}, "num_hidden_layers must be"),
    ("deepseek_v3", {"v_head_dim": 12}, r"value_dim \(12\) of latent_attention"),
    ("deepseek_v3", {"num_key_value_heads": 2}, r"num_kv_heads \(2\) must be None or num_heads"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func of the .*'softmax'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq of the .*2"),
    ("deepseek_v3", {"n_group": 4}, "num_groups .* must be 1, 2 or 3"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method of the .*'noaux_tc'"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "topk_group": None}, "topk_group of the .* None"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob of the .* True"),
    ("bert", {"is_decoder": True}, "is_decoder of the configuration must be False"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type of the .*relative_key"),
    ("bert classes", {"problem_type": "ranking"}, "problem_type of the .*ranking"),
    ("roberta", {"add_cross_attention": True}, "add_cross_attention of the"),
    ("roberta masked", {"tie_word_embeddings": False}, "tie_word_embeddings of the"),
]  # fmt: skip


def test_unsupported_settings_are_refused_by_name():
    kinds = (UnsupportedError, CheckpointMismatchError)
    for case, changes, message in REFUSED:
        with pytest.raises(kinds, match=message):
            our_config_of(case, **changes)
    with pytest.raises(
        CheckpointMismatchError, match="must have all fields of its class: hidden_size"
    ):
        family_of("llama").config({"vocab_size": 7})
    for case, name in (("gemma2", "query_pre_attn_scalar"), ("granite", "logits_scaling")):
        with pytest.raises(CheckpointMismatchError, match=f"{name} must be .* it is None"):
            family_of_case(case).config({**config_of(case).to_dict(), name: None})
    with pytest.raises(UnsupportedError, match=r"'opt' is not.*llama \(LlamaForCausalLM\)"):
        family_of("opt")


def test_all_fields_of_hugging_face_are_known():
    for family in families():
        assert isinstance(family.config, ConfigTable)
        # One family has no default for this field.
        needed = {"num_experts_per_tok": 6} if family.model_type == "deepseek_v2" else {}
        theirs = getattr(transformers, family.architecture).config_class(**needed).to_dict()
        names = {name for name in theirs if not name.startswith("_")}
        unknown = names - family.config.names - IRRELEVANT
        assert not unknown, f"{family.model_type} does not handle {sorted(unknown)}"
        # Most published models have the defaults.
        assert family.unsupported_reason(theirs) == "", family.model_type
        assert isinstance(family.config(theirs), (GPTConfig, EncoderConfig))


def test_the_pages_list_and_count_all_decoders():
    text = (ROOT / "docs" / "hugging_face.md").read_text()
    rows = re.search(r"^\| family \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows is not None
    listed = set(re.findall(r"`(\w+)`", rows.group(1)))
    heads = ("ForCausalLM", "LMHeadModel")
    decoders = {one.model_type for one in FAMILIES if one.architecture.endswith(heads)}
    assert decoders <= listed <= {family.model_type for family in FAMILIES}, "docs/hugging_face.md"
    for page in ("README.md", "CHANGELOG.md"):
        assert f"decoders of {len(decoders)} families" in (ROOT / page).read_text(), page


def test_notations_of_earlier_files_are_read():
    assert our_config_of("llama", rope_parameters=None, rope_theta=5e5).rotary_base == 5e5
    linear = our_config_of("llama", rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rotary_scaling == RotaryScaling(kind="linear", factor=2.0)
    llama3 = {**LLAMA3, "original_max_position_embeddings": 32}
    earlier = our_config_of("llama", rope_parameters=None, rope_theta=7e4, rope_scaling=llama3)
    assert earlier == our_config_of("llama", rope_parameters={**llama3, "rope_theta": 7e4})
    bases = {"rotary_pct": 0.5, "rotary_emb_base": 2e4, "rope_theta": 2e4}
    neox = our_config_of("gpt_neox", rope_parameters=None, **bases)
    assert (neox.rotary_dim, neox.rotary_base) == (2, 2e4)
    phi: Any = {"num_attention_heads": 6, "rope_parameters": None, "rope_scaling": LONG}
    phi = our_config_of("phi3", partial_rotary_factor=0.5, rope_theta=1e4, **phi)
    factors = {"short_factors": (1.5, 1.0), "long_factors": (2.5, 3.0)}
    longrope = RotaryScaling(kind="longrope", factor=4.0, original_length=16, **factors)
    assert (phi.rotary_dim, phi.rotary_scaling) == (4, longrope)
    gemma = our_config_of("gemma", hidden_act="gelu")
    assert gemma.activation == "geglu_tanh"
    assert our_config_of("gpt_bigcode", num_key_value_heads=4).num_kv_heads == 1


# ---- published models


def num_parameters(config: GPTConfig) -> int:
    shape, layout = config.memory_shape(), ParallelLayout(1)
    mixtures = sum(map(config.has_experts_in, range(config.num_layers)))
    dense = shape.stage_parameters(layout, 0, config.num_layers, mixtures)
    return dense + mixtures * shape.expert_parameters(layout)


def test_configurations_of_published_models_are_read():
    for name, config in PUBLISHED.items():
        family = family_of(config["architectures"][0])
        assert family is family_of(config["model_type"])
        theirs = transformers.AutoConfig.for_model(**config).to_dict()
        if theirs.pop("quantization_config", None) is not None:
            with pytest.raises(UnsupportedError, match="quantization_config of the"):
                family.config(transformers.AutoConfig.for_model(**config).to_dict())
        assert family.config(theirs).vocab_size == config["vocab_size"], name


def test_published_mixtures_have_their_published_sizes():
    fields = {k: v for k, v in PUBLISHED["DeepSeek-V3"].items() if k != "quantization_config"}
    config = family_of("deepseek_v3").config(transformers.DeepseekV3Config(**fields).to_dict())
    # All parameters but those of the layer that predicts later tokens.
    assert num_parameters(config) == 671_026_404_352
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.rotary_interleaved
    scaling = RotaryScaling(kind="yarn", factor=40.0, original_length=163840, attention_factor=1.0)
    assert config.rotary_scaling == scaling
    experts = ExpertsConfig(
        num_experts=256, top_k=8, ffn_hidden_size=2048, layers=(False,) * 3 + (True,) * 58, scoring="sigmoid",
        score_scale=2.5, expert_bias=True, num_groups=8, top_k_groups=4, shared_ffn_hidden_size=2048,
    )  # fmt: skip
    assert config.experts == experts
    family = family_of("gpt_oss")
    config = family.config(transformers.GptOssConfig(**PUBLISHED["gpt-oss-20b"]).to_dict())
    in_table = sum(math.prod(tensor.shape) for tensor in family.tensors(config))
    assert in_table == num_parameters(config) == 20_914_757_184
    scaling = RotaryScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False)
    assert config.rotary_scaling == scaling
    assert (config.sliding_window, config.window_layers) == (128, (True, False) * 12)


def test_router_settings_of_configurations_are_used():
    mixtral = {"num_experts": 5, "top_k": 2, "ffn_hidden_size": 20}
    settings = {"aux_loss": 0.02, "z_loss": 0.001, "aux_loss_scope": "global"}
    with_settings = our_config_of("mixtral", expert_settings=settings)
    assert with_settings.experts == ExpertsConfig(**mixtral, **settings)
    qwen3 = {"num_experts": 4, "top_k": 3, "ffn_hidden_size": 14}
    assert our_config_of("qwen3_moe").experts == ExpertsConfig(**qwen3, layers=(True, False, True))
    changes = {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}
    every_second = our_config_of("qwen3_moe", **changes).experts
    assert every_second == ExpertsConfig(**qwen3, layers=2, normalize_top_k=False)


#: Fields that earlier versions of transformers wrote in every configuration, with their defaults.
EARLIER_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("torchscript", "use_bfloat16", "tf_legacy_loss", "is_decoder", "do_sample", "early_stopping"), False),
    **dict.fromkeys(("output_scores", "remove_invalid_values", "tie_encoder_decoder", "add_cross_attention"), False),
    **dict.fromkeys(("cross_attention_hidden_size", "bad_words_ids", "finetuning_task", "tokenizer_class", "prefix")),
    **dict.fromkeys(("sep_token_id", "decoder_start_token_id", "task_specific_params")),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"), 1.0),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    "max_length": 20, "top_k": 50, "diversity_penalty": 0.0, "pruned_heads": {}, "torch_dtype": "float32",
    "_attn_implementation_autoset": True, "return_dict_in_generate": False,
    # Unsloth and trainers.
    "unsloth_fixed": True, "unsloth_version": "2025.1.5", "neftune_noise_alpha": 5.0,
}  # fmt: skip


def test_unknown_fields_of_earlier_versions_and_of_users_are_ignored_but_not_silently(caplog):
    for case in CASES:
        assert our_config_of(case, **EARLIER_DEFAULTS) == our_config_of(case)
    ours = [record for record in caplog.records if record.name.startswith("lightning_megatron")]
    assert not ours
    notes = {"my_note_llama": "tuned on speeches", "my_list": [{"a": 1}], "my_zero": None}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert our_config_of("llama", **notes) == our_config_of("llama")
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("lightning_megatron")]
    assert "'my_list', 'my_note_llama' of a" in line
