"""A class that a recipe or an option names has its own defaults, not those of the default class."""

from __future__ import annotations

import pytest
import yaml

from lightning_megatron.strategy.cli import MegatronCLI, named_class

BERT = "lightning_megatron.tasks.bert.BERTDataModule"


def test_named_data_module_has_its_own_defaults(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lightning-megatron"])
    path, corpus = tmp_path / "data.yaml", "--data.corpus=speeches"
    path.write_text(f"data: {{class_path: {BERT}, init_args: {{corpus: speeches}}}}\n")
    # The default class has rows of 1,024 tokens.
    for arguments, name, length in (
        (["-c", str(path)], BERT, 512),
        ([f"--data={BERT}", corpus], BERT, 512),
        ([corpus], "lightning_megatron.TokenDataModule", 1024),
    ):
        with pytest.raises(SystemExit):
            MegatronCLI(args=["fit", *arguments, "--print_config"])
        data = yaml.safe_load(capsys.readouterr().out)["data"]
        assert data["class_path"] == name
        assert (data["init_args"]["seq_length"], data["init_args"]["corpus"]) == (
            length,
            "speeches",
        )


def test_last_named_class_is_used_and_missing_classes_are_left_to_the_parser(tmp_path):
    first = tmp_path / "a.yaml"
    first.write_text(f"data: {BERT}\nmodel: null\n")
    second = tmp_path / "b.yaml"
    second.write_text("data: {class_path: lightning_megatron.TokenDataModule}\n")
    broken = tmp_path / "c.yaml"
    broken.write_text("data: [")
    tokens = "lightning_megatron.TokenDataModule"
    for arguments, expected in (
        (["-c", str(first)], BERT),
        (["-c", str(first), f"--config={second}"], tokens),
        (["-c", str(second), "--data.class_path", BERT], BERT),
        *(
            (["--data", f"{name}Module"], None)
            for name in ("", "no_such_package.", "lightning_megatron.")
        ),
        *((["-c", str(path)], None) for path in (broken, tmp_path, tmp_path / "none.yaml")),
    ):
        assert named_class(["fit", *arguments], "data") == expected
    assert named_class(["fit", "-c", str(first)], "model") is None
