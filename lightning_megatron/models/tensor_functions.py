"""Classification of tensor functions by their needs: a shape, values, or memory to write into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Attributes and methods that need only a shape and a dtype.
NEED_SHAPE_ONLY = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad",
        "grad_fn",
        "itemsize",
        "nbytes",
    }
    | {
        "is_cuda",
        "is_cpu",
        "is_mps",
        "is_xla",
        "is_xpu",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_mkldnn",
    }
    | {
        "is_quantized",
        "is_nested",
        "retains_grad",
        "output_nr",
        "names",
        "size",
        "dim",
        "ndimension",
        "numel",
    }
    | {
        "nelement",
        "stride",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "element_size",
        "get_device",
        "is_neg",
    }
    | {
        "is_contiguous",
        "__len__",
        "storage_offset",
        "is_inference",
        "is_conj",
        "__hash__",
        "requires_grad_",
    }
)
#: Functions that create a tensor and read only the shape and dtype of their first argument.
CREATE_LIKE = frozenset(
    {
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
    }
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)


def name_of(func: Any) -> str:
    """Return the name of a function that torch passes to ``__torch_function__``."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute: str = getattr(getattr(func, "__self__", None), "__name__", name)
        return attribute if name == "__get__" or attribute == "requires_grad" else "__setattr__"
    return name


def writes_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
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
