"""Tensors of families with experts convert to ours and back bit for bit, from modules and from
files.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.hugging_face import export_model, import_model
from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError, UnsupportedError
from lightning_megatron.families import Family, family_of
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.swap.apply import parallelize
from lightning_megatron.swap.families.expert_names import ExpertNames
from lightning_megatron.swap.families.fields import IRRELEVANT
from lightning_megatron.swap.hugging_face.class_tensors import ClassTensors
from lightning_megatron.swap.hugging_face.state_dict import to_class_names, to_package_names
from lightning_megatron.swap.pretrained.from_pretrained import build_on_meta
from lightning_megatron.swap.tensors.mapping import Slices, TensorsInMemory
from lightning_megatron.swap.tensors.packed import Packed, pack
from lightning_megatron.swap.weights.export import export_folder, foreign_tensors
from lightning_megatron.swap.weights.load import full_tensors, load_from, reader_of
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.expert_models import CASES, config_of, twin_of
from tests.swap.families import transformers

#: The published configuration, with further fields of its first release.
DEEPSEEK_V3: dict[str, Any] = {
    **{
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
    },
    **{
        "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    },
    **{
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
    },
    **{
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
    },
    **{
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
    },
    **{
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    **{
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
    },
    **{
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
    },
    **{
        "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    **{
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
    },
    "rope_scaling": {
        "beta_fast": 32,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "yarn",
    },
    **{
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "use_cache": True,
    },
    **{
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


#: The published configuration, without the quantization of its weights.
GPT_OSS_20B: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0},
    **{"eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu"},
    **{"hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02},
    **{"intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12},
    **{"max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64},
    **{"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8},
    **{"num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999},
    **{"rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9},
    **{"sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False},
    **{"transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
}


def gpt_config_of(case: str, **changes: Any) -> GPTConfig:
    config = family_of(CASES[case][0]).config({**config_of(case).to_dict(), **changes})
    assert isinstance(config, GPTConfig)
    return config


def experts_of(case: str, config: dict[str, Any] | None = None) -> ExpertsConfig:
    table: Any = family_of(CASES[case][0]).config
    experts = table.parts["experts"].record(config_of(case).to_dict() if config is None else config)
    assert isinstance(experts, ExpertsConfig)
    return experts


def saved_folder(twin: nn.Module, path: Path) -> SafetensorsFolder:
    twin.save_pretrained(path)
    return SafetensorsFolder(path)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_a_module_and_of_its_files_is_read_once_and_restored(
    case: str, tmp_path: Path
) -> None:
    twin, family, config = twin_of(case), family_of(CASES[case][0]), gpt_config_of(case)
    folder = saved_folder(twin, tmp_path)
    files = {name: folder.read(name) for name in folder.names()}
    module = twin.state_dict()
    table = family.tensors(config)
    counts = Counter(source.name for tensor in table for source in tensor.sources)
    names = set(reader_of(folder, family).names())
    assert counts.keys() == names, "every tensor of the files has a place"
    assert set(counts.values()) == {1}
    # Both forms are complete: the reader refuses missing and further tensors.
    from_module = dict(full_tensors(module, family, config, torch.float32))
    from_files = dict(full_tensors(files, family, config, torch.float32))
    assert from_module.keys() == from_files.keys() == {tensor.target for tensor in table}
    assert all(torch.equal(from_module[name], from_files[name]) for name in from_module)
    back = dict(foreign_tensors(from_module.items(), family, config))
    assert back.keys() == files.keys()
    assert all(torch.equal(back[name], files[name]) for name in files)
    packed = pack(back, family.packed)
    assert packed.keys() == module.keys()
    assert all(torch.equal(packed[name], module[name]) for name in module)


def test_every_expert_is_a_separate_entry_with_gate_rows_above_up_rows() -> None:
    twin, family = twin_of("mixtral"), family_of("mixtral")
    tensors = dict(full_tensors(twin.state_dict(), family, gpt_config_of("mixtral"), torch.float32))
    experts: Any = twin.model.layers[1].mlp.experts
    for number in range(5):
        assert torch.equal(
            tensors[f"layers.1.mlp.experts.{number}.gate_up.weight"], experts.gate_up_proj[number]
        )
        assert torch.equal(
            tensors[f"layers.1.mlp.experts.{number}.down.weight"], experts.down_proj[number]
        )
    assert torch.equal(tensors["layers.1.mlp.router.weight"], twin.model.layers[1].mlp.gate.weight)


def test_layers_without_experts_have_an_mlp_and_shared_experts_are_joined() -> None:
    names = {tensor.target for tensor in family_of("qwen3_moe").tensors(gpt_config_of("qwen3_moe"))}
    kinds = ("router.weight", "gate_up.weight", "experts.3.down.weight")
    assert [[f"layers.{layer}.mlp.{kind}" in names for kind in kinds] for layer in range(3)] == [
        [True, False, True],
        [False, True, False],
        [True, False, True],
    ]
    table = {
        tensor.target: tensor
        for tensor in family_of("deepseek_v3").tensors(gpt_config_of("deepseek_v3"))
    }
    assert table["layers.1.mlp.shared.gate_up.weight"].shape == (2 * 2 * 14, 24)
    assert table["layers.1.mlp.router.expert_bias"].shape == (6,)
    assert "layers.0.mlp.gate_up.weight" in table
    assert "layers.0.mlp.router.weight" not in table


@pytest.mark.parametrize("case", CASES)
def test_an_exported_folder_is_loaded_bit_for_bit(case: str, tmp_path: Path) -> None:
    twin, family = twin_of(case), family_of(CASES[case][0])
    tensors = full_tensors(twin.state_dict(), family, gpt_config_of(case), torch.float32)
    export_folder(tensors, family, twin.config.to_dict(), tmp_path, 20_000)
    reloaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    expected = twin.state_dict()
    assert reloaded.state_dict().keys() == expected.keys()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in reloaded.state_dict().items()
    )


def test_a_folder_is_imported_as_a_checkpoint_and_exported_unchanged(tmp_path: Path) -> None:
    folder = saved_folder(twin_of("mixtral"), tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "back")
    back = SafetensorsFolder(tmp_path / "back")
    assert set(back.names()) == set(folder.names())
    assert all(torch.equal(back.read(name), folder.read(name)) for name in folder.names())


def test_a_state_dict_for_other_strategies_has_the_tensors_of_the_class() -> None:
    twin, family = twin_of("qwen3_moe"), family_of("qwen3_moe")
    config = twin.config.to_dict()
    table = family.class_tensors(gpt_config_of("qwen3_moe"))
    ours = full_tensors(twin.state_dict(), family, gpt_config_of("qwen3_moe"), torch.float32, table)
    prefixed = {f"model.{name}": tensor for name, tensor in ours}
    back = to_class_names(
        ClassTensors.from_checkpoint(
            {"model": {"architecture": family.architecture, "config": config}}
        ),
        prefixed,
    )
    expected = twin.state_dict()
    assert back.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(back[f"model.{name}"], tensor) for name, tensor in expected.items())


class CountingReader(TensorsInMemory):
    """Record the name and the number of elements of every read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        object.__setattr__(self, "parts", [])

    def read(self, name: str, slices: Slices) -> Tensor:
        part = super().read(name, slices)
        self.parts.append((name, part.numel()))  # type: ignore[attr-defined]
        return part


