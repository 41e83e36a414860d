"""Index of a batch that Python code must not read while a step is captured."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_megatron.errors import UnsupportedError

_READS = tuple(
    """
    __bool__ __index__ __int__ __float__ __hash__ __repr__ __str__ __format__ __eq__
    __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__
    __rmul__ __neg__ __abs__ __floordiv__ __rfloordiv__ __truediv__ __rtruediv__
    __mod__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ __and__ __rand__ __or__
    __ror__ __xor__ __rxor__ __lshift__ __rshift__ __round__
    """.split()
)


class CapturedIndex(int):
    """Index that may be passed on, but not read: each replay would read that of the capture.

    Raises:
        UnsupportedError: When code computes with the index, compares it or formats it.
    """


def _refuse(index: CapturedIndex, *others: Any) -> NoReturn:
    raise UnsupportedError(
        "a captured step must not read the index of its batch: it computes with batch_idx, or "
        "compares or prints it. A replay runs no Python, so that it would use the index of the "
        "capture. Leave batch_idx to hooks such as on_train_batch_end."
    )


for _name in _READS:
    setattr(CapturedIndex, _name, _refuse)
