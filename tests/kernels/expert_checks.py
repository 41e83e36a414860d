"""Checks that compare results and all gradients of the kernels of experts with plain torch in
float64, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.experts.routing.balance import tokens_per_expert_of_sequences
from lightning_megatron.experts.routing.router import Routing
from lightning_megatron.experts.routing.router_losses import RouterLosses
from lightning_megatron.experts.routing.scores import RouterOutput, score_tokens, weigh_selected
from lightning_megatron.experts.routing.statistics import RouterStatistics
from lightning_megatron.experts.transport.permute import RowMap, sort_by_expert
from lightning_megatron.kernels import triton as kernels
from lightning_megatron.plan.experts import ExpertsConfig, RoutingSum
from tests.kernels.checks import Draw, check_rounded, leaf, wide
from tests.kernels.clone_checks import CloneSizes, check_clones
from tests.kernels.peer_checks import check_peer_rows
from tests.kernels.peer_clone_checks import PeerCloneCase, check_peer_clones


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of all checks.

    Args:
        routings: Tokens, experts, choices, size of a token.
        inner: Rows, inner features, rows past the last end.
        routers: Sequences, their length, and settings of the configuration of experts.
        peers: Ranks, tokens per rank, experts, choices, size of a token.
        clones: Sizes of the plans of clones.
        peer_clones: Ranks, experts, places per rank, shapes of an expert's matrices.
        ways: How tokens choose experts.
        logits: Kinds of logits of routers.
    """

    routings: tuple[tuple[int, int, int, int], ...]
    inner: tuple[tuple[int, int, int], ...]
    routers: tuple[tuple[int, int, dict[str, object]], ...]
    peers: tuple[tuple[int, int, int, int, int], ...]
    clones: CloneSizes
    peer_clones: tuple[PeerCloneCase, ...]
    ways: tuple[str, ...] = (
        "random",
        "all to the same",
        "last experts empty",
        "some nowhere",
        "all nowhere",
    )
    logits: tuple[str, ...] = ("random", "ties", "all equal")


