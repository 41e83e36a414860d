"""Recipes train in several processes as in one, and what they leave is exported."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from lightning_megatron.cli.main import main
from lightning_megatron.data.speeches import write_documents
from lightning_megatron.data.tokenizer import load_tokenizer
from tests.corpora import SPEECHES, need
from tests.tasks.chat.chat_folder import conversations, preferences, save_chat_llama, write_lines
from tests.tiny_llama import save_tiny_mixtral
from tests.world import run_world

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

STEPS = 3
SHARED = (
    f"--trainer.max_steps={STEPS} --trainer.val_check_interval={STEPS} --trainer.log_every_n_steps=1 "
    "--trainer.limit_val_batches=1 --model.warmup_steps=0 --trainer.accelerator=cpu "
    "--trainer.precision=32-true"
)
CHATS = "--model.path={root}/chat_model --data.seq_length=250 --data.global_batch_size=4"
STREAM = "--data.streaming.shuffle_buffer=5 --data.num_workers=1"
#: Recipe and further options, options of two processes, and options of one process.
TWO = {
    "moe_speeches_cpu": (
        "-c recipe:moe_speeches_cpu --data.data_dir={root}/data --data.seq_length=32",
        "--data.batch_size=16",
        "--data.batch_size=16 --trainer.strategy.tp=1 --trainer.strategy.ep=1",
    ),
    "bert_speeches_cpu": (
        "-c recipe:bert_speeches_cpu --data.data_dir={root}/data --data.seq_length=32 "
        "--trainer.strategy.tp=1",
        "",
        "--trainer.strategy.pp=1",
    ),
    "finetune_hf": (
        "-c recipe:finetune_hf --model.path={root}/mixtral --data.corpus=null --data.train={root}/text "
        "--data.split=8,1,1 --data.seq_length=32 "
        '--model.expert_settings={{"aux_loss":0.02,"aux_loss_scope":"global"}}',
        "--trainer.strategy.ep=2 --data.batch_size=2",
        "",
    ),
    "sft_hf": (
        f"-c recipe:sft_hf {CHATS} {STREAM} --data.train={{root}}/chats/train.jsonl --data.val={{root}}/chats/val.jsonl",
        "--trainer.strategy.tp=2",
        "",
    ),
    "lora_hf": (
        f"-c recipe:lora_hf {CHATS} --data.train={{root}}/encoded/train.jsonl --data.val={{root}}/encoded/val.jsonl "
        "--model.lora.r=4 --model.learning_rate=0.01",
        "--trainer.strategy.pp=2",
        "",
    ),
    "dpo_hf": (
        f"-c recipe:dpo_hf {CHATS} {STREAM} --data.train={{root}}/pairs/train.jsonl --data.val={{root}}/pairs/val.jsonl "
        "--model.learning_rate=0.003",
        "--trainer.strategy.tp=2",
        "",
    ),
}  # fmt: skip
FOUR = {
    "gpt_speeches_cpu": (
        "-c recipe:gpt_speeches_cpu --data.data_dir={root}/data --data.seq_length=32",
        "",
        "",
    )
}


def fit(name: str, root: Path, folder: Path, options: str, devices: int) -> None:
    """Run a recipe on the processes of a world, or in this one."""
    sys.argv = ["lightning-megatron"]
    place = f"--trainer.devices={devices} --trainer.default_root_dir={folder}"
    main(["fit", *options.format(root=root).split(), *SHARED.split(), *place.split()])


def fit_all(rank: int, size: int, root: Path, recipes: Mapping[str, tuple[str, str, str]]) -> None:
    for name, (options, several, _) in recipes.items():
        fit(name, root, root / "several", f"{options} {several}", size)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models and data, and run all recipes on two and four processes."""
    need(SPEECHES)
    root = tmp_path_factory.mktemp("recipes")
    save_chat_llama(root / "chat_model")
    save_tiny_mixtral(root / "mixtral")
    texts = [f"In {year} our fathers brought forth a new nation." for year in range(1960, 2000)]
    write_documents(str(root / "text"), texts, load_tokenizer(root / "mixtral"))
    for kind, make in (
        ("chats", conversations),
        ("encoded", conversations),
        ("pairs", preferences),
    ):
        (root / kind).mkdir()
        write_lines(root / kind / "train.jsonl", make(20))
        write_lines(root / kind / "val.jsonl", make(6, seed=2))
    run_world(fit_all, 2, root, TWO)
    run_world(fit_all, 4, root, FOUR)
    return root


def losses_of(folder: Path, name: str) -> dict[str, list[float]]:
    """Return the losses in the metrics file of a run, by name."""
    columns: dict[str, list[float]] = {"train_loss": [], "val_loss": [], "val_bits_per_byte": []}
    with (folder / name / "version_0/metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for column, values in columns.items():
                if row.get(column):
                    values.append(float(row[column]))
    return columns


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_several_processes_train_a_recipe_as_one(name: str, root: Path, tmp_path: Path) -> None:
    options, _, alone = (TWO | FOUR)[name]
    if name == "gpt_speeches_cpu":
        options += " -c recipe:gpt_speeches_1process"
    fit(name, root, tmp_path, f"{options} {alone}", 1)
    one = losses_of(tmp_path, "gpt_speeches_1process" if name in FOUR else name)
    several = losses_of(root / "several", name)
    assert (len(several["train_loss"]), len(several["val_loss"])) == (STEPS, 1)
    for column, values in one.items():
        assert all(math.isfinite(value) for value in values)
        assert several[column] == pytest.approx(values, abs=2e-4), column
    if name in ("lora_hf", "dpo_hf"):
        assert several["train_loss"][-1] < several["train_loss"][0] - 0.01
    if name == "moe_speeches_cpu":
        assert (root / f"several/{name}/version_0/expert_load.png").exists()


def test_only_files_that_are_no_stream_are_encoded_before(root: Path) -> None:
    for kind, num in {"chats": 1, "pairs": 1, "encoded": 2}.items():
        folders = [path for path in (root / kind / "index_cache").iterdir() if path.is_dir()]
        assert len(folders) == num, kind


def test_trained_adapters_and_experts_are_exported(root: Path) -> None:
    def exported(name: str, *options: str) -> Path:
        (checkpoint,) = root.glob(f"several/{name}/version_0/checkpoints/step{STEPS}-*.ckpt")
        main(["convert", str(checkpoint), str(root / f"{name}_exported"), *options])
        return root / f"{name}_exported"

    assert peft.LoraConfig.from_pretrained(exported("lora_hf")).r == 4
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        exported("finetune_hf", "--verify"), output_loading_info=True
    )
    assert not any(report.values()), report
    initial = transformers.AutoModelForCausalLM.from_pretrained(root / "mixtral").state_dict()
    for name, tensor in model.state_dict().items():
        assert "mlp" not in name or not torch.equal(tensor, initial[name]), name
