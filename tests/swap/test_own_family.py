"""A family that another package describes is found, loaded, computed and exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_megatron import families
from lightning_megatron.families import family_of, find_family
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap import families as former
from lightning_megatron.swap.weights.export import export_folder
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.parts import full_tensors
from tests.swap.stablelm import STABLELM

transformers = pytest.importorskip("transformers")

PROGRAM = """
from lightning_megatron import families
from lightning_megatron.families import families, family_of
print(family_of("StableLmForCausalLM").model_type, families()[0].model_type)
"""


def test_a_family_of_another_package_is_loaded_computed_and_exported(tmp_path: Path) -> None:
    assert find_family("stablelm") is None
    torch.manual_seed(0)
    settings = {
        "vocab_size": 53,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "use_qkv_bias": True,
    }
    settings |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64}
    twin = transformers.StableLmForCausalLM(transformers.StableLmConfig(**settings)).eval()
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
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(
        torch.equal(tensor, reloaded.state_dict()[name])
        for name, tensor in twin.state_dict().items()
    )


def test_families_have_public_names_and_keep_their_former_path() -> None:
    for name in families.__all__:
        assert getattr(former, name, None) in (getattr(families, name), None), name
    assert {"Family", "ConfigTable", "Field", "DecoderNames"} <= vars(former).keys()


def output_with_package(folder: Path, value: str) -> str:
    information = folder / "stablelm_for_us-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stablelm-for-us\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text(
        f"[lightning_megatron.families]\nstablelm = {value}\n"
    )
    root = Path(__file__).parents[2]
    program = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(root)!r}]\n{PROGRAM}"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return process.stdout.strip() if process.returncode == 0 else process.stderr


def test_a_family_of_an_installed_package_is_known(tmp_path: Path) -> None:
    assert output_with_package(tmp_path, "tests.swap.stablelm:STABLELM") == "stablelm stablelm"


def test_an_entry_point_that_is_not_a_family_is_refused(tmp_path: Path) -> None:
    assert "stablelm (json:dumps) is a function" in output_with_package(tmp_path, "json:dumps")
