"""Samples of conversations that are read as a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_megatron.data.conversation_encoder import ConversationEncoder
from lightning_megatron.data.encoded_rows import no_rows_error
from lightning_megatron.data.row_files import sizes_of
from lightning_megatron.data.stream_sections import RowStream
from lightning_megatron.data.streamed_samples import StreamCounts, StreamedSamples
from lightning_megatron.data.streaming import Streaming
from lightning_megatron.errors import CorruptDataError


class ConversationMessages:
    """Log and error messages about a stream of conversations."""

    def summary(self, counts: StreamCounts, seq_length: int) -> str:
        """Return how many conversations were read, cut and left out."""
        return (
            f"{counts.num_read} conversations read, {counts.num_cut} cut after {seq_length + 1} "
            f"tokens (seq_length + 1), {counts.num_left_out} left out as too long; "
            f"{counts.num_tokens} tokens, {counts.num_answers} of them in answers"
        )

    def empty_error(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error for files whose conversations are all too long."""
        return no_rows_error(
            "conversations", names, seq_length, counts.num_read, counts.num_left_out
        )


def streamed_samples(
    files: tuple[Path, ...],
    encoder: ConversationEncoder,
    streaming: Streaming,
    num_windows: int,
    seed: int,
    num_workers: int,
    report: Callable[[str, bool], None],
    num_samples: int | None,
) -> StreamedSamples:
    """Return the samples of files that are read as a stream.

    Args:
        files: Files of conversations.
        encoder: Encoder of conversations.
        streaming: Settings of the stream.
        num_windows: Windows of a packed row; 0 puts one conversation into each row.
        seed: Seed of the order.
        num_workers: Processes that encode; 0 encodes in this process.
        report: Function that takes a line about the rows that were read, and whether rows were cut
            or left out.
        num_samples: Samples of the run; None means that the run has a number of passes instead
            (samples).
    """
    order = seed if streaming.shuffle else None
    most_pieces = streaming.most_pieces(encoder.seq_length, num_windows)
    key = {
        # The contents are unknown until the stream has been read, so sizes identify the files.
        "files": [sizes_of(path) for path in files],
        "tokenizer": encoder.tokenizer.fingerprint,
        "seq_length": encoder.seq_length,
        "too_long": encoder.too_long,
        "section_size": streaming.shuffle_buffer,
        "seed": order,
        "num_windows": num_windows,
        "most_pieces": most_pieces,
    }
    stream = RowStream(files, encoder.encode_row, streaming.shuffle_buffer, order, num_workers)
    return StreamedSamples(
        stream,
        ConversationMessages(),
        encoder.seq_length,
        num_windows,
        most_pieces,
        key,
        report,
        num_samples,
    )