def test_a_part_of_an_expert_is_read_without_the_remaining_stack() -> None:
    twin, family = twin_of("mixtral"), family_of("mixtral")
    state = CountingReader(twin.state_dict())
    reader = reader_of(state, family)
    tensor = next(
        t
        for t in family.tensors(gpt_config_of("mixtral"))
        if t.target == "layers.1.mlp.experts.3.gate_up.weight"
    )
    view = torch.empty(8, 5)
    # The part has the last rows of the gate and the first rows of the up projection.
    tensor.fill(view, [16, 7], [8, 5], reader)
    expected: Tensor = twin.model.layers[1].mlp.experts.gate_up_proj[3, 16:24, 7:12]
    assert torch.equal(view, expected)
    assert state.parts == [("model.layers.1.mlp.experts.gate_up_proj", 20)] * 2  # type: ignore[attr-defined]


def test_an_expert_stack_in_a_file_is_read_like_a_stack_of_a_module(tmp_path: Path) -> None:
    twin, family = twin_of("qwen3_moe"), family_of("qwen3_moe")
    twin.save_pretrained(tmp_path, save_original_format=False)
    folder = SafetensorsFolder(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in set(folder.names())
    config = gpt_config_of("qwen3_moe")
    actual = dict(full_tensors(folder, family, config, torch.float32))
    expected = full_tensors(twin.state_dict(), family, config, torch.float32)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 41, 24), r"'model.layers.0.mlp.experts.gate_up_proj' has shape \(5, 41, 24\)"),
        ((40,), r"2 parts must have experts and equally many rows for each: .* has shape \(40,\)"),
        ((4, 40, 24), r"'model.layers.0.block_sparse_moe.experts.4.w1.weight'.* missing"),
        ((6, 40, 24), r"'model.layers.0.block_sparse_moe.experts.5.w1.weight'.* unexpected"),
        ((5, 38, 24), r"w1.weight' \(19, 24\) instead of \(20, 24\)"),
    ],
)
def test_expert_stacks_of_another_shape_are_refused(shape: tuple[int, ...], message: str) -> None:
    family = family_of("mixtral")
    state = {
        **twin_of("mixtral").state_dict(),
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(shape),
    }
    with pytest.raises(CheckpointMismatchError, match=message):
        list(full_tensors(state, family, gpt_config_of("mixtral"), torch.float32))


