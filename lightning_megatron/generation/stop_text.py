"""Text of tokens while they are produced, and where it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_megatron.errors import UnsupportedError

#: Function that returns the text of tokens, such as ``Tokenizer.decode``.
Decode = Callable[[Sequence[int]], str]
#: Function that says of the new tokens of a row whether they are its last ones.
StopFunction = Callable[[Sequence[int]], bool]

#: What stands for bytes that are no character, perhaps because the next token has its rest.
_REPLACEMENT = "\ufffd"


class StopStrings:
    """Function that ends a row when its new text has one of some strings.

    Args:
        decode: Function that returns the text of tokens.
        strings: Strings that end a row.

    Raises:
        UnsupportedError: If a string is empty.
    """

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        if "" in strings:
            raise UnsupportedError(
                "a string that stops a text must have a character: one is empty, and every text "
                "has that. Leave it out."
            )
        self._decode = decode
        self.strings = tuple(strings)

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of tokens has one of the strings.

        Args:
            tokens: New tokens of a row.
        """
        text = self._decode(tokens)
        return any(string in text for string in self.strings)


def before_stop(text: str, strings: Sequence[str]) -> str:
    """Return a text up to the first of some strings.

    Args:
        text: Text.
        strings: Strings that stop it.
    """
    found = [place for string in strings if (place := text.find(string)) >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """Text of a row that grows token by token.

    The pieces that it returns are together the text of all tokens, up to the first stop string. A
    piece holds only what no later token changes: bytes of an unfinished character wait for its
    rest, and so does the beginning of a stop string.

    Args:
        decode: Function that returns the text of tokens.
        strings: Strings that stop the text.
        before: Tokens before the row, whose text is complete; they are not returned.
    """

    def __init__(
        self, decode: Decode, strings: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._strings = tuple(strings)
        # The last tokens whose text is complete, and all after them: some tokenizers decode a token
        # in another way if it is the first.
        self._window = list(before)
        self._num_complete = len(self._window)
        self._num_decoded = len(decode(self._window))
        self._waiting = ""
        self._has_stopped = False

    def push(self, token: int) -> str:
        """Return the text that is certain now.

        Args:
            token: Next token of the row.
        """
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
        """Return the rest of the text."""
        text = self._decode(self._window)[self._num_decoded :]
        self._num_decoded += len(text)
        found = self._until_stop(text)
        rest = "" if self._has_stopped else self._waiting
        self._waiting = ""
        return found + rest

    def _until_stop(self, new: str) -> str:
        """Return what of the waiting and new text comes before a stop string for certain."""
        if self._has_stopped:
            return ""
        text = self._waiting + new
        found = before_stop(text, self._strings)
        self._has_stopped = len(found) < len(text)
        if self._has_stopped:
            self._waiting = ""
            return found
        held = max((_overlap(text, string) for string in self._strings), default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of a text begin a string."""
    most = min(len(text), len(string) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(string[:size])), 0)
