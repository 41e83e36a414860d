"""Checks that every fused kernel returns the float64 result rounded once, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.layers.attention.cached_attention import attend_by_mask
from lightning_megatron.layers.fused import choose_kernels
from lightning_megatron.layers.fused.dropout import keep_mask
from lightning_megatron.layers.loss.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.layers.rotary import apply_rotary, position_tables
from lightning_megatron.plan.mask_numbers import MaskNumbers, PlaceCut, dimension_of_rows
from tests.kernels.magnitude_checks import (
    check_growing_magnitudes,
    check_norm_magnitudes,
    check_swiglu_magnitudes,
)
from tests.kernels.token_checks import check_gated_vector_products, check_rotated_attention
from tests.kernels.vector_checks import check_vector_products

# Largest relative change by one rounding to nearest.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of all checks."""

    heads: tuple[tuple[int, int, int, int, int], ...]
    gated: tuple[tuple[int, int, int], ...]
    elements: tuple[tuple[int, ...], ...]
    vocabularies: tuple[tuple[int, int, int], ...]
    norms: tuple[tuple[int, int, int], ...]


SMALL = Sizes(
    heads=((5, 3, 6, 2, 12), (4, 1, 2, 2, 8), (1, 2, 3, 1, 96)),
    gated=((3, 2, 37), (1, 1, 1), (2, 3, 64)),
    elements=((3, 5, 41), (1,), (2, 1024)),
    vocabularies=((7, 100, 128), (3, 9000, 9088), (5, 64, 64), (4, 1, 16)),
    norms=((3, 2, 40), (11, 1, 33), (2, 1, 64)),
)
# (S, B, H, G, K), (S, B, F), ..., (tokens, vocabulary, padded), (S, B, D): Llama 3 8B, GPT-2 1.2B,
# and odd ones.
REAL = Sizes(
    heads=(
        (4096, 1, 32, 8, 128),
        (1024, 8, 16, 16, 96),
        (4096, 1, 8, 2, 128),
        (333, 3, 7, 1, 20),
        (64, 2, 5, 5, 64),
    ),
    gated=((4096, 1, 14336), (4096, 1, 3584), (1024, 8, 2816), (33, 3, 1001)),
    elements=((1024, 8, 6144), (13, 7, 1001), (1,)),
    vocabularies=(
        (4096, 131072, 131072),
        (8192, 50257, 50304),
        (4096, 32768, 32768),
        (77, 1000, 1024),
    ),
    norms=(
        (4096, 1, 4096),
        (1024, 8, 1536),
        (1024, 1, 4096),
        (77, 3, 1001),
        (3, 1, 16384),
        (1, 1, 64),
    ),
)


class Draw:
    """Draw tensors of one dtype on one device from a fixed seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=self.generator, device=self.device)).to(
            self.dtype
        )

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, device=self.device)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def check_rounded(
    actual: Tensor | None, expected: Tensor | None, what: str, noise: float = 4e-6
) -> None:
    """Assert that ``actual`` is the float64 result rounded once to its dtype, up to the noise of
    float32 arithmetic.
    """
    assert actual is not None, f"{what}: nothing"
    assert expected is not None, f"{what}: nothing to compare with"
    shapes = tuple(actual.shape), tuple(expected.shape)
    assert shapes[0] == shapes[1], f"{what}: shapes {shapes}"
    actual, expected = actual.detach(), expected.detach()
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    allowed = (
        1.01 * ROUNDOFF[actual.dtype] * expected.abs() + noise * expected.abs().max() + 2.0**-25
    )
    excess = ((actual.double() - expected).abs() - allowed).max()
    assert excess <= 0, (
        f"{what}: {float(excess)} beyond one rounding, largest {float(expected.abs().max())}"
    )


def check_rotary(draw: Draw, sizes: Sizes) -> None:
    """Compare rotated queries, keys and values."""
    for shape in sizes.heads:
        seq_length, _, heads, kv_heads, head_dim = shape
        positions = torch.arange(seq_length, device=draw.device)[None]
        tables = position_tables(positions, head_dim, dtype=draw.dtype)
        fast, parts, slow = drawn_projection(draw, *shape)
        results = kernels.rotate_qkv(fast * 1, tables, heads, kv_heads)
        compare_rotated(draw, results, parts, tables, (fast, slow), f"rotary {shape}")


def check_normed_rotary(draw: Draw, sizes: Sizes) -> None:
    """Compare norms of heads, partial rotation, interleaved pairs, and rows with own positions."""
    for shape in sizes.heads:
        seq_length, batch, heads, kv_heads, head_dim = shape
        for has_norm, interleaved, has_row_positions in (
            (True, False, False),
            (True, True, True),
            (False, True, False),
            (False, False, True),
        ):
            rotated = head_dim if has_norm != interleaved else max(head_dim // 4 * 2, 2)
            what = f"normed rotary {shape, rotated}, {has_norm, interleaved, has_row_positions}"
            fast, parts, slow = drawn_projection(draw, *shape)
            positions = torch.arange(seq_length, device=draw.device)[None]
            if has_row_positions:
                positions = positions + torch.arange(batch, device=draw.device)[:, None]
            tables = position_tables(positions, rotated, dtype=draw.dtype)
            scales = tuple(draw(head_dim) for _ in range(2)) if has_norm else ()
            factors, twins = [leaf(scale) for scale in scales], [wide(scale) for scale in scales]
            results = kernels.norm_and_rotate_qkv(
                fast * 1,
                tables,
                (heads, kv_heads, head_dim),
                tuple(factors) if has_norm else None,
                1e-3,
                interleaved,
            )
            for number, twin in enumerate(twins):
                parts[number] = F.rms_norm(parts[number], (head_dim,), twin, 1e-3)
            compare_rotated(draw, results, parts, tables, (fast, slow), what, interleaved)
            for factor, twin in zip(factors, twins, strict=True):
                check_rounded(factor.grad, twin.grad, f"{what}: gradient of a weight", 2e-5)


def drawn_projection(
    draw: Draw, seq_length: int, batch: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Draw a projection, and return it with its queries, keys and values in float64 and the leaf of
    these.
    """
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    fast = leaf(draw(seq_length, batch, sum(widths)))
    slow = wide(fast)
    return fast, [part.unflatten(-1, (-1, head_dim)) for part in slow.split(widths, -1)], slow


