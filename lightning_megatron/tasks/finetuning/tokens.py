"""Tokenization of texts and pairs of texts with the tokenizer of a BERT or RoBERTa."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.building_blocks import local_folder, read_json, read_pretrained_tokenizer
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra

#: Text of a pair that is truncated: token by token the longer one, or always the second one.
Cut = Literal["longest_first", "only_second"]
#: Number of pairs that are encoded at once, by the threads of the library (pairs).
_CHUNK = 1024
#: Largest size of a tokenizer.json (bytes).
_MAX_TOKENIZER_BYTES = 1 << 26


class PairTokenizer:
    """Tokenizer of texts and pairs of texts, with the special tokens of its model.

    Equal to ``transformers.AutoTokenizer`` of the folder. Code in the folder is not run.

    Args:
        folder: Folder, or name on the Hub, with ``vocab.txt``, or with ``tokenizer.json`` of
            WordPiece or of the byte-level BPE of RoBERTa.
    """

    def __init__(self, folder: str) -> None:
        folder = local_folder(folder, has_weights=False)
        check_folder(folder)
        self.folder = folder
        kind = _class_of(Path(folder, "tokenizer.json"))
        self._tokenizer = read_pretrained_tokenizer(folder, kind)
        needed = {"CLS": self._tokenizer.cls_token_id, "SEP": self._tokenizer.sep_token_id}
        missing = [name for name, token in needed.items() if token is None]
        if missing or not self._tokenizer.is_fast:
            raise UnsupportedError(
                f"the tokenizer must be a fast one with the tokens CLS and SEP: that of {folder} "
                f"lacks {', '.join(missing) or 'a fast version'}. Use the folder of a BERT or "
                "RoBERTa."
            )

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def num_separators(self) -> int:
        """Number of special tokens of a pair: 3 for BERT, 4 for RoBERTa (tokens)."""
        return int(self._tokenizer.num_special_tokens_to_add(pair=True))

    @property
    def padding(self) -> int:
        """Id of the padding token, or 0 if there is none."""
        return int(self._tokenizer.pad_token_id or 0)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines how texts are tokenized."""
        special = sorted((k, str(v)) for k, v in self._tokenizer.special_tokens_map.items())
        state = self._tokenizer.backend_tokenizer.to_str()
        version = import_extra("tokenizers", "text").__version__
        return hashlib.sha256(repr((state, special, version)).encode()).hexdigest()

    def pairs(
        self, first: Sequence[str], second: Sequence[str] | None, max_tokens: int, cut: Cut
    ) -> tuple[list[list[int]], list[list[int]], int]:
        """Return the tokens of texts or pairs of texts, cut to at most ``max_tokens`` tokens.

        Args:
            second: Second texts; None for single texts.
            max_tokens: Maximum number of tokens, with the special ones (tokens).

        Returns:
            Tokens, their types, and how many texts or pairs were cut
        """
        tokens: list[list[int]] = []
        types: list[list[int]] = []
        num_cut = 0
        for start in range(0, len(first), _CHUNK):
            chosen = slice(start, start + _CHUNK)
            texts = [list(first[chosen])] + ([] if second is None else [list(second[chosen])])
            encoding = self._call(*texts)
            long = [
                index
                for index, tokens_of_text in enumerate(encoding["input_ids"])
                if len(tokens_of_text) > max_tokens
            ]
            if long:
                num_cut += len(long)
                long_texts = [list(map(side.__getitem__, long)) for side in texts]
                short = self._cut(long_texts, max_tokens, cut)
                for name in ("input_ids", "token_type_ids"):
                    for index, shortened in zip(long, short[name], strict=True):
                        encoding[name][index] = shortened
            tokens += encoding["input_ids"]
            types += encoding["token_type_ids"]
        return tokens, types, num_cut

    def _cut(self, texts: list[list[str]], max_tokens: int, cut: Cut) -> Any:
        side = cut if len(texts) > 1 else "only_first"
        if side == "only_second":
            # The special tokens of a pair, and one token of the second text.
            needed = self.num_separators + 1
            first = self._call(texts[0], add_special_tokens=False)["input_ids"]
            for text, tokens in zip(texts[0], first, strict=True):
                if len(tokens) + needed > max_tokens:
                    raise CorruptDataError(
                        "a first text must leave room for one token of the second in seq_length "
                        f"({max_tokens} tokens): {text[:80]!r} has {len(tokens)}, and a pair has "
                        f"{needed - 1} special tokens. Use a larger seq_length."
                    )
        return self._call(*texts, truncation=side, max_length=max_tokens)

    def short(self, texts: Sequence[str], max_tokens: int) -> tuple[list[str], int]:
        """Return texts cut to at most ``max_tokens`` tokens, and how many were cut.

        Args:
            texts: Texts; special tokens are not counted.
            max_tokens: Maximum number of tokens (tokens).
        """
        shortened = []
        num_cut = 0
        for start in range(0, len(texts), _CHUNK):
            part = list(texts[start : start + _CHUNK])
            encoding = self._call(part, add_special_tokens=False, return_offsets_mapping=True)
            for text, places in zip(part, encoding["offset_mapping"], strict=True):
                is_long = len(places) > max_tokens
                num_cut += is_long
                shortened.append(text[: _end_of(places, max_tokens)] if is_long else text)
        return shortened, num_cut

    def windows(
        self, questions: Sequence[str], contexts: Sequence[str], max_tokens: int, shared: int
    ) -> Any:
        """Return the tokens of windows of contexts, each preceded by its question.

        Equal to transformers' ``return_overflowing_tokens``: ``input_ids``, ``token_type_ids``,
        ``offset_mapping`` and ``overflow_to_sample_mapping``.

        Args:
            max_tokens: Maximum length of a window with the question and special tokens (tokens).
            shared: Overlap of successive windows in the context (tokens).
        """
        return self._call(
            list(questions), list(contexts), truncation="only_second", max_length=max_tokens,
            stride=shared, return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip

    def _call(self, *texts: list[str], **options: Any) -> Any:
        defaults = {"truncation": False, "padding": False, "return_attention_mask": False}
        return self._tokenizer(
            *texts, **(defaults | options), return_token_type_ids=True, verbose=False
        )


def check_folder(folder: str) -> None:
    """Refuse a folder without the file of a tokenizer."""
    files = [Path(folder, name) for name in ("tokenizer.json", "vocab.txt")]
    if not any(path.is_file() for path in files):
        raise UnsupportedError(
            "the tokenizer must be a local folder with tokenizer.json or vocab.txt: "
            f"{folder!r} is not. Use the folder of a BERT or RoBERTa."
        )


def _class_of(path: Path) -> str:
    """Return the class of transformers that reads a ``tokenizer.json``, by its kind of tokens."""
    if not path.is_file():
        return "BertTokenizerFast"
    content = read_json(path, "Copy it again.", _MAX_TOKENIZER_BYTES)
    is_bytes = isinstance(content, dict) and content.get("model", {}).get("type") == "BPE"
    return "RobertaTokenizerFast" if is_bytes else "BertTokenizerFast"


def _end_of(places: Sequence[tuple[int, int]], max_tokens: int) -> int:
    """Return the end of the longest prefix of a text with at most ``max_tokens`` tokens.

    The prefix ends between characters: several tokens with overlapping offsets can be bytes of one
    character.
    """
    kept = max_tokens
    while kept and places[kept][0] < places[kept - 1][1]:
        kept -= 1
    return places[kept - 1][1] if kept else 0
