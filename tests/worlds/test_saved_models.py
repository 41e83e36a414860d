"""Models and adapters that several ranks hold are saved in full by save_pretrained, from all ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups import mesh as mesh_module
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.swap.families import V, transformers, twin_of
from tests.swap.parts import swapped
from tests.world import run_world

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
SIZES |= {"num_hidden_layers": 4}
# No family computes this activation, so the model keeps its own code.
OWN_CODE = {**SIZES, "hidden_act": "tanh"}
TIED = {**OWN_CODE, "tie_word_embeddings": True}
MIXTURE = {**OWN_CODE, "num_experts": 4, "num_experts_per_tok": 2}
OPT = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"ffn_dim": 16, "word_embed_proj_dim": 16}
#: Class, settings and layout of models that keep their own code; a vocabulary of 53 is padded under
#: tp, and OPT is not cut.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "tied pp": ("Olmo2ForCausalLM", TIED, {"pp": 2}),
    "experts tp": ("OlmoeForCausalLM", MIXTURE, {"tp": 2}),
    "tied tp": ("Olmo2ForCausalLM", TIED, {"tp": 2}),
    "own class tp": ("DerivedOlmo2", OWN_CODE, {"tp": 2}),
    "whole": ("OPTForCausalLM", OPT, {"tp": 2}),
}
#: Class, settings and layout of models with adapters; Llama models are replaced.
ADAPTED: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "two adapters pp": ("Olmo2ForCausalLM", OWN_CODE, {"pp": 2}),
    "replaced tp": ("LlamaForCausalLM", SIZES, {"tp": 2}),
    "replaced, head pp": ("LlamaForCausalLM", SIZES, {"pp": 2}),
}
#: Replaced models.
REPLACED = {"llama": {"tp": 2}, "gpt2": {"pp": 2}}


class DerivedOlmo2(transformers.Olmo2ForCausalLM):
    """Derive from a Hugging Face class, as users do."""


def build_model(name: str, settings: dict[str, Any], *_: Any) -> Any:
    torch.manual_seed(0)
    kind = DerivedOlmo2 if name == "DerivedOlmo2" else getattr(transformers, name)
    return kind(kind.config_class(**settings))


def adapted(case: str) -> Any:
    """Return a model with two adapters of random values, or with one adapter and a fully trained
    head.
    """
    targets: dict[str, Any] = {
        "target_modules": ["q_proj", "up_proj"],
        "base_model_name_or_path": "",
    }
    head = {"modules_to_save": ["lm_head"]} if "head" in case else {}
    model = build_model(*ADAPTED[case])
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, **targets, **head))
    if "two" in case:
        wrapped.add_adapter("second", peft.LoraConfig(r=3, **targets))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return wrapped


def cut(model: Any, size: int, sizes: dict[str, int]) -> tuple[Any, ParallelMesh, bool]:
    """Parallelize a model; return it, its mesh, and whether it holds fewer elements than before."""
    mesh = ParallelMesh.create(ParallelLayout(size, **sizes), sequence_parallel=False)
    root: Any = nn.ModuleDict({"model": model})
    before = sum(parameter.numel() for parameter in root.parameters())
    parallelize(root, mesh)
    return root["model"], mesh, sum(parameter.numel() for parameter in root.parameters()) < before


def save_all(rank: int, size: int, folder: Path) -> str:
    for case, (_, _, sizes) in CASES.items():
        model, mesh, is_cut = cut(build_model(*CASES[case]), size, sizes)
        assert is_cut == (case != "whole")
        if is_cut or rank == 0:
            options = {"max_shard_size": "10KB", "is_main_process": rank == 0}
            model.save_pretrained(folder / case, **options)
        mesh.destroy()
    for case, (name, _, sizes) in ADAPTED.items():
        model, mesh, is_cut = cut(adapted(case), size, sizes)
        assert is_cut
        model.save_pretrained(folder / case, is_main_process=rank == 0)
        base = model.get_base_model()
        if name == "Olmo2ForCausalLM":
            with pytest.raises(UnsupportedError, match="Call save_pretrained of the PeftModel on"):
                base.save_pretrained(folder / "base")
        else:
            with pytest.raises(UnsupportedError, match="cannot be written by itself: 'model'"):
                base.model.save_pretrained(folder / "part")
        mesh.destroy()
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    prompted = peft.get_peft_model(build_model(*CASES["tied pp"]), prompts)
    model, mesh, _ = cut(prompted, size, {"pp": 2})
    with pytest.raises(UnsupportedError, match="writes only adapters .*: 'default' is of the type"):
        model.save_pretrained(folder / "prompts")
    mesh.destroy()
    for case, sizes in REPLACED.items():
        model, mesh, _ = cut(twin_of(case), size, sizes)
        model.save_pretrained(folder / case, max_shard_size="20KB")
        mesh.destroy()
        # As after Trainer.fit.
        model.save_pretrained(folder / f"{case} after")
        # Rank 0 refuses the folder, and all ranks raise.
        with pytest.raises(UnsupportedError, match="folder without weights"):
            model.save_pretrained(folder / case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_module, "_TIMEOUT", timedelta(seconds=1))
        try:
            if rank == 0:
                model.save_pretrained(folder / "alone")
        except UnsupportedError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Write all cases from two processes; return the folder and the error of a save on one rank."""
    path = tmp_path_factory.mktemp("saved")
    return path, run_world(save_all, 2, path)[0]


