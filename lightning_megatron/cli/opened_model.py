"""Models that subcommands read: checkpoints and Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_megatron.checkpoint.load import saved_hyper_parameters, saved_tokenizer
from lightning_megatron.data.tokenizer import FileTokenizer, Tokenizer
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.hub import local_folder
from lightning_megatron.models.causal_lm import CausalLM
from lightning_megatron.models.hugging_face_folder import CONFIG
from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM
from lightning_megatron.models.token_module import TokenModule


@dataclass(frozen=True)
class OpenedModel:
    """Language model in a checkpoint or Hugging Face folder, before its weights are read.

    Args:
        checkpoint: Checkpoint with the weights; None if the module reads them itself.
        folder: Hugging Face folder with the configuration; None for a ``CausalLM``.
        scratch: Folder of the configuration and the files of the tokenizer that a checkpoint holds,
            until the command ends; None if it holds none.
    """

    path: str
    module: TokenModule
    checkpoint: str | None
    folder: str | None
    scratch: TemporaryDirectory[str] | None = None

    @classmethod
    def at(cls, path: str, dtype: str) -> OpenedModel:
        """Open the model at a path.

        Args:
            path: Hugging Face folder, model's name on the Hub, or checkpoint of this or
                another strategy.
        """
        folder: Any = local_folder(path)
        if Path(folder, "config.json").is_file():
            arguments: Any = {"path": folder, "dtype": dtype}
            return cls(path, HuggingFaceCausalLM(**arguments), None, folder)
        settings = _hyperparameters(path)
        if isinstance(settings.get("config"), Mapping):
            gpt = CausalLM(settings["config"])
            return cls(path, gpt, path, None, _unpacked(saved_tokenizer(path)))
        folder = settings.get("path")
        if not isinstance(folder, str):
            raise UnsupportedError(
                f"the checkpoint must be that of a CausalLM or a HuggingFaceCausalLM: {path} has "
                f"other hyperparameters ({', '.join(map(str, sorted(settings))) or 'none'}). Write "
                "its model as a Hugging Face folder (lightning-megatron convert), or call its "
                "model in a module of your own."
            )
        scratch = _unpacked(saved_tokenizer(path))
        if scratch is not None and Path(scratch.name, CONFIG).is_file():
            folder = scratch.name
        # The weights come from the checkpoint.
        module = HuggingFaceCausalLM(
            folder,
            from_scratch=True,
            dtype=dtype,  # type: ignore[arg-type]
            expert_settings=settings.get("expert_settings"),
            lora=settings.get("lora"),
        )
        return cls(path, module, path, module.folder, scratch)

    @property
    def tokenizer_folder(self) -> str | None:
        """Folder of the tokenizer: that of the checkpoint, or of the model; None without one."""
        return self.folder if self.scratch is None else self.scratch.name

    @property
    def max_length(self) -> int | None:
        """Return the maximum length of a row; None if the configuration gives none (tokens)."""
        config: Any = self.module.config
        if self.folder is None:
            return int(config.max_seq_length)
        return getattr(config.get_text_config(), "max_position_embeddings", None)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the end-of-text tokens that the folder names; empty if it names none."""
        if self.tokenizer_folder is None:
            return ()
        file = Path(self.tokenizer_folder, "generation_config.json")
        tokens = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
        if tokens is None and self.folder is not None:
            config: Any = self.module.config
            tokens = config.get_text_config().eos_token_id
        if tokens is None:
            return ()
        return tuple(tokens) if isinstance(tokens, list) else (int(tokens),)

    def prefix_token(self, tokenizer: Tokenizer) -> int | None:
        """Return the token that precedes texts without a context; None if there is none.

        It is the beginning-of-text token of the folder's tokenizer, or else an end-of-text token.
        """
        folder = self.tokenizer_folder
        file = Path(folder or "", "tokenizer_config.json")
        if folder is not None and isinstance(tokenizer, FileTokenizer) and file.is_file():
            settings = json.loads(file.read_text("utf-8"))
            for name in ("bos_token", "eos_token"):
                text = settings.get(name)
                text = text["content"] if isinstance(text, dict) else text
                token = None if text is None else tokenizer.token_id(text)
                if token is not None:
                    return token
        return tokenizer.eod

    def tokenizer_name(self, given: str | None) -> str:
        """Return the name or path of the tokenizer.

        Args:
            given: Name or path that the user gave; None means the tokenizer of the folder.
        """
        name = given or self.tokenizer_folder
        if name is None:
            raise UnsupportedError(
                f"{self.path} has no tokenizer: the data that it was trained on had none. Give the "
                "one that made its tokens: --tokenizer bytes, gpt2 or a path."
            )
        return name


def _unpacked(files: Mapping[str, bytes]) -> TemporaryDirectory[str] | None:
    if not files:
        return None
    scratch = TemporaryDirectory()
    for name, content in files.items():
        Path(scratch.name, name).write_bytes(content)
    return scratch


def _hyperparameters(path: str) -> Mapping[str, Any]:
    values = saved_hyper_parameters(path)
    if values is None:
        raise CheckpointMismatchError(
            f"MODEL must be a Hugging Face folder or a checkpoint: {path} has neither config.json "
            "nor the header of a checkpoint. Check the path."
        )
    return values
