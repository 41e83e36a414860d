"""Fused Triton kernels of Transformer blocks, experts and the optimizer.

Triton is installed with the CUDA builds of torch. ``layers.fused.choose_kernels`` imports this
package for tensors of half types on a GPU. Kernels use atomics only for maxima and to count
programs, so equal inputs give bitwise equal results. ``lightning_megatron.layers`` lists the names
of the dimensions.
"""

from lightning_megatron.kernels.triton.adamw import AdamKernel
from lightning_megatron.kernels.triton.clone_plan import (
    MAX_PLACED_EXPERTS,
    assign_clones,
    physical_experts,
)
from lightning_megatron.kernels.triton.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_statistics,
)
from lightning_megatron.kernels.triton.dropout import drop_elements
from lightning_megatron.kernels.triton.eight_bits import (
    cast_by_blocks,
    cast_by_lines,
    cast_by_one_scale,
)
from lightning_megatron.kernels.triton.expert_sort import MAX_SORTED_EXPERTS, sort_selections
from lightning_megatron.kernels.triton.gelu import apply_gelu
from lightning_megatron.kernels.triton.magnitudes import line_magnitudes, magnitude_parts
from lightning_megatron.kernels.triton.norm import MAX_WIDTH as MAX_NORM_WIDTH
from lightning_megatron.kernels.triton.norm import add_norm
from lightning_megatron.kernels.triton.normed_rotary import norm_and_rotate_qkv
from lightning_megatron.kernels.triton.one_shot import one_shot_bytes, reduce_one_shot_
from lightning_megatron.kernels.triton.peer_clones import (
    add_clone_gradients,
    put_counts,
    put_weights,
)
from lightning_megatron.kernels.triton.peer_rows import add_buffer_rows, put_sums, put_tokens
from lightning_megatron.kernels.triton.rotary import rotate_qkv
from lightning_megatron.kernels.triton.rotated_attention import attend_rotated_token
from lightning_megatron.kernels.triton.route import RouteSettings, route_tokens
from lightning_megatron.kernels.triton.router_losses import add_routing, attach_losses
from lightning_megatron.kernels.triton.swiglu import apply_swiglu
from lightning_megatron.kernels.triton.token_attention import attend_one_token, store_token
from lightning_megatron.kernels.triton.token_rows import permute_tokens, unpermute_rows
from lightning_megatron.kernels.triton.token_sums import (
    MAX_SUM_WIDTH,
    add_norm_sums,
    send_token_vector,
    token_sum_bytes,
)
from lightning_megatron.kernels.triton.two_halves import split_rows
from lightning_megatron.kernels.triton.vector_product import (
    MAX_PAIRED_WIDTH,
    multiply_vector,
    multiply_vector_swiglu,
    send_vector_product,
)
from lightning_megatron.kernels.triton.weight_slices import SliceCastKernel, padded_transpose
from lightning_megatron.kernels.triton.weighted_swiglu import (
    apply_weighted_clamped_swiglu,
    apply_weighted_swiglu,
)

__all__ = [
    "AdamKernel",
    "MAX_NORM_WIDTH",
    "MAX_PAIRED_WIDTH",
    "MAX_PLACED_EXPERTS",
    "MAX_SORTED_EXPERTS",
    "MAX_SUM_WIDTH",
    "RouteSettings",
    "SliceCastKernel",
    "add_norm",
    "add_norm_sums",
    "add_routing",
    "add_buffer_rows",
    "add_clone_gradients",
    "assign_clones",
    "attach_losses",
    "attend_one_token",
    "attend_rotated_token",
    "cast_by_blocks",
    "cast_by_lines",
    "cast_by_one_scale",
    "cross_entropy_gradient",
    "cross_entropy_statistics",
    "apply_gelu",
    "drop_elements",
    "line_magnitudes",
    "magnitude_parts",
    "multiply_vector",
    "multiply_vector_swiglu",
    "norm_and_rotate_qkv",
    "reduce_one_shot_",
    "rotate_qkv",
    "apply_swiglu",
    "apply_weighted_clamped_swiglu",
    "apply_weighted_swiglu",
    "one_shot_bytes",
    "padded_transpose",
    "permute_tokens",
    "physical_experts",
    "put_counts",
    "put_sums",
    "put_tokens",
    "put_weights",
    "route_tokens",
    "sort_selections",
    "split_rows",
    "send_token_vector",
    "send_vector_product",
    "store_token",
    "token_sum_bytes",
    "unpermute_rows",
]
