"""Parameters whose numbers are kept in 8 bits, and what code that reads or writes them gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.shapes import Float

#: Returns a new tensor with the numbers of a parameter, in its own type.
ReadNumbers = Callable[[], Float[Tensor, "rows columns"]]

#: Methods that do not look at the numbers.
_PLAIN = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride",
        "storage_offset", "data_ptr", "is_contiguous", "is_floating_point", "is_complex",
        "is_inference", "is_conj", "is_neg", "is_signed", "get_device", "requires_grad_",
        "register_hook", "register_post_accumulate_grad_hook", "new_empty", "new_zeros",
        "new_ones", "new_full", "__len__", "__hash__", "is_same_size", "retain_grad",
        "zeros_like", "empty_like", "ones_like", "full_like", "rand_like", "randn_like",
    }
)  # fmt: skip
#: Properties that look at them.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_ADDING = frozenset({f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "mod")})


class EightBitWeight(Tensor):
    """Weight whose numbers are in 8 bits elsewhere, behind a tensor without memory of its own.

    Shape, type, device, gradient and hooks are those of an ordinary weight in the type of the run.
    An operation without gradients gets the numbers, rounded to 8 bits, as a copy that refuses to be
    written. A write, and an operation that autograd would record, are refused: neither would reach
    the numbers. Linear layers read the 8 bits instead. Operators that do not ask, such as those
    written in C++, read NaN.
    """

    read_numbers: ReadNumbers

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            is_plain = attribute not in _VALUES
            if name != "__get__" and not is_plain:
                raise _refused(args[0], f"an assignment to its {attribute!r}")
            is_alias = attribute == "data"
        else:
            is_plain = name in _PLAIN
            is_alias = name == "detach"
        if is_plain:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_alias:
            return _alias(args[0])
        return _read(func, args, kwargs)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, in 8 bits)"

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy has nobody who keeps its numbers in 8 bits.
        found = memo[id(self)] = self._copied()
        return found

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    def _copied(self) -> Tensor:
        numbers = self.read_numbers()
        is_parameter = isinstance(self, nn.Parameter)
        return nn.Parameter(numbers, self.requires_grad) if is_parameter else numbers


class EightBitParameter(EightBitWeight, nn.Parameter):
    """Parameter that is an :class:`EightBitWeight`, with the identity that it had before."""


def keep_in_eight_bits(parameter: nn.Parameter, read_numbers: ReadNumbers) -> None:
    """Turn a parameter into one whose numbers are in 8 bits elsewhere, and free its memory.

    Optimizers, modules and hooks that refer to the parameter keep it.

    Args:
        parameter: The parameter.
        read_numbers: Returns its numbers.

    Raises:
        UnsupportedError: If the parameter has a class of its own.
    """
    if type(parameter) is not nn.Parameter:
        raise UnsupportedError(
            "weights that fp8.parameters keeps in 8 bits must be torch.nn.Parameter: one of shape "
            f"{tuple(parameter.shape)} is a {type(parameter).__name__}, whose own behaviour would "
            "be lost. Name its layer in fp8.keep, or leave fp8.parameters out."
        )
    none = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    torch.Tensor.data.__set__(parameter, none.expand(parameter.shape))  # type: ignore[attr-defined]
    parameter.__class__ = EightBitParameter
    cast(EightBitParameter, parameter).read_numbers = read_numbers


def keep_in_memory(parameter: nn.Parameter, memory: Float[Tensor, "rows columns"]) -> None:
    """Turn a parameter back into an ordinary one.

    Args:
        parameter: Parameter that :func:`keep_in_eight_bits` has changed.
        memory: Its numbers from now on.
    """
    del cast(EightBitParameter, parameter).read_numbers
    parameter.__class__ = nn.Parameter
    torch.Tensor.data.__set__(parameter, memory)  # type: ignore[attr-defined]


def placeholder(weight: Float[Tensor, "_ columns"], num_rows: int) -> Float[Tensor, "rows columns"]:
    """Return a tensor of NaN without memory of its own, with the columns of a weight.

    Args:
        weight: Weight in 8 bits.
        num_rows: Rows of the result (rows).
    """
    with torch._C.DisableTorchFunctionSubclass():
        plain = weight.detach().as_subclass(Tensor)
        return plain[:1, :1].expand(num_rows, weight.shape[1])


def _alias(weight: EightBitWeight) -> EightBitWeight:
    with torch._C.DisableTorchFunctionSubclass():
        found = weight.detach().as_subclass(EightBitWeight)
    found.read_numbers = weight.read_numbers
    return found


def _read(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers, or refuse it."""
    name = func.__name__
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _ADDING
    is_in_place |= name in ("__setitem__", "__delitem__")
    written = tree_leaves((args[0] if is_in_place and args else None, kwargs.get("out")))
    for one in written:
        if isinstance(one, EightBitWeight):
            raise _refused(one, f"{name!r} in place")
    for one in tree_leaves((args, kwargs)):
        is_recorded = isinstance(one, EightBitWeight) and one.requires_grad
        if is_recorded and torch.is_grad_enabled():
            raise _refused(one, f"{name!r} with gradients")
    args, kwargs = tree_map_only(EightBitWeight, _numbers, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _numbers(weight: EightBitWeight) -> Tensor:
    # Tensors of inference cannot be written outside of it, nor can views of them.
    with torch.inference_mode():
        return weight.read_numbers()


def _refused(weight: Tensor, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a weight that fp8.parameters keeps in 8 bits cannot be written during a fit, and has no "
        f"gradient but that of its layer: {what} was asked of one of shape {tuple(weight.shape)}. "
        "The numbers are in the main parameters of the optimizer, and a rounded copy in 8 bits. "
        "Read it under torch.no_grad(), write it before the fit (in configure_model or setup), "
        "name its layer in fp8.keep, or leave fp8.parameters out."
    )
