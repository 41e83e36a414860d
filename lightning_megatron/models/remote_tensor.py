"""Placeholders with a shape but no values, for tensors that another pipeline stage computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.shape_inference import OutputSpec
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.user_code import line_of_user

#: Attributes and methods that need only a shape and a dtype.
_NEED_SHAPE_ONLY = frozenset(
    """
    shape dtype device ndim layout requires_grad is_leaf grad grad_fn itemsize nbytes is_cuda is_cpu
    is_mps is_xla is_xpu is_meta is_sparse is_sparse_csr is_mkldnn is_quantized is_nested
    retains_grad output_nr names size dim ndimension numel nelement stride is_floating_point
    is_complex is_signed element_size get_device is_neg is_contiguous __len__ storage_offset
    is_inference is_conj __hash__ requires_grad_
    """.split()
)
#: Functions that create a tensor and read only the shape and dtype of their first argument.
_CREATE_LIKE = frozenset(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones
    new_empty new_full new_tensor
    """.split()
)


class RemoteTensor(Tensor):
    """Placeholder for a tensor whose values are on another pipeline stage.

    A function of a placeholder returns another placeholder until the values have arrived; after
    that, the function is computed. An operation that needs values earlier raises an error, so that
    no result is computed from wrong values.

    Args:
        owner: Model that is cut into stages.
        name: Description of the tensor, for errors.
        value_name: Name under which stages send the tensor to each other; None without a name.
        deferred: Function call that computes the tensor from other tensors; None without such a
            call.
        leaf: Index of the tensor among the leaves of the result of this call.
    """

    owner: PipelinedModule
    title: str
    value_name: str | None
    deferred: DeferredCall | None
    leaf: int
    #: The tensor with values after it has arrived; None before.
    value: Tensor | None
    #: Name of the block that has written into the tensor in place; None without such a block.
    writer: str | None

    @classmethod
    def of(
        cls,
        like: Tensor,
        owner: PipelinedModule,
        name: str,
        value_name: str | None = None,
        deferred: DeferredCall | None = None,
        leaf: int = 0,
    ) -> RemoteTensor:
        """Return a placeholder with the shape, dtype and device of another tensor."""
        device = owner.mesh.device if like.is_meta else like.device
        result: RemoteTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=device
        )
        result.owner = owner
        result.title = name
        result.value_name = value_name
        result.deferred = deferred
        result.leaf = leaf
        result.value = None
        result.writer = None
        return result

    def resolved(self) -> Tensor | None:
        """Return the tensor with values if they have arrived or can be computed; None otherwise."""
        cursor = self.owner.cursor
        if self.value is None and cursor is not None and not cursor.probe:
            if self.value_name is not None and self.value_name in cursor.known:
                return cursor.known[self.value_name]
            if self.deferred is not None and cursor.has_arrived:
                self.value = self.deferred.leaf_of_result(self)
        return self.value

    def resolve(self, why: str) -> Tensor:
        """Return the tensor with values, or raise an error that says why they are needed here."""
        tensor = self.resolved()
        if tensor is None:
            self._refuse(why)
        return tensor

    def check_unwritten(self) -> None:
        """Raise if a block has written into the tensor: other stages do not see the write."""
        if self.writer is not None:
            refuse(self, f"{self.writer} has changed it in place")

    def read_at_end(self, why: str) -> Tensor:
        """Return the tensor with values on the last stage, and the placeholder on other stages."""
        cursor = self.owner.cursor
        if cursor is not None and cursor.probe:
            self.owner.note_use(self)
        elif cursor is None or self.owner.is_last_stage(cursor.chunk):
            return self.resolve(why)
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _NEED_SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        values, absent = values_of(leaves)
        if not absent:
            args, kwargs = pytree.tree_unflatten(values, structure)
            return func(*args, **kwargs)
        first = absent[0]
        for leaf in absent:
            leaf.check_unwritten()
        if getattr(func, "__module__", None) == "torch.distributed.distributed_c10d":
            # Dispatch modes see the operator of a collective only after its Python function.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _CREATE_LIKE and isinstance(args[0], RemoteTensor) and len(absent) == 1:
            shaped = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(
                args[0].shape
            )
            return func(shaped, *args[1:], **kwargs)
        if _writes_in_place(name, kwargs):
            first._refuse(f"{name} uses it in an in-place write")
        return first._derived(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves = pytree.tree_leaves((args, dict(kwargs or {})))
        next(leaf for leaf in leaves if isinstance(leaf, RemoteTensor))._refuse(f"{func} reads it")

    def _derived(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            spec = self.owner.shape_inference.of_call(func, func, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            self._refuse(f"{name} needs its values")
        deferred = DeferredCall(func, args, kwargs, spec.is_random)
        return fill_outputs(
            spec,
            lambda leaf, number: RemoteTensor.of(
                leaf, self.owner, self.title, deferred=deferred, leaf=number
            ),
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return a description that names the tensor."""
        return f"a tensor of another pipeline stage ({self.title})"

    def __format__(self, _: str) -> str:
        """Raise, because there is no number to print."""
        return self._refuse("it is printed")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the placeholder itself, which has no values to copy."""
        return self

    def _refuse(self, why: str) -> NoReturn:
        cursor = self.owner.cursor
        if cursor is not None and cursor.may_stop:
            self.owner.note_use(self)
            cursor.stop_probe()
        refuse(self, why)


class DeferredCall:
    """Deferred call of a function with placeholders among its arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_random: bool,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.is_random = is_random
        self._result: Sequence[Any] | None = None

    @property
    def sources(self) -> list[RemoteTensor]:
        """Return the placeholders among the arguments."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, RemoteTensor)]

    def leaf_of_result(self, remote: RemoteTensor) -> Tensor | None:
        """Return a leaf of the result if the values of all arguments are known; None otherwise.

        The function is called once, and its result is kept for the other leaves. A function that
        draws random numbers is refused, because it would draw them a second time.
        """
        if self._result is None:
            leaves, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
            values, absent = values_of(leaves)
            if absent:
                return None
            if self.is_random:
                refuse(remote, f"it depends on random numbers ({_name_of(self.function)})")
            args, kwargs = pytree.tree_unflatten(values, structure)
            self._result = pytree.tree_leaves(self.function(*args, **kwargs))
        known: Tensor = self._result[remote.leaf]
        return known


def fill_outputs(spec: OutputSpec, absent: Callable[[Tensor, int], Any]) -> Any:
    """Build outputs with a placeholder for each tensor, given its description and index."""
    leaves = [
        absent(leaf, number) if isinstance(leaf, Tensor) else leaf
        for number, leaf in enumerate(spec.leaves)
    ]
    return pytree.tree_unflatten(leaves, spec.structure)


def values_of(leaves: Sequence[Any]) -> tuple[list[Any], list[RemoteTensor]]:
    """Return leaves with values for placeholders, and the placeholders that have no values yet."""
    values = [leaf.resolved() if isinstance(leaf, RemoteTensor) else leaf for leaf in leaves]
    pairs = zip(leaves, values, strict=True)
    return values, [leaf for leaf, value in pairs if value is None and leaf is not None]


def with_values(nest: Any, why: str) -> Any:
    """Return a nest with values, which must have arrived, instead of placeholders.

    ``why`` says in errors why the values are needed.
    """
    if not any(isinstance(leaf, RemoteTensor) for leaf in pytree.tree_leaves(nest)):
        return nest
    return pytree.tree_map_only(RemoteTensor, lambda leaf: leaf.resolve(why), nest)


def check_present(*tensors: Tensor | None) -> None:
    """Raise if an input of a model is a placeholder, such as the result of an earlier call."""
    for tensor in tensors:
        if isinstance(tensor, RemoteTensor):
            refuse(tensor, "the first stage would read it")


def refuse(absent: RemoteTensor, why: str) -> NoReturn:
    """Raise an error that names a placeholder, why it is needed and the line of the user's code."""
    raise UnsupportedError(
        f"{absent.title} cannot be used here with pp above 1, because another pipeline stage "
        f"computes it and {why}: {line_of_user()}. Stages send each other the inputs and outputs "
        "of the blocks, and values computed from these without random numbers or in-place writes. "
        "Change that line, or use pp=1."
    )


def _name_of(func: Any) -> str:
    """Return the name of a function that torch passes to ``__torch_function__``."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute: str = getattr(getattr(func, "__self__", None), "__name__", name)
        return attribute if name == "__get__" or attribute == "requires_grad" else "__setattr__"
    return name


def _writes_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a torch function writes into one of its arguments."""
    if (
        kwargs.get("out") is not None
        or kwargs.get("inplace") is True
        or name in ("__setitem__", "__setattr__")
    ):
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__invert__", "__int__")
    return name.endswith("_")
