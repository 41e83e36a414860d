"""Models whose blocks are compiled compute the same, and models are built without weights however their
libraries are imported.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import build_on_meta, parallelize
from tests.oracles import assert_equal
from tests.swap.families import config_of, exact_twin, transformers, twin_of
from tests.swap.parts import swapped


@pytest.mark.parametrize("case", ["mistral", "mixtral"])
def test_compiled_blocks_match_eager_blocks(case):
    eager, compiled = (swapped(exact_twin(case, num_hidden_layers=2)) for _ in range(2))
    torch.compiler.reset()
    for block in compiled.model.layers:
        block.compile(backend="aot_eager")
    tokens = torch.randint(
        eager.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for call in ({}, {"attention_mask": mask}) if case == "mistral" else ({},):
        losses = [
            model(input_ids=tokens, labels=tokens, **call).loss for model in (eager, compiled)
        ]
        assert_equal(losses[1], losses[0], case)
        for model, loss in zip((eager, compiled), losses, strict=True):
            model.zero_grad()
            loss.backward()
        pairs = zip(eager.named_parameters(), compiled.parameters(), strict=True)
        for (name, expected), actual in pairs:
            assert_equal(actual.grad, expected.grad, f"{case}, {sorted(call)}: {name}")


@pytest.mark.parametrize("part", ["whole", "block", "wrapped"])
def test_model_compiled_before_its_replacement_is_refused(part):
    model = twin_of("llama")
    if part == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        (model if part == "whole" else model.model.layers[1]).compile(backend="eager")
    with pytest.raises(UnsupportedError, match="was compiled.*Compile the new modules in on_fit"):
        parallelize(nn.ModuleDict({"model": model}), ParallelMesh.single())


def test_models_are_built_on_meta_if_transformers_is_imported_inside_the_block():
    code = """
import sys
from lightning_megatron.swap import build_on_meta
with build_on_meta():
    assert "transformers.modeling_utils" not in sys.modules
    from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = AutoModelForCausalLM.from_config(config)
assert model.lm_head.weight.is_meta
assert not AutoModelForCausalLM.from_config(config).lm_head.weight.is_meta
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("remaining", [(), ("peft",), ("peft.tuners.tuners_utils",)])
def test_build_on_meta_works_after_a_partly_failed_import_of_peft(remaining, monkeypatch):
    for name in ("peft", "peft.tuners.tuners_utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in remaining:
        module: Any = ModuleType(name)
        module.BaseTuner = object
        monkeypatch.setitem(sys.modules, name, module)
    finders, library = list(sys.meta_path), transformers.AutoModelForCausalLM
    with build_on_meta():
        model = library.from_config(config_of("gpt2"))
    assert model.lm_head.weight.is_meta
    assert sys.meta_path == finders
