"""Decoder in plain torch, written from the formulas, as a reference for every setting of GPT."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.rotary_frequencies import rotary_frequencies
from lightning_megatron.models.config import GPTConfig

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "swiglu": lambda x: x * torch.sigmoid(x),
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class PlainGPT:
    """Compute logits and losses from full weights, one formula a line.

    Args:
        config: Shape of the model.
        weights: Full weights by the names of GPT, without a tied head.
        span: Span of the rows of the batch.
    """

    def __init__(
        self, config: GPTConfig, weights: Mapping[str, Tensor], span: AttentionSpan | None
    ) -> None:
        self.config, self.weights, self.span = config, weights, span or AttentionSpan()

    def logits(self, tokens: Tensor, embeddings: Tensor | None = None) -> Tensor:
        w, config = self.weights, self.config
        x = w["embedding.word.weight"][tokens] if embeddings is None else embeddings
        if embeddings is None or config.scales_vectors:
            x = x * config.embedding_scale
        if config.position == "learned":
            x = x + w["embedding.position.weight"][self.positions(tokens)]
        x = self.norm(x, "embedding.norm")
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            if config.parallel_residual:
                x = (
                    x
                    + self.attention(self.norm(x, f"{name}.attention_norm"), layer, tokens)
                    + self.mlp(self.norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
                )
                continue
            update = self.attention(self.norm(x, f"{name}.attention_norm"), layer, tokens)
            x = x + self.norm(update, f"{name}.attention_output_norm") * config.residual_scale
            update = self.mlp(self.norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
            x = x + self.norm(update, f"{name}.mlp_output_norm") * config.residual_scale
        head = w.get("head.weight", w["embedding.word.weight"])
        return apply_soft_cap(
            self.norm(x, "final_norm") @ head.t() * config.logit_scale, config.logit_soft_cap
        )

    def losses(self, tokens: Tensor, labels: Tensor, embeddings: Tensor | None = None) -> Tensor:
        logits = self.logits(tokens, embeddings).transpose(1, 2)
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)

    def positions(self, tokens: Tensor) -> Tensor:
        if self.span.positions is not None:
            return self.span.positions
        if self.span.lengths is None or not self.span.restarts:
            return torch.arange(tokens.shape[1]).expand(tokens.shape)
        documents = self.documents(tokens)
        return torch.tensor(
            [[row[:index].count(row[index]) for index in range(len(row))] for row in documents]
        )

    def documents(self, tokens: Tensor) -> list[list[int]]:
        """Return the number of the document of each position."""
        num, length = tokens.shape
        lengths = [[]] * num if self.span.lengths is None else self.span.lengths.tolist()
        rows = []
        for row in lengths:
            document_lengths = [*row, length - sum(row)]
            rows.append(
                [number for number, size in enumerate(document_lengths) for _ in range(size)]
            )
        return rows

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return x @ self.weights[f"{name}.weight"].t() + (0.0 if bias is None else bias)

    def norm(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        weight, eps = self.weights[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "rmsnorm" or name.endswith(("query_norm", "key_norm")):
            return (
                x
                / (x.square().mean(-1, keepdim=True) + eps).sqrt()
                * (weight + self.config.norm_offset)
            )
        x = x - x.mean(-1, keepdim=True)
        bias = self.weights.get(f"{name}.bias")
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + (
            0.0 if bias is None else bias
        )

    def mlp(self, x: Tensor, name: str) -> Tensor:
        function = ACTIVATIONS[self.config.activation]
        if self.config.is_gated:
            gate, up = self.linear(x, f"{name}.gate_up").chunk(2, -1)
            return self.linear(function(gate) * up, f"{name}.down")
        return self.linear(function(self.linear(x, f"{name}.up")), f"{name}.down")

    def attention(self, x: Tensor, layer: int, tokens: Tensor) -> Tensor:
        config, name = self.config, f"layers.{layer}.attention"
        size, queries, keys = config.head_size, config.num_heads, config.kv_heads
        parts = self.linear(x, f"{name}.qkv").split([queries * size, keys * size, keys * size], -1)
        names = f"{name}.query_norm", f"{name}.key_norm", ""
        if config.qk_norm_over == "layer":
            parts = [self.norm(part, norm) for part, norm in zip(parts, names, strict=True)]
        q, k, v = (part.unflatten(-1, (-1, size)) for part in parts)
        if config.qk_norm_over == "head":
            q, k = self.norm(q, names[0]), self.norm(k, names[1])
        if config.rotates_in(layer):
            q, k = self.rotate(q, layer, tokens), self.rotate(k, layer, tokens)
        k, v = (part.repeat_interleave(queries // keys, 2) for part in (k, v))
        scale = size**-0.5 if config.attention_scale is None else config.attention_scale
        scores = torch.einsum("bshk,bthk->bhst", q, k) * scale
        scores = apply_soft_cap(scores, config.attention_soft_cap)
        if config.position == "alibi":
            scores = scores - self.slopes() * self.distances(tokens)
        scores = scores.masked_fill(
            ~self.visible_pairs(tokens, config.window_of(layer)), -torch.inf
        )
        exponents = scores.exp()
        total = exponents.sum(-1, keepdim=True)
        if config.attention_sinks:
            total = total + self.weights[f"{name}.sinks"].exp()[:, None, None]
        weights = exponents / total
        return self.linear(torch.einsum("bhst,bthk->bshk", weights, v).flatten(2), f"{name}.output")

    def slopes(self) -> Tensor:
        """Return the ALiBi slopes of four heads, which are powers of one number."""
        assert self.config.num_heads == 4
        return torch.tensor([2 ** (-self.config.alibi_bias_max * n / 4) for n in range(1, 5)])[
            :, None, None
        ]

    def distances(self, tokens: Tensor) -> Tensor:
        """Return the number of unmasked tokens between every two positions."""
        places = torch.arange(tokens.shape[1]).expand(tokens.shape)
        if self.config.alibi_skips_padding and self.span.mask is not None:
            places = self.span.mask[:, 0, 0].cumsum(-1).expand(tokens.shape)
        return (places[:, None, :, None] - places[:, None, None, :]).abs()

    def rotate(self, heads: Tensor, layer: int, tokens: Tensor) -> Tensor:
        """Rotate pairs of elements as complex numbers."""
        config, positions = self.config, self.positions(tokens)
        base, scaling = config.rotary_base, config.rotary_scaling
        if config.window_rotary_base is not None and config.window_of(layer) is not None:
            base, scaling = config.window_rotary_base, None
        size, amplitude = config.rotary_size, 1.0 if scaling is None else scaling.amplitude
        is_long = scaling is not None and int(positions.max()) + 1 > (
            scaling.original_length or 10**9
        )
        frequencies = rotary_frequencies(size, base, scaling, is_long=is_long, device="cpu")
        angles = (positions[..., None].float() * frequencies)[:, :, None]
        rotations = torch.complex(
            (angles.cos() * amplitude).double(), (angles.sin() * amplitude).double()
        )
        if config.rotary_interleaved:
            pairs = heads[..., :size].unflatten(-1, (-1, 2))
            rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotations)
            return torch.cat((rotated.flatten(-2), heads[..., size:]), -1)
        rotated = torch.complex(heads[..., : size // 2], heads[..., size // 2 : size]) * rotations
        return torch.cat((rotated.real, rotated.imag, heads[..., size:]), -1)

    def visible_pairs(self, tokens: Tensor, window: int | None) -> Tensor:
        """Return whether each position attends to each other position."""
        mask, documents = self.span.mask, self.documents(tokens)
        num, length = tokens.shape
        pairs = torch.zeros(num, 1, length, length, dtype=torch.bool)
        for row in range(num):
            for query in range(length):
                for key in range(query + 1 if self.config.causal else length):
                    is_in_window = window is None or abs(query - key) < window
                    is_same_document = documents[row][query] == documents[row][key]
                    is_unmasked = mask is None or bool(mask[row, 0, 0, key])
                    pairs[row, 0, query, key] = is_in_window and is_same_document and is_unmasked
                pairs[row, 0, query, query] |= not pairs[row, 0, query].any()
        return pairs


def apply_soft_cap(values: Tensor, cap: float | None) -> Tensor:
    """Apply a soft cap."""
    return values if cap is None else cap * torch.tanh(values / cap)
