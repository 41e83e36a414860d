"""Description of a family of Hugging Face models: configurations, tensors and file contents."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.layered import WORD_EMBEDDING
from lightning_megatron.swap.families.layer_names import ExpertNames, LatentNames
from lightning_megatron.swap.tensors.mapping import Source, TensorMap, joined, joined_layers
from lightning_megatron.swap.tensors.packed import Packed, class_table

ModelConfig: TypeAlias = GPTConfig | EncoderConfig
"""Configuration of a model of this package; its class determines the model."""


@dataclass(frozen=True)
class Family:
    """Family of Hugging Face models; loading, export and all checks follow from it.

    Args:
        model_type: Model type in configurations, such as ``llama``.
        architecture: Name of the model's class, such as ``LlamaForCausalLM``.
        config: Function that converts a configuration of the family to a ``ModelConfig``, or
            refuses it.
        tensors: Function that lists the sources of a model's full tensors.
        base: Prefix of names in files of the language model that files of the headless model lack.
        ignored: Patterns of whole names in files that contain no weights, such as masks.
        renamed: Patterns of parts of names in other files of the family, with their names in the
            class.
        head: Name of the output head's weight, which a file may have in addition to a tied
            embedding.
        embedding: Name of the token embedding's weight.
        heads: Patterns of full names of tensors that belong to heads. Heads of other classes in a
            file are skipped. Missing heads of this class keep their initial values.
        copies: Pairs of a further name in a state dict and the name of the tensor that it repeats.
        packed: Rules for tensors that the class packs. The tables of the family use the names in
            files.
    """

    model_type: str
    architecture: str
    config: Callable[[Mapping[str, Any]], Any]
    tensors: Callable[[Any], tuple[TensorMap, ...]]
    base: str = "model."
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"
    heads: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    packed: tuple[Packed, ...] = ()

    def unsupported_reason(self, settings: Mapping[str, Any]) -> str:
        """Return the setting of a configuration that the table does not support; empty if none."""
        if settings.get("expert_settings"):
            # Only models of this package have these settings.
            return ""
        try:
            self.config(settings)
        except UnsupportedError as error:
            return str(error)
        return ""

    def ignores(self, name: str) -> bool:
        """Return whether a tensor with this name contains no weights, or repeats another tensor."""
        is_copy = name in dict(self.copies)
        return is_copy or any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def is_head(self, name: str) -> bool:
        """Return whether a tensor of this name belongs to a head."""
        return any(re.fullmatch(pattern, name) for pattern in self.heads)

    def class_tensors(self, config: ModelConfig) -> tuple[TensorMap, ...]:
        """List the sources of a model's parameters in its class's tree.

        The list is that of :attr:`tensors`, with the names in the class as targets. A layer that
        joins several layers of the class has several entries.
        """
        return class_table(self.tensors(config), self.packed)

    def is_alias(self, name: str, config: ModelConfig) -> bool:
        """Return whether a name of the class is another name of a parameter."""
        is_copy = any(name == copy for copy, _ in self.copies)
        return is_copy or (name == self.head and bool(config.tie_embeddings))

    def present_name(self, name: str) -> str:
        """Return the class's name of a file's tensor."""
        for earlier, present in self.renamed:
            name = re.sub(earlier, present, name)
        return name


@dataclass(frozen=True)
class DecoderNames:
    """Tensor names of a decoder, with ``{}`` for the layer.

    Args:
        embedding: Token embedding.
        final_norm: Norm before the head.
        attention_norm: Norm before the attention, if there is one.
        mlp_norm: Norm before the MLP, if there is one.
        qkv: Projections to queries, keys and values, or one projection to all of them.
        output: Output projection of the attention.
        up: First projections of the MLP: gate and up, one projection to both, or the projection
            before the activation of an MLP without a gate.
        down: Second projection of the MLP.
        query_norm: Norm of queries, if there is one.
        key_norm: Norm of keys, if there is one.
        attention_output_norm: Norm of the attention's output before the residual sum, if there is
            one.
        mlp_output_norm: Norm of the MLP's output before the residual sum, if there is one.
        sinks: Scores of the heads' sinks, if there are any; the name of the tensor.
        position: Position embedding, if there is one.
        embedding_norm: Norm after the embedding, if there is one.
        head: Output head, if its weight is not that of the embedding.
        is_transposed: Whether weights of projections are stored input first.
        latent: Projections to latent vectors and to heads, if attention has them; ``qkv`` is then
            not used.
        experts: Routers and experts, if there are any; ``up`` and ``down`` are then those of layers
            without experts.
        by_heads: Whether ``qkv`` has the query, key and value rows of each head together, one head
            after the other.
    """

    embedding: str
    final_norm: str
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    output: str
    up: tuple[str, ...]
    down: str
    query_norm: str = ""
    key_norm: str = ""
    attention_output_norm: str = ""
    mlp_output_norm: str = ""
    sinks: str = ""
    position: str | None = None
    embedding_norm: str = ""
    head: str = "lm_head"
    latent: LatentNames | None = None
    experts: ExpertNames | None = None
    is_transposed: bool = False
    by_heads: bool = False

    def __call__(self, config: GPTConfig) -> tuple[TensorMap, ...]:
        """List the sources of a model's full tensors."""
        size = config.hidden_size
        vocabulary = config.vocab_size
        tensors = [joined(WORD_EMBEDDING, (vocabulary, size), f"{self.embedding}.weight")]
        if self.position is not None:
            shape = (config.max_seq_length, size)
            tensors.append(joined("embedding.position.weight", shape, f"{self.position}.weight"))
        if config.embedding_norm:
            tensors += self._norm("embedding.norm", self.embedding_norm, config)
        tensors += [
            tensor for layer in range(config.num_layers) for tensor in self._layer(config, layer)
        ]
        tensors += self._norm("final_norm", self.final_norm, config)
        if not config.tie_embeddings:
            tensors.append(joined("head.weight", (vocabulary, size), f"{self.head}.weight"))
        return tuple(tensors)

    def _layer(self, config: GPTConfig, layer: int) -> list[TensorMap]:
        size = config.hidden_size
        prefix = f"layers.{layer}"
        width = config.num_heads * config.value_size
        tensors = self._norms(config, layer)
        if config.attention_sinks:
            sinks = self.sinks.format(layer)
            tensors.append(joined(f"{prefix}.attention.sinks", (config.num_heads,), sinks))
        output = (Source(self.output, size),)
        if self.latent is None:
            qkv = self._qkv(config)
            tensors += self._linear(layer, "attention.qkv", qkv, size, config.has_qkv_bias)
        else:
            tensors += self.latent.layer(config, layer)
        tensors += self._linear(layer, "attention.output", output, width, config.has_output_bias)
        if self.experts is not None and config.has_experts_in(layer):
            return tensors + self.experts.layer(config, layer)
        up = "gate_up" if config.is_gated else "up"
        down = (Source(self.down, size),)
        tensors += self._linear(layer, f"mlp.{up}", self._up(config), size, config.has_mlp_bias)
        return tensors + self._linear(layer, "mlp.down", down, config.ffn_size, config.has_mlp_bias)

    def _norms(self, config: GPTConfig, layer: int) -> list[TensorMap]:
        prefix = f"layers.{layer}"
        names = {
            "attention_norm": self.attention_norm,
            "mlp_norm": self.mlp_norm,
            "attention_output_norm": self.attention_output_norm,
            "mlp_output_norm": self.mlp_output_norm,
        }
        tensors = []
        for target, name in names.items():
            if name:
                tensors += self._norm(f"{prefix}.{target}", name.format(layer), config)
        if config.qk_norm:
            is_whole = config.qk_norm_over == "layer"
            for target, name, number in (
                ("query_norm", self.query_norm, config.num_heads),
                ("key_norm", self.key_norm, config.kv_heads),
            ):
                shape = ((number if is_whole else 1) * config.head_size,)
                full = f"{prefix}.attention.{target}"
                tensors += joined_layers(full, shape, name.format(layer), has_bias=False)
        return tensors

    def _linear(
        self, layer: int, target: str, sources: tuple[Source, ...], num_columns: int, has_bias: bool
    ) -> list[TensorMap]:
        tensors = []
        num_rows = sum(source.num_rows for source in sources)
        shapes = {"weight": (num_rows, num_columns), "bias": (num_rows,)}
        for kind in ("weight", "bias") if has_bias else ("weight",):
            is_transposed = self.is_transposed and kind == "weight"
            parts = tuple(
                replace(s, name=f"{s.name.format(layer)}.{kind}", is_transposed=is_transposed)
                for s in sources
            )
            tensors.append(TensorMap(f"layers.{layer}.{target}.{kind}", shapes[kind], parts))
        return tensors

    def _qkv(self, config: GPTConfig) -> tuple[Source, ...]:
        head = config.head_size
        query = config.num_heads * head
        key = config.kv_heads * head
        if self.by_heads:
            return tuple(
                Source(self.qkv[0], query, first=n * head, strip=head, step=3 * head)
                for n in range(3)
            )
        if len(self.qkv) == 1:
            return (Source(self.qkv[0], query + 2 * key),)
        return tuple(
            Source(name, rows) for name, rows in zip(self.qkv, (query, key, key), strict=True)
        )

    def _up(self, config: GPTConfig) -> tuple[Source, ...]:
        num_rows = (2 if config.is_gated else 1) * config.ffn_size
        return tuple(Source(name, num_rows // len(self.up)) for name in self.up)

    @staticmethod
    def _norm(target: str, source: str, config: GPTConfig) -> list[TensorMap]:
        has_bias = config.norm == "layernorm" and config.bias
        return joined_layers(target, (config.hidden_size,), source, has_bias=has_bias)
