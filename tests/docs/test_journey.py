"""A new user's way, by the commands of the pages in a real shell: from an empty folder and a new
environment, from text and from conversations to models for transformers, and with a module of one's
own.
"""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.cli.test_chat import ANSWERS, TEMPLATE, save_base
from tests.docs.blocks import ROOT, read_blocks
from tests.tasks.chat.chat_folder import turn, write_lines
from tests.worlds import test_automatic_plans as modules

BLOCKS = {block.name: block for block in read_blocks()}
TWO_BY_TWO = """
--trainer.accelerator cpu --trainer.devices 4 --trainer.precision 32-true --trainer.strategy.tp 2
--trainer.strategy.pp 2
"""
SMALL = """
--model.config.num_layers 4 --model.config.hidden_size 32 --model.config.num_heads 4 --data.seq_length 64
--data.global_batch_size 8 --data.num_workers 0 --data.tokenizer my_tokenizer --data.split 90,10,0
--trainer.strategy.microbatch_size 2 --model.learning_rate 0.01 --model.warmup_steps 2
--trainer.log_every_n_steps 1
"""
#: What a reader on a small machine adds to the commands of a page, by command.
OPTIONS = {
    "preprocess": "--no_progress",
    "fit": f"{SMALL} {TWO_BY_TWO} --trainer.max_steps 30",
    "generate": "--max_new_tokens 12 --json --accelerator cpu --devices 4 --tp 2 --pp 2",
    "convert": "",
}
CHAT_OPTIONS = {
    "fit": f"""
        --data.chat_template chat.jinja --data.seq_length 60 --data.global_batch_size 2 --data.num_workers 0
        --model.learning_rate 0.01 --model.warmup_steps 5 --trainer.max_steps 80
        --trainer.val_check_interval 80 {TWO_BY_TWO}
        """,
    "convert": "",
    "generate": "--accelerator cpu",
}
#: Advice and noise of libraries on which a user cannot act.
NOISE = re.compile(
    r"Traceback|LeafSpec|litlogger|weights_only|callbacks used to create|dirpath has"
)
OWN_MODULE = """
import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy

WORDS, WIDTH, HEADS, LENGTH, DEPTH = 300, 16, 4, 16, 4

{classes}

class Mine(L.LightningModule):
    def configure_model(self):
        self.model = MiniGPT(Fused)

    def training_step(self, batch, batch_idx):
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_):
        self.losses = [*getattr(self, "losses", []), self.trainer.callback_metrics["loss"].item()]


if __name__ == "__main__":
    L.seed_everything(1)
    rows = torch.arange(LENGTH + 1) + torch.randint(9, (24, 1))
    sizes = {{"devices": 4, "strategy": MegatronStrategy(tp=2, pp=2)}}
    if sys.argv[1:] == ["one"]:
        sizes = {{"devices": 1, "strategy": MegatronStrategy()}}
    trainer = L.Trainer(accelerator="cpu", precision="64-true", max_epochs=1, logger=False, **sizes)
    module = Mine()
    trainer.fit(module, DataLoader(rows, batch_size=4))
    if trainer.is_global_zero:
        print("LOSSES", *map(repr, module.losses))
"""


def shell(command: str, folder: Path, seconds: int = 200, **variables: str) -> str:
    """Run a command as a reader does, and return what it prints; it must end without an error."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **variables}
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    shown = f"$ {command}\n{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    assert run.returncode == 0, shown
    # A script makes its Trainer itself, which prints Lightning's advice.
    assert "python train" in command or not NOISE.search(run.stdout + run.stderr), shown
    return run.stdout


def commands_of(name: str, options: dict[str, str]) -> list[str]:
    """Return the commands of a block of the pages with a reader's options."""
    commands = BLOCKS[name].code.replace("\\\n", " ").splitlines()
    added = [" ".join(options[command.split()[1]].split()) for command in commands]
    return [f"{command} {more}".strip() for command, more in zip(commands, added, strict=True)]


def losses_of(run: Path) -> dict[int, float]:
    """Return the training losses of a run by step."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train_loss"]]
    return {int(row["step"]): float(row["train_loss"]) for row in rows}


def tokens_of_transformers(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return tokens[0, len(prompt) :].tolist()


def write_text(folder: Path) -> None:
    """Write text of the user's own, and the user's own tokenizer of 700 tokens for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = folder / "my_text.txt"
    text.write_text("\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    tokenizer.train(
        [str(text)], trainers.BpeTrainer(vocab_size=700, show_progress=False, **special)
    )
    (folder / "my_tokenizer").mkdir()
    tokenizer.save(str(folder / "my_tokenizer" / "tokenizer.json"))


