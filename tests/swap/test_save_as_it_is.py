"""Hugging Face models that keep their own code, and adapters, are saved in full from all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.world import run_world

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
# No family computes this activation, so the model keeps its own code.
OWN_CODE = {**SIZES, "hidden_act": "tanh"}
#: Class, settings and layout of each case; a vocabulary of 53 is padded under tp, and OPT is not
#: cut.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "tp": ("Olmo2ForCausalLM", OWN_CODE, {"tp": 2}),
    "tied tp": ("Olmo2ForCausalLM", {**OWN_CODE, "tie_word_embeddings": True}, {"tp": 2}),
    "pp": ("Olmo2ForCausalLM", OWN_CODE, {"pp": 2}),
    "tied pp": ("Olmo2ForCausalLM", {**OWN_CODE, "tie_word_embeddings": True}, {"pp": 2}),
    "experts tp": (
        "OlmoeForCausalLM",
        {**OWN_CODE, "num_experts": 4, "num_experts_per_tok": 2},
        {"tp": 2},
    ),
    "own class tp": ("DerivedOlmo2", OWN_CODE, {"tp": 2}),
    "whole": (
        "OPTForCausalLM",
        {
            **{"vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "ffn_dim": 16, "word_embed_proj_dim": 16},
        },
        {"tp": 2},
    ),
}


#: Class, settings and layout of models with adapters; Llama models are replaced.
ADAPTED: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "two adapters pp": ("Olmo2ForCausalLM", OWN_CODE, {"pp": 2}),
    "head pp": ("Olmo2ForCausalLM", OWN_CODE, {"pp": 2}),
    "replaced tp": ("LlamaForCausalLM", SIZES, {"tp": 2}),
    "replaced, head pp": ("LlamaForCausalLM", SIZES, {"pp": 2}),
}


class DerivedOlmo2(transformers.Olmo2ForCausalLM):
    """Derive from a Hugging Face class, as users do."""


def build_model(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    kind = DerivedOlmo2 if name == "DerivedOlmo2" else getattr(transformers, name)
    return kind(kind.config_class(**settings))


def twin_of(case: str) -> Any:
    name, settings, _ = CASES[case]
    return build_model(name, settings)


def save_all_cases(rank: int, size: int, folder: Path) -> None:
    for case, (_, _, layout) in CASES.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **layout), sequence_parallel=False)
        root: Any = nn.ModuleDict({"model": twin_of(case)})
        before = sum(parameter.numel() for parameter in root.parameters())
        parallelize(root, mesh)
        assert (sum(parameter.numel() for parameter in root.parameters()) < before) == (
            case != "whole"
        )
        if case != "whole" or rank == 0:
            root["model"].save_pretrained(
                folder / case, max_shard_size="10KB", is_main_process=rank == 0
            )
        if case == "tp":
            with pytest.raises(UnsupportedError, match="takes no variant"):
                root["model"].save_pretrained(folder / "new", variant="fp16")
        mesh.destroy()
    save_adapters(rank, size, folder)


def adapted(case: str) -> Any:
    """Return a model with two adapters of random values, or with one adapter and a fully trained
    head.
    """
    name, settings, _ = ADAPTED[case]
    model = build_model(name, settings)
    targets: dict[str, Any] = {
        "r": 2,
        "target_modules": ["q_proj", "up_proj"],
        "base_model_name_or_path": "",
    }
    head = {"modules_to_save": ["lm_head"]} if "head" in case else {}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**targets, **head))
    if "two" in case:
        wrapped.add_adapter("second", peft.LoraConfig(**{**targets, "r": 3}))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return wrapped


def save_adapters(rank: int, size: int, folder: Path) -> None:
    for case, (name, _, layout) in ADAPTED.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **layout), sequence_parallel=False)
        root: Any = nn.ModuleDict({"model": adapted(case)})
        before = sum(parameter.numel() for parameter in root.parameters())
        parallelize(root, mesh)
        assert sum(parameter.numel() for parameter in root.parameters()) < before
        root["model"].save_pretrained(folder / case, is_main_process=rank == 0)
        if name == "Olmo2ForCausalLM":
            with pytest.raises(
                UnsupportedError, match="Call save_pretrained of the PeftModel on all ranks"
            ):
                root["model"].get_base_model().save_pretrained(folder / "base")
        else:
            with pytest.raises(UnsupportedError, match="cannot be written by itself: 'model'"):
                root["model"].get_base_model().model.save_pretrained(folder / "part")
        mesh.destroy()
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2), sequence_parallel=False)
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    root = nn.ModuleDict({"model": peft.get_peft_model(twin_of("pp"), prompts)})
    parallelize(root, mesh)
    with pytest.raises(
        UnsupportedError,
        match="save_pretrained writes only adapters .*: 'default' is of the type",
    ):
        root["model"].save_pretrained(folder / "prompts")
    mesh.destroy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all cases from two processes."""
    path = tmp_path_factory.mktemp("saved")
    run_world(save_all_cases, 2, path)
    return path


@pytest.mark.parametrize("case", ADAPTED)
def test_peft_reads_the_full_adapter_that_all_ranks_saved(
    case: str, folder: Path, tmp_path: Path
) -> None:
    adapted(case).save_pretrained(tmp_path)
    for name in (".", "second") if "two" in case else (".",):
        expected, actual = (
            safetensors.load_file(path / name / "adapter_model.safetensors")
            for path in (tmp_path, folder / case)
        )
        assert actual.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(actual[key], tensor), key
        configs = [
            peft.LoraConfig.from_pretrained(path / name) for path in (tmp_path, folder / case)
        ]
        assert configs[0] == configs[1]
        assert configs[1].inference_mode
    reloaded = peft.PeftModel.from_pretrained(build_model(*ADAPTED[case][:2]), folder / case).eval()
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(
        reloaded(input_ids=tokens).logits, adapted(case).eval()(input_ids=tokens).logits
    )


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_keeps_its_own_code_is_saved_in_full(
    case: str, folder: Path, tmp_path: Path
) -> None:
    twin = twin_of(case)
    twin.save_pretrained(tmp_path)
    names = [
        {key for file in place.glob("*.safetensors") for key in safetensors.load_file(file)}
        for place in (folder / case, tmp_path)
    ]
    assert names[0] == names[1]
    reloaded, report = type(twin).from_pretrained(folder / case, output_loading_info=True)
    assert not any(report.values()), f"{case}: {report}"
    expected, actual = twin.state_dict(), reloaded.state_dict()
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{case}: {name}"
    assert reloaded.config.architectures == [type(twin).__name__]
