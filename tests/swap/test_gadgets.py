"""Reading a folder of weights, a configuration, a checkpoint file or the YAML of a recipe runs no code
in it.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from lightning_megatron.checkpoint.hugging_face import import_model
from lightning_megatron.checkpoint.single_file import read_single_file
from lightning_megatron.cli import checkpoint as cli_checkpoint
from lightning_megatron.cli import convert as cli_convert
from lightning_megatron.cli.main import OUR_ERRORS
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.families import config_of, transformers


class Trap:
    """Create a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def trap_path(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


def save_llama(folder: Path) -> Path:
    transformers.AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(folder)
    return folder


def write_trap(path: Path, trap_path: Path, kind: str) -> None:
    if kind == "torch.save":
        torch.save({"state_dict": {"weight": Trap(trap_path)}}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"state_dict": {"weight": Trap(trap_path)}}, protocol=2))
    else:
        numpy.save(
            path.with_suffix(".npy"),
            numpy.array([Trap(trap_path)], dtype=object),
            allow_pickle=True,
        )
        path.with_suffix(".npy").rename(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["torch.save", "pickle", "numpy"])
def test_reading_a_checkpoint_file_runs_no_code(kind: str, tmp_path: Path, trap_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_trap(path, trap_path, kind)
    with pytest.raises((CorruptDataError, UnsupportedError), match="last.ckpt"):
        read_single_file(path)
    with pytest.raises((*OUR_ERRORS, SystemExit)):
        cli_checkpoint.main(["show", str(path)])
    assert not trap_path.exists()
    if kind == "torch.save":
        read_single_file(path, weights_only=False)  # the trap springs if the user allows code
        assert trap_path.exists()


@pytest.mark.parametrize("kind", ["torch.save", "pickle", "numpy"])
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "consolidated.00.pth", "model.pt"]
)
def test_pickled_weights_are_refused_without_running_code(
    name: str, kind: str, tmp_path: Path, trap_path: Path
) -> None:
    folder = save_llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    write_trap(folder / name, trap_path, kind)
    with pytest.raises(OUR_ERRORS, match="model"):
        SafetensorsFolder(folder)
    with pytest.raises(OUR_ERRORS):
        cli_convert.main([str(folder), str(tmp_path / "out")])
    assert not trap_path.exists()


def test_code_that_a_configuration_names_does_not_run(tmp_path: Path, trap_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    parts = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    config |= {"auto_map": dict.fromkeys(parts, "trap.Trap")}
    for file in ("trap.py", "__init__.py", "sitecustomize.py"):
        (folder / file).write_text(f"import os\nos.mkdir({str(trap_path)!r})\nclass Trap: pass\n")
    (folder / "config.json").write_text(json.dumps(config))
    import_model(folder, tmp_path / "out")
    cli_convert.main([str(tmp_path / "out"), str(tmp_path / "again"), "--verify"])
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "trust_remote_code": True}))
    with pytest.raises(
        UnsupportedError, match="trust_remote_code of a Llama configuration must be None or False"
    ):
        import_model(folder, tmp_path / "trusted")
    assert not trap_path.exists()


def test_yaml_tags_of_a_recipe_create_no_objects(tmp_path: Path, trap_path: Path) -> None:
    from lightning_megatron.strategy.cli import main

    # A class_path of a recipe is imported, because recipes name the code of a training.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: !!python/object/apply:os.mkdir [{str(trap_path)!r}]\n")
    with pytest.raises((SystemExit, *OUR_ERRORS)):
        main(["fit", "-c", str(recipe)])
    assert not trap_path.exists()
