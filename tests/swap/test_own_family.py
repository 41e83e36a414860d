"""A family that another package describes is found, loaded, computed and exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from lightning_megatron.families import family_of, find_family
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.weights.export import export_folder
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.families import transformers
from tests.swap.parts import full_tensors, in_class_tree
from tests.swap.stablelm import STABLELM


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
    tensors = in_class_tree(full_tensors(model).items(), family, model.config)
    export_folder(tensors, family, folder.config, tmp_path / "ours")
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
    name = "tests.swap.stablelm:STABLELM"
    assert output_with_package(tmp_path, name) == "stablelm stablelm"
    assert "(json:dumps) is a function" in output_with_package(tmp_path / "other", "json:dumps")
