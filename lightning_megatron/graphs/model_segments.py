"""Models of this package as lists of segments, which CUDA graphs capture one by one.

Each list equals the forward pass of its module, which is the plain formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.graphs.segments import Segment, SegmentList, names_from_outside
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.block import Block, ParallelBlock, PostNormBlock
from lightning_megatron.layers.normed_input import norm_recomputed, normalise_for
from lightning_megatron.layers.recomputed_block import is_recomputed
from lightning_megatron.models.encoder import Encoder, EncoderCall
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.gpt_block import rotary_name
from lightning_megatron.models.gpt_inputs import GPTCall
from lightning_megatron.models.layer_inputs import span_name
from lightning_megatron.models.layered import LayeredModule, LayerInputs
from lightning_megatron.plan.cuda_graphs import SegmentScope

#: Names of the values that a block reads.
_INPUTS = ("hidden", "rotary", "span")
Rotary = tuple[Tensor, Tensor] | None


def chunk_segments(model: LayeredModule, chunk: int = 0) -> SegmentList:
    """Return the segments that equal :meth:`LayeredModule.run_chunk`.

    On the first virtual stage they begin with the embedding; other stages read ``hidden``. Each
    layer is one segment, which can be divided into the segments of its block. On the last virtual
    stage the segment ``head`` follows, which includes the loss and writes ``result``; on other
    stages the last layer writes ``hidden``. Attention spans and rotary tables are inputs.

    Args:
        model: A GPT or an encoder.
        chunk: Index of this rank's chunk.
    """
    segments: list[Segment] = []
    if model.is_first_stage(chunk):
        segments.append(_embedding_segment(model))
    segments += [_layer_segment(model, index) for index in model.layers_of_chunk(chunk)]
    outputs: tuple[str, ...] = ("hidden",)
    if model.is_last_stage(chunk):
        segments.append(_head_segment(model))
        outputs = ("result",)
    return SegmentList(segments, names_from_outside(segments, outputs), outputs)


def chunk_values(
    model: LayeredModule, hidden: Tensor | None, call: Any, layers: Mapping[int, LayerInputs]
) -> dict[str, Any]:
    """Return the inputs of a chunk by the names that its segments read.

    Args:
        model: A GPT or an encoder.
        hidden: Hidden states of the previous virtual stage; None on the first one.
        call: Inputs of the model.
        layers: Inputs of each layer, by its index in the whole model.
    """
    values: dict[str, Any] = {"hidden": hidden}
    if isinstance(call, GPTCall):
        values |= {
            "tokens": call.tokens,
            "vectors": call.vectors,
            "positions": call.positions,
            "order": call.order,
            "labels": call.targets,
            "place": call.place,
        }
    if isinstance(call, EncoderCall):
        values |= {
            "rows": call.rows,
            "labels": call.labels,
            "ignore_index": call.ignore_index,
            "num_joined": call.num_joined,
        }
    for index, given in layers.items():
        rotary, span = _names_of_layer(model, index)
        values |= {rotary: given.rotary, span: given.span}
    return values


def _names_of_layer(model: LayeredModule, index: int) -> tuple[str, str]:
    """Return the names of a layer's rotary tables and of its attention span."""
    if isinstance(model, GPT):
        return rotary_name(model.config, index), span_name(model.config, index)
    return "rotary", "span"


def _embedding_segment(model: LayeredModule) -> Segment:
    assert isinstance(model, GPT | Encoder), "these models have segments"
    assert model.embedding is not None, "the first virtual stage holds the embedding"
    is_gpt = isinstance(model, GPT)
    return Segment(
        "embedding",
        model.embed,
        ("tokens", "vectors", "positions", "order") if is_gpt else ("rows",),
        ("hidden",),
        scopes=("embedding",),
        modules=(model.embedding,),
    )


def _head_segment(model: LayeredModule) -> Segment:
    assert isinstance(model, GPT | Encoder), "these models have segments"
    word: nn.Module | None = None if model.embedding is None else model.embedding.word
    reads: tuple[str, ...] = ("hidden", "labels", "order", "place")
    modules = [model.final_norm, word if model.head is None else model.head]
    if isinstance(model, Encoder):
        # The head of a masked language model reads the weight of the embedding, or has a copy.
        reads = ("hidden", "labels", "ignore_index", "num_joined")
        modules = [model.final_norm, model.head, word if model.config.tie_embeddings else None]
    return Segment(
        "head",
        partial(_run_head, model),
        reads,
        ("result",),
        scopes=("head",),
        modules=_present(*modules),
    )


def _run_head(model: GPT | Encoder, hidden: Tensor, *given: Any) -> Any:
    if model.final_norm is not None:
        hidden = model.final_norm(hidden)
    return model.result(hidden, *given)


