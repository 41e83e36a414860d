"""Recomputation around blocks: what their backward passes compute a second time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.attention.span import AttentionSpan, CoreResults
from lightning_megatron.layers.block import Block, PreNormBlock
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.offload import HostOffload
from lightning_megatron.layers.recompute import replayed
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.plan.recomputation import Parts
from lightning_megatron.shapes import Float
from lightning_megatron.user_code import is_compiled


class RecomputedForward:
    """Forward pass of a block that keeps only its inputs; the backward pass runs it again.

    Equal to the forward pass of the block, gradients included. It takes the place of the block's
    ``forward``, so that hooks of the block run once.

    Args:
        keeps_core: Whether the second run reuses the results of the attention core from the first.
        offload: Host storage for the inputs; None keeps them on the device.
    """

    def __init__(self, block: Block, keeps_core: bool, offload: HostOffload | None) -> None:
        self.block = block
        self.keeps_core = keeps_core
        self.offload = offload

    def __call__(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: Rotary | None = None,
        span: AttentionSpan | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        results = CoreResults() if self.keeps_core and torch.is_grad_enabled() else None
        offloading: AbstractContextManager[Any] = nullcontext()
        if self.offload is not None and torch.is_grad_enabled():
            offloading = self.offload.save_on_host(hidden, self.block.layer)
        with offloading:
            output: Tensor = replayed(
                partial(self._run, results),
                self.block.mesh.random,
                self.block.layer,
                hidden,
                rotary,
                span,
            )
        return output

    def _run(
        self,
        results: CoreResults | None,
        hidden: Tensor,
        rotary: Rotary | None,
        span: AttentionSpan | None,
    ) -> Tensor:
        if results is not None:
            results.start()
            span = replace(span or AttentionSpan(), results=results)
        output: Tensor = type(self.block).forward(self.block, hidden, rotary, span)
        return output


def is_recomputed(block: nn.Module) -> bool:
    """Return whether a backward pass runs a block a second time as a whole."""
    return isinstance(block.forward, RecomputedForward)


def recompute_parts(layer: nn.Module, parts: Parts, offload: HostOffload | None = None) -> None:
    """Choose what the backward passes of a block, or of its compiled module, recompute.

    ``offload`` stores the input of a fully recomputed block on the host.

    Raises:
        UnsupportedError: If the block cannot recompute ``norms``, because no norm before each
            sublayer has this sublayer as its only reader; or if it is compiled, or its attention
            has dropout, and ``full_except_core`` or ``offload`` excludes that.
    """
    block: Any = getattr(layer, "_orig_mod", layer)
    _check(block, parts, offload, is_compiled(layer))
    keeps_core = "full_except_core" in parts
    network = block.mlp
    block.attention.recomputes_core = "selective" in parts
    is_mixture = hasattr(network, "recomputes_experts")
    if is_mixture:
        network.recomputes_experts = "experts" in parts
        network.sends_inputs_again = "expert_inputs" in parts
    if isinstance(network, MLP):
        network.recomputes_activation = "activations" in parts
    for norm, recomputes in ((block.attention_norm, True), (block.mlp_norm, not is_mixture)):
        if norm is not None:
            norm.is_recomputed = "norms" in parts and recomputes
    vars(block).pop("forward", None)
    if "full" in parts or keeps_core:
        vars(block)["forward"] = RecomputedForward(block, keeps_core, offload)


def _check(block: Block, parts: Parts, offload: HostOffload | None, runs_compiled: bool) -> None:
    is_before = isinstance(block, PreNormBlock) and block.attention_norm is not None
    if "norms" in parts and not is_before:
        raise UnsupportedError(
            "recompute of norms needs a norm before each sublayer that only this sublayer reads: "
            f"layer {block.layer} is a {type(block).__name__} without such norms. Leave norms out "
            "of recompute."
        )
    if offload is not None and runs_compiled:
        raise UnsupportedError(
            "recompute.offload cannot be used with torch.compile, because compiled code keeps its "
            f"tensors on the GPU: layer {block.layer} is compiled. Leave one of them out."
        )
    dropout = getattr(block.attention, "dropout", 0.0)
    if "full_except_core" in parts and (dropout > 0.0 or runs_compiled):
        problem = f"drops {dropout} of its weights" if dropout > 0.0 else "is compiled"
        raise UnsupportedError(
            "recompute of full_except_core needs attention that keeps its output and the "
            "log-sum-exps of its scores, without dropout and outside of torch.compile: layer "
            f"{block.layer} {problem}. Use full."
        )
