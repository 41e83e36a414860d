"""The command ``recipes``, and recipes that change other ones."""

from __future__ import annotations

import pytest
import yaml

from lightning_megatron.recipe_files import RECIPES, with_recipe_paths
from lightning_megatron.strategy.cli import MegatronCLI


def test_recipe_is_shown_and_copied(printed, refused, tmp_path):
    text = (RECIPES / "sft_hf.yaml").read_text()
    assert printed("recipes show sft_hf") == text
    target = tmp_path / "mine.yaml"
    assert str(target) in printed("recipes copy recipe:sft_hf", target)
    assert target.read_text() == text.replace("recipe:sft_hf", str(target))
    for place in (target, tmp_path / "none" / "mine.yaml"):
        assert "cannot be written" in refused("recipes copy sft_hf", place)
    printed("recipes copy lora_hf", tmp_path)
    assert (tmp_path / "lora_hf.yaml").is_file()
    assert "recipe:nothing is not a recipe" in refused("recipes show nothing")


def test_recipe_of_your_own_changes_one_of_the_package(tmp_path, capsys, refused):
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: sft_hf\nmodel: {init_args: {path: other}}\n")
    files = [str(RECIPES / "sft_hf.yaml"), str(path)]
    assert with_recipe_paths(["-c", str(path)]) == ["-c", files[0], "-c", files[1]]
    assert with_recipe_paths([f"--config={path}"]) == [f"--config={file}" for file in files]
    with pytest.raises(SystemExit, match="^0$"):
        MegatronCLI(args=["fit", "-c", str(path), "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["data"]["init_args"]["tokenizer"] == "other"
    assert config["model"]["init_args"]["learning_rate"] == 2e-5
    path.write_text("recipe: none\n")
    assert "recipe:none is not a recipe" in refused(f"fit -c {path}")
    assert "--recipe is no option" in refused("fit --recipe sft_hf")
