"""Tensors of every Hugging Face family convert to ours and back bit for bit, in full, in shards and
through files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.families import Family, family_of, find_family
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.weights.export import export_folder, foreign_tensors
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.families import CASES, transformers, twin_of
from tests.swap.parts import full_tensors, mesh_of, part_on_meta


def family_of_case(case: str) -> Family:
    return family_of(CASES[case][0])


def loaded_gpt(case: str, twin: nn.Module) -> GPT:
    family = family_of_case(case)
    model = part_on_meta(family.config(twin.config.to_dict()), mesh_of())
    load_from(model, twin.state_dict(), family)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_is_restored_bit_for_bit(case: str) -> None:
    twin = twin_of(case)
    model = loaded_gpt(case, twin)
    ours = full_tensors(model)
    back = dict(foreign_tensors(ours.items(), family_of_case(case), model.config))
    theirs = dict(twin.named_parameters())
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_reads_its_shard_from_files(case: str, tmp_path: Path) -> None:
    twin = twin_of(case, torch.bfloat16)
    twin.save_pretrained(tmp_path)
    folder, family = SafetensorsFolder(tmp_path), family_of_case(case)
    assert folder.dtype == torch.bfloat16
    config = family.config(folder.config)
    assert config == family.config(twin.config.to_dict()), (
        "the file and the object give the same configuration"
    )
    full = full_tensors(loaded_gpt(case, twin))
    legal = [
        tp
        for tp in (1, 2, 3, 4, 6)
        if config.num_heads % tp == 0 and (config.kv_heads % tp == 0 or tp % config.kv_heads == 0)
    ]
    assert len(legal) >= 4
    for tp in legal:
        for pp, pp_rank, tp_rank in [
            (n, p, t) for n in (1, 3) for p in range(n) for t in range(tp)
        ]:
            part = part_on_meta(config, mesh_of(tp, pp, tp_rank, pp_rank))
            load_from(part, folder, family)
            for name, parameter in part.named_parameters():
                spec = shard_spec_of(parameter)
                expected = spec.shard(full[spec.tied_to or name].float(), parameter.shape[spec.dim])
                assert torch.equal(parameter, expected), (
                    f"{name} on tp {tp_rank} of {tp}, pp {pp_rank} of {pp}"
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_an_exported_folder_is_loaded_bit_for_bit(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    twin, family = twin_of(case, dtype), family_of_case(case)
    model = loaded_gpt(case, twin)
    export_folder(
        full_tensors(model).items(), family, twin.config.to_dict(), tmp_path, 20_000, dtype
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    reloaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(reloaded) is type(twin)
    assert not any(report.values()), report
    expected = twin.state_dict()
    assert reloaded.state_dict().keys() == expected.keys()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in reloaded.state_dict().items()
    )
    assert all(tensor.dtype == dtype for tensor in reloaded.parameters())
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(reloaded.eval()(tokens).logits, twin.eval()(tokens).logits)


def test_loading_keeps_the_dtype_and_memory_of_parameters() -> None:
    twin, family = twin_of("llama", torch.float64), family_of("llama")
    model = GPT(family.config(twin.config.to_dict()), seed=1).bfloat16()
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load_from(model, twin.state_dict(), family)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert torch.equal(model.final_norm.weight, twin.model.norm.weight.bfloat16())


def test_a_file_of_gpt2_without_head_and_with_masks_is_read(tmp_path: Path) -> None:
    twin = twin_of("gpt2")
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(3)}
    expected = full_tensors(loaded_gpt("gpt2", twin))
    model = part_on_meta(family_of("gpt2").config(twin.config.to_dict()), mesh_of())
    load_from(model, twin.transformer.state_dict() | masks, family_of("gpt2"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full_tensors(model).items())


def test_earlier_names_of_gpt_neox_are_read() -> None:
    twin = twin_of("gpt_neox")
    expected = full_tensors(loaded_gpt("gpt_neox", twin))
    state = {
        name.replace("lm_head", "embed_out"): tensor for name, tensor in twin.state_dict().items()
    }
    state["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(2)
    model = part_on_meta(family_of("gpt_neox").config(twin.config.to_dict()), mesh_of())
    load_from(model, state, family_of("gpt_neox"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full_tensors(model).items())
    state["lm_head.weight"] = state["embed_out.weight"]
    with pytest.raises(
        CheckpointMismatchError, match="'embed_out.weight' and 'lm_head.weight' are two names of"
    ):
        load_from(model, state, family_of("gpt_neox"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "'model.norm.weight' missing"),
        ({"model.extra.weight": torch.ones(2)}, "'model.extra.weight' unexpected"),
        ({"model.norm.weight": torch.ones(5)}, r"'model.norm.weight' \(5,\) instead of \(48,\)"),
        ({"lm_head.weight": None}, "'lm_head.weight' missing"),
        (
            {"model.norm.weight": torch.ones(48, device="meta")},
            "'model.norm.weight' is on the meta device",
        ),
    ],
)
def test_tensors_of_another_model_are_refused(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    twin, family = twin_of("llama"), family_of("llama")
    state = {
        name: tensor
        for name, tensor in {**twin.state_dict(), **change}.items()
        if tensor is not None
    }
    model = part_on_meta(family.config(twin.config.to_dict()), mesh_of())
    with pytest.raises(CheckpointMismatchError, match=message):
        load_from(model, state, family)


def test_a_model_of_another_configuration_is_refused() -> None:
    twin, family = twin_of("llama"), family_of("llama")
    biased = part_on_meta(family.config({**twin.config.to_dict(), "mlp_bias": True}), mesh_of())
    # The model determines the table, so its biases are missing among the tensors.
    with pytest.raises(
        CheckpointMismatchError, match=r"'model.layers.0.mlp.down_proj.bias'.* missing"
    ):
        load_from(biased, twin.state_dict(), family)


def test_a_tied_head_that_differs_from_the_embedding_is_refused() -> None:
    twin, family = twin_of("qwen3"), family_of("qwen3")
    state = twin.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    config = family.config(twin.config.to_dict())
    separate = state | {"lm_head.weight": state["lm_head.weight"].clone()}
    load_from(part_on_meta(config, mesh_of(2)), separate, family)
    separate["lm_head.weight"][40] += 1
    with pytest.raises(
        CheckpointMismatchError, match="a tied output head must equal the embedding"
    ):
        load_from(part_on_meta(config, mesh_of()), separate, family)


def test_an_export_names_wrong_tensors_and_leaves_no_files(tmp_path: Path) -> None:
    twin, family = twin_of("llama"), family_of("llama")
    ours = full_tensors(loaded_gpt("llama", twin))
    config = twin.config.to_dict()
    for tensors, message in (
        (
            {name: t for name, t in ours.items() if name != "final_norm.weight"},
            "'final_norm.weight' missing",
        ),
        (
            {**ours, "layers.9.mlp.down.weight": torch.ones(2)},
            "'layers.9.mlp.down.weight' is unknown",
        ),
        (
            {**ours, "final_norm.weight": torch.ones(64)},
            r"'final_norm.weight' has \(64,\) instead of \(48,\)",
        ),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            export_folder(tensors.items(), family, config, tmp_path, 20_000)
        assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointMismatchError, match="given twice"):
        export_folder([*ours.items(), *ours.items()], family, config, tmp_path)
    export_folder(ours.items(), family, config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(UnsupportedError, match="a folder without weights"):
        export_folder(ours.items(), family, config, tmp_path)


def test_an_unknown_family_is_refused_with_the_known_families() -> None:
    with pytest.raises(UnsupportedError, match=r"'opt' is not.*llama \(LlamaForCausalLM\)"):
        family_of("opt")
    assert find_family("OPTForCausalLM") is None


def test_a_family_of_the_user_takes_precedence() -> None:
    user_family = Family(
        "llama", "OwnForCausalLM", family_of("llama").config, family_of("llama").tensors
    )
    assert family_of("llama", [user_family]) is user_family
    assert family_of("OwnForCausalLM", [user_family]) is user_family
