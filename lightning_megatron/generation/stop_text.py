"""Incremental decoding of generated tokens to text, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_megatron.errors import UnsupportedError

#: Function that decodes tokens to text, such as ``Tokenizer.decode``.
Decode = Callable[[Sequence[int]], str]
#: Function that takes the new tokens of a row and returns whether the row ends.
StopFunction = Callable[[Sequence[int]], bool]

#: Character that decoding returns for invalid bytes, such as an incomplete character that the next
#: token may complete.
_REPLACEMENT = "\ufffd"


class StopStrings:
    """Stop function that ends a row when the text of its new tokens contains a stop string.

    Args:
        decode: Function that decodes tokens to text.

    Raises:
        UnsupportedError: If a stop string is empty.
    """

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        if "" in strings:
            raise UnsupportedError(
                "a stop string must have at least one character: one is empty, and every text "
                "contains it. Leave it out."
            )
        self._decode = decode
        self.strings = tuple(strings)

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of the tokens contains a stop string."""
        text = self._decode(tokens)
        return any(string in text for string in self.strings)

    def before(self, text: str) -> str:
        """Return the part of a text before its first stop string."""
        starts = [place for string in self.strings if (place := text.find(string)) >= 0]
        return text[: min(starts)] if starts else text


class TextStream:
    """Text of a row, decoded token by token.

    The concatenation of the returned pieces equals the text of all tokens up to the first stop
    string. A piece has only characters that no later token can change: the bytes of an incomplete
    character and the beginning of a possible stop string are held back until later tokens decide.

    Args:
        decode: Function that decodes tokens to text.
        before: Tokens before the row, such as the prompt. Their text must be complete, and is not
            returned.
    """

    def __init__(
        self, decode: Decode, strings: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._stops = StopStrings(decode, strings)
        # The last tokens with complete text, and all later tokens. The complete ones are kept,
        # because some tokenizers decode the first token of a list differently.
        self._window = list(before)
        self._num_complete = len(self._window)
        self._num_decoded = len(decode(self._window))
        self._held_back = ""
        self._has_stopped = False

    def push(self, token: int) -> str:
        """Add a token, and return the text that has become final."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._num_decoded :]
        self._num_decoded = max(self._num_decoded, len(certain))
        if certain == text and new:
            self._window = self._window[self._num_complete :]
            self._num_complete = len(self._window)
            self._num_decoded = len(self._decode(self._window))
        return self._until_stop(new)

    def finish(self) -> str:
        """Return the remaining text."""
        text = self._decode(self._window)[self._num_decoded :]
        self._num_decoded += len(text)
        released = self._until_stop(text)
        rest = "" if self._has_stopped else self._held_back
        self._held_back = ""
        return released + rest

    def _until_stop(self, new: str) -> str:
        """Return the held-back and new text, up to the first possible stop string."""
        if self._has_stopped:
            return ""
        text = self._held_back + new
        released = self._stops.before(text)
        self._has_stopped = len(released) < len(text)
        if self._has_stopped:
            self._held_back = ""
            return released
        held = max((_overlap(text, string) for string in self._stops.strings), default=0)
        self._held_back = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of a text are the beginning of a string."""
    most = min(len(text), len(string) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(string[:size])), 0)
