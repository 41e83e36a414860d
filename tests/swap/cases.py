"""Modules, inputs and comparisons for tests of swapped modules against their originals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.swap import SwapRecord, parallelize


class Classifier(nn.Module):
    """Classify token sequences, like a model inside a user's LightningModule."""

    def __init__(self, num_tokens: int = 21, num_labels: int = 7, **layer: Any) -> None:
        super().__init__()
        settings = {"nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True} | layer
        self.embedding = nn.Embedding(num_tokens, 16, padding_idx=0)
        encoder_layer = nn.TransformerEncoderLayer(16, **settings)
        nested = bool(settings["batch_first"]) and not settings.get("norm_first", False)
        nested = nested and settings.get("bias", True)
        self.encoder = nn.TransformerEncoder(
            encoder_layer, 2, nn.LayerNorm(16), enable_nested_tensor=nested
        )
        self.head = nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, num_labels))
        self.batch_first = settings["batch_first"]

    def forward(self, tokens: Tensor, **masks: Any) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        hidden = self.encoder(hidden, **masks)
        return self.head(hidden.mean(1 if self.batch_first else 0))


class TiedDecoder(nn.Module):
    """Predict tokens with a decoder that shares the embedding's weight."""

    def __init__(self, num_tokens: int = 21) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, 8)
        self.body = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, num_tokens)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.body(self.embedding(tokens))))


class Translator(nn.Module):
    """Hold a torch.nn.Transformer, whose decoder layers have self-attention and cross-attention."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            16, 4, 1, 2, 24, dropout=0.0, **{"batch_first": True, **settings}
        )
        # torch initializes all decoder layers with the same values.
        for parameter in self.transformer.decoder.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, source: Tensor, target: Tensor, **masks: Tensor) -> Tensor:
        if not self.transformer.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
            mask = nn.Transformer.generate_square_subsequent_mask(len(target), dtype=target.dtype)
            return self.transformer(source, target, tgt_mask=mask, **masks).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True, **masks)


class AttentionOnly(nn.Module):
    """Hold a single attention module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **settings)

    def forward(self, *inputs: Tensor, **masks: Any) -> Tensor:
        output, weights = self.attention(*inputs, **masks)
        # Both results are returned, so that gradients also flow back through the attention weights.
        return output if weights is None else torch.cat([output.flatten(), weights.flatten()])


@dataclass
class Comparison:
    """Collect the largest difference for each claim."""

    differences: dict[str, float] = field(default_factory=dict)

    def add(self, claim: str, ours: Tensor, theirs: Tensor) -> None:
        """Record the largest difference of two tensors, which is infinite if their shapes differ."""
        ours, theirs = ours.detach(), theirs.detach()
        difference = (
            float("inf")
            if ours.shape != theirs.shape
            else float((ours - theirs).abs().max())
            if ours.numel()
            else 0.0
        )
        self.differences[claim] = max(self.differences.get(claim, 0.0), difference)


