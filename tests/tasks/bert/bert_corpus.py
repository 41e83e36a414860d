"""A vocabulary of word pieces and a token file of sentences, both made up from a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import BERT_TOKENS, load_tokenizer

VOCABULARY = 61


def write_vocabulary(path: Path) -> str:
    """Write a vocab.txt: the special tokens, 36 words, and 20 pieces that continue a word."""
    pieces = [f"word{number}" for number in range(36)] + [f"##s{number}" for number in range(20)]
    path.write_text("".join(f"{piece}\n" for piece in (*BERT_TOKENS, *pieces)))
    return str(path)


def write_sentences(prefix: Path, vocabulary: str, num_documents: int = 12, seed: int = 0) -> str:
    """Write documents of 0 to 30 sentences of 1 to 12 tokens."""
    random = np.random.RandomState(seed)
    with TokenFileWriter(prefix, tokenizer=load_tokenizer(vocabulary)) as writer:
        for _ in range(num_documents):
            lengths = random.randint(1, 13, size=random.randint(0, 31)).tolist()
            writer.add_document(random.randint(5, VOCABULARY, size=sum(lengths)), lengths=lengths)
    return str(prefix)
