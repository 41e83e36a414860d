"""Folders of Hugging Face models: the files that belong to their tokenizers."""

from __future__ import annotations

import os
from pathlib import Path

#: Key of the files of a tokenizer in a checkpoint.
TOKENIZER = "tokenizer_files"
#: Names of the files of a tokenizer and of generation.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "spiece.model",
)


def tokenizer_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files of a folder that belong to the tokenizer or to generation, by name."""
    found = (file for pattern in _TOKENIZER_FILES for file in Path(folder).glob(pattern))
    return {file.name: file.read_bytes() for file in sorted(found) if file.is_file()}