def test_an_expert_stored_under_two_names_is_refused() -> None:
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    state = {**twin_of("mixtral").state_dict(), name: torch.zeros(24, 20)}
    with pytest.raises(
        CheckpointMismatchError, match=f"mlp.experts.down_proj' and '{name}' are two names of"
    ):
        reader_of(state, family_of("mixtral"))


def test_the_gate_of_shared_experts_is_loaded_and_restored() -> None:
    # Qwen2-MoE has one.
    names = ExpertNames(
        router="model.layers.{}.mlp.gate",
        up=tuple(f"model.layers.{{}}.mlp.experts.{{}}.{part}_proj" for part in ("gate", "up")),
        down="model.layers.{}.mlp.experts.{}.down_proj",
        shared_up=tuple(
            f"model.layers.{{}}.mlp.shared_expert.{part}_proj" for part in ("gate", "up")
        ),
        shared_down="model.layers.{}.mlp.shared_expert.down_proj",
        shared_gate="model.layers.{}.mlp.shared_expert_gate",
    )
    theirs = transformers.Qwen2MoeConfig(
        vocab_size=53,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=14,
        shared_expert_intermediate_size=10,
    )
    experts = ExpertsConfig(
        num_experts=4, top_k=2, ffn_hidden_size=14, shared_ffn_hidden_size=10, shared_gate=True
    )
    config = GPTConfig.llama(
        vocab_size=53, max_seq_length=64, num_layers=1, hidden_size=24, num_heads=6, experts=experts
    )
    twin = transformers.AutoModelForCausalLM.from_config(theirs)
    state = {name: tensor for name, tensor in twin.state_dict().items() if ".mlp." in name}
    parts = tuple(
        f"model.layers.{{}}.mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")
    )
    packed = (
        Packed("model.layers.{}.mlp.experts.gate_up_proj", parts[:2]),
        Packed("model.layers.{}.mlp.experts.down_proj", parts[2:]),
    )
    family = Family("qwen2_moe", "Qwen2MoeForCausalLM", lambda _: config, names, packed=packed)
    tensors = dict(full_tensors(state, family, config, torch.float32))
    assert tensors["layers.0.mlp.shared.gate.weight"].shape == (1, 24)
    back = pack(dict(foreign_tensors(tensors.items(), family, config)), packed)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_expert_biases_stay_in_float32_beside_bfloat16_weights(
    tmp_path: Path,
) -> None:
    family = family_of("deepseek_v3")
    config = gpt_config_of("deepseek_v3")
    generator = torch.Generator().manual_seed(0)
    weights = {
        entry.target: torch.randn(entry.shape, generator=generator).bfloat16()
        for entry in family.tensors(config)
    }
    biases = {
        name: torch.randn(6, generator=generator)
        for name in weights
        if name.endswith("router.expert_bias")
    }
    assert len(biases) == 2
    theirs = config_of("deepseek_v3").to_dict()
    export_folder({**weights, **biases}.items(), family, theirs, tmp_path, dtype=torch.bfloat16)
    folder = SafetensorsFolder(tmp_path)
    assert folder.dtype_of("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    with torch.device("meta"):
        model = GPT(config, ParallelMesh.single()).bfloat16()
    load_from(model, folder, family)
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    for name, tensor in {**weights, **biases}.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name][: len(tensor)], tensor), name
    full = dict(full_tensors(folder, family, config, torch.bfloat16))
    assert all(torch.equal(full[name], bias) for name, bias in biases.items())


