"""Forward pass over one new token per row, captured once as a CUDA graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.generation.fused_pass import FusedPass, reason_against_fused_pass
from lightning_megatron.graphs.backend import (
    CAPTURE_ERRORS,
    CaptureBackend,
    CapturedGraph,
    collection_paused,
)
from lightning_megatron.graphs.cuda import CudaBackend, RunStream
from lightning_megatron.graphs.user_hooks import modules_with_user_hooks
from lightning_megatron.layers.attention.cached_attention import reason_against_token_attention
from lightning_megatron.layers.attention.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.gpt_block import span_of_layer
from lightning_megatron.shapes import Float, Int

_log = logging.getLogger(__name__)
#: Smallest number of new tokens for which a capture saves time; it takes as long as computing a few
#: tokens.
_MIN_TOKENS = 16


def reason_against_capture(gpt: GPT, num_tokens: int) -> str | None:
    """Return why passes over one token per row are not captured as a CUDA graph; None if they are.

    Args:
        num_tokens: Maximum number of new tokens per row (tokens).
    """
    if gpt.mesh.device.type != "cuda":
        return f"CUDA graphs need a GPU, and the model is on {gpt.mesh.device.type}"
    if num_tokens < _MIN_TOKENS:
        return f"a capture pays off from {_MIN_TOKENS} new tokens, and there are {num_tokens}"
    return reason_against_replay(gpt)


def reason_against_replay(gpt: GPT) -> str | None:
    """Return why a graph cannot replay the pass over one token per row; None if it can.

    A replay runs no Python code, and finds the position of the new tokens in a tensor on the
    device.
    """
    config = gpt.config
    mesh = gpt.mesh
    for name in ("pp", "cp"):
        size = getattr(mesh, name).size
        if size > 1:
            return f"the host sends and receives parts of a pass between ranks ({name}={size})"
    if mesh.sequence_parallel:
        return "sequence parallelism pads a pass over one token to a position for each rank of tp"
    if config.experts is not None:
        return "the host reads how many rows each expert has"
    if config.rotary_scaling is not None and config.rotary_scaling.kind == "longrope":
        return "the rotary angles of longrope depend on the length of the rows"
    if any(getattr(module, "scaling", None) is not None for module in gpt.modules()):
        return "8-bit matrix products, those of Transformer Engine included, are not captured"
    if torch.is_autocast_enabled(mesh.device.type):
        return "autocast caches copies of weights between operators"
    if any(parametrize.is_parametrized(module) for module in gpt.modules()):
        return "a parametrization computes weights in each pass"
    hooked = next(iter(modules_with_user_hooks(gpt).items()), None)
    if hooked is not None:
        return f"a hook on {hooked[0]} ({hooked[1]}) would not run in a replay"
    if any(getattr(module, "sinks", None) is not None for module in gpt.modules()):
        return "the attention of the model has sinks"
    reasons = (
        reason_against_token_attention(span_of_layer(config, index))
        for index in range(config.num_layers)
    )
    return next((reason for reason in reasons if reason is not None), None)


class TokenPass:
    """Forward pass over one new token per row, whose position is a tensor on the device.

    Equals ``GPT.logits_at`` with the tokens of the cache. On a GPU the first call captures a CUDA
    graph, and later calls replay it: the host launches one graph instead of hundreds of kernels.
    The kernels read the position from the tensor, so one graph serves all positions. If the capture
    fails, a warning names the reason, and all calls run without a graph.

    Args:
        cache: Cache of the earlier tokens; it must not be empty.
        padding: Padding before each row; None means no padding (tokens).
        backend: Backend that captures the graph; None means CUDA graphs on a GPU, and no graph on
            other devices.

    Communication: that of the layers over tp. Ranks that replay a graph and ranks that run without
        one communicate alike.
    """

    def __init__(
        self,
        gpt: GPT,
        cache: KeyValueCache,
        padding: Int[Tensor, " batch"] | None,
        num_rows: int,
        backend: CaptureBackend | None = None,
    ) -> None:
        device = gpt.mesh.device
        self._gpt = gpt
        self._cache = cache
        self._padding = padding
        self._tokens = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        if backend is None and device.type == "cuda":
            backend = CudaBackend()
        self._backend = backend
        self._graph: CapturedGraph | None = None
        self._logits: Tensor | None = None
        self._fused: FusedPass | None = None
        reason = reason_against_fused_pass(gpt, num_rows, padding)
        if reason is not None:
            _log.info("passes over single tokens do not run on fused layers: %s", reason)
        #: Whether the pass runs the kernels of :class:`FusedPass`.
        self.is_fused = reason is None

    @property
    def is_captured(self) -> bool:
        """Return whether later calls replay a graph."""
        return self._graph is not None

    def __call__(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
        """Append the keys and values of new tokens to the cache, and return the logits.

        The logits of a replay are valid until the next call.
        """
        self._tokens.copy_(tokens[:, None])
        self._position.fill_(self._cache.length)
        if self._backend is None:
            return self._run()
        if self._graph is None:
            return self._capture(self._backend)
        self._graph.replay()
        assert self._logits is not None, "a captured pass has logits"
        return self._logits

    def _run(self) -> Tensor:
        """Compute the logits; a repetition with the same inputs stores the same keys and values."""
        if self.is_fused:
            if self._fused is None:
                # The layers of the cache exist once the prompt is in it.
                self._fused = FusedPass(self._gpt, self._cache)
            with evaluation_mode(self._gpt):
                return self._fused.logits(self._tokens, self._position)
        positions = self._position.expand(self._tokens.shape)
        if self._padding is not None:
            positions = positions - self._padding[:, None]
        with evaluation_mode(self._gpt), self._cache.at(self._position):
            return self._gpt.logits_at(
                self._tokens,
                0,
                AttentionSpan(
                    positions=positions,
                    past=CachedTokens(self._cache, 1, padding=self._padding),
                ),
            )

    def _capture(self, backend: CaptureBackend) -> Tensor:
        """Return the logits of a run that loads kernels and allocates workspaces, then capture."""
        with _side_stream(self._gpt.mesh.device), collection_paused():
            logits = self._run()
            try:
                self._graph, self._logits = backend.capture(self._run, backend.make_pool())
            except CAPTURE_ERRORS as error:
                self._backend = None
                warnings.warn(
                    "passes over single tokens run without a CUDA graph, because their capture "
                    f"failed: {type(error).__name__}: {error}",
                    SpeedWarning,
                    stacklevel=2,
                )
        return logits


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a stream of a GPU that CUDA can capture; do nothing on other devices."""
    if device.type != "cuda":
        yield
        return
    stream = RunStream(device)
    stream.enter()
    try:
        yield
    finally:
        stream.leave()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules of a model in evaluation mode inside the ``with`` block."""
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True
