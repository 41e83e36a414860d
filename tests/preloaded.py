"""What processes of a world are forked from: the imports that each would spend seven seconds on,
and nothing else.
"""

import contextlib
import gc

import beartype
import jaxtyping
import lightning.pytorch
import omegaconf
import pytest

import lightning_megatron

with contextlib.suppress(ImportError):
    # What Hugging Face's models load at their first use, as every fit of the strategy does to know
    # them.
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401

__all__ = ["beartype", "jaxtyping", "lightning", "lightning_megatron", "omegaconf", "pytest"]

with contextlib.suppress(ImportError):
    # Of the processes that tests start: see startup/sitecustomize.py.
    from shape_checks import prepare

    prepare()

# Collections in the forked processes need not look at all of this, nor copy its memory.
gc.freeze()
# Every fit asks for their number, and to count them takes longer than a step of the tests.
NUM_FROZEN = gc.get_freeze_count()
gc.get_freeze_count = lambda: NUM_FROZEN