def test_a_gpt_built_before_parallelize_keeps_its_expert_biases() -> None:
    experts = ExpertsConfig(
        num_experts=4, top_k=2, ffn_hidden_size=8, scoring="sigmoid", expert_bias=True
    )
    sizes = {
        "vocab_size": 53,
        "max_seq_length": 64,
        "num_layers": 1,
        "hidden_size": 24,
        "num_heads": 6,
    }
    source: Any = GPT(GPTConfig.llama(**sizes, experts=experts), seed=1)
    bias = source.layers["0"].mlp.router.expert_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    root = nn.ModuleDict({"model": source})
    parallelize(root, ParallelMesh.single())
    model: Any = root["model"]
    assert model is not source
    assert torch.equal(model.layers["0"].mlp.router.expert_bias, bias)


def test_step_shares_of_routers_are_left_out_for_other_strategies() -> None:
    settings = {"aux_loss": 0.1, "aux_loss_scope": "global"}
    twin = twin_of("mixtral", expert_settings=settings)
    root = nn.ModuleDict({"model": twin})
    expected = root.state_dict()
    parallelize(root, ParallelMesh.single())
    ours = root.state_dict()
    step_shares = {name for name in ours if name.endswith("step_shares")}
    assert len(step_shares) == 2
    models = {"model": {"architecture": "MixtralForCausalLM", "config": twin.config.to_dict()}}
    theirs = to_class_names(ClassTensors.from_checkpoint(models), ours)
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in theirs.items())
    assert to_package_names(root, theirs).keys() == ours.keys()


def test_router_settings_of_configurations_are_used() -> None:
    assert gpt_config_of("mixtral").experts == ExpertsConfig(
        num_experts=5, top_k=2, ffn_hidden_size=20
    )
    assert gpt_config_of("qwen3_moe").experts == ExpertsConfig(
        num_experts=4, top_k=3, ffn_hidden_size=14, layers=(True, False, True)
    )
    every_second = gpt_config_of(
        "qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=False
    ).experts
    assert every_second == ExpertsConfig(
        num_experts=4, top_k=3, ffn_hidden_size=14, layers=2, normalize_top_k=False
    )
    assert experts_of("deepseek_v3") == ExpertsConfig(
        num_experts=6,
        top_k=2,
        ffn_hidden_size=14,
        layers=(False, True, True),
        scoring="sigmoid",
        score_scale=2.5,
        num_groups=3,
        top_k_groups=2,
        expert_bias=True,
        shared_ffn_hidden_size=28,
    )


