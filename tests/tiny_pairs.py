"""A small model whose tokenizer has a chat template, and preference pairs, as local files."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.tiny_llama import save_tiny_llama

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def save_chat_model(folder: Path) -> None:
    """Write a Llama with random weights and a tokenizer of bytes."""
    save_tiny_llama(folder, max_position_embeddings=1024)
    fast = PreTrainedTokenizerFast.from_pretrained(folder, eos_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__" and not Path("pairs.jsonl").exists():
    save_chat_model(Path("my_model"))
    pairs = [
        {"prompt": f"Is {n} even?", "chosen": "Yes." if n % 2 == 0 else "No.", "rejected": "Maybe."}
        for n in range(40)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
