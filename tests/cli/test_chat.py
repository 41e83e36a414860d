"""From conversations to answers by three commands: the template that trained a model goes with it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightning_megatron.checkpoint.load import saved_tokenizer
from lightning_megatron.tasks.chat import ChatTokenizer
from tests.tasks.chat.chat_folder import save_chat_llama, turn, write_lines
from tests.tiny_llama import save_tiny_llama

CPU = "--accelerator cpu --precision 32-true"
ANSWERS = {"Who spoke?": "Lincoln.", "When?": "In 1861."}
# The tokenizer of the folder has no template, and its end of text does not end a message.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fit the recipe on two questions, export the last checkpoint, and return the folder of both."""
    from lightning_megatron.cli.main import main

    root = tmp_path_factory.mktemp("chat")
    save_base(root / "model")
    (root / "chat.jinja").write_text(TEMPLATE)
    rows = [
        {"messages": [turn("user", asked), turn("assistant", answer)]}
        for asked, answer in ANSWERS.items()
    ]
    data = write_lines(root / "train.jsonl", rows)
    main(
        f"fit -c recipe:sft_hf --model.path {root}/model --data.train {data} --data.val {data} "
        f"--data.chat_template {root}/chat.jinja --data.seq_length 60 --data.global_batch_size 2 "
        f"--data.num_workers 0 --model.learning_rate 0.02 --model.warmup_steps 5 "
        f"--trainer.max_steps 50 --trainer.val_check_interval 50 --trainer.accelerator cpu "
        f"--trainer.devices 1 --trainer.precision 32-true --trainer.default_root_dir {root}".split()
    )
    [checkpoint] = (root / "sft_hf" / "version_0" / "checkpoints").glob("step*")
    checkpoint.rename(root / "trained.ckpt")
    main(["convert", str(root / "trained.ckpt"), str(root / "exported")])
    return root


def save_base(folder: Path) -> None:
    """Write a base model: no template, and a token of which its configuration knows nothing."""
    from transformers import PreTrainedTokenizerFast

    save_tiny_llama(folder, vocab_size=258, max_position_embeddings=160)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.save_pretrained(folder)


def test_three_commands_lead_from_conversations_to_answers(trained: Path, printed: Any) -> None:
    for model in (trained / "exported", trained / "trained.ckpt"):
        for question, answer in ANSWERS.items():
            command = f"generate {model} --chat {CPU}".split()
            assert printed("", *command, "--prompt", question) == f"{answer}\n"
    prompts = [part for question in ANSWERS for part in ("--prompt", question)]
    text = printed("", *f"generate {trained}/exported --chat {CPU}".split(), *prompts)
    assert text.startswith("=== prompt 1, sample 1\nWho spoke?\nLincoln.\n=== prompt 2")
    lines = printed("", *f"generate {trained}/exported --chat --json {CPU}".split(), *prompts)
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(row["text"], row["finish_reason"]) for row in rows] == [
        (answer, "stop") for answer in ANSWERS.values()
    ]


def test_files_of_conversations_are_answered(
    trained: Path, tmp_path: Path, printed: Any, refused: Any
) -> None:
    talk = [turn("system", "Hi"), turn("user", "Who spoke?"), turn("assistant", "Lincoln.")]
    rows = [
        {"messages": [*talk, turn("user", "When?")]},
        {"prompt": [turn("user", "When?")]},
        {"prompt": "When?"},
    ]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    command = f"generate {trained}/exported --chat --json {CPU} --prompts"
    lines = [json.loads(line) for line in printed(f"{command} {file}").splitlines()]
    assert [line["prompt"] for line in lines] == ["When?"] * 3
    assert [line["text"] for line in lines[1:]] == [ANSWERS["When?"]] * 2
    chat = ChatTokenizer(str(trained / "exported"))
    given = torch.tensor([chat.prompt_tokens(rows[0]["messages"], "it")])
    model = AutoModelForCausalLM.from_pretrained(trained / "exported")
    expected = model.generate(given, max_new_tokens=20, do_sample=False)[0, given.shape[1] :]
    assert lines[0]["tokens"][:20] == expected.tolist()
    answered = write_lines(tmp_path / "answered.jsonl", [{"messages": talk}])
    for options, message in {
        f"{command} {answered}": f"the last message of {answered}:1 is an answer.",
        f"{command} {file} --system Hi": f"{file}:1 has one, and --system is another.",
        f"{command} {file}".replace("--chat ", ""): f"{file}:1 has messages, and --chat is not",
    }.items():
        assert message in refused(options)


