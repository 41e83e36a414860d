"""Loading of Hugging Face model folders, with errors that name the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_megatron.errors import (
    CheckpointMismatchError,
    CorruptDataError,
    ParallelPlanError,
    UnsupportedError,
)
from lightning_megatron.extras import import_extra
from lightning_megatron.plan.settings import shown
from lightning_megatron.strict_json import read_json

#: Name of the file of a configuration.
CONFIG = "config.json"
_REMEDY = "Copy the folder again."
#: Size limit of a configuration, enough for the names of a hundred thousand classes (bytes).
_MAX_CONFIG_BYTES = 1 << 23
#: Errors that pass unchanged, because they state a reason, or the folder is not their cause.
_UNCHANGED_ERRORS = (
    CheckpointMismatchError,
    CorruptDataError,
    ParallelPlanError,
    UnsupportedError,
    ImportError,
    MemoryError,
)


def read_config(path: str) -> Any:
    """Read the configuration of a folder with ``AutoConfig``, without running its code."""
    # Unlike pathlib, os.path returns False for names that are too long or have illegal characters.
    if not os.path.isfile(os.path.join(path, CONFIG)):
        raise UnsupportedError(
            "path must be a local folder with config.json, or a model's name on the Hub, such as "
            f"Qwen/Qwen3-0.6B: {shown(path)} is not. Use such a name, or a folder written by "
            "save_pretrained."
        )
    with name_folder_in_errors(
        path, "config.json must be a configuration that transformers can read"
    ):
        return _library().AutoConfig.from_pretrained(path, trust_remote_code=False)


def load_model(path: str, config: Any, dtype: str) -> nn.Module:
    """Load the model of a folder with its weights; the dtype ``auto`` means that of the folder.

    Under MegatronStrategy the weights may not be read yet, so that each rank later reads only its
    shards. Missing weights are refused, because transformers would initialise them at random.
    """
    with name_folder_in_errors(path, "a folder must have a model that transformers can load"):
        model, loading_info = _library().AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise CheckpointMismatchError(
            f"a folder must have all weights of its model: {path} lacks {len(missing)} tensor(s) "
            f"of {type(model).__name__}, such as {', '.join(map(repr, missing[:3]))}. {CONFIG} "
            "and the weights belong to different models, or the copy is incomplete. Copy the "
            "folder again, or use from_scratch=True to initialise all weights at random."
        )
    loaded: nn.Module = model
    return loaded


def random_model(path: str, config: Any, dtype: str) -> nn.Module:
    """Build the model of a configuration with random weights; ``auto`` is the dtype it names."""
    with name_folder_in_errors(
        path, "config.json must describe a model that transformers can build"
    ):
        chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
        model: nn.Module = _library().AutoModelForCausalLM.from_config(
            config, dtype=chosen or torch.float32, trust_remote_code=False
        )
        return model


@contextmanager
def name_folder_in_errors(path: str, rule: str) -> Iterator[None]:
    """Convert errors of transformers into errors that name the folder and begin with a rule.

    Raises:
        CorruptDataError: If ``config.json`` is not valid JSON.
        CheckpointMismatchError: If ``config.json`` is valid JSON, and transformers rejects its
            contents.
    """
    try:
        yield
    except (*_UNCHANGED_ERRORS, torch.OutOfMemoryError):
        raise
    except Exception as error:
        read_json(Path(path, CONFIG), _REMEDY, _MAX_CONFIG_BYTES)
        text = " ".join(str(error).split())
        raise CheckpointMismatchError(
            f"{rule}: {path} is rejected by transformers {_library().__version__} "
            f"({type(error).__name__}: {text[:600]}). Correct {CONFIG}, copy the folder again, or "
            "install the version that wrote it."
        ) from error


def _library() -> Any:
    return import_extra("transformers", "hf")