def test_published_expert_settings_are_read() -> None:
    path = Path(__file__).parent / "published_configs.json"
    published = json.loads(path.read_text())
    actual = {}
    for name in ("Mixtral-8x7B-v0.1", "Mixtral-8x22B-v0.1", "Qwen3-30B-A3B", "Qwen3-235B-A22B"):
        config: Any = family_of(published[name]["model_type"]).config(published[name])
        experts = config.experts
        actual[name] = (
            experts.num_experts,
            experts.top_k,
            experts.ffn_hidden_size,
            experts.normalize_top_k,
        )
        assert experts.layers == 1
    assert actual == {
        "Mixtral-8x7B-v0.1": (8, 2, 14336, True),
        "Mixtral-8x22B-v0.1": (8, 2, 16384, True),
        "Qwen3-30B-A3B": (128, 8, 768, True),
        "Qwen3-235B-A22B": (128, 8, 1536, True),
    }


def test_the_published_deepseek_v3_configuration_is_read() -> None:
    family: Any = family_of("deepseek_v3")
    with pytest.raises(UnsupportedError, match="quantization_config of a DeepSeek-V3"):
        family.config(DEEPSEEK_V3)
    plain = {name: value for name, value in DEEPSEEK_V3.items() if name != "quantization_config"}
    config = family.config(plain)
    assert config.latent_attention == LatentAttentionConfig(
        key_value_rank=512, query_rank=1536, plain_dim=128, rotary_dim=64, value_dim=128
    )
    assert config.rotary_interleaved
    assert config.rotary_scaling == RotaryScaling(
        kind="yarn", factor=40.0, original_length=163840, attention_factor=1.0
    )
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    # All parameters but those of the layer that predicts later tokens.
    num_parameters = config.memory_shape().stage_parameters(ParallelLayout(1), 0, 61, 58)
    num_parameters += 58 * config.memory_shape().expert_parameters(ParallelLayout(1))
    assert num_parameters == 671_026_404_352
    assert plain.keys() <= family.config.names | {name for name in plain if name in IRRELEVANT}
    expected = ExpertsConfig(
        num_experts=256,
        top_k=8,
        ffn_hidden_size=2048,
        layers=(False,) * 3 + (True,) * 58,
        scoring="sigmoid",
        score_scale=2.5,
        num_groups=8,
        top_k_groups=4,
        expert_bias=True,
        shared_ffn_hidden_size=2048,
    )
    theirs = transformers.AutoConfig.for_model(**plain)
    assert (
        experts_of("deepseek_v3", plain) == experts_of("deepseek_v3", theirs.to_dict()) == expected
    )
    assert experts_of("deepseek_v3", {}) == expected


