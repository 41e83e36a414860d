"""Hugging Face models that keep their own code are written whole, whatever ranks hold of them."""

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

SIZES: dict[str, Any] = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
#: Class, settings and layout of each case; a vocabulary of 53 is padded under tp, and BLOOM stays whole.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "tp": ("Olmo2ForCausalLM", SIZES, {"tp": 2}),
    "tied tp": ("Olmo2ForCausalLM", {**SIZES, "tie_word_embeddings": True}, {"tp": 2}),
    "pp": ("Olmo2ForCausalLM", SIZES, {"pp": 2}),
    "tied pp": ("Olmo2ForCausalLM", {**SIZES, "tie_word_embeddings": True}, {"pp": 2}),
    "whole": ("BloomForCausalLM", {"vocab_size": 53, "hidden_size": 16, "n_layer": 2, "n_head": 4}, {"tp": 2}),
}


def twin_of(case: str) -> Any:
    name, settings, _ = CASES[case]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings))


def save(rank: int, size: int, folder: Path) -> None:
    for case, (_, _, layout) in CASES.items():
        mesh = ParallelMesh.create(ParallelLayout(size, **layout), sequence_parallel=False)
        root: Any = nn.ModuleDict({"model": twin_of(case)})
        before = sum(one.numel() for one in root.parameters())
        parallelize(root, mesh)
        assert (sum(one.numel() for one in root.parameters()) < before) == (case != "whole")
        if case != "whole" or rank == 0:
            root["model"].save_pretrained(folder / case, max_shard_size="10KB")
        if case == "tp":
            with pytest.raises(UnsupportedError, match="takes no variant"):
                root["model"].save_pretrained(folder / "new", variant="fp16")
        mesh.destroy()


def test_a_model_that_keeps_its_code_is_written_whole(tmp_path: Path) -> None:
    run_world(save, 2, tmp_path)
    for case in CASES:
        twin = twin_of(case)
        again, report = type(twin).from_pretrained(tmp_path / case, output_loading_info=True)
        assert not any(report.values()), f"{case}: {report}"
        expected, found = twin.state_dict(), again.state_dict()
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{case}: {name}"
        assert again.config.architectures == [type(twin).__name__]
