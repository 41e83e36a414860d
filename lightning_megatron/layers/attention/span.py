"""Description of which tokens attend to which, without a tensor with an entry for each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.layers.attention.document_cut import DocumentCut, TokenOrder
from lightning_megatron.layers.attention.key_value_cache import CachedTokens
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(frozen=True, eq=False)
class AttentionSpan:
    """Description of which tokens attend to which, and of how their scores become weights.

    By default every row is one document, and a token attends to itself and to all tokens before it.
    Documents lie one after the other in a row. No token attends to another document; the tokens
    after the last document form one more document. Padding is described by lengths, too: a row of 5
    tokens and 3 of padding on its right has the lengths ``[5]``, a row with the padding on its left
    has ``[3, 5]``.

    Args:
        lengths: Lengths of the documents of each row. A row with fewer documents than others ends
            with zeros. CUDA graphs can be replayed only if the number of columns is the same in all
            batches (tokens).
        longest: Upper bound of the lengths, which sizes the launch of the kernel; None means the
            length of the rows (tokens).
        positions: Position of every token, for rotary or learned embeddings; None counts from 0.
        restarts: Whether positions that are not given count from 0 in every document of
            ``lengths``; otherwise they count from 0 in every row.
        mask: Mask of the pairs of a query and a key, or of the keys of a row. A boolean mask is
            false where no attention is allowed; a query without any allowed key attends to itself.
            A floating-point mask is added to the scores and must be complete: ``causal`` and
            ``window`` are ignored. None means no mask.
        causal: Whether a token attends only to itself and to tokens before it.
        window: Number of tokens that a token attends to: itself and the tokens before it; without
            ``causal`` also as many tokens after it as before it. None means all (tokens).
        prefix: Number of first tokens of each row to which every token of the row attends; None
            means none (tokens).
        soft_cap: Bound c of the scores s, which become ``c tanh(s / c)``; None means no bound.
        slopes: ALiBi slopes of the heads: scores decrease by them for each token of distance
            between query and key, after the soft cap. None means no ALiBi.
        places: Place of every token of this rank in its row, which determines these distances; None
            counts along the row (tokens).
        sinks: Score of each head's sink, which takes part in the softmax and has the value 0; None
            means no sinks.
        scale: Factor of the scores; None means ``head_dim ** -0.5``.
        borders: Cumulative lengths of all documents of all rows, from 0 to ``batch seq`` as int32.
            :meth:`laid_out` derives them (tokens).
        key_borders: Cumulative lengths of the documents of the keys, as many as ``borders`` then
            has for the queries; None means that keys have the documents of the queries. Only
            without ``causal`` and ``window``. :meth:`padded` describes padding by them (tokens).
        cut: Cut of each document over the ranks that share the rows, or over a group of these
            ranks; ``borders`` then describe the window of the rows that the group holds. None means
            that whole rows are cut, or that nothing is cut.
        order: Positions of the rows that each of the ranks that share them holds; None means that
            whole rows are cut.
        results: Store of results for recomputation: a second forward pass takes the results of the
            first one from it. None means that it computes them again.
        past: Cache of earlier tokens, to which these tokens attend, too; None means that rows are
            whole.
    """

    lengths: Int[Tensor, "batch documents"] | None = None
    longest: int | None = None
    positions: Int[Tensor, "batch seq"] | None = None
    restarts: bool = True
    mask: Shaped[Tensor, "#batch 1 #seq _"] | None = None
    causal: bool = True
    window: int | None = None
    prefix: Int[Tensor, " batch"] | None = None
    soft_cap: float | None = None
    slopes: AlibiSlopes | None = None
    places: Int[Tensor, "#batch _"] | None = None
    sinks: Float[Tensor, " heads"] | None = None
    scale: float | None = None
    borders: Int[Tensor, " borders"] | None = None
    key_borders: Int[Tensor, " borders"] | None = None
    cut: DocumentCut | None = None
    order: TokenOrder | None = None
    results: CoreResults | None = None
    past: CachedTokens | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and (self.has_documents or self.prefix is not None):
            raise ParallelPlanError(
                "a span must have either a mask or lengths and prefix: both were given. A mask "
                "already states for each pair of tokens what lengths and prefix state for rows. "
                "Leave one of them out."
            )
        if self.prefix is not None and self.has_documents:
            raise ParallelPlanError(
                "a span must have either lengths or prefix: both were given. A prefix starts at "
                "the start of a row, so its tokens would attend to other documents. Leave one of "
                "them out."
            )
        if self.key_borders is not None and (
            self.borders is None or self.causal or self.window is not None
        ):
            raise ParallelPlanError(
                "span.key_borders must come with borders and without causal and window, because "
                "these count the distance of a query and a key in one document: borders "
                f"{'are missing' if self.borders is None else 'are given'}, causal is "
                f"{self.causal}, window is {self.window}. Use key_borders for attention to all "
                "keys of a document."
            )
        for name in ("longest", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParallelPlanError(
                    f"span.{name} must be at least 1 token: it is {value}. A token always attends "
                    "to itself. Use None for no limit."
                )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ParallelPlanError(
                f"span.soft_cap must be above 0: it is {self.soft_cap}. It limits the scores. Use "
                "None for no limit."
            )

    @classmethod
    def packed(
        cls, lengths: Sequence[Sequence[int]], seq_length: int, num_documents: int | None = None
    ) -> AttentionSpan:
        """Return the span of rows of packed documents.

        Args:
            lengths: Lengths of the documents of each row; rows may have different numbers of
                documents (tokens).
            seq_length: Length of the rows; the rest of a row is padding (tokens).
            num_documents: Columns of the tensor of lengths, equal in all batches for CUDA graphs;
                None means the largest number of documents in a row.
        """
        check_lengths(lengths, seq_length)
        most = max(map(len, lengths), default=0)
        columns = most if num_documents is None else num_documents
        if most > columns:
            raise ParallelPlanError(
                f"a row must not have more than num_documents ({columns}) documents: one has "
                f"{most}. The lengths of all batches have the same number of columns. Raise "
                f"num_documents to {most}, or put fewer documents into a row."
            )
        rows = [[*row, *[0] * (columns - len(row))] for row in lengths]
        longest = max((max(row, default=0) for row in rows), default=0)
        # The padding at the end of a row is a document, too.
        longest = max([longest, *(seq_length - sum(row) for row in rows)])
        lengths_of_rows = torch.tensor(rows, dtype=torch.int64).view(len(rows), columns)
        return cls(lengths=lengths_of_rows, longest=longest)

    @classmethod
    def padded(cls, lengths: Int[Tensor, " batch"], seq_length: int) -> AttentionSpan:
        """Return the span of bidirectional attention to all tokens that are not padding.

        Equal to a mask of the keys: queries at padding attend to the same keys as the others. The
        keys of a row that are not padding form a document with all its queries, and its padding
        forms a document without queries. The number of documents depends on that of the rows alone,
        and the host reads no value, so the result may be computed inside a captured region.

        Args:
            lengths: Number of tokens before the padding of each row; a row of padding alone is
                taken as a row without padding (tokens).
        """
        counts = lengths.masked_fill(lengths < 1, seq_length)[:, None]
        return cls(
            causal=False,
            longest=seq_length,
            borders=borders_of(torch.full_like(counts, seq_length), seq_length),
            key_borders=borders_of(counts, seq_length),
        )

    @property
    def has_own_scores(self) -> bool:
        """Return whether a soft cap, ALiBi or sinks change the softmax of scaled scores."""
        return self.soft_cap is not None or self.slopes is not None or self.sinks is not None

    @property
    def has_documents(self) -> bool:
        """Return whether rows may consist of several documents."""
        return self.lengths is not None or self.borders is not None

    def check_shape(self, num_sequences: int, seq_length: int) -> None:
        """Check that the shapes of the fields fit rows of tokens.

        The host does not read lengths, which may be on a GPU; :func:`check_lengths` checks them.
        """
        positions = self.positions
        if positions is not None and tuple(positions.shape) != (num_sequences, seq_length):
            raise ParallelPlanError(
                f"span.positions must have the shape of the tokens ({num_sequences}, "
                f"{seq_length}), because it describes each of them: its shape is "
                f"{tuple(positions.shape)}. Expand or cut it."
            )
        mask = self.mask
        if mask is not None and (
            mask.dim() != 4
            or mask.shape[3] != seq_length
            or mask.shape[2] not in (1, seq_length)
            or mask.shape[0] not in (1, num_sequences)
            or mask.shape[1] != 1
        ):
            raise ParallelPlanError(
                f"span.mask must have the shape ({num_sequences} or 1, 1, {seq_length} or 1, "
                f"{seq_length}), for rows, heads, queries and keys: its shape is "
                f"{tuple(mask.shape)}. Insert dimensions of size 1."
            )
        if self.lengths is None:
            return
        if self.lengths.dim() != 2 or len(self.lengths) != num_sequences:
            raise ParallelPlanError(
                f"span.lengths must have a row for each of the {num_sequences} rows of tokens, "
                "because it describes their documents: its shape is "
                f"{tuple(self.lengths.shape)}. Give rows without documents zeros."
            )

    def over(self, rows: AttentionSpan | None) -> AttentionSpan:
        """Return a span with this kind of attention and the rows of another span."""
        if rows is None:
            return self
        return replace(
            rows,
            causal=self.causal,
            window=self.window,
            soft_cap=self.soft_cap,
            slopes=self.slopes,
            sinks=self.sinks,
            scale=self.scale,
        )

    def laid_out(self, num_sequences: int, seq_length: int, device: torch.device) -> AttentionSpan:
        """Return the span with the borders of its documents and its positions, on a device.

        Kernels and masks take spans that are laid out or have no documents. The host reads no
        value, so the result may be computed inside a captured region.
        """
        if self.lengths is None:
            return self
        borders = borders_of(self.lengths.to(device, non_blocking=True), seq_length)
        positions = self.positions
        if positions is None and self.restarts:
            positions = _positions_in_documents(borders, num_sequences, seq_length)
        return replace(self, lengths=None, borders=borders, positions=positions)


def borders_of(lengths: Int[Tensor, "batch documents"], seq_length: int) -> Int[Tensor, " borders"]:
    """Return the cumulative lengths of all documents of all rows, from 0 to ``batch seq``.

    The rest of a row after its last document is one more document.
    """
    num_rows = len(lengths)
    # Lengths that exceed their row must not reach into the next one.
    ends = lengths.cumsum(1).clamp(max=seq_length)
    starts_of_rows = torch.arange(num_rows, device=lengths.device)[:, None] * seq_length
    ends = F.pad(ends, (0, 1), value=seq_length) + starts_of_rows
    return F.pad(ends.flatten(), (1, 0)).to(torch.int32)


def document_of_tokens(
    borders: Int[Tensor, " borders"], num_sequences: int, seq_length: int
) -> Int[Tensor, "batch seq"]:
    """Return the index of each token's document among the documents of all rows."""
    index = torch.arange(num_sequences * seq_length, device=borders.device, dtype=borders.dtype)
    document = torch.searchsorted(borders[1:].contiguous(), index, right=True)
    return document.view(num_sequences, seq_length)


