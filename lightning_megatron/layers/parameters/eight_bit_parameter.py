"""Parameters whose values are stored in 8 bits, with rules for code that reads or writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.shapes import Float

#: Returns a new tensor with the dequantized values of a parameter, in the parameter's dtype.
ReadNumbers = Callable[[], Float[Tensor, "rows columns"]]

#: Methods that do not read the values.
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
#: Properties that read the values.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_ADDING = frozenset({f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "mod")})


class EightBitWeight(Tensor):
    """Weight whose values are stored in 8 bits in a flat buffer; this tensor takes no memory.

    Shape, dtype, device, gradient and hooks are those of an ordinary weight in the dtype of the
    run. An operation without gradients gets a read-only copy of the dequantized values. Writes, and
    operations that autograd would record, raise an error, because they would not reach the stored
    values. Linear layers read the 8-bit values directly. Operators that bypass
    ``__torch_function__``, such as those written in C++, read NaN.
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
        # A copy is an ordinary tensor, because no buffer stores its values in 8 bits.
        copied = memo[id(self)] = self._copied()
        return copied

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    def _copied(self) -> Tensor:
        numbers = self.read_numbers()
        is_parameter = isinstance(self, nn.Parameter)
        return nn.Parameter(numbers, self.requires_grad) if is_parameter else numbers


class EightBitParameter(EightBitWeight, nn.Parameter):
    """Parameter that became an :class:`EightBitWeight` and is still the same Python object."""


def keep_in_eight_bits(parameter: nn.Parameter, read_numbers: ReadNumbers) -> None:
    """Turn a parameter in place into an :class:`EightBitParameter`, and free its memory.

    References of optimizers, modules and hooks to the parameter stay valid.
    """
    # The class is replaced, so a subclass would lose its own behaviour.
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
    """Undo :func:`keep_in_eight_bits`, in place; ``memory`` becomes the parameter's memory."""
    del cast(EightBitParameter, parameter).read_numbers
    parameter.__class__ = nn.Parameter
    torch.Tensor.data.__set__(parameter, memory)  # type: ignore[attr-defined]


def placeholder(weight: Float[Tensor, "_ columns"], num_rows: int) -> Float[Tensor, "rows columns"]:
    """Return a tensor of NaN that takes no memory, with the columns of an 8-bit weight."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = weight.detach().as_subclass(Tensor)
        return plain[:1, :1].expand(num_rows, weight.shape[1])


def _alias(weight: EightBitWeight) -> EightBitWeight:
    with torch._C.DisableTorchFunctionSubclass():
        alias = weight.detach().as_subclass(EightBitWeight)
    alias.read_numbers = weight.read_numbers
    return alias


def _read(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the dequantized values; raise an error if it writes or is recorded."""
    name = func.__name__
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _ADDING
    is_in_place |= name in ("__setitem__", "__delitem__")
    written = tree_leaves((args[0] if is_in_place and args else None, kwargs.get("out")))
    for value in written:
        if isinstance(value, EightBitWeight):
            raise _refused(value, f"{name!r} in place")
    for value in tree_leaves((args, kwargs)):
        is_recorded = isinstance(value, EightBitWeight) and value.requires_grad
        if is_recorded and torch.is_grad_enabled():
            raise _refused(value, f"{name!r} with gradients")
    args, kwargs = tree_map_only(EightBitWeight, _numbers, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _numbers(weight: EightBitWeight) -> Tensor:
    # Tensors created in inference mode, and their views, cannot be written outside of it.
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