def build_in_float64(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a float64 module from a seed, with weights of usual size."""
    torch.manual_seed(seed)
    module = build().double()
    with torch.no_grad():
        for parameter in module.parameters():
            # torch starts biases and norms at constants, which would hide a wrong cut.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def swapped_copy_of(
    build: Callable[[], nn.Module], mesh: ParallelMesh, plan: dict[str, str] | None = None
) -> tuple[nn.Module, nn.Module, list[SwapRecord]]:
    """Return a module, its swapped copy and the records of the swap."""
    module = build_in_float64(build)
    ours = copy.deepcopy(module)
    return module, ours, parallelize(ours, mesh, plan)


def compare_training(
    comparison: Comparison,
    claim: str,
    theirs: nn.Module,
    ours: nn.Module,
    call: Callable[[nn.Module], Tensor],
    num_steps: int = 5,
    inputs: tuple[Tensor, ...] = (),
) -> None:
    """Take SGD steps with both modules and record differences of outputs, gradients and weights."""
    # SGD is written out, because torch.optim loads torch's compiler, which is slower than all steps.
    velocities: dict[nn.Parameter, Tensor] = {}
    for _ in range(num_steps):
        outputs, grads = [], []
        for module in (theirs, ours):
            module.zero_grad()
            output = call(module)
            weights = torch.linspace(-1.0, 2.0, output.numel(), dtype=output.dtype).reshape(
                output.shape
            )
            (output * weights + output.square()).mean().backward()
            outputs.append(output.detach())
            grads.append([x.grad.clone() for x in inputs])
            for x in inputs:
                x.grad = None
        comparison.add(f"{claim}: outputs", outputs[1], outputs[0])
        for actual, expected in zip(grads[1], grads[0], strict=True):
            comparison.add(f"{claim}: gradients of inputs", actual, expected)
        compare_parameters(comparison, claim, theirs, ours)
        for parameter in (*theirs.parameters(), *ours.parameters()):
            if parameter.grad is not None:
                velocities[parameter] = (
                    0.9 * velocities.get(parameter, torch.zeros(())) + parameter.grad
                )
                parameter.data -= 0.1 * velocities[parameter]
    compare_parameters(comparison, f"{claim}: after training", theirs, ours, with_grads=False)


def compare_parameters(
    comparison: Comparison, claim: str, theirs: nn.Module, ours: nn.Module, with_grads: bool = True
) -> None:
    """Record the differences of this rank's weights and gradients from those of the full module."""
    for name, parameter in ours.named_parameters():
        spec = shard_spec_of(parameter)
        full = theirs.get_parameter(
            name if spec.tied_to is None else f"{name.split('.')[0]}.{spec.tied_to}"
        )
        comparison.add(f"{claim}: weights", parameter, _local(full, parameter))
        if with_grads and full.grad is not None:
            assert parameter.grad is not None, f"{name} got no gradient"
            comparison.add(f"{claim}: gradients", parameter.grad, _local(full.grad, parameter))


def _local(full: Tensor, parameter: nn.Parameter) -> Tensor:
    """Cut this rank's part out of a full tensor, which may be padded."""
    spec = shard_spec_of(parameter)
    unpadded = full.detach().narrow(spec.dim, 0, spec.full_shape[spec.dim])
    return spec.shard(unpadded, parameter.shape[spec.dim])


def tokens(num_rows: int = 3, length: int = 6, num_tokens: int = 21) -> Tensor:
    """Return token ids that include both ends of the vocabulary."""
    ids = torch.randint(
        0, num_tokens, (num_rows, length), generator=torch.Generator().manual_seed(1)
    )
    ids[0, 0], ids[-1, -1] = num_tokens - 1, 0
    return ids


def padding(num_rows: int = 3, length: int = 6) -> Tensor:
    """Return a padding mask whose rows end at different places."""
    return torch.arange(length)[None] >= torch.tensor([length, length - 2, 3])[:num_rows, None]


def causal(length: int = 6) -> Tensor:
    """Return the causal mask as floating-point numbers."""
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def normal(*shape: int, seed: int = 2, grad: bool = False) -> Tensor:
    """Return reproducible normal numbers in float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_(grad)


def mlp() -> nn.Module:
    """Build a stack of linear layers that uses every way to cut one."""
    return nn.Sequential(
        nn.Linear(12, 16),
        nn.GELU(),
        nn.Linear(16, 12),
        nn.Linear(12, 8),
        nn.ReLU(),
        nn.Linear(8, 5),
        nn.LayerNorm(5),
    )


MLP_PLAN = {"0": "column", "2": "row", "3": "column_gather", "5": "vocab"}
CLASSIFIER_PLAN = {"embedding": "vocab", "encoder": "auto", "head.0": "column", "head.2": "row"}


def losses_of(module: nn.Module, ids: Tensor) -> Tensor:
    """Return next-token losses of a GPT."""
    return F.cross_entropy(
        module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