def test_saving_after_a_run_on_one_rank_is_refused(saved: tuple[Path, str]) -> None:
    assert "must be called on all ranks" in saved[1]
    assert "rank 1 did not join within 1 s" in saved[1]
    assert not (saved[0] / "alone").exists()


def test_peft_reads_the_full_adapter_that_all_ranks_saved(saved, tmp_path):
    tokens = torch.arange(10).view(2, 5)
    for case in ADAPTED:
        expected, folder = adapted(case), saved[0] / case
        expected.save_pretrained(tmp_path / case)
        for name in (".", "second") if "two" in case else (".",):
            paths = (folder / name, tmp_path / case / name)
            ours, theirs = (
                safetensors.load_file(path / "adapter_model.safetensors") for path in paths
            )
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items()), case
            configs = [peft.LoraConfig.from_pretrained(path) for path in paths]
            assert configs[0] == configs[1]
            assert configs[0].inference_mode
        base = build_model(*ADAPTED[case])
        reloaded = peft.PeftModel.from_pretrained(base, folder).eval()
        assert torch.equal(reloaded(tokens).logits, expected.eval()(tokens).logits)


def test_models_are_saved_in_full(saved: tuple[Path, str], tmp_path: Path) -> None:
    twins = {case: build_model(*CASES[case]) for case in CASES}
    twins |= {f"{case}{when}": twin_of(case) for case in REPLACED for when in ("", " after")}
    for case, twin in twins.items():
        twin.save_pretrained(tmp_path / case)
        names = [
            {key for file in place.glob("*.safetensors") for key in safetensors.load_file(file)}
            for place in (saved[0] / case, tmp_path / case)
        ]
        assert case not in CASES or names[0] == names[1], case
        reloaded, report = type(twin).from_pretrained(saved[0] / case, output_loading_info=True)
        assert not any(report.values()), f"{case}: {report}"
        expected, actual = twin.state_dict(), reloaded.state_dict()
        assert expected.keys() == actual.keys()
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items()), case
        assert reloaded.config.architectures == [type(twin).__name__]


def test_saves_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    model = swapped(twin_of("llama"))
    for options, message in (
        ({"variant": "fp16"}, "takes no variant"),
        ({"max_shard_size": "much"}, "max_shard_size must"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            model.save_pretrained(tmp_path / "new", **options)