ROUTERS: tuple[dict[str, object], ...] = (
    {"num_experts": 8, "top_k": 2},
    {"num_experts": 8, "top_k": 2, "normalize_top_k": False, "score_scale": 2.5},
    {"num_experts": 20, "top_k": 3, "scoring": "sigmoid", "normalize_top_k": False},
    {"num_experts": 16, "top_k": 5, "scoring": "sigmoid", "score_scale": 1.5, "aux_loss_scope": "sequence"},
    {"num_experts": 16, "top_k": 4, "num_groups": 4, "top_k_groups": 2, "aux_loss_scope": "sequence"},
    {
        "num_experts": 32, "top_k": 4, "num_groups": 8, "top_k_groups": 3, "scoring": "sigmoid", "expert_bias": True,
        "score_scale": 2.5,
    },
    {"num_experts": 16, "top_k": 3, "num_groups": 8, "top_k_groups": 3, "best_of_group": 1, "normalize_top_k": False},
    {"num_experts": 11, "top_k": 1, "expert_bias": True},
    {"num_experts": 4, "top_k": 4},
    {"num_experts": 1, "top_k": 1},
)  # fmt: skip
SMALL = ExpertSizes(
    routings=((7, 4, 2, 37), (1, 1, 1, 1), (40, 5, 3, 8), (5, 40, 8, 16), (0, 4, 2, 8)),
    inner=((5, 37, 3), (1, 1, 0), (20, 64, 0), (0, 8, 4), (3, 200, 2)),
    routers=tuple((2, 9, config) for config in ROUTERS) + ((1, 0, ROUTERS[0]), (3, 1, ROUTERS[3])),
    peers=((2, 7, 4, 2, 37), (3, 5, 9, 3, 64), (1, 3, 4, 2, 8), (4, 1, 4, 1, 1)),
    clones=CloneSizes(plans=1000, routings=150, layers=((3, 6, 2, 50, 2),)),
    peer_clones=(
        (2, 4, 1, ((5, 7), (7, 3))),
        (3, 6, 4, ((40, 16), (16, 20))),
        (4, 8, 2, ((33, 129),)),
    ),
)
# For the interpreter: every branch of every kernel, few programs.
FEW = ExpertSizes(
    routings=((6, 4, 2, 21), (25, 5, 3, 8), (0, 4, 2, 8)),
    inner=((5, 37, 3), (20, 64, 0), (0, 8, 4)),
    routers=tuple((2, 4, config) for config in ROUTERS) + ((1, 0, ROUTERS[0]),),
    peers=((2, 5, 4, 2, 21), (3, 4, 9, 3, 32), (4, 1, 4, 1, 1)),
    clones=CloneSizes(plans=16, routings=6, layers=((3, 6, 2, 50, 2),)),
    peer_clones=((2, 4, 1, ((5, 7), (7, 3))), (3, 6, 4, ((20, 8), (8, 10)))),
    ways=("random", "some nowhere"),
    logits=("ties",),
)
# Qwen3-30B-A3B, Mixtral, DeepSeek-V3, and odd ones.
REAL = ExpertSizes(
    routings=((4096, 128, 8, 2048), (4096, 8, 2, 4096), (777, 256, 8, 7168), (1001, 10, 3, 1001), (40000, 1000, 16, 8)),
    inner=((32768, 768, 999), (8192, 14336, 0), (1001, 1001, 77)),
    routers=(
        (1, 4096, {"num_experts": 128, "top_k": 8}),
        (2, 777, {"num_experts": 512, "top_k": 16, "normalize_top_k": False, "aux_loss_scope": "sequence"}),
        (1, 4096, {"num_experts": 8, "top_k": 2}),
        (
            3, 1001,
            {
                "num_experts": 256, "top_k": 8, "num_groups": 8, "top_k_groups": 4, "scoring": "sigmoid",
                "expert_bias": True, "score_scale": 2.5, "aux_loss_scope": "sequence",
            },
        ),
    ),
    peers=((2, 4096, 128, 8, 2048), (8, 1000, 256, 8, 7168), (4, 4096, 8, 2, 4096), (3, 1001, 12, 3, 1001)),
    clones=CloneSizes(
        plans=0, routings=0,
        layers=((4, 128, 1, 4096, 8), (4, 128, 2, 4096, 8), (8, 256, 4, 777, 8), (2, 8, 1, 4096, 2), (32, 512, 16, 100, 4)),
    ),
    peer_clones=((4, 16, 2, ((1536, 2048), (2048, 768))), (2, 4, 1, ((28672, 4096), (4096, 14336)))),
)  # fmt: skip


def draw_choices(draw: Draw, tokens: int, num_experts: int, top_k: int, routing: str) -> Tensor:
    """Draw the experts of tokens; a token chooses an expert at most once."""
    scores = torch.rand(tokens, num_experts, generator=draw.generator, device=draw.device)
    if routing == "all to the same":
        scores[:] = torch.arange(num_experts, device=draw.device)
    if routing == "last experts empty":
        scores[:, top_k:] -= 1.0
    experts = scores.topk(top_k, -1).indices
    if routing == "some nowhere":
        experts[torch.rand(experts.shape, generator=draw.generator, device=draw.device) < 0.5] = -1
    return torch.full_like(experts, -1) if routing == "all nowhere" else experts


