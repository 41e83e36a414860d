"""The convert command converts checkpoints of Hugging Face models, and refuses other input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from lightning_megatron import CausalLM, GPTConfig
from lightning_megatron.checkpoint.hugging_face import export_model, import_model
from lightning_megatron.cli.main import main
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.swap.families import exported_form
from tests.fits import Job, run_job, trainer_of
from tests.oracles import float32_as_float64
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


_SIZES = {"vocab_size": 53, "max_seq_length": 16, "num_layers": 2, "hidden_size": 24}
_SIZES |= {"num_heads": 4}
_LLAMA = {"num_kv_heads": 2, "rotary_base": 1e3}
GPTS = {
    "gpt2": GPTConfig.gpt2(**_SIZES, activation="relu", hidden_dropout=0.1),
    "gpt2 with a head": GPTConfig.gpt2(**_SIZES, tie_embeddings=False, ffn_hidden_size=40),
    "llama": GPTConfig.llama(**_SIZES, **_LLAMA, head_dim=8),
    "llama with biases": GPTConfig.llama(**_SIZES, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": GPTConfig.llama(**_SIZES, **_LLAMA, qkv_bias=True, tie_embeddings=True),
    "qwen3": GPTConfig.llama(**_SIZES, **_LLAMA, qk_norm=True),
    "gptneox": GPTConfig.gpt2(**_SIZES, position="rotary", rotary_dim=4, tie_embeddings=False),
    "olmo2": GPTConfig.llama(**_SIZES, norm_position="output", qk_norm=True, qk_norm_over="layer"),
    "qwen2 with windows": GPTConfig.llama(
        **_SIZES, **_LLAMA, qkv_bias=True, sliding_window=5, window_layers=(False, True)
    ),
    "mistral": GPTConfig.llama(**_SIZES, **_LLAMA, sliding_window=5, padding_id=3),
}


@pytest.mark.parametrize("case", GPTS)
def test_a_gpt_of_this_package_becomes_a_folder_for_transformers(case, tmp_path):
    torch.manual_seed(3)
    module = CausalLM(GPTS[case]).double()
    trainer = trainer_of(Job(strategy={}, steps=1))
    tokens = torch.randint(53, (2, 12))
    data = DataLoader([{"tokens": row, "labels": row} for row in tokens], batch_size=2)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    export_model(tmp_path / "own.ckpt", tmp_path / "folder")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert type(model).__name__.lower().startswith(case.split()[0])
    assert model.dtype == torch.float64
    assert module.model is not None
    expected = module.model.eval()(tokens)
    # Hugging Face computes rotary angles in float32 when it builds a model.
    with torch.no_grad(), float32_as_float64():
        torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-8)


def test_a_gpt_that_no_class_computes_is_refused_with_its_fields():
    for changed, reason in (
        ({"norm_position": "post"}, "GPT2LMHeadModel, differs in norm_position"),
        ({"norm": "rmsnorm", "activation": "swiglu"}, "LlamaForCausalLM, differs in position"),
        ({"logit_scale": 0.5, "init_std": 0.1}, "GPT2LMHeadModel, differs in logit_scale"),
    ):
        config = GPTConfig.gpt2(**_SIZES, **changed)
        with pytest.raises(UnsupportedError, match=f"only if a class .*{reason}"):
            exported_form(config)
