"""Weight initialisation that does not depend on the layout.

Each rank draws the full tensor of every parameter and keeps only its shard.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_megatron.groups.random import derive_seed
from lightning_megatron.groups.shard_spec import (
    ShardSpec,
    copy_from_full,
    set_shard_spec,
    shard_spec_of,
)
from lightning_megatron.plan.shards import ShardRange

_ATTRIBUTE = "initializer"


@dataclass(frozen=True)
class Initializer:
    """Distribution of the initial values of a parameter's full tensor.

    Args:
        std: Standard deviation of a normal distribution with mean 0.
        value: Constant that fills the tensor instead; None draws.
    """

    std: float = 0.0
    value: float | None = None

    @classmethod
    def normal(cls, std: float = 0.02) -> Initializer:
        """Return an initializer that draws from a normal distribution with mean 0."""
        return cls(std)

    @classmethod
    def constant(cls, value: float) -> Initializer:
        """Return an initializer that fills a tensor with a constant."""
        return cls(value=value)

    @classmethod
    def residual(cls, std: float, num_layers: int) -> Initializer:
        """Return the initializer of weights whose outputs are added to the residual stream.

        The standard deviation decreases with the number of layers, because their outputs add up.

        Source: Radford et al. 2019, section 2.3; Shoeybi et al. 2019, section 4.2.
        """
        return cls(std / math.sqrt(2 * num_layers))


ZEROS = Initializer.constant(0.0)
ONES = Initializer.constant(1.0)


def sharded_parameter(
    full_shape: Sequence[int],
    ranges: Sequence[ShardRange],
    initializer: Initializer,
    *,
    dim: int = 0,
    partial: bool = False,
    local_size: int | None = None,
) -> nn.Parameter:
    """Create the uninitialised local shard of a parameter, with its ShardSpec and initializer.

    Args:
        full_shape: Shape of the full tensor, without padding (elements).
        ranges: Parts of the full tensor that this rank holds along ``dim``.
        partial: Whether the gradients of copies must be summed over the tensor axis.
        local_size: Local size along ``dim``, padding included; None means no padding (elements).
    """
    spec = ShardSpec(tuple(full_shape), tuple(ranges), dim, partial)
    shape = list(full_shape)
    shape[dim] = spec.local_extent if local_size is None else local_size
    parameter = nn.Parameter(torch.empty(shape))
    setattr(parameter, _ATTRIBUTE, initializer)
    return set_shard_spec(parameter, spec)


def initialize_(
    module: nn.Module,
    device: str | torch.device,
    seed: int,
    only: Container[str] | None = None,
) -> None:
    """Initialise every parameter of ``module`` in place; meta parameters move to ``device``.

    Full tensors are drawn one at a time in float32. The seed of each is derived from ``seed`` and
    the name of the parameter in ``module``. All layouts therefore start with the same full weights,
    and a rank needs memory only for its shards and one full tensor. The last-stage copy of a tied
    parameter gets the values of its original. Shared parameters stay shared.

    Args:
        seed: Seed of the run, the same on all ranks.
        only: Names of the parameters to fill; None means all.
    """
    done: dict[int, nn.Parameter] = {}
    for name, owner, key, parameter in list(_slots(module)):
        if only is not None and name not in only:
            continue
        if id(parameter) not in done:
            done[id(parameter)] = materialised(parameter, device)
            _fill_(done[id(parameter)], name, seed)
        owner._parameters[key] = done[id(parameter)]


def _slots(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for path, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield (f"{path}.{key}" if path else key), owner, key, parameter


def materialised(parameter: nn.Parameter, device: str | torch.device) -> nn.Parameter:
    """Return a parameter with memory for values: a new one for a parameter on the meta device."""
    if not parameter.is_meta:
        return parameter
    # A meta tensor cannot change its device in place, so the attributes of the old Parameter are
    # copied to a new one.
    result = nn.Parameter(
        torch.empty_like(parameter, device=device),
        requires_grad=parameter.requires_grad,
    )
    result.__dict__.update(parameter.__dict__)
    return result


@torch.no_grad()
def _fill_(parameter: nn.Parameter, name: str, seed: int) -> None:
    initializer = getattr(parameter, _ATTRIBUTE, None)
    if initializer is None:
        raise ValueError(
            f"a parameter on the meta device must have an initializer: {name!r} has none, because "
            "only layers of this package have initializers. Create the parameter on a real device "
            "and initialise it."
        )
    spec = shard_spec_of(parameter)
    # The padding of a padded shard stays zero.
    if parameter.shape[spec.dim] != spec.local_extent:
        parameter.zero_()
    if initializer.value is None:
        generator = torch.Generator(parameter.device).manual_seed(
            derive_seed(seed, spec.tied_to or name),
        )
        full = torch.empty(spec.full_shape, dtype=torch.float32, device=parameter.device)
        copy_from_full(spec, parameter, full.normal_(0.0, initializer.std, generator=generator))
        return
    for _, view in spec.local_views(parameter):
        view.fill_(initializer.value)
