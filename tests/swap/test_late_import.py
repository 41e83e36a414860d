"""A module that is imported later is changed as one that is there, and none is imported for it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_megatron.swap import build_on_meta
from lightning_megatron.swap.pretrained.late_import import call_on_import

NAME = "a_module_of_this_test"


@pytest.fixture
def module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return tmp_path


def test_a_module_is_acted_on_once_and_only_inside_the_block(module_path: Path) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    with call_on_import(NAME, lambda module: seen.append(module.value)):
        assert not seen
        importlib.import_module(NAME)
        assert seen == [1]
        with call_on_import(NAME, lambda module: seen.append(2)):
            assert seen == [1, 2]
    assert sys.meta_path == finders
    del sys.modules[NAME]
    with call_on_import(NAME, lambda module: seen.append(3)):
        pass
    importlib.import_module(NAME)
    assert seen == [1, 2]
    assert sys.meta_path == finders


def test_models_are_built_on_meta_though_transformers_come_later_and_are_not_imported_for_others() -> (
    None
):
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("left", [(), ("peft",), ("peft.tuners.tuners_utils",)])
def test_models_are_built_on_meta_after_an_import_of_peft_has_failed_half_way(
    left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("peft", "peft.tuners.tuners_utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in left:
        module = ModuleType(name)
        module.BaseTuner = object
        monkeypatch.setitem(sys.modules, name, module)
    with build_on_meta():
        pass
