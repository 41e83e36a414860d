"""Tokenizers that transformers reads from local folders."""

from __future__ import annotations

import os
from typing import Any

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.extras import import_extra


def read_pretrained_tokenizer(folder: str, default_class: str) -> Any:
    """Return the transformers tokenizer of a folder, without running code from the folder.

    Args:
        folder: Local folder of a tokenizer.
        default_class: Name of the transformers class to use if the folder has no
            ``tokenizer_config.json``. transformers would otherwise derive a class from the model
            type, which may tokenize differently than the files of the tokenizer say.

    Raises:
        CorruptDataError: If transformers cannot read the folder.
        MissingExtraError: If transformers is not installed.
    """
    transformers = import_extra("transformers", "hf")
    is_named = os.path.isfile(os.path.join(folder, "tokenizer_config.json"))
    kind = transformers.AutoTokenizer if is_named else getattr(transformers, default_class)
    try:
        return kind.from_pretrained(folder, trust_remote_code=False)
    # The tokenizers library is written in Rust and raises plain instances of Exception.
    except Exception as error:
        raise CorruptDataError(
            f"{folder} has no tokenizer that transformers can read: {error}. Copy it again."
        ) from error
