"""Former names of :mod:`tests.swap.families`."""

from tests.swap.families import ENCODERS as CASES
from tests.swap.families import HEADS, PADDING, V
from tests.swap.families import twin_of as encoder_of

__all__ = ["CASES", "HEADS", "PADDING", "V", "encoder_of"]