def row_maps(draw: Draw, sizes: ExpertSizes) -> list[tuple[str, RowMap, int]]:
    """List row maps of all routings: for all experts, and for some of them in the middle."""
    named_maps = []
    for tokens, num_experts, top_k, width in sizes.routings:
        for routing in sizes.ways:
            experts = draw_choices(draw, tokens, num_experts, top_k, routing)
            for first, here in ((0, num_experts), (num_experts // 3, (num_experts + 1) // 2)):
                name = f"{tokens, num_experts, top_k, width}, {routing}, {here} from {first}"
                named_maps.append((name, sort_by_expert(experts, first, here), width))
    return named_maps


def check_sort(draw: Draw, sizes: ExpertSizes) -> None:
    """Compare the row map with that of a stable sort, exactly."""
    for tokens, num_experts, top_k, _ in sizes.routings:
        for routing in sizes.ways:
            experts = draw_choices(draw, tokens, num_experts, top_k, routing)
            for first, here in ((0, num_experts), (num_experts // 3, (num_experts + 1) // 2)):
                expected = sort_by_expert(experts, first, here)
                pairs, rows, ends = kernels.sort_selections(experts, first, here)
                what = f"sort {tokens, num_experts, top_k}, {routing}, {here} from {first}"
                pairs = pairs[: expected.pairs.shape[0]]
                assert torch.equal(ends, expected.ends), f"{what}: ends"
                assert torch.equal(rows, expected.rows), f"{what}: rows"
                assert torch.equal(pairs, expected.pairs), f"{what}: pairs"
                assert ends.dtype == torch.int32, f"{what}: ends are {ends.dtype}"


def with_nan_tail(row_map: RowMap, rows: Tensor) -> Tensor:
    """Return the rows with NaN past the last end, to show whether they are read."""
    past = torch.arange(rows.shape[0], device=rows.device) >= row_map.ends[-1]
    return rows.masked_fill(past.view(-1, *[1] * (rows.dim() - 1)), torch.nan)


def is_row(row_map: RowMap, num_rows: int) -> Tensor:
    return torch.arange(num_rows, device=row_map.ends.device) < row_map.ends[-1]


def check_permute(draw: Draw, sizes: ExpertSizes) -> None:
    """Compare rows, scales and both gradients, with NaN in the rows past the last end."""
    for name, row_map, width in row_maps(draw, sizes):
        what = f"permute {name}"
        tokens, top_k = row_map.rows.shape
        hidden, probabilities = leaf(draw(tokens, width)), leaf(draw(tokens, top_k).float())
        num_rows = row_map.pairs.shape[0]
        rows, scales = kernels.permute_tokens(
            hidden, probabilities, row_map.rows, row_map.ends, num_rows
        )
        is_here = is_row(row_map, num_rows)
        pairs = row_map.pairs[is_here]
        assert torch.equal(rows[is_here], hidden[pairs // top_k]), what
        assert torch.equal(scales[is_here], probabilities.flatten()[pairs]), f"{what}: scales"
        row_grads = with_nan_tail(row_map, draw(num_rows, width))
        scale_grads = with_nan_tail(row_map, draw(num_rows).float())
        torch.autograd.backward((rows, scales), (row_grads, scale_grads))
        expected = torch.zeros(tokens * top_k, width, dtype=torch.float64, device=draw.device)
        expected[pairs] = row_grads[is_here].double()
        expected = expected.view(tokens, top_k, width).sum(1)
        check_grad(hidden.grad, expected, f"{what}: gradient")
        expected = torch.zeros(tokens * top_k, device=draw.device)
        expected[pairs] = scale_grads[is_here]
        expected = expected.view(tokens, top_k)
        assert torch.equal(probabilities.grad, expected), f"{what}: gradient of scales"
        alone, nothing = kernels.permute_tokens(hidden, None, row_map.rows, row_map.ends, num_rows)
        assert nothing is None, f"{what}: scales of nothing"
        assert torch.equal(alone[is_here], rows[is_here]), f"{what}: without scales"


def check_grad(actual: Tensor | None, expected: Tensor, what: str, noise: float = 4e-6) -> None:
    if expected.numel():
        check_rounded(actual, expected, what, noise)
    else:
        assert actual is not None, f"{what}: nothing"
        assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}"


def check_unpermute(draw: Draw, sizes: ExpertSizes) -> None:
    """Compare sums and their gradients, with NaN in the rows past the last end."""
    for name, row_map, width in row_maps(draw, sizes):
        tokens, top_k = row_map.rows.shape
        num_rows = row_map.pairs.shape[0]
        is_here = is_row(row_map, num_rows)
        pairs = row_map.pairs[is_here]
        what = f"unpermute {name}"
        rows = leaf(with_nan_tail(row_map, draw(num_rows, width)))
        result = kernels.unpermute_rows(rows, row_map.rows, row_map.ends)
        outer = draw(tokens, width)
        result.backward(outer)
        slow = wide(rows.detach()[is_here])
        chosen = slow.new_zeros(tokens * top_k, width).index_put((pairs,), slow)
        expected = chosen.view(tokens, top_k, width).sum(1)
        expected.backward(outer.double())
        check_grad(result, expected, what)
        assert rows.grad is not None, f"{what}: no gradient"
        check_grad(rows.grad[is_here], slow.grad, f"{what}: gradient")


def check_swiglu(draw: Draw, sizes: ExpertSizes) -> None:
    """Compare the rows before the last end; the last group is empty, and later rows are NaN."""
    run = kernels.apply_weighted_swiglu
    check_weighted_activation(draw, sizes, run, lambda gate, up: F.silu(gate) * up)


def check_clamped_swiglu(draw: Draw, sizes: ExpertSizes) -> None:
    """Compare features within and beyond the bounds."""

    def reference(gate: Tensor, up: Tensor) -> Tensor:
        # Versions of torch disagree about the gradient of clamp at a bound.
        gate = torch.where(gate <= 7.0, gate, 7.0)
        up = torch.where(up.abs() <= 7.0, up, up.sign() * 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    check_weighted_activation(draw, sizes, kernels.apply_weighted_clamped_swiglu, reference)


def check_weighted_activation(
    draw: Draw,
    sizes: ExpertSizes,
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    activation: Callable[[Tensor, Tensor], Tensor],
) -> None:
    for num_rows, features, tail in sizes.inner:
        what = f"weighted swiglu {num_rows, features, tail}"
        ends = torch.tensor([num_rows // 3, num_rows, num_rows], device=draw.device).int()
        past = torch.full((tail, 2 * features), torch.nan, device=draw.device, dtype=draw.dtype)
        gate_up = leaf(torch.cat([draw(num_rows, 2 * features, scale=4.0), past]))
        probabilities = leaf(torch.cat([draw(num_rows).float(), past[:, 0].float()]))
        result = run(gate_up, probabilities, ends)
        outer = torch.cat([draw(num_rows, features), past[:, :features]])
        result.backward(outer)
        slow, slow_probabilities = wide(gate_up[:num_rows]), wide(probabilities[:num_rows])
        gate, up = slow.chunk(2, -1)
        expected = activation(gate, up) * slow_probabilities.unsqueeze(-1)
        expected.backward(outer[:num_rows].double())
        assert gate_up.grad is not None, f"{what}: no gradient"
        assert probabilities.grad is not None, f"{what}: no gradient of probabilities"
        check_grad(result[:num_rows], expected, what)
        check_grad(gate_up.grad[:num_rows], slow.grad, f"{what}: gradient")
        gradient = probabilities.grad[:num_rows]
        check_grad(gradient, slow_probabilities.grad, f"{what}: of probabilities", 2e-5)


def logits_of(draw: Draw, tokens: int, num_experts: int, kind: str) -> Tensor:
    """Draw logits; ties are between numbers that float32 represents exactly."""
    logits = 2 * torch.randn(tokens, num_experts, generator=draw.generator, device=draw.device)
    if kind == "ties":
        return logits.round()
    return torch.zeros_like(logits) if kind == "all equal" else logits


def check_router(draw: Draw, sizes: ExpertSizes) -> None:
    """Compare choices exactly, also between equal scores, and all else to float32's precision."""
    for num_sequences, length, settings in sizes.routers:
        config = ExpertsConfig(ffn_hidden_size=4, aux_loss=0.1, **settings)  # type: ignore[arg-type]
        for kind in sizes.logits:
            what = f"router {num_sequences, length}, {settings}, {kind}"
            logits = leaf(logits_of(draw, num_sequences * length, config.num_experts, kind))
            bias = None
            if config.expert_bias:
                # Multiples of a power of two, so that ties of scores stay ties.
                bias = (draw.integers(9, config.num_experts) - 4) * 2.0**-5
            check_routed(draw, logits, bias, config, num_sequences, what)


def check_routed(
    draw: Draw,
    logits: Tensor,
    bias: Tensor | None,
    config: ExpertsConfig,
    num_sequences: int,
    what: str,
) -> None:
    """Compare a router with that of torch: choices with those in float32, and all else with float64
    for the same choices.
    """
    classes = num_sequences if config.aux_loss_scope == "sequence" else 1
    actual = score_tokens(logits, bias, config, classes, kernels)
    choices_of_torch = score_tokens(logits.detach(), bias, config, classes)
    check_choices(actual, choices_of_torch, logits.detach(), bias, config, what)
    slow = wide(logits)
    expected = weigh_selected(slow, actual.experts, actual.experts, config, classes)
    for name in ("probabilities", "share_sums", "square_sum", "entropy_sum"):
        check_grad(getattr(actual, name), getattr(expected, name), f"{what}: {name}", noise=1e-5)
    names = ("probabilities", "share_sums", "square_sum")
    results, twins = ([getattr(output, name) for name in names] for output in (actual, expected))
    outer = [
        torch.randn(result.shape, generator=draw.generator, device=draw.device)
        for result in results
    ]
    torch.autograd.backward(results, outer, retain_graph=True)
    torch.autograd.backward(twins, [grad.double() for grad in outer], retain_graph=True)
    check_grad(logits.grad, slow.grad, f"{what}: gradient", noise=2e-5)
    # The gradient of the probabilities alone, as in evaluation or without losses.
    (alone,) = torch.autograd.grad(results[0], logits, outer[0])
    (expected_alone,) = torch.autograd.grad(twins[0], slow, outer[0].double())
    check_grad(alone, expected_alone, f"{what}: part", noise=2e-5)


def check_choices(
    actual: RouterOutput,
    expected: RouterOutput,
    logits: Tensor,
    bias: Tensor | None,
    config: ExpertsConfig,
    what: str,
) -> None:
    """Assert equal choices, except between scores or groups that differ by rounding alone."""
    is_same = torch.equal(actual.experts, expected.experts)
    if is_same:
        assert torch.equal(actual.load, expected.load), f"{what}: load"
        assert torch.equal(actual.unbiased_load, expected.unbiased_load), (
            f"{what}: load without biases"
        )
        return
    classes, slack = actual.load.shape[0], 2e-6
    load = tokens_per_expert_of_sequences(
        actual.experts.unflatten(0, (-1, classes)), config.num_experts
    )
    assert torch.equal(actual.load, load), f"{what}: load"
    scores = (
        logits.double().softmax(-1) if config.scoring == "softmax" else logits.double().sigmoid()
    )
    scores = scores if bias is None else scores + bias
    by_group = scores.unflatten(-1, (config.num_groups, -1))
    size, eligible = by_group.shape[-1], config.top_k_groups
    is_left = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, actual.experts, False)
    if eligible < config.num_groups:
        group_scores = by_group.topk(config.best_of_group, -1).values.sum(-1)
        best = group_scores.topk(eligible + 1).values
        chosen = group_scores.gather(-1, actual.experts // size)
        assert (chosen >= best[:, -2:-1] - slack).all(), f"{what}: choices in other groups"
        # Only groups that are certainly among the best.
        is_left &= (group_scores > best[:, -1:] + slack).repeat_interleave(size, -1)
    picked = scores.gather(-1, actual.experts)
    assert (picked.diff() <= slack).all(), f"{what}: not the best first"
    assert (scores.masked_fill(~is_left, -1.0).amax(-1) <= picked[:, -1] + slack).all(), (
        f"{what}: not the best"
    )


def check_losses(draw: Draw, sizes: ExpertSizes) -> None:
    """Compare gradients of a router's losses, and the sums of a step, with operators of torch in
    float64.
    """
    for classes, num_experts in ((1, 8), (3, 5), (2, 130), (1, 1)):
        counts = draw.integers(99, classes, num_experts).int()
        shares = torch.rand(num_experts, generator=draw.generator, device=draw.device)
        for load_factors in (counts, None) if classes > 1 else (counts, shares, None):
            for square_coefficient in (0.0, 0.2):
                for is_late in (False, True):
                    what = f"losses {classes, num_experts}, {load_factors is None or load_factors.dtype}, "
                    what += f"z {square_coefficient}, late {is_late}"
                    check_attached(draw, counts, load_factors, square_coefficient, is_late, what)


def check_attached(
    draw: Draw, counts: Tensor, load_factors: Tensor | None, square_coefficient: float, is_late: bool, what: str
) -> None:  # fmt: skip
    """Attach losses to a tensor and count a microbatch twice, by the kernels and by torch."""
    classes, num_experts = counts.shape
    # As in the router's kernel, rows have two more numbers behind the shares.
    totals = torch.rand(classes, num_experts + 2, generator=draw.generator, device=draw.device)
    outer = torch.randn(4, 2, generator=draw.generator, device=draw.device)
    before = torch.rand(
        RoutingSum.LOAD + num_experts, generator=draw.generator, device=draw.device
    ).double()
    results = []
    for kernels_or_none, dtype in ((kernels, torch.float32), (None, torch.float64)):
        total, x = leaf(totals.to(dtype)), leaf(outer.to(dtype) + 1)
        losses = RouterLosses(
            total[:, :num_experts],
            load_factors,
            0.3,
            total[0, num_experts],
            square_coefficient,
            kernels_or_none,
        )
        scale = torch.zeros((), dtype=torch.float64, device=draw.device) if is_late else 0.7
        attached = losses.attach_to(x, scale)
        assert torch.equal(attached, x), f"{what}: not the same numbers"
        if isinstance(scale, Tensor):
            scale.fill_(0.7)
        attached.backward(outer.to(dtype))
        statistics = RouterStatistics(
            ExpertsConfig(num_experts=num_experts, top_k=1, ffn_hidden_size=4), draw.device
        )
        statistics.sums.copy_(before)
        for dropped in (None, counts.sum().int()):
            entropy, load = total.detach()[0, num_experts + 1], counts.sum(0, dtype=torch.int32)
            statistics.add_(Routing(outer, outer.long(), load, dropped, entropy, losses))
        gradient = torch.zeros_like(total) if total.grad is None else total.grad
        results.append((x.grad, gradient, statistics.sums))
    assert torch.equal(results[0][0], outer), f"{what}: the gradient of what losses are attached to"
    check_grad(results[0][1], results[1][1], f"{what}: gradient", noise=1e-6)
    # Counts are integers, and an exact comparison does not let the largest ones hide the others.
    loads = [(sums - before)[RoutingSum.LOAD :].round() for _, _, sums in results]
    assert torch.equal(*loads), f"{what}: load"
    actual, expected = (sums[: RoutingSum.LOAD] for _, _, sums in results)
    check_grad(actual.float(), expected, f"{what}: sums", noise=1e-6)


def check_split(draw: Draw, sizes: ExpertSizes) -> None:
    """Check that the sum of both parts has twice the precision of one part, and that the first part
    is the number as torch rounds it.
    """
    for tokens, width in ((5, 7), (40, 64), (0, 4)):
        values = torch.randn(tokens, width, generator=draw.generator, device=draw.device)
        parts = kernels.split_rows(
            values, torch.empty(tokens, 2, width, dtype=draw.dtype, device=draw.device)
        )
        high = values.to(draw.dtype)
        check_grad(parts.float().sum(1), values.double(), f"split {tokens, width}", noise=2.0**-14)
        assert parts[:, 0].equal(high) or draw.device.type == "cpu", (
            f"split {tokens, width}: rounded differently"
        )


#: Checks of scores and integers, which have no half-precision type.
ONLY_FLOAT32 = {"sort", "router", "losses", "clones"}
CHECKS: dict[str, Callable[[Draw, ExpertSizes], None]] = {
    "sort": check_sort,
    "permute": check_permute,
    "unpermute": check_unpermute,
    "weighted swiglu": check_swiglu,
    "weighted clamped swiglu": check_clamped_swiglu,
    "router": check_router,
    "losses": check_losses,
    "split": check_split,
    "peer rows": lambda draw, sizes: check_peer_rows(draw, sizes.peers),
    "clones": lambda draw, sizes: check_clones(draw, sizes.clones),
    "peer clones": lambda draw, sizes: check_peer_clones(draw, sizes.peer_clones),
}
