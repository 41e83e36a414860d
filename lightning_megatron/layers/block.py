"""A Transformer block with norms before or after the residual additions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.core_results import CoreResults
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.fp8.magnitude import Magnitude
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.normed_input import normalise_for
from lightning_megatron.layers.offload import HostOffload
from lightning_megatron.layers.recompute import output_recomputed, replayed
from lightning_megatron.layers.segments import Segment, SegmentList, is_compiled
from lightning_megatron.plan.recomputation import Parts
from lightning_megatron.shapes import Float

NormPosition = Literal["pre", "post"]

BlockMode = Literal["none", "selective", "full"]
"""What the backward pass recomputes: nothing, the attention core, or the full block."""

#: Names of the values that a block reads.
_INPUTS = ("hidden", "rotary", "rows")


class TransformerBlock(nn.Module):
    """Self-attention and an MLP, each with a norm and a residual connection.

    With ``pre``, the norms do not change the residual stream (figure 7 (b) of the paper). With
    ``post``, their outputs replace it (figure 7 (a), the original BERT). Equal to
    torch.nn.TransformerEncoderLayer with ``norm_first`` True or False. A parallel block computes
    ``x + attention(norm1(x)) + mlp(norm2(x))``.

    Args:
        attention: The attention layer, called with (hidden, rotary, recompute_core, rows).
        mlp: The MLP, or a mixture of experts.
        attention_norm: Norm of the attention's input (``pre``) or of the first residual sum
            (``post``); None means no such norm, only with ``pre``.
        mlp_norm: Norm of the MLP's input (``pre``) or of the second residual sum (``post``); None
            means no such norm, only with ``pre``.
        mesh: Process groups and random streams of this rank.
        layer: Number of the layer in the random streams; 1 is the first block.
        norm_position: Position of the norms, ``pre`` or ``post``.
        output_norms: Norms of the outputs of the attention and of the MLP before their residual
            additions; None means no such norms.
        scale: Factor of the outputs of the attention and of the MLP.
        dropout: Probability that an element is dropped before each residual addition.
        is_parallel: Whether attention and MLP read the same residual stream; only with ``pre``.

    Source: Shoeybi et al. 2019, section 5.3, figure 7; Wang and Komatsuzaki 2021 (parallel blocks).
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        attention_norm: nn.Module | None,
        mlp_norm: nn.Module | None,
        *,
        mesh: ParallelMesh,
        layer: int,
        norm_position: NormPosition = "pre",
        output_norms: tuple[nn.Module, nn.Module] | None = None,
        scale: float = 1.0,
        dropout: float = 0.0,
        is_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        norms: tuple[nn.Module | None, nn.Module | None] = output_norms or (None, None)
        self.attention_output_norm, self.mlp_output_norm = norms
        self.scale = scale
        self.mesh = mesh
        self.layer = layer
        self.norm_position = norm_position
        self.dropout = dropout
        self.is_parallel = is_parallel
        #: Whether the backward pass recomputes the outputs of norms before sublayers.
        self.recomputes_norms = False
        #: Whether the recomputation of the block reuses the results of the attention core from the
        #: first forward pass.
        self.keeps_core = False
        #: Host storage for the input of a recomputed block; None keeps the input on the device.
        self.offload: HostOffload | None = None
        self._lists = {mode: self.segments(mode) for mode in get_args(BlockMode)}

    def recompute_parts(self, parts: Parts, offload: HostOffload | None = None) -> BlockMode:
        """Choose what backward passes recompute, and return the mode for :meth:`forward`.

        Args:
            parts: Parts of this block that are recomputed.
            offload: Host storage for the input of a fully recomputed block; None keeps the input on
                the device.

        Raises:
            UnsupportedError: If the block cannot recompute ``norms``, because no norm before each
                sublayer has this sublayer as its only reader; or if it is compiled, or its
                attention has dropout, and ``full_except_core`` or ``offload`` excludes that.
        """
        is_before = self.norm_position == "pre" and self.attention_norm is not None
        if "norms" in parts and (not is_before or self.is_parallel):
            where = "in parallel sublayers" if self.is_parallel else "behind the sublayers"
            raise UnsupportedError(
                "recompute of norms needs norms before the sublayers, because only a sublayer may "
                f"read the norm's output: the norm_position of layer {self.layer} is {where!r}. "
                "Leave norms out of recompute."
            )
        if offload is not None and is_compiled(self):
            raise UnsupportedError(
                "recompute.offload cannot be used with torch.compile, because compiled code keeps "
                f"its tensors on the GPU: layer {self.layer} is compiled. Leave one of them out."
            )
        self.keeps_core = "full_except_core" in parts
        if self.keeps_core:
            self._check_kept_core()
        self.offload = offload
        self.recomputes_norms = "norms" in parts
        network: Any = self.mlp
        if hasattr(network, "recomputes_experts"):
            network.recomputes_experts = "experts" in parts
            network.sends_inputs_again = "expert_inputs" in parts
        if isinstance(network, MLP):
            network.recomputes_activation = "activations" in parts
        if "full" in parts or self.keeps_core:
            return "full"
        return "selective" if "selective" in parts else "none"

    def _check_kept_core(self) -> None:
        """Check that the results of the attention core suffice to compute its gradients."""
        dropout = getattr(self.attention, "dropout", 0.0)
        if dropout > 0.0 or is_compiled(self):
            problem = f"drops {dropout} of its weights" if dropout > 0.0 else "is compiled"
            raise UnsupportedError(
                "recompute of full_except_core needs attention that keeps its output and the "
                "log-sum-exps of its scores, without dropout and outside of torch.compile: layer "
                f"{self.layer} {problem}. Use full."
            )

    def segments(self, recompute: BlockMode = "none") -> SegmentList:
        """Return the list that a forward pass runs.

        The list reads ``hidden``, ``rotary`` and ``rows``, and writes ``hidden``. Its segments are
        ``attention`` and ``mlp`` with their norms and residual additions; a mixture of experts is
        divided into several segments. With ``recompute="full"`` there is one segment, whose
        backward pass runs the list for ``"none"`` a second time.

        Args:
            recompute: Activations that the backward pass recomputes.
        """
        if recompute == "full":
            plain = partial(self.segments, "none")
            whole = Segment(
                "block",
                self._replayed,
                _INPUTS,
                ("hidden",),
                modules=(self,),
                parts=plain,
                stays_whole=True,
                keeps_only_inputs=True,
            )
            return SegmentList([whole], _INPUTS, ("hidden",))
        attention = self._attention_segment(is_core_recomputed=recompute == "selective")
        has_parts = hasattr(self.mlp, "segments")
        rest = self._mixture_segments(self.mlp) if has_parts else [self._mlp_segment()]
        return SegmentList([attention, *rest], _INPUTS, ("hidden",), self._begin)

    def forward(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        rotary: tuple[
            Float[Tensor, "seq_part #batch 1 rotary_dim"],
            Float[Tensor, "seq_part #batch 1 rotary_dim"],
        ]
        | None = None,
        recompute: BlockMode = "none",
        rows: AttentionSpan | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the residual stream after this block.

        Args:
            hidden: The residual stream.
            rotary: Cosines and sines from ``rotary_tables``; None means no rotary embedding.
            recompute: Activations that the backward pass recomputes.
            rows: Documents, prefix or mask of the rows; None means rows of one document.
        """
        return self._lists[recompute]((hidden, rotary, rows))[0]

    def _attention_segment(self, is_core_recomputed: bool) -> Segment:
        run: Callable[..., Any] = self._attend
        writes: tuple[str, ...] = ("stream", "update")
        if self.norm_position == "post":
            run = self._attend_and_normalise
            writes = ("hidden",)
        elif self.is_parallel:
            run = self._attend_beside_mlp
            writes = ("stream", "normed")
        modules = [self.attention_norm, self.attention, self.attention_output_norm]
        if self.is_parallel:
            modules.append(self.mlp_norm)
        return Segment(
            "attention",
            partial(run, is_core_recomputed),
            _INPUTS,
            writes,
            scopes=("attention",),
            modules=_present(*modules),
        )

    def _mlp_segment(self) -> Segment:
        run: Callable[..., Tensor] = self._normalise_and_feed
        reads: tuple[str, ...] = ("stream", "update")
        modules = [self.mlp_norm, self.mlp, self.mlp_output_norm]
        if self.norm_position == "post":
            run = self._feed_and_normalise
            reads = ("hidden",)
        elif self.is_parallel:
            run = self._feed
            reads = ("stream", "normed")
            modules.remove(self.mlp_norm)
        return Segment("mlp", run, reads, ("hidden",), scopes=("mlp",), modules=_present(*modules))

    def _mixture_segments(self, mixture: Any) -> list[Segment]:
        """Return the segments after attention, with a mixture of experts.

        The norm before the mixture has the scope of the router, and the residual addition or norm
        after it has the scope of the combination of expert outputs.
        """
        norms = _present(self.mlp_norm)
        whole = Segment(
            "mlp",
            self._mlp,
            ("normed",),
            ("update",),
            modules=(mixture,),
            parts=mixture.segments,
        )
        if self.norm_position == "post":
            last = Segment(
                "mlp_norm",
                self._add_and_normalise,
                ("hidden", "update"),
                ("hidden",),
                scopes=("combine",),
                modules=norms,
            )
            return [replace(whole, reads=("hidden",)), last]
        last = Segment(
            "residual",
            self._add,
            ("stream", "update"),
            ("hidden",),
            scopes=("combine",),
            modules=_present(self.mlp_output_norm),
        )
        if self.is_parallel:
            return [whole, last]
        first = Segment(
            "mlp_norm",
            self._normalise,
            ("stream", "update"),
            ("stream", "normed"),
            scopes=("router",),
            modules=norms,
        )
        return [first, whole, last]

    def _replayed(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, rows: AttentionSpan | None
    ) -> Tensor:
        offloading: AbstractContextManager[Any] = nullcontext()
        run: Callable[..., Any] = self._run_plain
        if self.keeps_core and torch.is_grad_enabled():
            run = partial(self._run_with_core, CoreResults())
        if self.offload is not None and torch.is_grad_enabled():
            offloading = self.offload.save_on_host(hidden, self.layer)
        with offloading:
            output: Tensor = replayed(run, self.mesh.random, self.layer, hidden, rotary, rows)
        return output

    def _run_with_core(
        self,
        results: CoreResults,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows: AttentionSpan | None,
    ) -> Any:
        results.start()
        return self._run_plain(hidden, rotary, replace(rows or AttentionSpan(), results=results))

    def _run_plain(self, *values: Any) -> Any:
        return self._lists["none"](values)[0]

    @torch.compiler.disable
    def _begin(self) -> None:
        # torch.compile would specialise on these numbers and recompile every block in every step.
        self.mesh.random.seek(self.layer)

    def _attend(
        self,
        is_core_recomputed: bool,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows: AttentionSpan | None,
    ) -> tuple[Tensor, Tensor]:
        stream, hidden, extras = normalise_for(self.attention, self.attention_norm, hidden)
        with self._norm_output(self.attention_norm, stream, hidden):
            update = self.attention(hidden, rotary, is_core_recomputed, rows, **extras)
        return stream, self._update(update, self.attention_output_norm)

    def _attend_beside_mlp(
        self,
        is_core_recomputed: bool,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows: AttentionSpan | None,
    ) -> tuple[Tensor, Tensor]:
        assert self.attention_norm is not None, "parallel blocks have a norm of each input"
        assert self.mlp_norm is not None, "parallel blocks have a norm of each input"
        stream, hidden, extras = normalise_for(self.attention, self.attention_norm, hidden)
        stream, normed = self.mlp_norm(stream, None, True)
        update = self._attended(hidden, rotary, is_core_recomputed, rows, **extras)
        return stream + update, normed

    def _attend_and_normalise(
        self,
        is_core_recomputed: bool,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows: AttentionSpan | None,
    ) -> Tensor:
        assert self.attention_norm is not None, "the sum is normalised"
        update = self._attended(hidden, rotary, is_core_recomputed, rows)
        normed: Tensor = self.attention_norm(hidden, update)
        return normed

    def _attended(self, hidden: Tensor, *args: Any, **given: Magnitude) -> Tensor:
        return self._update(self.attention(hidden, *args, **given), self.attention_output_norm)

    def _normalise(self, stream: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        # The MLP runs in a separate segment, whose inputs are only tensors.
        stream, normed, _ = normalise_for(None, self.mlp_norm, stream, update)
        return stream, normed

    def _mlp(self, hidden: Tensor) -> Tensor:
        # The attribute is read in every call, because the module may have been replaced.
        update: Tensor = self.mlp(hidden)
        return update

    def _add(self, stream: Tensor, update: Tensor) -> Tensor:
        return stream + self._update(update, self.mlp_output_norm)

    def _add_and_normalise(self, hidden: Tensor, update: Tensor) -> Tensor:
        assert self.mlp_norm is not None, "the sum is normalised"
        normed: Tensor = self.mlp_norm(hidden, self._update(update, self.mlp_output_norm))
        return normed

    def _feed(self, stream: Tensor, normed: Tensor) -> Tensor:
        return self._add(stream, self.mlp(normed))

    def _normalise_and_feed(self, stream: Tensor, update: Tensor) -> Tensor:
        stream, normed, extras = normalise_for(self.mlp, self.mlp_norm, stream, update)
        with self._norm_output(self.mlp_norm, stream, normed):
            output = self.mlp(normed, **extras)
        return self._add(stream, output)

    def _norm_output(
        self, norm: nn.Module | None, stream: Tensor, normed: Tensor
    ) -> AbstractContextManager[Any]:
        """Return a context in which operators recompute a norm's output instead of keeping it."""
        if norm is None or not self.recomputes_norms:
            return nullcontext()
        return output_recomputed(normed, partial(norm.forward, stream.detach()))

    def _feed_and_normalise(self, hidden: Tensor) -> Tensor:
        return self._add_and_normalise(hidden, self.mlp(hidden))

    def _update(self, output: Tensor, norm: nn.Module | None) -> Tensor:
        """Return the residual update of a sublayer's output: normed, scaled, with dropout."""
        output = output if norm is None else norm(output)
        output = output if self.scale == 1.0 else output * self.scale
        return hidden_dropout(output, self.dropout, self.training, self.mesh)


def _present(*modules: nn.Module | None) -> tuple[nn.Module, ...]:
    return tuple(module for module in modules if module is not None)
