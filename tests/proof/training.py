"""Names that tests of other rooms still import from here; new tests use tests/fits.py."""

from __future__ import annotations

from tests import fits
from tests.fits import BATCH, GPT2, LLAMA, SEQUENCE, VOCABULARY
from tests.worlds.test_experts import KINDS as MIXTURES
from tests.worlds.test_layouts import KINDS as DENSE

__all__ = ["GLOBAL_BATCH", "KINDS", "SEQUENCE", "VOCABULARY", "Tokens"]

GLOBAL_BATCH = BATCH
KINDS = {"gpt2-tied": GPT2, "llama-untied": LLAMA, **DENSE, **MIXTURES}
KINDS |= {"experts": KINDS["plain"], "experts, whole step": KINDS["whole step"]}


class Tokens(fits.Tokens):
    """Tokens of four steps."""

    def __init__(self) -> None:
        super().__init__(4 * BATCH)