def compare_rotated(
    draw: Draw,
    results: tuple[Tensor, ...],
    parts: list[Tensor],
    tables: tuple[Tensor, Tensor],
    leaves: tuple[Tensor, Tensor],
    what: str,
    interleaved: bool = False,
) -> None:
    """Compare queries, keys and values, and the gradient of the projection for output gradients of
    several memory layouts.
    """
    wide_tables = (tables[0].double(), tables[1].double())
    expected = [*(apply_rotary(part, wide_tables, interleaved) for part in parts[:2]), parts[2]]
    grads = [draw(*result.shape) for result in results]
    # Attention kernels choose the memory layout of the gradients that they return.
    grads[1] = grads[1].permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    grads[2] = torch.cat((grads[2], grads[2]), -1)[..., : grads[2].shape[-1]]
    torch.autograd.backward(results, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for name, result, twin in zip("qkv", results, expected, strict=True):
        check_rounded(result, twin, f"{what}: {name}")
    check_rounded(leaves[0].grad, leaves[1].grad, f"{what}: gradient")


def check_swiglu(draw: Draw, sizes: Sizes) -> None:
    """Compare SwiGLU of contiguous projections, and of slices of wider projections."""
    for seq_length, batch, features in sizes.gated:
        for is_slice in (False, True):
            what = f"swiglu {seq_length, batch, features}, slice={is_slice}"
            projection = draw(seq_length, batch, 2 * features + (16 if is_slice else 0), scale=4.0)
            fast, slow = leaf(projection), wide(projection)
            result = kernels.apply_swiglu(fast[..., : 2 * features])
            gate, up = slow[..., : 2 * features].chunk(2, -1)
            expected = F.silu(gate) * up
            grad = draw(*result.shape)
            result.backward(grad)
            expected.backward(grad.double())
            check_rounded(result, expected, what)
            check_rounded(fast.grad, slow.grad, f"{what}: gradient")


def check_gelu(draw: Draw, sizes: Sizes) -> None:
    """Compare both kinds of GELU, with elements so large that the normal mass rounds to 0 or 1."""
    for shape in sizes.elements:
        for kind in ("tanh", "none"):
            hidden = draw(*shape, scale=4.0)
            large = torch.tensor([0.0, 6e4, -6e4, 90.0, -90.0, 1e-3], device=draw.device)
            hidden.view(-1)[:6] = large[: hidden.numel()].to(hidden.dtype)
            fast, slow = leaf(hidden), wide(hidden)
            result = kernels.apply_gelu(fast, kind == "tanh")
            expected = F.gelu(slow, approximate=kind)
            grad = draw(*shape)
            result.backward(grad)
            expected.backward(grad.double())
            inside = slow.detach().abs() < 1e3
            check_rounded(result[inside], expected[inside], f"gelu {shape} {kind}")
            assert torch.equal(result[~inside].double(), expected[~inside]), (
                f"gelu {shape} {kind}: large elements"
            )
            check_rounded(fast.grad, slow.grad, f"gelu {shape} {kind}: gradient")


def check_cross_entropy(draw: Draw, sizes: Sizes) -> None:
    """Compare losses with label smoothing, ignored labels, arbitrary numbers in padded columns and
    logits of -inf, with and without overwriting the logits.
    """
    mesh = ParallelMesh.single()
    for tokens, vocab_size, padded in sizes.vocabularies:
        for smoothing, overwrite in ((0.0, True), (0.1, False), (0.1, True)):
            what = f"cross entropy {tokens, vocab_size, padded}, {smoothing, overwrite}"
            logits = draw(tokens, 1, padded, scale=5.0)
            logits[..., vocab_size:] = float("nan") if overwrite else 1e4
            labels = draw.integers(vocab_size, tokens, 1)
            labels[0], labels[-1] = vocab_size - 1, 0
            if tokens > 3:
                labels[1] = -7
            if not smoothing and vocab_size > 2:
                logits[0, 0, 1] = -torch.inf
            fast, slow = leaf(logits), wide(logits[..., :vocab_size])
            weight = torch.rand(tokens, 1, generator=draw.generator, device=draw.device)
            losses = vocab_parallel_cross_entropy(
                fast * 1, labels, mesh, vocab_size, smoothing, -7, overwrite
            )
            options = {"label_smoothing": smoothing, "ignore_index": -7, "reduction": "none"}
            expected = F.cross_entropy(slow[:, 0], labels[:, 0], **options).unsqueeze(1)
            (losses * weight).sum().backward()
            (expected * weight.double()).sum().backward()
            assert slow.grad is not None
            check_rounded(losses, expected, what)
            gradient = F.pad(slow.grad, (0, padded - vocab_size))
            check_rounded(fast.grad, gradient, f"{what}: gradient")


def check_norms(draw: Draw, sizes: Sizes) -> None:
    """Compare both norms, with and without an update, with and without a gradient of the stream."""
    for seq_length, batch, width in sizes.norms:
        for is_rms, has_update, uses_stream in (
            (True, True, True), (True, False, True), (True, False, False),
            (False, True, True), (False, True, False), (False, False, True),
        ):  # fmt: skip
            what = f"norm {seq_length, batch, width}, {is_rms, has_update, uses_stream}"
            hidden = leaf(draw(seq_length, batch, width) + 1)
            update = leaf(draw(seq_length, batch, width))
            weight, bias = leaf(draw(width)), None if is_rms else leaf(draw(width))
            stream, result = kernels.add_norm(
                hidden, update if has_update else None, weight, bias, 1e-5, is_rms
            )
            total = hidden.detach().double() + (update.detach().double() if has_update else 0.0)
            check_rounded(stream, total, f"{what}: stream")
            slow, slow_weight = wide(stream), wide(weight)
            slow_bias = None if bias is None else wide(bias)
            if is_rms:
                expected = F.rms_norm(slow, (width,), slow_weight, 1e-5)
            else:
                expected = F.layer_norm(slow, (width,), slow_weight, slow_bias, 1e-5)
            check_rounded(result, expected, what, noise=2e-5)
            grads = [draw(seq_length, batch, width) for _ in range(2)]
            pairs = [(result, grads[0]), (stream, grads[1])][: 2 if uses_stream else 1]
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
            outputs = [expected, slow][: len(pairs)]
            torch.autograd.backward(outputs, [grad.double() for _, grad in pairs])
            check_rounded(hidden.grad, slow.grad, f"{what}: input gradient", noise=2e-5)
            if has_update:
                assert torch.equal(update.grad, hidden.grad), f"{what}: update gradient"
            check_rounded(weight.grad, slow_weight.grad, f"{what}: weight gradient", noise=2e-5)
            if bias is not None and slow_bias is not None:
                check_rounded(bias.grad, slow_bias.grad, f"{what}: bias gradient", noise=2e-5)
            check_taken_gradients(hidden, weight, bias, grads[0], what)


def check_taken_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, what: str
) -> None:
    """Check that a norm hands gradients of its parameters to functions before it rounds them,
    instead of to autograd.
    """
    leaves = [leaf(parameter.detach()) for parameter in (weight, bias) if parameter is not None]

    def differentiate(*takers: Callable[[Tensor], None]) -> None:
        parameters = [*leaves, None][:2]
        _, result = kernels.add_norm(
            hidden.detach(), None, *parameters, 1e-5, bias is None, *takers
        )
        result.backward(grad)

    differentiate()
    rounded = [parameter.grad for parameter in leaves]
    for parameter in leaves:
        parameter.grad = None
    taken: list[list[Tensor]] = [[] for _ in leaves]
    differentiate(*(parts.append for parts in taken))
    for parameter, (parts,), expected in zip(leaves, taken, rounded, strict=True):
        assert parameter.grad is None, f"{what}: autograd got the gradient as well"
        assert parts.dtype == torch.float32, f"{what}: rounded before it was handed over"
        assert torch.equal(parts.sum(0).to(parameter.dtype), expected), f"{what}: handed over"


