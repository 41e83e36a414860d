"""Models and data sets by their names on the Hub: from its cache, in one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import HuggingFaceCausalLM
from lightning_megatron.cli.opened_model import OpenedModel
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.hub import hub_files, hub_name, local_folder
from lightning_megatron.tasks.chat import ChatDataModule
from tests.tasks.chat.chat_folder import conversations, save_chat_llama, write_lines

COMMIT = "0123456789" * 4
hub: Any = pytest.importorskip("huggingface_hub")


def cached(cache: Path, kind: str, name: str) -> Path:
    """Return the folder of a repository in a cache, as `hf download` lays it out."""
    folder = cache / f"{kind}s--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    return folder / "snapshots" / COMMIT


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a cache with a model that chats, a part of a model, and data sets with splits."""
    path = tmp_path_factory.mktemp("hub")
    save_chat_llama(cached(path, "model", "tiny/llama-0.1B"))
    part = cached(path, "model", "tiny/part")
    (part / "config.json").write_text("{}")
    index = '{"weight_map": {"a": "model-00001.safetensors"}}'
    (part / "model.safetensors.index.json").write_text(index)
    data = cached(path, "dataset", "tiny/chats") / "data"
    data.mkdir()
    for name, count in (("train_sft-00000-of-00002", 8), ("test_sft-00000-of-00001", 4)):
        write_lines(data / f"{name}.jsonl", conversations(count))
    write_lines(data / "train_sft-00001-of-00002.jsonl", conversations(8, seed=2))
    write_lines(cached(path, "dataset", "tiny/plain") / "all.jsonl", conversations(4))
    return path


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the library, which reads its variables when it is imported, use this cache alone."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def test_models_tokenizers_and_data_are_read_by_their_names(offline: Path) -> None:
    name = "tiny/llama-0.1B"
    module = HuggingFaceCausalLM(name)
    module.configure_model()
    assert module.hparams["path"] == name
    assert module.folder.startswith(str(offline))
    assert load_tokenizer(name).vocab_size == 257
    opened = OpenedModel.at(name, "float32")
    assert opened.tokenizer_name(None) == module.folder
    data = ChatDataModule("tiny/chats:train_sft", name, val="tiny/chats:test_sft", seq_length=100)
    assert [file.name for file in data.files["train"]] == [
        f"train_sft-0000{part}-of-00002.jsonl" for part in (0, 1)
    ]
    pattern = hub_files("tiny/chats@main:data/test*", (".jsonl",))
    assert pattern == list(data.files["val"])
    assert [file.name for file in hub_files("tiny/plain", (".jsonl",)) or ()] == ["all.jsonl"]


def test_what_the_cache_lacks_is_named_with_its_remedy_on_a_line_of_its_own(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(call: Any, *arguments: Any) -> list[str]:
        with pytest.raises(UnsupportedError) as error:
            call(*arguments)
        return str(error.value).splitlines()

    reason, remedy = refusal(HuggingFaceCausalLM, "nobody/nothing@v2")
    assert reason.startswith("nobody/nothing is no local path, and as the name of a model on the")
    assert str(offline) in reason
    assert remedy.endswith("hf download nobody/nothing --revision v2")
    assert "lacks model-00001.safetensors" in refusal(local_folder, "tiny/part")[0]
    assert local_folder("tiny/part", has_weights=False)
    reason, remedy = refusal(hub_files, "tiny/chats", (".jsonl",))
    assert "test_sft, train_sft" in reason
    assert remedy == "Name one of them: tiny/chats:train_sft"
    reason, remedy = refusal(hub_files, "tiny/chats:dev", (".jsonl",))
    assert "has no file like dev-*" in reason
    assert remedy.endswith("hf download tiny/chats --repo-type dataset")
    # Local paths stay local, and so do those of files that do not exist.
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for path in ("runs/model", "tiny/a.jsonl", "tiny/last.ckpt", "folder", "a/b/c", "/tiny/llama"):
        assert hub_name(path, "model") is None, path


def test_one_process_downloads_while_the_others_wait(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    most: list[int] = []

    def download(*_: object, **options: object) -> str:
        assert options["allow_patterns"] == ["*.json", "*.jinja", "*.txt", "*.model"]
        running.append(1)
        most.append(len(running))
        time.sleep(0.1)
        running.pop()
        return str(offline)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(local_folder, "tiny/other", has_weights=False) for _ in range(4)]
        assert {call.result() for call in calls} == {str(offline)}
    assert most == [1] * 4


def test_a_recipe_trains_by_names_on_two_ranks_without_a_connection(
    cache: Path, tmp_path: Path
) -> None:
    command = (
        "fit -c recipe:sft_hf --model.path tiny/llama-0.1B --data.train tiny/chats:train_sft "
        "--data.val tiny/chats:test_sft --data.seq_length 250 --data.global_batch_size 4 "
        f"--data.cache_dir {tmp_path} --data.num_workers 0 --trainer.max_steps 2 "
        "--trainer.val_check_interval 2 --trainer.accelerator cpu --trainer.devices 2 "
        f"--trainer.precision 32-true --trainer.default_root_dir {tmp_path}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lightning_megatron", *command.split()],
        env=os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "sft_hf" / "version_0" / "checkpoints").glob("step*"))


def test_user_code_loads_shards_by_name(cache: Path) -> None:
    code = (
        f"COMMIT = '{COMMIT}'\n"
        "from transformers import AutoModelForCausalLM as Auto\n"
        "from lightning_megatron.swap import build_on_meta\n"
        "from lightning_megatron.swap.pretrained.deferred import origin_of\n"
        "with build_on_meta():\n"
        "    model = Auto.from_pretrained('tiny/llama-0.1B')\n"
        "assert origin_of(model).folder.endswith(f'snapshots/{COMMIT}')\n"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
