"""Tokenizers that transformers reads from local folders."""

from __future__ import annotations

import os
from typing import Any

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.extras import import_extra


def read_pretrained_tokenizer(folder: str, otherwise: str) -> Any:
    """Return the transformers tokenizer of a folder. No code of the folder runs.

    Args:
        folder: Local folder of a tokenizer.
        otherwise: Class of transformers where no ``tokenizer_config.json`` names one. It would be
            guessed from the model's, which may cut text in another way than the files say.

    Raises:
        CorruptDataError: If transformers cannot read the folder.
        MissingExtraError: If transformers is not installed.
    """
    transformers = import_extra("transformers", "hf")
    is_named = os.path.isfile(os.path.join(folder, "tokenizer_config.json"))
    kind = transformers.AutoTokenizer if is_named else getattr(transformers, otherwise)
    try:
        return kind.from_pretrained(folder, trust_remote_code=False)
    # The library is written in Rust and raises instances of Exception itself.
    except Exception as error:
        raise CorruptDataError(
            f"{folder} has no tokenizer that transformers reads: {error}. Copy it again."
        ) from error
