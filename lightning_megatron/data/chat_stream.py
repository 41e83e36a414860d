"""Stream of the conversations of files, and what a data module and a Trainer must allow for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.data.conversation_encoder import ConversationEncoder
from lightning_megatron.data.dataset_folders import files_of
from lightning_megatron.data.stream_sections import ConversationStream
from lightning_megatron.data.streamed_samples import StreamedSamples
from lightning_megatron.data.streaming import Streaming
from lightning_megatron.errors import UnsupportedError


def streamed_samples(
    files: tuple[Path, ...],
    encoder: ConversationEncoder,
    streaming: Streaming,
    num_windows: int,
    seed: int,
    num_workers: int,
    tell: Callable[[str, bool], None],
    num_samples: int | None,
) -> StreamedSamples:
    """Return the samples of files that are read as a stream.

    Args:
        files: Files of conversations.
        encoder: Encoder of conversations.
        streaming: Sections and their order.
        num_windows: Windows of a packed row; 0 puts one conversation into a row.
        seed: Seed of the order.
        num_workers: Processes that encode; 0 encodes in this process.
        tell: Function that is called with a line about what was read, and whether something was
            cut or left out.
        num_samples: Samples of a run; None means that passes bound it (samples).
    """
    order = seed if streaming.shuffle else None
    most_pieces = streaming.most_pieces(encoder.seq_length, num_windows)
    key = {
        # Contents are unknown before a stream has been read.
        "files": [[(one.name, one.stat().st_size) for one in files_of(path)] for path in files],
        "tokenizer": encoder.tokenizer.fingerprint,
        "seq_length": encoder.seq_length,
        "too_long": encoder.too_long,
        "section_size": streaming.shuffle_buffer,
        "seed": order,
        "num_windows": num_windows,
        "most_pieces": most_pieces,
    }
    stream = ConversationStream(files, encoder, streaming.shuffle_buffer, order, num_workers)
    return StreamedSamples(stream, num_windows, most_pieces, key, tell, num_samples)


def check_stream_settings(streaming: Streaming, given: Mapping[str, Any]) -> None:
    """Refuse settings of a data module that a stream cannot honour.

    Args:
        streaming: Settings of the stream.
        given: Other settings by name.

    Raises:
        UnsupportedError: If one needs the number of samples.
        ParallelPlanError: If rows cannot have enough conversations.
    """
    if given["train_samples"] is not None:
        raise UnsupportedError(
            f"train_samples ({given['train_samples']}) cannot be used with streaming: a stream has "
            "no samples to choose from. Use max_steps of the Trainer, and limit_train_batches for "
            "shorter epochs."
        )
    streaming.most_pieces(given["seq_length"], given["context_windows"])


def check_stream_trainer(trainer: Any) -> None:
    """Refuse a Trainer that would train on a stream without end, or on some of its batches again.

    Args:
        trainer: The Trainer; None without one.

    Raises:
        UnsupportedError: If it does.
    """
    if trainer is None:
        return
    # Lightning's Timer, which `max_time` adds
    has_timer = any(hasattr(one, "time_remaining") for one in trainer.callbacks)
    if trainer.max_steps == -1 and trainer.max_epochs == -1 and not has_timer:
        raise UnsupportedError(
            "a Trainer of a stream needs max_steps, max_epochs or max_time: none is given, and "
            "the stream begins its files again without end. Use max_steps for a number of "
            "optimizer steps, or max_epochs for a number of passes."
        )
    if trainer.overfit_batches:
        raise UnsupportedError(
            f"overfit_batches ({trainer.overfit_batches}) cannot be used with streaming, which "
            "trains on other batches in each epoch. Leave streaming out, or use a small file."
        )