def _positions_in_documents(
    borders: Int[Tensor, " borders"], num_sequences: int, seq_length: int
) -> Int[Tensor, "batch seq"]:
    starts = borders[document_of_tokens(borders, num_sequences, seq_length)]
    index = torch.arange(num_sequences * seq_length, device=borders.device)
    return index.view(num_sequences, seq_length) - starts


def check_lengths(
    lengths: Sequence[Sequence[int]], seq_length: int, longest: int | None = None
) -> None:
    """Check that the lengths of documents fit rows; ``longest`` is their upper bound."""
    most = seq_length if longest is None else longest
    for number, row in enumerate(lengths):
        if sum(row) > seq_length:
            raise ParallelPlanError(
                f"the lengths of the documents of a row must not exceed its {seq_length} tokens: "
                f"row {number} has {list(row)}, which is {sum(row)}. A document must end in its "
                f"row. Use lengths with a sum of at most {seq_length}."
            )
        if row and (min(row) < 0 or max(row) > most):
            raise ParallelPlanError(
                f"the length of a document must be from 0 to {most} tokens: row {number} has "
                f"{list(row)}. The kernel is launched for the longest document. Cut the document, "
                "or raise its bound (span.longest, max_length_q)."
            )


#: Output of an attention core, and the log-sum-exp of the scores of every query.
Results = tuple[Float[Tensor, "seq batch heads head_dim"], Float[Tensor, "batch heads seq"]]


