"""The convert command converts checkpoints of Hugging Face models, and refuses other input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_megatron.checkpoint.hugging_face import export_model, import_model
from lightning_megatron.cli.main import main
from lightning_megatron.errors import CheckpointMismatchError
from tests.fits import Job, run_job
from tests.swap.families import twin_of


def test_conversion_copies_the_files_of_the_tokenizer(tmp_path):
    folder, out = tmp_path / "given", tmp_path / "out"
    twin_of("llama").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "notes.txt"):
        (folder / name).write_text(name)
    import_model(folder, tmp_path / "checkpoint")
    main(["convert", str(tmp_path / "checkpoint"), str(out), "--tokenizer", str(folder)])
    texts = {f.name: f.read_text() for f in out.glob("*") if f.suffix != ".safetensors"}
    copied = {name for name, text in texts.items() if name == text}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "merges.txt"}


def test_invalid_paths_options_and_checkpoints_are_refused(tmp_path, capsys):
    folder, out, checkpoint = (str(tmp_path / name) for name in ("given", "out", "checkpoint"))
    twin_of("llama").save_pretrained(folder)
    import_model(folder, checkpoint)
    for arguments, reason in (
        ([folder, folder], "must not exist yet"),
        ([str(tmp_path / "nothing"), out], "local folder"),
        ([folder, out, "--merge"], "are only for conversion to a Hugging Face folder"),
        ([folder, out, "--tokenizer", folder], "are only for conversion"),
        ([checkpoint, out, "--tokenizer", str(tmp_path)], "files of a tokenizer"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["convert", *arguments])
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(
        CheckpointMismatchError, match="'other' is not .*Choose 'model' with --name"
    ):
        export_model(checkpoint, out, name="other")
    run_job(Job(strategy={}, steps=1, save=str(tmp_path / "plain.ckpt")))
    with pytest.raises(CheckpointMismatchError, match=r"plain\.ckpt holds none.*consolidate"):
        export_model(tmp_path / "plain.ckpt", out)
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [3]}))
    with pytest.raises(CheckpointMismatchError, match=r"a list of names.*they are \[3\]"):
        import_model(folder, out)
    assert not Path(out).exists()
