"""Stream of the conversations of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_megatron.data.conversation_encoder import ConversationEncoder
from lightning_megatron.data.encoded_rows import no_text_error
from lightning_megatron.data.row_files import sizes_of
from lightning_megatron.data.stream_sections import RowStream
from lightning_megatron.data.streamed_samples import StreamCounts, StreamedSamples
from lightning_megatron.data.streaming import Streaming
from lightning_megatron.errors import CorruptDataError


class Conversations:
    """Words for a stream of conversations."""

    def account(self, counts: StreamCounts, seq_length: int) -> str:
        """Return in words what was read, cut and left out."""
        return (
            f"{counts.num_read} conversations read, {counts.num_cut} cut after {seq_length + 1} "
            f"tokens (seq_length + 1), {counts.num_left_out} left out as too long; "
            f"{counts.num_tokens} tokens, {counts.num_answers} of them in answers"
        )

    def nothing_left(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error of conversations that are all too long."""
        return no_text_error(
            "conversations", names, seq_length, counts.num_read, counts.num_left_out
        )


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
        Conversations(),
        encoder.seq_length,
        num_windows,
        most_pieces,
        key,
        tell,
        num_samples,
    )