def test_the_first_command_of_the_readme_trains_in_a_new_environment(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a clone needs a repository: these files are not in one")
    clone, venv = tmp_path / "clone", tmp_path / "venv"
    shell(f"git clone -q '{ROOT}' '{clone}' && '{sys.executable}' -m venv '{venv}'", tmp_path)
    # The new environment must not see the packages of the tests.
    path = {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    fetch = "pip download -q --no-deps -c clone/constraints.txt -d fetched lightning-utilities"
    probe = subprocess.run(
        ["bash", "-c", fetch], cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True
    )  # fmt: skip
    if probe.returncode:
        pytest.skip(f"pip reaches no index of packages: {probe.stderr.strip()[-300:]}")
    block = BLOCKS["main"]
    shell(f"{block.code.rstrip()} {block.append}", clone, 900, **path)
    run = clone / "runs/gpt_speeches_cpu/version_0"
    assert {path.name for path in run.iterdir()} >= {"checkpoints", "config.yaml", "loss.png"}
    assert "val_loss" in (run / "metrics.csv").read_text()
    say = f"lightning-megatron generate {run}/checkpoints/last.ckpt --prompt We --max_new_tokens 8"
    assert shell(f"{say} --accelerator cpu", clone, **path).startswith("We")


def test_own_text_becomes_a_model_that_transformers_continues_alike(tmp_path: Path) -> None:
    write_text(tmp_path)
    encode, fit, say, convert = commands_of("own text", OPTIONS)
    shell(encode.replace("gpt2", "my_tokenizer"), tmp_path)
    told = re.search(r"Try it: (lightning-megatron .*--prompt) ", shell(f"{fit} 2>&1", tmp_path))
    assert told is not None
    assert say.startswith(told[1])
    runs = tmp_path / "runs/pretrain_text"
    assert "vocab_size: 700\n" in (runs / "version_0/config.yaml").read_text()
    # The newest checkpoint continues, in another layout.
    again = fit.replace("max_steps 30", "max_steps 40").replace("tp 2", "tp 1")
    shell(f"{again} --ckpt_path last", tmp_path)
    first, second = losses_of(runs / "version_0"), losses_of(runs / "version_1")
    assert (min(first), max(first), min(second), max(second)) == (0, 29, 30, 39)
    assert max(first[29], *second.values()) < first[0] - 0.5
    say, convert = (command.replace("version_0", "version_1") for command in (say, convert))
    gap = re.search(r"32 tokens differ by (\S+) of", shell(convert, tmp_path))
    assert gap is not None
    assert float(gap[1]) < 1e-5
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "my_gpt")
    assert len(tokenizer) == 700
    expected = tokens_of_transformers(
        tmp_path / "my_gpt", tokenizer("The state of")["input_ids"], 12
    )
    exported = re.sub(r"runs/\S+", "my_gpt", say)
    for command in (say, exported):
        row = json.loads(shell(command, tmp_path))
        assert row["tokens"] == expected, command
        assert row["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_conversations_become_a_model_that_answers(tmp_path: Path) -> None:
    save_base(tmp_path / "my_model")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    talks = [[turn("user", asked), turn("assistant", told)] for asked, told in ANSWERS.items()]
    for name in ("my.jsonl", "held_out.jsonl"):
        write_lines(tmp_path / name, [{"messages": talk} for talk in talks])
    fit, convert, say = commands_of("train on conversations", CHAT_OPTIONS)
    checkpoint = "runs/sft_hf/version_0/checkpoints/last.ckpt"
    assert f"generate {checkpoint} --chat --prompt" in shell(f"{fit} 2>&1", tmp_path)
    (tmp_path / "my_model").rename(tmp_path / "away")
    shell(convert, tmp_path)
    assert shell(say, tmp_path) == f"{ANSWERS['Who spoke?']}\n"
    rows = write_lines(tmp_path / "rows.jsonl", [{"messages": talk[:1]} for talk in talks])
    command = f"lightning-megatron generate MODEL --chat --json --prompts {rows} --accelerator cpu"
    for model in ("chat_model", checkpoint):
        lines = shell(command.replace("MODEL", model), tmp_path).splitlines()
        assert [json.loads(line)["text"] for line in lines] == list(ANSWERS.values())
    talk = "printf 'When?\\nWho spoke?\\n' | lightning-megatron generate chat_model --interactive"
    first, _ = shell(f"{talk} --accelerator cpu --max_new_tokens 20", tmp_path).splitlines()
    assert first == ANSWERS["When?"]


def test_a_module_of_ones_own_trains_in_four_processes_as_in_one(tmp_path: Path) -> None:
    parts = (modules.Fused, modules.GPTBlock, modules.MiniGPT)
    classes = "\n\n".join(inspect.getsource(part) for part in parts)
    program = OWN_MODULE.format(classes=classes).replace("Any", "object")
    (tmp_path / "train.py").write_text(program.replace("Callable[[], nn.Module]", "type"))
    four, one = (shell(f"python train.py {how}", tmp_path) for how in ("", "one"))
    (parallel,), (single,) = (re.findall(r"LOSSES (.*)", text) for text in (four, one))
    losses = [[float(loss) for loss in text.split()] for text in (parallel, single)]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert losses[0][-1] < losses[0][0]
