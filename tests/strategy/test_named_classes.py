"""A class that a recipe or an option names has its own defaults, not those of the default class."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_megatron.strategy.cli import MegatronCLI
from lightning_megatron.strategy.named_classes import named_class

BERT = "lightning_megatron.BERTDataModule"


def resolved_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    with pytest.raises(SystemExit) as stopped:
        MegatronCLI(args=["fit", *arguments, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_named_data_module_has_its_own_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    path = tmp_path / "data.yaml"
    path.write_text(
        yaml.safe_dump({"data": {"class_path": BERT, "init_args": {"corpus": "speeches"}}})
    )
    # The default class has rows of 1,024 tokens.
    for arguments in (["-c", str(path)], [f"--data={BERT}", "--data.corpus=speeches"]):
        data = resolved_config(capsys, *arguments)["data"]
        assert data["class_path"] == BERT
        assert data["init_args"]["seq_length"] == 512
        assert data["init_args"]["corpus"] == "speeches"
    data = resolved_config(capsys, "--data.corpus=speeches")["data"]
    assert data["class_path"] == "lightning_megatron.TokenDataModule"
    assert data["init_args"]["seq_length"] == 1024


def test_last_named_class_is_used_and_missing_classes_are_left_to_the_parser(
    tmp_path: Path,
) -> None:
    first = tmp_path / "a.yaml"
    first.write_text(f"data: {BERT}\nmodel: null\n")
    second = tmp_path / "b.yaml"
    second.write_text("data: {class_path: lightning_megatron.TokenDataModule}\n")
    arguments = ["fit", "-c", str(first)]
    assert named_class(arguments, "data") == BERT
    assert named_class(arguments, "model") is None
    assert (
        named_class([*arguments, f"--config={second}"], "data")
        == "lightning_megatron.TokenDataModule"
    )
    option = ["--data.class_path", BERT]
    assert named_class(["fit", "-c", str(second), *option], "data") == BERT
    for missing in ("lightning_megatron.NoSuchModule", "no_such_package.Module", "Module", ""):
        assert named_class(["fit", "--data", missing], "data") is None
    broken = tmp_path / "c.yaml"
    broken.write_text("data: [")
    for path in (broken, tmp_path, tmp_path / "none.yaml"):
        assert named_class(["fit", "-c", str(path)], "data") is None
