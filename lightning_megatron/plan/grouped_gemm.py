"""Choice of the grouped GEMM variant for a shape, from sizes that the host knows.

The rule is measured on one H200: bursts of single calls, seven shapes of mixtures, balanced and
skewed groups. The group sizes are on the device, so that the rule sees only the mean number of rows
per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightning_megatron.errors import UnsupportedError


class Pass(StrEnum):
    """Product of a linear layer with one weight per group; each weight has N rows and K columns."""

    FORWARD = "forward"  # y = x w^T
    FORWARD_SWIGLU = "forward_swiglu"  # y = silu(gate) up p of (gate, up) = x w^T
    DATA_GRAD = "data_grad"  # dx = dy w
    WEIGHT_GRAD_BF16 = "weight_grad_bf16"  # dw = dy^T x
    WEIGHT_GRAD_FP32 = "weight_grad_fp32"  # dw = dy^T x
    WEIGHT_GRAD_ADD = "weight_grad_add"  # dw += dy^T x, in float32


@dataclass(frozen=True)
class VariantChoice:
    """Kernel variant to launch, with the reason for it.

    Args:
        along_n: Whether consecutive tiles are neighbours along N of the product instead of M.
        band: Number of clusters of tiles that are walked in that direction before the other
            direction advances; 0 means all.
        reason: Explanation for the log.
    """

    variant: str
    along_n: bool
    band: int
    reason: str


_COOPERATIVE = "cooperative_128x256_1x1"
_WIDE_PAIR_TILE = "pingpong_128x192_1x2"
_SQUARE = "pingpong_128x128_1x2"
_WIDE_TILE = "pingpong_128x192_1x1"

#: Every variant that the rule can return; the bundled library contains exactly these.
VARIANTS: tuple[str, ...] = tuple(
    f"{kind}_{tile}"
    for kind, tiles in (
        ("forward", (_COOPERATIVE, _WIDE_PAIR_TILE, _SQUARE)),
        ("forward_swiglu", (_WIDE_TILE, _SQUARE)),
        ("data_grad", (_COOPERATIVE, _WIDE_PAIR_TILE, _SQUARE)),
        ("weight_grad_bf16", (_COOPERATIVE, _WIDE_PAIR_TILE, _SQUARE)),
        ("weight_grad_fp32", (_WIDE_PAIR_TILE, _SQUARE)),
        ("weight_grad_add_reduce", (_WIDE_PAIR_TILE, _SQUARE)),
        ("weight_grad_add_read", (_SQUARE,)),
    )
    for tile in tiles
)

MAX_GROUPS = 1024
# Rows of a weight with gate and up must be a multiple of it: TMA stores rows of multiples of 16
# bytes for each half.
_SWIGLU_UNIT = 16
#: Alignment of each array in the workspace (bytes).
WORKSPACE_ALIGNMENT = 128
#: Arguments of one group, summed over all arrays (bytes).
BYTES_PER_GROUP = 96
# The arguments of the groups are in nine arrays.
_NUM_ARRAYS = 9
# Each CTA has five tensor maps of 128 bytes (A, B, C, and D for both consumer warp groups), plus
# alignment.
_BYTES_PER_SM = 8 * 128

# With fewer rows per group the product is bound by reading the weights, and small tiles waste fewer
# rows.
_FEW_ROWS = 256
# A reduction of at least this length hides the epilogue of the largest tile.
_LONG_REDUCTION = 4096
_LONG_REDUCTION_BAND = 16
# Fusing SwiGLU into the product gains 7 % at a reduction of 4,096, and nothing at 7,168.
_TOO_LONG_FOR_SWIGLU = 6144
# TMA reduce-adds reach 1.2 TB/s, loads and stores 3.2 TB/s. From this many rows per group on, the
# product takes longer than the reduce-adds and hides them.
_ROWS_FOR_REDUCE_ADD = 1024
# A cluster has two tiles of 192 columns, or one.
_WIDE_PAIR_COLUMNS = 384
_WIDE_TILE_COLUMNS = 192
# Largest share of padded columns that wide tiles may waste.
_MAX_PADDED_SHARE = 0.035


def choose_variant(product: Pass, num_rows: int, num_groups: int, n: int, k: int) -> VariantChoice:
    """Choose the kernel variant for a grouped product.

    Args:
        n: Rows of each weight: the features of y.
        k: Columns of each weight: the features of x.

    Raises:
        UnsupportedError: If the kernels do not support these sizes.
    """
    _check_sizes(num_rows, num_groups, n, k)
    if product is Pass.FORWARD_SWIGLU and n % _SWIGLU_UNIT:
        raise UnsupportedError(
            f"n ({n}) must be a multiple of {_SWIGLU_UNIT}, because gate and up have n / 2 "
            "features each, and TMA stores multiples of 16 bytes. Use such sizes, or the product "
            "and the activation one after the other."
        )
    rows = num_rows // num_groups
    if product is Pass.FORWARD_SWIGLU:
        return _choose_swiglu(rows, n, k)
    if product is Pass.FORWARD or product is Pass.DATA_GRAD:
        return _choose_activation(product, rows, n, k)
    return _choose_weight_grad(product, rows, n, k)


def pass_of(variant: str) -> Pass:
    """Return the product that a variant computes."""
    return max((product for product in Pass if variant.startswith(f"{product}_")), key=len)


def reason_against_fusion(n: int, k: int) -> str | None:
    """Return why SwiGLU should be a separate kernel after the product; None if it should be fused.

    The fused kernel saves a pass over the result. The longer the reduction, the smaller the share
    of that pass in the total time. The fused kernel has no cooperative variant, which is the
    fastest one for long reductions.

    Args:
        n: Rows of each weight: gate and up features.
        k: Columns of each weight: the features of x.
    """
    if n % _SWIGLU_UNIT:
        return (
            f"{n} rows of a weight are not a multiple of {_SWIGLU_UNIT}: gate and up need "
            "multiples of 16 bytes"
        )
    if k >= _TOO_LONG_FOR_SWIGLU:
        return f"the reduction over {k} is at least {_TOO_LONG_FOR_SWIGLU}"
    fits, reason = _fills(n, _WIDE_TILE_COLUMNS)
    if k >= _LONG_REDUCTION and not fits:
        return f"the reduction over {k} is at least {_LONG_REDUCTION}, and {reason}"
    return None


def workspace_bytes(num_groups: int, num_sms: int) -> int:
    """Return a workspace size that suffices for every variant (bytes)."""
    return (
        num_groups * BYTES_PER_GROUP + _NUM_ARRAYS * WORKSPACE_ALIGNMENT + num_sms * _BYTES_PER_SM
    )


def _choose_activation(product: Pass, rows: int, n: int, k: int) -> VariantChoice:
    reduction, columns = (k, n) if product is Pass.FORWARD else (n, k)
    if rows < _FEW_ROWS:
        return VariantChoice(
            f"{product}_{_SQUARE}", False, 0, f"{rows} rows a group are fewer than {_FEW_ROWS}"
        )
    if reduction >= _LONG_REDUCTION:
        reason = f"the reduction over {reduction} is at least {_LONG_REDUCTION}"
        return VariantChoice(f"{product}_{_COOPERATIVE}", False, _LONG_REDUCTION_BAND, reason)
    tile, reason = _tile_of_columns(columns)
    return VariantChoice(f"{product}_{tile}", False, 0, reason)


def _choose_swiglu(rows: int, n: int, k: int) -> VariantChoice:
    band = _LONG_REDUCTION_BAND if k >= _LONG_REDUCTION else 0
    if rows < _FEW_ROWS:
        reason = f"{rows} rows a group are fewer than {_FEW_ROWS}"
        return VariantChoice(f"{Pass.FORWARD_SWIGLU}_{_SQUARE}", False, band, reason)
    fits, reason = _fills(n, _WIDE_TILE_COLUMNS)
    return VariantChoice(
        f"{Pass.FORWARD_SWIGLU}_{_WIDE_TILE if fits else _SQUARE}", False, band, reason
    )


def _choose_weight_grad(product: Pass, rows: int, n: int, k: int) -> VariantChoice:
    along_n = k < n  # so that the tiles of a wave share the larger operand
    tile, reason = _tile_of_columns(k)
    if product is Pass.WEIGHT_GRAD_ADD:
        if rows < _ROWS_FOR_REDUCE_ADD:
            reason = (
                f"{rows} rows a group are fewer than {_ROWS_FOR_REDUCE_ADD}: sums are read, added "
                "to and stored"
            )
            return VariantChoice(f"{product}_read_{_SQUARE}", True, 0, reason)
        return VariantChoice(
            f"{product}_reduce_{tile}",
            along_n,
            0,
            f"{rows} rows a group suffice for TMA adds; {reason}",
        )
    if product is Pass.WEIGHT_GRAD_BF16 and rows < _FEW_ROWS:
        reason = f"{rows} rows a group are fewer than {_FEW_ROWS}: the largest tile stores most"
        return VariantChoice(f"{product}_{_COOPERATIVE}", along_n, 0, reason)
    return VariantChoice(f"{product}_{tile}", along_n, 0, reason)


def _tile_of_columns(columns: int) -> tuple[str, str]:
    fits, reason = _fills(columns, _WIDE_PAIR_COLUMNS)
    return _WIDE_PAIR_TILE if fits else _SQUARE, reason


def _fills(columns: int, unit: int) -> tuple[bool, str]:
    padded = -(-columns // unit) * unit
    fits = padded <= columns * (1 + _MAX_PADDED_SHARE)
    return fits, f"{columns} columns {'fill' if fits else 'do not fill'} multiples of {unit}"


def _check_sizes(num_rows: int, num_groups: int, n: int, k: int) -> None:
    if not 1 <= num_groups <= MAX_GROUPS:
        raise UnsupportedError(
            f"the number of groups must be between 1 and {MAX_GROUPS}: it is {num_groups}. One "
            "thread block builds the arguments of a launch, with a thread for each group. Use more "
            "expert parallel ranks, so that each holds fewer experts."
        )
    if num_rows < 0 or n < 1 or k < 1 or n % 8 or k % 8:
        raise UnsupportedError(
            f"n ({n}) and k ({k}) must be positive multiples of 8 and rows ({num_rows}) not "
            "negative, because TMA loads multiples of 16 bytes. Use such sizes, or the products of "
            "torch."
        )
    if max(num_rows, num_groups * n, k) > 2**31 - 1:
        raise UnsupportedError(
            f"sizes must fit 32 bits: rows {num_rows}, groups x n {num_groups * n}, k {k}. TMA "
            "coordinates have 32 bits. Use more ranks."
        )
