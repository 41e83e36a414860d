"""Folders with weights in 4 or 8 bits decode to the values of transformers and plain arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.hugging_face import export_model, import_model
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import build_on_meta, parallelize
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.families import transformers, twin_of

save_file = pytest.importorskip("safetensors.torch").save_file

BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def save_quantized_gpt_oss(folder: Path) -> dict[str, Tensor]:
    """Save a gpt-oss folder in the published format; return its decoded tensors by the class's names."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    twin = twin_of("gpt_oss", hidden_size=64, intermediate_size=32).to(torch.bfloat16)
    twin.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    expected = twin.state_dict()
    generator = torch.Generator().manual_seed(2)
    for name, tensor in expected.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        num_runs = inputs // 32
        blocks = torch.randint(
            0, 256, (experts, outputs, num_runs, 16), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(
            117, 126, (experts, outputs, num_runs), dtype=torch.uint8, generator=generator
        )
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return expected


def set_quantization(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization}))


def built(folder: Path) -> Any:
    """Return a module with the model of a folder, built without values."""
    with build_on_meta():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    return nn.ModuleDict({"model": model})


def test_packed_experts_are_decoded_like_in_transformers(tmp_path):
    expected = save_quantized_gpt_oss(tmp_path)
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.names()) == expected.keys()
    assert "quantization_config" not in folder.config
    for name, tensor in expected.items():
        assert folder.shape(name) == tuple(tensor.shape)
        assert folder.dtype_of(name) == torch.bfloat16
        assert torch.equal(folder.read(name), tensor), name
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for part in (
        (slice(1, 3), slice(0, 64), slice(0, 64, 2)),
        (slice(0, 1), slice(31, 33), slice(1, 64, 2)),
        (slice(2, 4), slice(40, 64), slice(5, 6)),
    ):
        assert torch.equal(folder.read(name, part), expected[name][part])


def test_fp8_blocks_are_multiplied_by_their_scales(tmp_path):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    save_file({"w": numbers, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert [*folder.names()] == ["w"]
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    expected = (numbers.double() * spread.double()).to(torch.bfloat16)
    assert torch.equal(folder.read("w"), expected)
    for part in ((slice(100, 150), slice(250, 300)), (slice(127, 129), slice(1, 7, 2))):
        assert torch.equal(folder.read("w", part), expected[part])


@torch.no_grad()
def test_a_replaced_model_of_quantized_weights_uses_and_saves_the_decoded_weights(tmp_path):
    expected = save_quantized_gpt_oss(tmp_path / "published")
    plain = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "published"), dtype=torch.bfloat16
    ).float()
    plain.load_state_dict({name: tensor.float() for name, tensor in expected.items()})
    tokens = torch.arange(24).view(2, 12) % 50
    root = built(tmp_path / "published")
    parallelize(root, ParallelMesh.single())
    replaced: Any = root["model"]
    torch.testing.assert_close(replaced(tokens).logits, plain(tokens).logits, rtol=2e-4, atol=2e-4)
    replaced.save_pretrained(tmp_path / "saved")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(saved, expected[name]) for name, saved in reloaded.state_dict().items())


def test_quantized_weights_that_cannot_be_decoded_are_refused(tmp_path):
    save_quantized_gpt_oss(tmp_path)
    message = "4 or 8 bits are read for models that are replaced"
    with pytest.raises(UnsupportedError, match=message):
        parallelize(built(tmp_path), ParallelMesh.single(), {"*": "replicate"})
    # Scales without their blocks.
    stored = SafetensorsFolder(tmp_path)
    tensors = {name: stored.read(name).contiguous() for name in stored.names()}
    name = "model.layers.1.mlp.experts.down_proj"
    del tensors[name]
    tensors[f"{name}_scales"] = torch.zeros(4, 64, 1, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="down_proj.* missing"):
        parallelize(built(tmp_path), ParallelMesh.single())
    for block_size in (None, [64, 64]):
        set_quantization(tmp_path, {**BLOCK_FP8, "weight_block_size": block_size})
        with pytest.raises(UnsupportedError, match="quantization_config of the configuration"):
            import_model(tmp_path, tmp_path / "ours")


def test_an_fp8_deepseek_folder_is_imported_and_exported_decoded(tmp_path):
    twin = twin_of("deepseek_v3").to(torch.bfloat16)
    twin.save_pretrained(tmp_path / "published")
    plain = SafetensorsFolder(tmp_path / "published")
    stored, expected = {}, {}
    for name in plain.names():
        tensor = plain.read(name).clone()
        if "proj" in name and name.endswith("weight"):
            scale = tensor.abs().max().float().view(1, 1) / 448
            numbers = (tensor.float() / scale).to(torch.float8_e4m3fn)
            stored |= {name: numbers, f"{name}_scale_inv": scale}
            tensor = (numbers.float() * scale).to(torch.bfloat16)
        else:
            stored[name] = tensor
        expected[name] = tensor
    assert len(stored) > len(expected)
    save_file(stored, tmp_path / "published" / "model.safetensors", metadata={"format": "pt"})
    set_quantization(tmp_path / "published", BLOCK_FP8)
    import_model(tmp_path / "published", tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "back")
    back = SafetensorsFolder(tmp_path / "back")
    assert set(back.names()) == expected.keys()
    assert all(torch.equal(back.read(name), tensor) for name, tensor in expected.items())
