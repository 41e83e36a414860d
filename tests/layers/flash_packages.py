"""Stand-ins for packages of flash attention: functions with the same arguments, computed by torch."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _split_documents(rows: Tensor, borders: Tensor | None) -> list[Tensor]:
    if borders is None:
        return list(rows.unbind())
    return [rows[a:b] for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)]


def _join_documents(parts: list[Tensor], borders: Tensor | None, dim: int = 0) -> Tensor:
    return torch.stack(parts) if borders is None else torch.cat(parts, dim)


def _scores(
    query: Tensor, key: Tensor, scale: float, cap: float, causal: bool, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """Return the bounded, masked scores (heads, queries, keys), and the slope of the bound."""
    group_size = query.shape[1] // key.shape[1]
    scores = torch.einsum("shd,thd->hst", query, key.repeat_interleave(group_size, 1)) * scale
    slope = torch.ones_like(scores)
    if cap:
        bounded = (scores / cap).tanh()
        scores, slope = cap * bounded, 1 - bounded**2
    positions = torch.arange(len(query))[:, None] + len(key) - len(query)
    key_positions = torch.arange(len(key))[None]
    masked = torch.zeros(len(query), len(key), dtype=torch.bool)
    if left >= 0:
        masked |= key_positions < positions - left
    if right >= 0 or causal:
        masked |= key_positions > positions + (0 if causal else right)
    return scores.masked_fill(masked, -torch.inf), slope


def _forward(query: Tensor, key: Tensor, value: Tensor, q: Any, k: Any, **options: Any) -> Any:
    outs, sums = [], []
    pairs = ((query, q), (key, k), (value, k))
    parts = (_split_documents(tensor, borders) for tensor, borders in pairs)
    for queries, keys, values in zip(*parts, strict=True):
        scores, _ = _scores(queries, keys, **options)
        sums.append(scores.logsumexp(-1))
        weights = (scores - sums[-1][..., None]).exp().nan_to_num(0.0)
        wide_values = values.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
        outs.append(torch.einsum("hst,thd->shd", weights, wide_values))
    return _join_documents(outs, q), _join_documents(sums, q, 1)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    q: Any, k: Any, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients: tuple[list[Tensor], ...] = ([], [], [])
    pairs = ((grad, q), (query, q), (key, k), (value, k), (out, q))
    sums = _split_documents(lse.transpose(-1, -2), q)
    parts = (_split_documents(tensor, borders) for tensor, borders in pairs)
    for grads, queries, keys, values, outs, log_sums in zip(*parts, sums, strict=True):
        scores, slope = _scores(queries, keys, **options)
        weights = (scores - log_sums.t()[..., None]).exp().nan_to_num(0.0, posinf=0.0)
        group_size = queries.shape[1] // keys.shape[1]
        wide_keys, wide_values = (t.repeat_interleave(group_size, 1) for t in (keys, values))
        weight_gradients = torch.einsum("shd,thd->hst", grads, wide_values)
        delta = (grads * outs).sum(-1).t()[..., None]
        score_gradients = weights * (weight_gradients - delta) * slope * options["scale"]
        gradients[0].append(torch.einsum("hst,thd->shd", score_gradients, wide_keys))
        key_gradient = torch.einsum("hst,shd->thd", score_gradients, queries)
        value_gradient = torch.einsum("hst,shd->thd", weights, grads)
        for documents, gradient in zip(gradients[1:], (key_gradient, value_gradient), strict=True):
            documents.append(gradient.unflatten(1, (-1, group_size)).sum(2))
    query_gradients, key_gradients, value_gradients = gradients
    return (
        _join_documents(query_gradients, q),
        _join_documents(key_gradients, k),
        _join_documents(value_gradients, k),
    )


# The arguments of flash_attn_interface, whose functions torch.library wraps.
def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
    cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
    seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
    rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    assert (max_seqlen_q is None) == (cu_seqlens_q is None)
    out, lse = _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, cap=softcap, causal=causal,
        left=window_size_left, right=window_size_right,
    )  # fmt: skip
    return out, lse, torch.tensor([]), torch.tensor([])


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
    sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
    softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    deterministic=False, sm_margin=0,
):  # fmt: skip
    gradients = _backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale,
        cap=softcap, causal=is_causal, left=window_size_left, right=window_size_right,
    )  # fmt: skip
    for out_gradient, gradient in zip((dq, dk, dv), gradients, strict=True):
        assert out_gradient.is_contiguous()
        out_gradient.copy_(gradient)
    return torch.zeros(())


def _options(
    scale: float, cap: float, causal: bool, left: int | None, right: int | None
) -> dict[str, Any]:
    left, right = (-1 if size is None else size for size in (left, right))
    return {"scale": scale, "cap": cap, "causal": causal, "left": left, "right": right}


# The arguments of flash_attn.cute.interface.
def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None,
    learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384,
    num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None,
    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
):  # fmt: skip
    assert return_lse
    options = _options(softmax_scale, softcap, causal, window_size_left, window_size_right)
    return (*_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **options), None, None, None)


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
    num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False,
    AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None,
    cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None,
    mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    options = _options(softmax_scale, softcap, causal, window_size_left, window_size_right)
    return _backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, **options)


class Wrapped(SimpleNamespace):
    """Call a function through another object, as torch.library does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._init_fn(*args, **kwargs)


def make_flash_attention_3() -> ModuleType:
    """Return a stand-in for ``flash_attn_interface``."""
    module = ModuleType("flash_attn_interface")
    for function in (_flash_attn_forward, _flash_attn_backward):
        setattr(module, function.__name__, Wrapped(_init_fn=function))
    return module


def make_flash_attention_4() -> ModuleType:
    """Return a stand-in for ``flash_attn.cute.interface``."""
    module = ModuleType("flash_attn.cute.interface")
    for function in (_flash_attn_fwd, _flash_attn_bwd):
        setattr(module, function.__name__, function)
    return module