def serve(tensor: Tensor) -> bool:
    return True


def use_kernels_everywhere() -> None:
    """Make layers use the kernels for all tensors of this process."""
    choose_kernels.is_served = serve
    choose_kernels.choose_kernels = lambda device: choose_kernels.KernelChoice(kernels, "a test")


def check_token_attention(draw: Draw, sizes: Sizes) -> None:
    """Compare places at the start, in the middle, at the end and past the end of a ring buffer, and
    rows with padding.
    """
    for slots, batch, heads, kv_heads, head_dim in sizes.heads:
        for place in {0, slots // 2, slots - 1, slots + 2}:
            for has_padding in (False, True):
                what = f"token {place} of {slots, batch, heads, kv_heads, head_dim}, {has_padding}"
                query = draw(1, batch, heads, head_dim)
                keys = draw(batch, kv_heads, slots, head_dim)
                values = draw(batch, kv_heads, slots, head_dim + 5)
                # Slots behind the current token are still empty.
                keys[:, :, place + 1 :] = torch.nan
                values[:, :, place + 1 :] = torch.nan
                padding = None
                if has_padding:
                    padding = torch.arange(batch, device=draw.device).clamp(max=place)
                at = torch.tensor([place], device=draw.device)
                scale = head_dim**-0.5
                new = draw(1, batch, kv_heads, 2 * head_dim + 5).split((head_dim, head_dim + 5), -1)
                kernels.store_token(*new, keys, values, at)
                stored = torch.cat((keys, values), -1)[:, :, place % slots]
                assert torch.equal(stored, torch.cat(new, -1)[0]), what
                result = kernels.attend_one_token(query, keys, values, at, padding, scale)
                wide_keys = keys.double().nan_to_num()
                expected = attend_by_mask(
                    query.double(), wide_keys, values.double(), at, padding, scale
                )
                # The weights are rounded before they are multiplied by the values.
                noise = 4e-6 + 2 * ROUNDOFF[query.dtype] * float(values.nan_to_num().abs().max())
                check_rounded(result, expected, what, noise=noise)


def check_dropout(draw: Draw, sizes: Sizes) -> None:
    """Compare the masks of shards with those of the operators, bit for bit."""
    for shape in (*sizes.elements, *sizes.gated):
        rows = (1,) * (3 - len(shape)) + tuple(shape)
        values = draw(*rows).abs() + 1.0
        numbers = MaskNumbers(
            dimension_of_rows(rows, 1),
            dimension_of_rows(rows, 0),
            cut=PlaceCut(3, 5, 10, 200),
            first_feature=100,
        )
        key = torch.tensor([0x7123456789ABCDEF, 5, 2, 1])
        kept = keep_mask(key, (values[..., 0].numel(), rows[2]), numbers, 2**29, draw.device)
        expected = torch.where(kept.view(rows), values * 1.25, 0.0)
        for given in (key, key.to(draw.device)):
            dropped = kernels.drop_elements(values, given, numbers, 2**29, 1.25)
            assert torch.equal(dropped == 0, expected == 0), f"masks of {rows}"
            error = (wide(dropped) - wide(expected)).abs()
            assert (error <= ROUNDOFF[draw.dtype] * wide(expected)).all(), f"factors of {rows}"


CHECKS: dict[str, Callable[[Draw, Sizes], None]] = {
    "dropout": check_dropout,
    "rotary": check_rotary,
    "normed": check_normed_rotary,
    "swiglu": check_swiglu,
    "gelu": check_gelu,
    "cross entropy": check_cross_entropy,
    "norms": check_norms,
    "token attention": check_token_attention,
    "swiglu magnitudes": check_swiglu_magnitudes,
    "norm magnitudes": check_norm_magnitudes,
    "growing magnitudes": check_growing_magnitudes,
    "vector products": check_vector_products,
    "gated vector products": check_gated_vector_products,
    "rotated attention": check_rotated_attention,
}
