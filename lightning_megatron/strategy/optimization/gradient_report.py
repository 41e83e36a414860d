"""Error message for gradients that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

_NUM_SHOWN = 5


def describe_nonfinite(gradients: Sequence[tuple[int, str, int, int]], step: int) -> str:
    """Describe parameters, ranks and step of gradients that are not finite.

    Args:
        gradients: Rank, parameter name, number of NaN elements and number of infinite elements of
            each gradient. The message names the first few gradients.
        step: Index of the training batch (batches).
    """
    places = [
        f"{name} on rank {rank} ({_counts(nans, infinities)})"
        for rank, name, nans, infinities in gradients[:_NUM_SHOWN]
    ]
    more = f"; and {len(gradients) - _NUM_SHOWN} more" if len(gradients) > _NUM_SHOWN else ""
    ranks = sorted({rank for rank, *_ in gradients})
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return (
        f"all gradients must be finite: training batch {step} gave {'; '.join(places)}{more}. The "
        f"optimizer would spread them to all weights. Look at the batch that {where} had read, use "
        "a lower learning rate or a longer warm-up, or a precision with a wider range, such as "
        "bf16-mixed."
    )


def _counts(num_nan: int, num_infinite: int) -> str:
    return " and ".join(
        f"{count:,} {kind}"
        for count, kind in ((num_nan, "NaN"), (num_infinite, "infinite"))
        if count
    )
