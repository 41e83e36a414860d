"""Modules that compute every position separately, and may therefore get a part of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import isfunction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.errors import UnsupportedError

T = TypeVar("T", bound=nn.Module | type[nn.Module])

_MARK = "_computes_positions_separately"
#: Maximum difference between outputs of halves and of all positions, relative to the largest
#: element.
_TOLERANCE = 1e-2

_SEPARATE = (
    nn.Linear, nn.Identity, nn.Dropout, nn.AlphaDropout, nn.Embedding, nn.ModuleList, nn.ModuleDict,
    nn.Sequential, nn.ParameterList, nn.ParameterDict, nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink,
    nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU,
    nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
#: Modules of torch that mix positions, with a description of how they do so.
_MIXING: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (
        (
            nn.MultiheadAttention,
            nn.Transformer,
            nn.TransformerEncoderLayer,
            nn.TransformerDecoderLayer,
        ),
        "attends to all positions",
    ),
    ((nn.RNNBase, nn.RNNCellBase), "carries a state from position to position"),
    ((nn.modules.conv._ConvNd,), "reads neighbouring positions"),
    (
        (
            nn.modules.pooling._MaxPoolNd,
            nn.modules.pooling._AvgPoolNd,
            nn.modules.pooling._AdaptiveMaxPoolNd,
            nn.modules.pooling._AdaptiveAvgPoolNd,
            nn.modules.pooling._LPPoolNd,
        ),
        "pools over positions",
    ),
    ((nn.modules.batchnorm._NormBase,), "takes statistics over positions"),
)
#: Functions of torch that mix positions, which the code of a user's module may call.
_MIXING_FUNCTIONS = ("scaled_dot_product_attention", "multi_head_attention_forward")
#: Methods that do not change what a subclass computes.
_PASSIVE = ("__init__", "extra_repr", "reset_parameters", "__repr__")


def position_wise(module: T) -> T:
    """Declare that a module, or every module of a class, computes each position separately.

    With ``cp`` above 1 the modules inside a decoder get a part of each sequence: two pieces that
    are not adjacent. Modules of this package support this, and modules of torch that compute every
    position separately, such as nn.Linear, are not affected. Other modules must be declared. Their
    first call also computes both halves of its positions separately, and checks that the results
    equal those of all positions.

    Args:
        module: Module that takes and returns tensors with the positions first, or its class.

    Returns:
        The same object, so that this can decorate a class.
    """
    setattr(module, _MARK, True)
    return module


def foreign_parts(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """List the modules in a decoder that may mix positions, each with its name and the reason."""
    pending = [(name, child) for name, child in root.named_children()]
    while pending:
        name, module = pending.pop(0)
        if getattr(module, _MARK, False):
            continue
        if not _computes_separately(module):
            yield name, module, mixing_of(module) or "has code of its own"
            continue
        # Parametrizations compute weights, which have no positions.
        pending += [
            (f"{name}.{key}", child)
            for key, child in module.named_children()
            if key != "parametrizations"
        ]


def mixing_of(module: nn.Module) -> str:
    """Return how a module mixes positions, judged by its class; empty if no mixing is found."""
    for kinds, what in _MIXING:
        if isinstance(module, kinds):
            return what
    code = getattr(type(module).forward, "__code__", None)
    called = [name for name in _MIXING_FUNCTIONS if code is not None and name in code.co_names]
    return f"calls {called[0]}" if called else ""


def check_declared(root: nn.Module) -> None:
    """Check the declared modules of a decoder at their first calls."""
    for name, module in root.named_modules():
        if getattr(module, _MARK, False):
            _check_first_call(name, module)


def _computes_separately(module: nn.Module) -> bool:
    """Return whether a module is known to compute positions separately if its children do."""
    if hasattr(module, "_orig_mod"):
        # A wrapper of torch.compile computes what its child computes.
        return True
    for kind in type(module).__mro__:
        if kind.__module__.startswith("lightning_megatron."):
            return True
        if kind in _SEPARATE:
            return True
        if kind in (nn.LayerNorm, nn.RMSNorm):
            return len(module.normalized_shape) == 1  # type: ignore[arg-type]
        if kind in (nn.Softmax, nn.LogSoftmax, nn.GLU):
            return bool(module.dim == -1)
        computes = any(
            isfunction(attribute) for key, attribute in vars(kind).items() if key not in _PASSIVE
        )
        if computes and kind.__module__ != "torch.nn.utils.parametrize":
            return False
    return False


def _check_first_call(name: str, module: nn.Module) -> None:
    def check(
        module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        length = _length((args, kwargs))
        if length > 1:
            handle.remove()
            if not _is_separate(module, args, kwargs, length):
                raise UnsupportedError(
                    "a module declared position_wise must compute each position separately, "
                    "because with cp above 1 it gets a part of the positions: the result of "
                    f"{name!r} ({type(module).__name__}) for {length} positions differs from its "
                    "results for their halves. Use cp=1, or call the module outside of the model, "
                    "where it gets whole sequences."
                )

    handle = module.register_forward_hook(check, with_kwargs=True)


def _length(values: Any) -> int:
    """Return the length of the first tensor's first dimension; 0 without one."""
    tensors = [
        leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()
    ]
    return len(tensors[0]) if tensors else 0


def _is_separate(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int
) -> bool:
    def run(first: int, stop: int) -> list[Tensor]:
        def part(value: Any) -> Any:
            has_positions = isinstance(value, Tensor) and value.dim() and len(value) == length
            return value[first:stop] if has_positions else value

        own_args, own_kwargs = pytree.tree_map(part, (args, dict(kwargs)))
        leaves = pytree.tree_leaves(module.forward(*own_args, **own_kwargs))
        return [
            leaf.double()
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == stop - first
        ]

    half = length // 2
    with torch.no_grad(), _without_draws(module):
        whole = run(0, length)
        parts = [torch.cat(halves) for halves in zip(run(0, half), run(half, length), strict=True)]
    if not whole or len(whole) != len(parts):
        return False
    for expected, joined in zip(whole, parts, strict=True):
        if expected.shape != joined.shape:
            return False
        if float((expected - joined).abs().max()) > _TOLERANCE * float(expected.abs().max()):
            return False
    return True


@contextmanager
def _without_draws(module: nn.Module) -> Iterator[None]:
    """Disable dropout inside a module, and restore the training mode when the block ends."""
    trained = [part for part in module.modules() if part.training]
    for part in trained:
        part.training = False
    try:
        yield
    finally:
        for part in trained:
            part.training = True
