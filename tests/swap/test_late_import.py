"""A callback runs once for a module imported before or in a block, which does not import it itself."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from lightning_megatron.swap import build_on_meta
from lightning_megatron.swap.pretrained.late_import import call_on_import
from tests.swap.families import config_of, transformers

NAME = "a_module_of_this_test"


def test_import_callback_runs_once_and_only_inside_the_block(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    calls: list[int] = []
    finders = list(sys.meta_path)
    with call_on_import(NAME, lambda module: calls.append(module.value)):
        assert not calls
        importlib.import_module(NAME)
        assert calls == [1]
        with call_on_import(NAME, lambda module: calls.append(2)):
            assert calls == [1, 2]
    assert sys.meta_path == finders
    del sys.modules[NAME]
    with call_on_import(NAME, lambda module: calls.append(3)):
        pass
    importlib.import_module(NAME)
    assert calls == [1, 2]
    assert sys.meta_path == finders


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
    assert not library.from_config(config_of("gpt2")).lm_head.weight.is_meta