def _layer_segment(model: LayeredModule, index: int) -> Segment:
    """Return the segment of a layer, from ``hidden`` to ``hidden``."""
    layer = model.layers[str(index)]
    is_block = isinstance(getattr(layer, "_orig_mod", layer), Block)
    return Segment(
        f"layers.{index}",
        # The attribute is read in every call, because the module may have been replaced.
        lambda *values: model.layers[str(index)](*values),
        ("hidden", *_names_of_layer(model, index)),
        ("hidden",),
        is_static=is_block,
        modules=(layer,),
        parts=(lambda: block_segments(model.layers[str(index)])) if is_block else None,
    )


def block_segments(layer: nn.Module) -> SegmentList:
    """Return the segments that equal the forward pass of a block.

    They read ``hidden``, ``rotary`` and ``span``, and write ``hidden``. They are ``attention`` and
    ``mlp`` with their norms and residual additions; a mixture of experts is divided into several
    segments. A block that is recomputed as a whole is one segment.

    Args:
        layer: The block, or its compiled module.
    """
    block: Any = getattr(layer, "_orig_mod", layer)
    plain = _plain_segments(block)
    if not is_recomputed(block):
        return plain
    whole = Segment(
        "block",
        block.forward,
        _INPUTS,
        ("hidden",),
        modules=(block,),
        parts=lambda: plain,
        stays_whole=True,
        keeps_only_inputs=True,
    )
    return SegmentList([whole], _INPUTS, ("hidden",))


def _plain_segments(block: Block) -> SegmentList:
    """Return the segments of a block of any form, without recomputation of the whole block."""
    build = _pre_norm_segments
    if isinstance(block, PostNormBlock):
        build = _post_norm_segments
    elif isinstance(block, ParallelBlock):
        build = _parallel_segments
    return SegmentList(build(block), _INPUTS, ("hidden",), block.begin)