def test_a_checkpoint_answers_without_the_folder_that_it_was_trained_from(
    trained: Path, printed: Any
) -> None:
    (trained / "model").rename(trained / "away")
    try:
        answer = printed(
            "", *f"generate {trained}/trained.ckpt --chat {CPU} --prompt When?".split()
        )
    finally:
        (trained / "away").rename(trained / "model")
    assert answer == f"{ANSWERS['When?']}\n"


def test_an_export_chats_in_transformers_as_it_was_trained(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "exported")
    assert tokenizer.chat_template == TEMPLATE
    messages = [turn("user", "When?")]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    chat = ChatTokenizer(str(trained / "model"), str(trained / "chat.jinja"))
    assert given["input_ids"] == chat.prompt_tokens(messages, "it")
    # The end of a message ends generation, too: nothing else tells servers of models where to stop.
    ends = GenerationConfig.from_pretrained(trained / "exported").eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|end|>"]
    model = AutoModelForCausalLM.from_pretrained(trained / "exported")
    tokens = model.generate(torch.tensor([given["input_ids"]]), max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(tokens[0, len(given["input_ids"]) :], skip_special_tokens=True)
    assert text == ANSWERS["When?"]


def test_checkpoints_hold_the_tokenizer_of_their_model_and_its_template(
    trained: Path, tmp_path: Path, printed: Any
) -> None:
    files = saved_tokenizer(str(trained / "trained.ckpt"))
    assert files["chat_template.jinja"].decode() == TEMPLATE
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert files[name] == (trained / "model" / name).read_bytes()
    # The template of a tokenizer stands in its configuration in old folders.
    folder = Path(save_chat_llama(tmp_path / "old"))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    for jinja, expected in ((None, template), (str(trained / "chat.jinja"), TEMPLATE)):
        saved = ChatTokenizer(str(folder), jinja).files()
        assert saved["chat_template.jinja"].decode() == expected
        assert json.loads(saved["tokenizer_config.json"]) == {**config, "chat_template": expected}
    printed(f"convert {trained}/exported {tmp_path}/again.ckpt")
    files["config.json"] = (trained / "exported/config.json").read_bytes()
    assert saved_tokenizer(str(tmp_path / "again.ckpt")) == files


def test_a_talk_keeps_the_conversation_and_begins_anew_when_it_is_full(
    trained: Path, printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[Any]] = []
    render = ChatTokenizer.prompt_tokens

    def remember(self: ChatTokenizer, messages: Any, place: str) -> list[int]:
        asked.append([message["content"] for message in messages])
        return render(self, messages, place)

    monkeypatch.setattr(ChatTokenizer, "prompt_tokens", remember)
    command = f"generate {trained}/exported --interactive --system Hi {CPU} --max_new_tokens"
    monkeypatch.setattr("sys.stdin", io.StringIO("When?\nWho spoke?\n\nnot read\n"))
    first, _ = printed(f"{command} 30").splitlines()
    assert asked[-1] == ["Hi", "When?", first, "Who spoke?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("When?\n" + "w" * 160 + "\nWho spoke?"))
    text = printed(f"{command} 100")
    assert "(the question is too long for the model; ask a shorter one)\n" in text
    assert asked[-1] == ["Hi", "Who spoke?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("When?\n" + "w" * 40))
    text = printed(f"{command} 70")
    assert "(the conversation has become too long, and begins anew)\n" in text
    assert asked[-1] == ["Hi", "w" * 40]


def test_options_that_do_not_go_with_a_conversation_are_refused(
    trained: Path, refused: Any
) -> None:
    for options, message in {
        "--system Hi --prompt a": "--system has no effect without a conversation",
        "--chat_template a.jinja --prompt a": "--chat_template has no effect",
        "--interactive --prompt a": "--prompt does not go with it",
        "--interactive --json": "--json does not go with it",
        "--chat --prompt a --tokenizer bytes": "'bytes' is not",
        "--chat": "there must be prompts",
    }.items():
        assert message in refused(f"generate {trained}/exported {CPU} {options}")
    assert "must have one chat template" in refused(
        f"generate {trained}/model --chat --prompt a {CPU}"
    )
