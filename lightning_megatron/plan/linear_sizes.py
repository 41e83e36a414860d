"""Sizes of the linear layers of a block on one tensor-parallel rank, before anything is built."""

from __future__ import annotations

from lightning_megatron.plan.model_shape import ModelShape

#: Output and input features of each linear layer of a rank, by its name in the block (elements).
LinearSizes = dict[str, tuple[int, int]]


def linear_sizes(model: ModelShape, layer: int, tp: int) -> LinearSizes:
    """Return the sizes of the linear layers of a block, except routers and routed experts.

    Equal to the sizes of the layers that a model builds and cuts over tp.

    Args:
        model: Shape of the model.
        layer: Index of the block.
        tp: Tensor-parallel size.

    Raises:
        ParallelPlanError: If the heads cannot be divided among the ranks.
    """
    sizes = {f"attention.{name}": size for name, size in _of_attention(model, tp).items()}
    if not model.has_experts_in(layer):
        sizes |= _of_network(model, "mlp", model.ffn_hidden_size, tp)
    elif model.experts is not None and model.experts.shared_ffn_hidden_size:
        sizes |= _of_network(model, "mlp.shared", model.experts.shared_ffn_hidden_size, tp)
    return sizes


def _of_network(model: ModelShape, name: str, inner: int, tp: int) -> LinearSizes:
    up = "gate_up" if model.gated else "up"
    features = 2 * inner if model.gated else inner
    return {
        f"{name}.{up}": (features // tp, model.hidden_size),
        f"{name}.down": (model.hidden_size, inner // tp),
    }


def _of_attention(model: ModelShape, tp: int) -> LinearSizes:
    hidden = model.hidden_size
    if model.latent is None:
        query, key = model.widths(tp)
        return {"qkv": (query + 2 * key, hidden), "output": (hidden, query)}
    latent = model.latent
    heads = model.num_heads // tp
    up = latent.plain_dim + latent.value_dim
    return {
        "query": (heads * latent.head_dim, latent.query_rank or hidden),
        "key_value": (heads * up, latent.key_value_rank),
        "output": (hidden, heads * latent.value_dim),
    }