def _pre_norm_segments(block: Block) -> list[Segment]:
    def attend(hidden: Tensor, rotary: Rotary, span: AttentionSpan | None) -> tuple[Tensor, Tensor]:
        hidden, normed, known = normalise_for(block.attention, block.attention_norm, hidden)
        with norm_recomputed(block.attention_norm, hidden, normed):
            update = block.attention(normed, rotary, span, **known)
        return hidden, block.residual(update, block.attention_output_norm)

    def feed(hidden: Tensor, update: Tensor) -> Tensor:
        hidden, normed, known = normalise_for(block.mlp, block.mlp_norm, hidden, update)
        with norm_recomputed(block.mlp_norm, hidden, normed):
            update = block.mlp(normed, **known)
        return add(hidden, update)

    def normalise(hidden: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        hidden, normed, _ = normalise_for(None, block.mlp_norm, hidden, update)
        return hidden, normed

    def add(hidden: Tensor, update: Tensor) -> Tensor:
        return hidden + block.residual(update, block.mlp_output_norm)

    attention = _attention_segment(block, attend, ("stream", "update"))
    sums = ("stream", "update")
    if not isinstance(block.mlp, MixtureOfExperts):
        modules = _present(block.mlp_norm, block.mlp, block.mlp_output_norm)
        feeds = Segment("mlp", feed, sums, ("hidden",), scopes=("mlp",), modules=modules)
        return [attention, feeds]
    # The norm before a mixture has the scope of the router, and the addition after it that of the
    # combination of the experts' outputs.
    norm = Segment(
        "mlp_norm",
        normalise,
        sums,
        ("stream", "normed"),
        scopes=("router",),
        modules=_present(block.mlp_norm),
    )
    return [attention, norm, _mixture_segment(block, "normed"), _residual_segment(block, add)]


def _post_norm_segments(block: Block) -> list[Segment]:
    def attend(hidden: Tensor, rotary: Rotary, span: AttentionSpan | None) -> Any:
        update = block.residual(block.attention(hidden, rotary, span), block.attention_output_norm)
        return _norm_of(block.attention_norm)(hidden, update)

    def feed(hidden: Tensor) -> Any:
        return add(hidden, block.mlp(hidden))

    def add(hidden: Tensor, update: Tensor) -> Any:
        return _norm_of(block.mlp_norm)(hidden, block.residual(update, block.mlp_output_norm))

    attention = _attention_segment(block, attend, ("hidden",))
    if not isinstance(block.mlp, MixtureOfExperts):
        modules = _present(block.mlp_norm, block.mlp, block.mlp_output_norm)
        reads = ("hidden",)
        return [attention, Segment("mlp", feed, reads, reads, scopes=("mlp",), modules=modules)]
    last = Segment(
        "mlp_norm",
        add,
        ("hidden", "update"),
        ("hidden",),
        scopes=("combine",),
        modules=_present(block.mlp_norm),
    )
    return [attention, _mixture_segment(block, "hidden"), last]


def _parallel_segments(block: Block) -> list[Segment]:
    def attend(hidden: Tensor, rotary: Rotary, span: AttentionSpan | None) -> tuple[Tensor, Tensor]:
        hidden, normed, known = normalise_for(block.attention, block.attention_norm, hidden)
        hidden, beside, _ = normalise_for(None, block.mlp_norm, hidden)
        update = block.attention(normed, rotary, span, **known)
        return hidden + block.residual(update, block.attention_output_norm), beside

    def feed(hidden: Tensor, normed: Tensor) -> Tensor:
        return add(hidden, block.mlp(normed))

    def add(hidden: Tensor, update: Tensor) -> Tensor:
        return hidden + block.residual(update, block.mlp_output_norm)

    attention = _attention_segment(block, attend, ("stream", "normed"), block.mlp_norm)
    if isinstance(block.mlp, MixtureOfExperts):
        return [attention, _mixture_segment(block, "normed"), _residual_segment(block, add)]
    modules = _present(block.mlp, block.mlp_output_norm)
    reads = ("stream", "normed")
    return [attention, Segment("mlp", feed, reads, ("hidden",), scopes=("mlp",), modules=modules)]


def _attention_segment(
    block: Block, attend: Any, writes: tuple[str, ...], *beside: nn.Module | None
) -> Segment:
    modules = _present(block.attention_norm, block.attention, block.attention_output_norm, *beside)
    return Segment("attention", attend, _INPUTS, writes, scopes=("attention",), modules=modules)


def _residual_segment(block: Block, add: Any) -> Segment:
    return Segment(
        "residual",
        add,
        ("stream", "update"),
        ("hidden",),
        scopes=("combine",),
        modules=_present(block.mlp_output_norm),
    )


def _mixture_segment(block: Block, reads: str) -> Segment:
    mixture: Any = block.mlp
    return Segment(
        "mlp",
        # The attribute is read in every call, because the module may have been replaced.
        lambda hidden: block.mlp(hidden),
        (reads,),
        ("update",),
        modules=(mixture,),
        parts=partial(mixture_segments, mixture),
    )


def mixture_segments(mixture: MixtureOfExperts) -> SegmentList:
    """Return the segments that equal the forward pass of a mixture, from ``hidden`` to ``output``.

    Those from ``send`` to ``send_back`` are static if the dispatcher is, the others always.

    Args:
        mixture: The mixture of experts.
    """

    def prepare(*routed: Tensor) -> Any:
        return mixture.transport_choice.dispatcher.prepare(*routed)

    def send(prepared: Any) -> Any:
        return mixture.transport_choice.dispatcher.send(prepared)

    def send_back(rows: Tensor, dispatched: Any) -> Any:
        return mixture.transport_choice.dispatcher.send_back(rows, dispatched)

    choice = mixture.transport_choice
    sizes: dict[str, Any] = {"is_static": choice.dispatcher.is_static}
    experts = (mixture.experts,)
    weights: dict[str, Any] = {"modules": experts if choice.puts_weights else ()}
    weights["starts_transfer"] = choice.puts_weights
    routed = "tokens probabilities selected"
    router = (mixture.router,)
    segments = [
        _part("route", mixture.route, "hidden", f"entered {routed}", "router", modules=router),
        _part("prepare", prepare, routed, "prepared", "preprocess"),
        _part("send", send, "prepared", "sent", "preprocess", starts_transfer=True, **sizes),
        _part("receive", mixture.receive, "sent", "dispatched", "preprocess", **weights, **sizes),
        _part(
            "experts", mixture.compute, "dispatched", "rows", "experts", modules=experts, **sizes
        ),
        _part("send_back", send_back, "rows dispatched", "returned", "combine", **sizes),
        _part("combine", mixture.combine, "returned entered", "output", "combine"),
    ]
    if mixture.shared is not None:
        part = (mixture.shared,)
        shared = _part("shared", mixture.shared, "entered", "shared", "preprocess", modules=part)
        # It overlaps with the transport of tokens.
        segments.insert(3, shared)
        segments.append(_part("join", torch.add, "output shared", "output", "combine"))
    return SegmentList(segments, ("hidden",), ("output",))


def _part(
    name: str, run: Any, reads: str, writes: str, scope: SegmentScope, **properties: Any
) -> Segment:
    return Segment(
        name, run, tuple(reads.split()), tuple(writes.split()), scopes=(scope,), **properties
    )


def _norm_of(norm: nn.Module | None) -> nn.Module:
    assert norm is not None, "the sum is normalised"
    return norm


def _present(*modules: nn.Module | None) -> tuple[nn.Module, ...]:
    return tuple(module for module in modules if module is not None)