class CoreResults:
    """Outputs and log-sum-exps of the attention cores of a block that is recomputed.

    The gradients of an attention core need its inputs, its output and the log-sum-exps of its
    scores. The inputs are cheap to recompute, but in long rows the core is not. The first forward
    pass therefore stores the results of the cores here, and later passes read them in the same
    order.
    """

    def __init__(self) -> None:
        self._kept: list[Results] = []
        self._num_taken: int | None = None

    def start(self) -> None:
        """Begin a forward pass: the first one stores results, later ones read them."""
        self._num_taken = 0 if self._kept else None

    def of(self, compute: Callable[[], Results]) -> Results:
        """Return the next core's results; compute and store them only in the first pass."""
        if self._num_taken is None:
            out, lse = compute()
            self._kept.append((out.detach(), lse.detach()))
            return out, lse
        out, lse = self._kept[self._num_taken]
        self._num_taken += 1
        # Autograd attaches the tensors that a custom function returns to its graph.
        return out.detach(), lse.detach()


@dataclass(frozen=True)
class AlibiSlopes:
    """ALiBi slopes of the heads of a layer.

    The score of a query and a key decreases by the slope of the head for each token of distance
    between them. If ``num_heads`` is a power of two, head ``i`` of 1 to ``num_heads`` has the slope
    ``2 ** (-i bias_max / num_heads)``. Otherwise the first heads, up to the largest power of two P,
    have the slopes of P heads, and the others have the slopes of the odd ``i`` of 2 P heads.

    Equal to the slopes of Hugging Face's BLOOM (with a ``bias_max`` of 8) and MPT.

    Args:
        num_heads: Query heads of the full layer (heads).
        skips_padding: Whether distances count only tokens that the mask of keys shows.
        heads: Indices of this rank's heads; None means all.

    Source: Press et al. 2022 (ALiBi), section 3.
    """

    num_heads: int
    bias_max: float = 8.0
    skips_padding: bool = False
    heads: range | None = None

    def of(self, heads: range) -> AlibiSlopes:
        """Return the slopes of a range of these heads, counted from the first of them."""
        available = range(self.num_heads) if self.heads is None else self.heads
        return replace(self, heads=available[heads.start : heads.stop])

    def on(self, device: torch.device) -> Float[Tensor, " heads"]:
        """Return the slopes on a device, in float64.

        The device computes the slopes, so that a CUDA graph can capture the call.
        """
        numbers = range(self.num_heads) if self.heads is None else self.heads
        heads = torch.arange(numbers.start, numbers.stop, dtype=torch.float64, device=device)
        power = 1 << (self.num_heads.bit_length() - 1)
        further = (heads - power) + 0.5
        steps = torch.where(heads < power, heads + 1, further) / power
        return torch.exp2(-self.bias_max * steps)


def add_sinks(
    out: Float[Tensor, "seq batch heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    sinks: Float[Tensor, " heads"],
) -> tuple[Float[Tensor, "seq batch heads head_dim"], Float[Tensor, "batch heads seq"]]:
    """Merge the score of each head's sink into the merged result of all other parts."""
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (out * (lse - merged).exp().permute(2, 0, 1)[..., None]).to(out.dtype), merged


def gradient_of_sinks(
    grad_out: Float[Tensor, "seq batch heads head_dim"],
    out: Float[Tensor, "seq batch heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    sinks: Float[Tensor, " heads"],
) -> Float[Tensor, " heads"]:
    """Compute the gradient of the sinks' scores."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0)
    shares = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    return -(shares * delta).sum((0, 2)).to(sinks.dtype)
