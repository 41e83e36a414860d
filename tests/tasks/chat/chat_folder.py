"""A small model with a chat template, and conversations for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

#: A template that marks answers, and the same template without marks.
MARKED = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|endoftext|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def save_chat_llama(folder: Path, template: str = MARKED) -> str:
    """Write a small Llama whose tokenizer has a template; a message ends with a single token."""
    from tests.tiny_llama import save_tiny_llama

    # Conversations are longer than the sequences of other tests.
    save_tiny_llama(folder, max_position_embeddings=512)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def turn(role: str, content: str) -> dict[str, str]:
    """Return a message."""
    return {"role": role, "content": content}


def conversations(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return conversations of one to three questions with answers, of several lengths."""
    draws = random.Random(seed)
    rows = []
    for number in range(count):
        messages = [turn("system", "Be brief.")] if number % 3 == 0 else []
        for _ in range(draws.randint(1, 3)):
            messages.append(turn("user", "why " * draws.randint(1, 5)))
            messages.append(turn("assistant", f"é{number} " + "so " * draws.randint(1, 9)))
        rows.append({"messages": messages})
    return rows


def preferences(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return pairs in the four forms of a row, of several lengths."""
    draws = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        prompt = [turn("system", "Be brief.")] if number % 3 == 0 else []
        prompt += [turn("user", "hi"), turn("assistant", "yes?")] if number % 5 == 0 else []
        prompt.append(turn("user", f"why {number} " + "and " * draws.randint(1, 5)))
        good = f"é{number} " + "so " * draws.randint(1, 9)
        bad = f"no{number} " + "er " * draws.randint(1, 9)
        sides = {"chosen": [turn("assistant", good)], "rejected": [turn("assistant", bad)]}
        if number % 4 == 0:
            rows.append({name: prompt + side for name, side in sides.items()})
        elif number % 4 == 1:
            rows.append({"prompt": prompt, **sides})
        elif number % 4 == 2:
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
        else:
            rows.append({"prompt": prompt[-1]["content"], "chosen": good, "rejected": bad})
    return rows


def write_lines(path: Path, rows: list[Any]) -> str:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