def test_the_published_gpt_oss_configuration_is_read() -> None:
    family: Any = family_of("gpt_oss")
    config = family.config(GPT_OSS_20B)
    assert config.experts == ExpertsConfig(
        num_experts=32, top_k=4, ffn_hidden_size=2880, linear_bias=True, router_bias=True
    )
    assert config.rotary_scaling == RotaryScaling(
        kind="yarn", factor=32.0, original_length=4096, truncate=False
    )
    assert (config.sliding_window, config.window_layers) == (128, (True, False) * 12)
    assert (config.activation, config.attention_sinks) == ("clamped_swiglu", True)
    assert (config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias) == (True, True, False)
    shape, one_process = config.memory_shape(), ParallelLayout(1)
    num_parameters = shape.stage_parameters(one_process, 0, 24, 24) + 24 * shape.expert_parameters(
        one_process
    )
    assert num_parameters == 20_914_757_184
    in_table = sum(math.prod(tensor.shape) for tensor in family.tensors(config))
    assert in_table == num_parameters
    # Fields that a configuration leaves out have the defaults of the class.
    defaults = family.config({})
    assert defaults == family.config(transformers.GptOssConfig().to_dict())
    assert (defaults.num_layers, defaults.experts.num_experts) == (36, 128)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config of a gpt-oss .* 'awq'.* Here weights are floating-point",
        ),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit of a gpt-oss .* must be 7.0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act of a gpt-oss .* 'gelu'"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must have one entry"),
        ("gpt_oss", {"output_router_logits": True}, "output_router_logits .*True"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise of a Mixtral .*0.1"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits .*True"),
        (
            "mixtral",
            {"num_experts": 4},
            r"num_experts of a Mixtral .* is another name of num_local_experts \(5\)",
        ),
        ("mixtral", {"num_experts_per_tok": "2"}, "num_experts_per_tok .* '2'"),
        (
            "mixtral",
            {"num_experts_per_tok": 6},
            r"top_k \(6\) of experts must be at most num_experts \(5\)",
        ),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits .*True"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "max_window_layers": 2},
            "max_window_layers .*2",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "no layer would have experts"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank of a DeepSeek-V3 .* None"),
        ("deepseek_v3", {"head_dim": 6}, "head_dim of a DeepSeek-V3 .* must be 4 or None"),
        ("deepseek_v3", {"v_head_dim": 12}, r"value_dim \(12\) of latent_attention"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            r"num_kv_heads \(2\) must be None or num_heads",
        ),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method of a DeepSeek-V2 .*'noaux_tc'"),
        ("deepseek_v2", {"n_group": None}, "n_group of a DeepSeek-V2 .* None"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob of a DeepSeek-V2 .* True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias of a DeepSeek-V2 .* True"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        (UnsupportedError, CheckpointMismatchError, ParallelPlanError), match=message
    ):
        gpt_config_of(case, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func of a DeepSeek-V3 .*'softmax'"),
        ({"topk_method": "greedy"}, "topk_method of a DeepSeek-V3 .*'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq of a DeepSeek-V3 .*2"),
        ({"n_group": 4}, "num_groups .* must be 1, 2 or 3"),
    ],
)
def test_unsupported_deepseek_routers_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedError, ParallelPlanError), match=message):
        experts_of("deepseek_v3", {**config_of("deepseek_v3").to_dict(), **changes})


def test_a_model_with_unsupported_settings_keeps_its_code_unless_tables_are_required() -> None:
    positions = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    root = nn.ModuleDict({"model": twin_of("deepseek_v3", rope_parameters=positions)})
    model = root["model"]
    message = "rope_type must be .*: it is 'dynamic'"
    with pytest.raises(UnsupportedError, match=message):
        parallelize(root, ParallelMesh.single(), needs_tables=True)
    (record,) = parallelize(root, ParallelMesh.single())
    assert root["model"] is model
    assert record.kind == "Hugging Face's own module"
    assert re.search(message, str(record))


@pytest.mark.parametrize("is_pretrained", [True, False])
def test_a_model_that_the_plan_keeps_gets_its_values(is_pretrained: bool, tmp_path: Path) -> None:
    # configure_model builds every model of a known family without values.
    twin = twin_of("mixtral").to(torch.bfloat16)
    twin.save_pretrained(tmp_path)
    library = transformers.AutoModelForCausalLM
    torch.manual_seed(3)
    if is_pretrained:
        expected = library.from_pretrained(tmp_path)
    else:
        expected = library.from_config(twin.config, dtype=torch.bfloat16)
    with build_on_meta():
        model = (
            library.from_pretrained(tmp_path)
            if is_pretrained
            else library.from_config(twin.config, dtype=torch.bfloat16)
        )
    assert all(parameter.is_meta for parameter in model.parameters())
    model.model.norm.weight.requires_grad_(False)
    root = nn.ModuleDict({"model": model})
    torch.manual_seed(3)
    assert parallelize(root, ParallelMesh.single(), {"*": "replicate"}) == []
    assert root["model"] is model
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "model.norm.weight"
    ]
    actual_tensors, expected_tensors = (
        {**network.state_dict(), **dict(network.named_buffers())} for network in (model, expected)
    )
    assert actual_tensors.keys() == expected_tensors.keys()
    assert all(
        torch.equal(tensor, expected_tensors[name]) for name, tensor in actual_tensors.items()
    )
