"""Division of the head and the loss into chunks of tokens, so that no logits are stored."""

from __future__ import annotations

from typing import Literal

from lightning_megatron.plan.settings import Count

#: Tokens of a chunk; ``auto`` divides only large logits, ``forward`` divides all, and computes the
#: gradients of summed losses in the forward pass. None divides none.
LossChunk = Count | Literal["auto", "forward"] | None

#: Largest logits of a microbatch that ``auto`` stores: a fortieth of a GPU with 80 GiB (bytes).
MAX_STORED_BYTES = 2**31
#: Logits of a chunk of ``auto`` and ``forward`` (bytes).
_CHUNK = 2**29
#: Matrix products are fastest with a multiple of this many rows (tokens).
_ROWS = 256


def tokens_of_chunk(
    option: LossChunk, num_tokens: int, vocab_rows: int, element_bytes: int
) -> int | None:
    """Return how many tokens the head and the loss compute at once; None means all, stored.

    Args:
        option: Setting of the user.
        num_tokens: Tokens of a microbatch on one rank, those of all ranks of tp (tokens).
        vocab_rows: Columns of the logits on one rank (tokens).
        element_bytes: Size of a logit (bytes).
    """
    if option is None or isinstance(option, int):
        return option
    row = vocab_rows * element_bytes
    if option == "auto" and num_tokens * row <= MAX_STORED_BYTES:
        return None
    fitting = max(1, _CHUNK // row)
    return fitting - fitting % _ROWS if fitting > _ROWS else fitting
