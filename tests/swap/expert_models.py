"""Former names of :mod:`tests.swap.families`."""

from tests.swap.families import EXPERTS as CASES
from tests.swap.families import config_of, twin_of
from tests.swap.families import exact_twin as exact_twin_of

__all__ = ["CASES", "config_of", "exact_twin_of", "twin_of"]
