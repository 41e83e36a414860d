"""Annotations that name the dimensions of a tensor, as in ``Float[Tensor, "seq batch hidden"]``.

They are written as those of jaxtyping, which the package does not need: here each of them is
``typing.Annotated``, so type checkers see a tensor and nothing happens at run time. The tests put
the types of jaxtyping in their place and check every call. ``layers`` lists the names of the
dimensions.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int
from typing import Annotated as Shaped

#: ``Float`` means any floating dtype, ``Int`` any integer dtype, and ``Shaped`` any dtype.
__all__ = ["Bool", "Float", "Int", "Shaped"]
