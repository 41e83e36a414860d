"""Imports that the fork server of test worlds preloads, because each process would spend seven
seconds on them.
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
    # Hugging Face's models load these modules at their first use, and every fit of the strategy
    # loads them to recognize such models.
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401

__all__ = ["beartype", "jaxtyping", "lightning", "lightning_megatron", "omegaconf", "pytest"]

with contextlib.suppress(ImportError):
    # Shape checks of the processes that tests start: see startup/sitecustomize.py.
    from shape_checks import prepare

    prepare()

# Garbage collections in forked processes skip these objects and do not copy their memory.
gc.freeze()
# Every fit asks for the number of frozen objects, and counting takes longer than a test step.
NUM_FROZEN = gc.get_freeze_count()
gc.get_freeze_count = lambda: NUM_FROZEN
