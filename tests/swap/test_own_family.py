"""A family that another package describes is found, loaded, computed and exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from lightning_megatron.families import (
    ConfigTable,
    DecoderNames,
    Family,
    Field,
    family_of,
    find_family,
    rotary_fields,
    translate_values,
)
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.weights.export import export_folder
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.families import transformers
from tests.swap.parts import full_tensors

_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_LAYER = "model.layers.{}"
#: The StableLM family, which this package lacks.
STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    config=ConfigTable(
        "StableLM",
        (
            Field("vocab_size", 50304, "vocab_size"),
            Field("hidden_size", 2560, "hidden_size"),
            Field("num_hidden_layers", 32, "num_layers"),
            Field("num_attention_heads", 32, "num_heads"),
            Field("intermediate_size", 6912, "ffn_hidden_size"),
            Field("num_key_value_heads", 32, "num_kv_heads"),
            Field("max_position_embeddings", 4096, "max_seq_length"),
            Field("hidden_act", "silu", translate_values("hidden_act", "activation", _ACTIVATIONS)),
            Field("layer_norm_eps", 1e-5, "norm_eps"),
            Field("initializer_range", 0.02, "init_std"),
            Field("tie_word_embeddings", False, "tie_embeddings"),
            Field("attention_dropout", 0.0, "attention_dropout"),
            Field("use_qkv_bias", False, "qkv_bias"),
            Field("use_parallel_residual", False, allowed=(False,), reason="blocks have two norms"),
            Field("hidden_dropout", 0.0, allowed=(0.0,), reason="it would also apply to vectors"),
            *rotary_fields(share_field="partial_rotary_factor", default_share=0.25),
        ),
        fixed={"norm": "layernorm", "position": "rotary"}
        | {"bias": True, "output_bias": False, "mlp_bias": False},
    ),
    tensors=DecoderNames(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        attention_norm=f"{_LAYER}.input_layernorm",
        mlp_norm=f"{_LAYER}.post_attention_layernorm",
        qkv=tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
        output=f"{_LAYER}.self_attn.o_proj",
        up=tuple(f"{_LAYER}.mlp.{part}_proj" for part in ("gate", "up")),
        down=f"{_LAYER}.mlp.down_proj",
    ),
)


def test_a_family_of_another_package_is_loaded_computed_and_exported(tmp_path):
    assert find_family("stablelm") is None
    sizes = {"vocab_size": 53, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = transformers.StableLmConfig(**sizes, use_qkv_bias=True)
    twin = transformers.StableLmForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    twin.save_pretrained(tmp_path / "theirs")
    folder, family = SafetensorsFolder(tmp_path / "theirs"), family_of("stablelm", [STABLELM])
    model = GPT(family.config(folder.config), seed=0).eval()
    load_from(model, folder, family)
    tokens = torch.randint(0, 53, (2, 20))
    assert torch.allclose(model(tokens), twin(tokens).logits, atol=1e-4)
    export_folder(full_tensors(model).items(), family, folder.config, tmp_path / "ours")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(tensor, reloaded[name]) for name, tensor in twin.state_dict().items())


def output_with_package(folder: Path, value: str) -> str:
    """Return the output of a program that finds a family among installed packages."""
    information = folder / "stablelm_for_us-1.0.dist-info"
    information.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: stablelm-for-us\nVersion: 1.0\n"
    (information / "METADATA").write_text(metadata)
    entry = f"[lightning_megatron.families]\nstablelm = {value}\n"
    (information / "entry_points.txt").write_text(entry)
    program = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(Path(__file__).parents[2])!r}]\n"
        "from lightning_megatron.families import families, family_of\n"
        "print(family_of('StableLmForCausalLM').model_type, families()[0].model_type)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return process.stdout.strip() if process.returncode == 0 else process.stderr


def test_families_of_installed_packages_are_known_or_refused(tmp_path):
    name = "tests.swap.test_own_family:STABLELM"
    assert output_with_package(tmp_path, name) == "stablelm stablelm"
    assert "(json:dumps) is a function" in output_with_package(tmp_path / "other", "json:dumps")
