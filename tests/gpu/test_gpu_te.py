"""Tests that models with products and norms of Transformer Engine train like native models."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import FP8, CudaGraphs, MegatronStrategy
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.experts.compute.backends import stacked
from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.layers.attention.engine_core import attend_by_engine
from lightning_megatron.layers.attention.operators import attend_by_operators
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear.engine_products import (
    engine_column_linear,
    engine_row_linear,
)
from lightning_megatron.layers.linear.fp8_products import fp8_column_linear
from lightning_megatron.layers.linear.regions import column_linear, row_linear
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, StackedSlot, set_slot
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling, engine_recipe
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.layered import single_mesh
from tests.fits import EXPERTS, Job, Language, Report, Tokens, run_job, run_jobs
from tests.gpu.grouped import SIZES as GROUPS
from tests.gpu.grouped import assert_close, captured, ends_of, poisoned
from tests.gpu.ranks import assert_near, gpu_job, on_two_and_four_gpus, run_ranks
from tests.gpu.test_gpu_attention import LENGTHS, B, S, draw_inputs, wide_of
from tests.gpu.test_gpu_grouped_linear import reference
from tests.graphs.jobs import VARIED, differences, run_graphs
from tests.layers.noted_casts import spread as draw
from tests.optimizer.fused_fits import SMALL
from tests.oracles import relative_difference

te = pytest.importorskip("transformer_engine.pytorch", reason="the extra te is not installed")

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
ALL = ("products", "norms", "attention", "experts")
#: Recipes of this chip with scales of the current tensors, and None for the dtype of the inputs.
RECIPES = (None, "tensorwise", "blockwise")
LAYERS = {"column": (column_linear, engine_column_linear), "row": (row_linear, engine_row_linear)}
_SIZES = {"vocab_size": 300, "max_seq_length": 16, "num_layers": 4, "num_heads": 4}
_LLAMA = {**_SIZES, "hidden_size": 64, "num_kv_heads": 2, "ffn_hidden_size": 64}
#: Sizes of all ranks are multiples of 16 with tp 2, or of 128 for blocks.
CONFIGS = {
    "te": GPTConfig.llama(**_LLAMA),
    "te, gpt2": GPTConfig.gpt2(**_SIZES, hidden_size=64),
    "te, offset": GPTConfig.llama(**_LLAMA, qk_norm=True, norm_offset=1.0),
    "te, experts": GPTConfig.llama(**_LLAMA, experts={**EXPERTS, "ffn_hidden_size": 64}),
    "te, dropout": GPTConfig.gpt2(**_SIZES, hidden_size=64, attention_dropout=0.1),
    "te, blocks": GPTConfig.llama(**_SIZES, hidden_size=256, num_kv_heads=4, ffn_hidden_size=256),
}
LAYOUTS_OF_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "delayed, attention, tp2+sp, pp2": (
        "te", {"tp": 2, "pp": 2, "fp8": "delayed", "linear.parts": ("products", "attention")}
    ),
    "all, tp2, ep2": ("te, experts", {"tp": 2, "ep": 2, "linear.parts": ALL}),
    "weights in 8 bits, dp4": ("te", {"fp8": FP8(parameters="fp8")}),
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2+sp": ("te", {"tp": 2}),
    "tp2": ("te, gpt2", {"tp": 2, "sequence_parallel": False}),
    "pp2": ("te, gpt2", {"pp": 2}),
    "zb-h1": ("te", {"pp": 2, "schedule": "zb-h1"}),
    "dp2": ("te", {}),
    "tensorwise, tp2+sp": ("te", {"tp": 2, "fp8": "tensorwise"}),
    "tensorwise, zb-h1": ("te", {"pp": 2, "schedule": "zb-h1", "fp8": "tensorwise"}),
    "delayed, tp2+sp": ("te", {"tp": 2, "fp8": "delayed"}),
    "delayed, pp2, recomputed": ("te, gpt2", {"pp": 2, "fp8": "delayed", "recompute": "full"}),
    "blockwise, tp2+sp": ("te, blocks", {"tp": 2, "fp8": "blockwise"}),
    "attention, tp2+sp": ("te", {"tp": 2, "linear.parts": ("products", "attention")}),
    "attention, dp2": ("te, gpt2", {"linear.parts": ("attention",)}),
    "experts, ep2": ("te, experts", {"ep": 2, "linear.parts": ("experts",)}),
    "all, ep2": ("te, experts", {"ep": 2, "linear.parts": ALL, "fp8": "tensorwise"}),
}
#: Trainings whose captured steps have the bits of eager steps.
CAPTURED: dict[str, tuple[str, dict[str, Any]]] = {
    "norms": ("te", {"linear.parts": ("norms",)}),
    "norms with biases": ("te, gpt2", {"linear.parts": ("norms",)}),
    "products": ("te", {"linear.parts": ("products",)}),
    "attention": ("te", {"linear.parts": ("attention",)}),
    "dropout": ("te, dropout", {"linear.parts": ("attention",)}),
    "tensorwise": ("te", {"fp8": "tensorwise"}),
    "delayed": ("te", {"fp8": FP8("delayed", history=3)}),
    "blockwise": ("te, blocks", {"fp8": "blockwise"}),
    "weights in 8 bits": ("te", {"fp8": FP8(parameters="fp8")}),
    "recomputed": ("te", {"fp8": "delayed", "recompute": "full", "linear.parts": ALL[:3]}),
    "all": ("te", {"fp8": "tensorwise", "linear.parts": ALL[:3]}),
    "experts": ("te, experts", {"linear.parts": ALL}),
}
# The losses are near 5.7.
TOLERANCE = {None: 3e-2, "tensorwise": 8e-2, "delayed": 8e-2, "blockwise": 8e-2}


def bf16(*sizes: int, seed: int = 0) -> Tensor:
    return draw(*sizes, seed=seed, dtype=torch.bfloat16).cuda()


def gap(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the relative difference of tensors that must exist, such as gradients."""
    assert actual is not None
    assert expected is not None
    return relative_difference(actual, expected)


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    """Return an input of 94 tokens, a weight and a bias."""
    hidden = bf16(94, 1024).view(47, 2, 1024)
    weight, bias = bf16(512, 1024, seed=1), bf16(1, 512, seed=2)[0]
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def run(layer: Any, hidden: Tensor, weight: Tensor, bias: Tensor, *more: Any) -> list[Tensor]:
    """Return the output and all gradients of a layer."""
    output = layer(hidden, weight, bias, single_mesh(0), *more)
    output.backward(bf16(94, 512, seed=3).view(47, 2, 512))
    grads = hidden.grad, weight.grad, bias.grad
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def scaling_of(recipe: Any) -> EngineScaling:
    return EngineScaling(FP8(recipe) if recipe else None, CUDA)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_transformer_engine_agree_with_layers_of_this_package(kind, recipe):
    native, engine = LAYERS[kind]
    actual_tensors = run(engine, *leaves(), scaling_of(recipe))
    expected_tensors = run(native, *leaves())
    assert len(actual_tensors) == len(expected_tensors) == 4
    for actual, expected in zip(actual_tensors, expected_tensors, strict=True):
        assert gap(actual, expected) < (4e-3 if recipe is None else 0.08)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_agree_with_the_linear_module_of_transformer_engine(recipe):
    # The module supports only complete blocks of tokens.
    hidden = bf16(128, 1024).requires_grad_()
    weight, bias = leaves()[1:]
    module = te.Linear(1024, 512, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    twin = hidden.detach().clone().requires_grad_()
    options = {} if recipe is None else {"recipe": engine_recipe(FP8(recipe))}
    with te.autocast(enabled=recipe is not None, **options):
        expected = module(twin)
    expected.backward(bf16(128, 512, seed=3))
    actual = engine_column_linear(hidden, weight, bias, single_mesh(0), scaling_of(recipe))
    actual.backward(bf16(128, 512, seed=3))
    # The module adds the bias before it rounds the output; the layer adds it afterwards.
    assert gap(actual, expected) < 4e-3
    assert gap(hidden.grad, twin.grad) < 1e-6
    assert gap(weight.grad, module.weight.grad) < 1e-6
    assert gap(bias.grad, module.bias.grad) < 4e-3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("scale", "is_split"), [(1.0, False), (0.5, True)])
def test_weight_gradients_of_transformer_engine_are_added_to_their_sum_in_place(
    recipe, scale, is_split
):
    scaling = scaling_of(recipe)
    sums = torch.full((512, 1024), 7.0, device="cuda")
    parts = [GradientSlot(part, lambda: None, scale=scale) for part in sums.split([128, 384])]
    full_slot = GradientSlot(sums, lambda: None, scale=scale)
    expected = torch.zeros(512, 1024, device="cuda", dtype=torch.float64)
    for _ in range(2):
        plain = run(engine_column_linear, *leaves(), scaling)
        expected += scale * plain[2].double()
        hidden, weight, bias = leaves()
        set_slot(weight, StackedSlot(parts, [128, 384]) if is_split else full_slot)
        run(engine_column_linear, hidden, weight, bias, scaling)
        assert weight.grad is None
    # The expected gradients are rounded to bfloat16, the sums are not.
    assert gap(sums, expected) < 3e-3


def test_delayed_scales_equal_delayed_scales_of_this_package():
    results = []
    for is_engine in (True, False):
        fp8 = FP8("delayed", history=2, margin=1)
        scales = DelayedScales(fp8, ["one"], CUDA)
        layer: Any = engine_column_linear if is_engine else fp8_column_linear
        own = scales.layer(0)
        scaling = EngineScaling(fp8, CUDA, own) if is_engine else Scaling(fp8, False, own)
        weight = bf16(512, 1024, seed=1).requires_grad_()
        tensors = []
        for step in range(4):
            hidden = (bf16(94, 1024, seed=step) * (1.0 + step)).view(47, 2, 1024).requires_grad_()
            output = layer(hidden, weight, None, single_mesh(0), scaling)
            with torch.no_grad():
                # Evaluations do not change the scales.
                layer(hidden * 100.0, weight, None, single_mesh(0), scaling)
            output.backward(bf16(94, 512, seed=step + 9).view(47, 2, 512))
            scales.end_step(single_mesh(0))
            assert weight.grad is not None
            tensors += [output.detach(), hidden.grad, weight.grad.clone()]
        results.append((tensors, scales.history))
    assert torch.equal(results[0][1], results[1][1])
    for actual, expected in zip(results[0][0], results[1][0], strict=True):
        assert gap(actual, expected) < 1e-2


def test_settings_of_a_recipe_object_are_used():
    recipes = import_module("transformer_engine.common.recipe")
    powers = FP8(te_recipe=recipes.Float8CurrentScaling(use_power_2_scales=True))
    for fp8, are_powers in ((powers, True), (FP8("tensorwise"), False)):
        cast = EngineScaling(fp8, CUDA).cast(bf16(16, 64), "input", columns=True, counts=True)
        exponent = float(cast._scale_inv.log2())
        assert (exponent == round(exponent)) == are_powers
    delayed = FP8(te_recipe=recipes.DelayedScaling(margin=2, amax_history_len=7))
    assert (delayed.history, delayed.margin) == (7, 2)


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(
    ("make", "options"),
    [(LayerNorm, {}), (LayerNorm, {"bias": False}), (RMSNorm, {}), (RMSNorm, {"offset": 1.0})],
)
def test_norms_equal_those_of_torch(make, options, is_added):
    norm = make(256, single_mesh(0), **options)
    norm.uses_engine = True
    norm = norm.to("cuda", torch.bfloat16)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(bf16(1, 256, seed=seed + 5)[0])
    hidden = bf16(12, 256).view(3, 4, 256).requires_grad_()
    update = bf16(12, 256, seed=1).view(3, 4, 256).requires_grad_() if is_added else None
    stream, output = norm(hidden, update, with_stream=True)
    output.backward(bf16(12, 256, seed=2).view(3, 4, 256))
    twin = stream.detach().double().requires_grad_()
    weight, *biases = wide = [p.detach().double().requires_grad_() for p in norm.parameters()]
    if make is LayerNorm:
        expected = F.layer_norm(twin, (256,), weight, biases[0] if biases else None, norm.eps)
    else:
        expected = F.rms_norm(twin, (256,), weight + norm.offset, norm.eps)
    expected.backward(bf16(12, 256, seed=2).view(3, 4, 256).double())
    assert gap(output, expected) < 5e-3
    assert gap(hidden.grad, twin.grad) < 1e-2
    for actual_parameter, expected_parameter in zip(norm.parameters(), wide, strict=True):
        assert gap(actual_parameter.grad, expected_parameter.grad) < 1e-2


def job(kind: str, layout: dict[str, Any], backend: str = "te") -> Job:
    return gpu_job(CONFIGS[kind], {**layout, "linear.backend": backend}, "bf16-mixed", steps=5)


def assert_near_and_learning(actual: Report, expected: Report, recipe: Any, where: str) -> None:
    assert_near(actual, expected, TOLERANCE[recipe], where)
    assert actual.losses[-1] < actual.losses[0] - 0.3, where


@pytest.mark.parametrize("kind", ["te", "te, gpt2", "te, offset"])
def test_training_with_transformer_engine_is_near_native_training(kind):
    actual, expected = run_job(job(kind, {})), run_job(job(kind, {}, "native"))
    assert_near_and_learning(actual, expected, None, kind)
    assert actual.pieces.keys() == expected.pieces.keys()
    for name, (weight, _) in actual.pieces.items():
        assert gap(weight, expected.pieces[name][0]) < 3e-2, name


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_training_in_8_bits_is_near_training_in_16_bits(recipe):
    kind = "te, blocks" if recipe == "blockwise" else "te"
    actual, expected = run_job(job(kind, {"fp8": recipe})), run_job(job(kind, {}, "native"))
    assert_near_and_learning(actual, expected, recipe, recipe)
    assert actual.losses != expected.losses


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_weights_in_8_bits_train_like_those_of_this_package(recipe):
    fp8 = FP8(recipe, parameters="fp8")
    actual, expected = (run_job(job("te", {"fp8": fp8}, name)) for name in ("te", "native"))
    assert_near_and_learning(actual, expected, recipe, recipe)


@pytest.mark.parametrize("mode", ["segments", "full"])
@pytest.mark.parametrize("case", CAPTURED)
def test_captured_steps_have_the_bits_of_eager_steps(case, mode):
    kind, options = CAPTURED[case]
    if case == "experts" and mode == "full":
        pytest.skip("the host gives the products of experts the sizes of groups")
    fit = replace(job(kind, options), steps=8, data=VARIED)
    eager = run_graphs(fit)
    repeated = differences(run_graphs(fit), eager)
    captured_fit = run_graphs(fit, CudaGraphs(mode, warmup_steps=3, on_failure="error"))
    assert captured_fit.graphs[-1] > 0
    assert set(differences(captured_fit, eager)) <= set(repeated)


def engine_spans() -> dict[str, AttentionSpan]:
    """Return spans that Transformer Engine's attention computes."""
    lengths = torch.tensor(LENGTHS, device="cuda")
    return {
        "causal": AttentionSpan(),
        "both ways": AttentionSpan(causal=False, scale=0.2),
        "window": AttentionSpan(window=33),
        "window both ways": AttentionSpan(window=33, causal=False),
        "documents": AttentionSpan(lengths, longest=384),
        "documents both ways": AttentionSpan(lengths, causal=False),
        "documents, window": AttentionSpan(lengths, window=33),
        "padded": AttentionSpan.padded(lengths[:, 2].clamp(min=100), S),
    }


def test_attention_of_transformer_engine_equals_the_formula():
    for kind, span in engine_spans().items():
        inputs = draw_inputs(torch.bfloat16)
        wide = wide_of(inputs)
        output = attend_by_engine(*inputs, span)
        expected_output = attend_by_operators(*wide, span.laid_out(B, S, CUDA)).flatten(2)
        outer = torch.randn_like(expected_output)
        gradients = torch.autograd.grad(output, inputs, outer.to(torch.bfloat16))
        expected_gradients = torch.autograd.grad(expected_output, wide, outer)
        for number, (actual, expected) in enumerate(
            zip((output, *gradients), (expected_output, *expected_gradients), strict=True)
        ):
            assert relative_difference(actual, expected) < 0.02, f"{kind}, {number}"


def test_attention_with_smaller_values_equals_the_formula():
    query, key, value = (bf16(S * B * 4, size).view(S, B, 4, size) for size in (192, 192, 128))
    span = AttentionSpan(scale=0.1)
    expected = attend_by_operators(query.double(), key.double(), value.double(), span).flatten(2)
    assert relative_difference(attend_by_engine(query, key, value, span), expected) < 0.02


def test_dropped_attention_weights_are_a_share_and_have_their_gradients():
    size = 64
    query, key = (bf16(size * 4, size, seed=seed).view(size, 1, 4, size) for seed in (1, 2))
    unit = torch.eye(size, device="cuda", dtype=torch.bfloat16)[:, None, None].expand_as(key)
    value = unit.clone().requires_grad_()
    span = AttentionSpan(causal=False)
    weights = attend_by_engine(query, key, value, span, dropout=0.25).view(size, 4, size)
    share = float((weights == 0).float().mean())
    assert 0.22 < share < 0.28
    kept = attend_by_engine(query, key, value, span).view(size, 4, size)
    expected = torch.where(weights == 0, 0.0, kept / 0.75)
    assert relative_difference(weights, expected) < 0.02
    outer = bf16(size * 4, size, seed=3).view(size, 4, size)
    (grad,) = torch.autograd.grad(weights, value, outer)
    expected_grad = torch.einsum("sht,shd->thd", weights.detach().double(), outer.double())
    assert relative_difference(grad[:, 0], expected_grad) < 0.02


def test_captured_attention_follows_changed_lengths_of_documents():
    query, key, value = (tensor.detach() for tensor in draw_inputs(torch.bfloat16))
    lengths = torch.tensor(LENGTHS, device="cuda")
    span = AttentionSpan(lengths)
    graph, replayed = captured(lambda: attend_by_engine(query, key, value, span))
    for changed in (LENGTHS, [[1, 2, 300], [200, 184, 0]]):
        lengths.copy_(torch.tensor(changed))
        graph.replay()
        assert torch.equal(replayed, attend_by_engine(query, key, value, span)), changed


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_grouped_products_of_transformer_engine_equal_float64(sizes):
    num_rows, width, inner = 700, 320, 256
    weights = [bf16(inner, width, seed=seed).requires_grad_() for seed in range(len(sizes))]
    rows = poisoned(bf16(num_rows, width, seed=7), sizes).requires_grad_()
    outer = poisoned(bf16(num_rows, inner, seed=8), sizes)
    output = grouped_linear(rows, weights, ends_of(sizes), "te")
    gradients = torch.autograd.grad(output, (rows, *weights), outer)
    expected = reference(rows.detach(), stacked(weights).detach(), outer, sizes)
    last = sum(sizes)
    assert_close(output[:last], expected[0], 4e-3, "output")
    assert_close(gradients[0][:last], expected[1], 4e-3, "gradient of rows")
    assert_close(torch.stack(gradients[1:]), expected[2], 4e-3, "gradients of weights")
    sums = torch.full((len(sizes), inner, width), torch.nan, device="cuda")
    for weight, gradient_sum in zip(weights, sums, strict=True):
        set_slot(weight, GradientSlot(gradient_sum, lambda: None))
    for _ in range(2):
        grouped_linear(rows, weights, ends_of(sizes), "te").backward(outer)
    assert_close(sums, 2 * expected[2], 1e-5, "sums of gradients")


@on_two_and_four_gpus
def test_layouts_match_one_gpu(size):
    layouts = LAYOUTS if size == 2 else LAYOUTS_OF_FOUR
    jobs = {name: job(kind, layout) for name, (kind, layout) in layouts.items()}
    ranks = run_ranks(run_jobs, size, jobs)
    keys = "fp8", "linear.parts"
    alone: dict[Any, Report] = {}
    for name, (kind, layout) in layouts.items():
        options = {key: layout[key] for key in keys if key in layout}
        case = kind, *options.values()
        alone[case] = alone.get(case) or run_job(job(kind, options))
        for rank, reports in enumerate(ranks):
            recipe = getattr(layout.get("fp8"), "recipe", layout.get("fp8"))
            where = f"{name}, rank {rank}"
            assert_near_and_learning(reports[name], alone[case], recipe, where)


class Losses(Callback):
    """Record the losses of all steps."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def tiny_fit(strategy: MegatronStrategy, folder: Path | None = None, **options: Any) -> list[float]:
    """Train a small GPT, and return the losses of its steps."""
    seed_everything(3, verbose=False)
    module = Language(replace(SMALL, hidden_size=64))
    ckpt = options.pop("ckpt_path", None)
    losses = Losses()
    trainer = Trainer(
        accelerator="gpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[losses],
        **{"max_steps": 6, **options},
    )  # fmt: skip
    # All epochs have the same single batch, so the position in an epoch does not matter.
    trainer.fit(module, DataLoader(Tokens(4), batch_size=4), ckpt_path=ckpt, weights_only=False)
    if folder is not None:
        trainer.save_checkpoint(folder)
    return losses.values


def test_the_precision_plugin_of_lightning_selects_transformer_engine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = MegatronStrategy()
        named = tiny_fit(strategy, precision="transformer-engine")
    assert strategy.options.linear.backend == "te"
    assert strategy.options.products is not None
    assert strategy.options.products.recipe == "delayed"
    assert str(strategy.precision_plugin.precision) == "bf16-true"
    explicit = tiny_fit(
        MegatronStrategy(linear={"backend": "te"}, fp8="delayed"), precision="bf16-true"
    )
    assert named == explicit
    assert named[-1] < named[0]
    recipe = import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    plugin = import_module("lightning.pytorch.plugins.precision").TransformerEnginePrecision(
        weights_dtype=torch.float32, fallback_compute_dtype=torch.bfloat16, recipe=recipe
    )
    mixed = tiny_fit(MegatronStrategy(), plugins=plugin)
    explicit = tiny_fit(
        MegatronStrategy(linear={"backend": "te"}, fp8="tensorwise"), precision="bf16-mixed"
    )
    assert mixed == explicit
    plain = tiny_fit(MegatronStrategy(), precision="bf16-mixed")
    assert mixed[:3] == pytest.approx(plain[:3], rel=2e-2)
    assert mixed != plain


@pytest.mark.parametrize(("first", "second"), [("native", "te"), ("te", "native")])
def test_checkpoints_resume_with_the_other_backend(first, second, tmp_path):
    fit = partial(tiny_fit, precision="bf16-mixed")
    before, after = (
        lambda backend=backend: MegatronStrategy(linear={"backend": backend}, fp8="delayed")
        for backend in (first, second)
    )
    uninterrupted = fit(before())
    fit(before(), tmp_path / "half", max_steps=3)
    resumed = fit(after(), ckpt_path=tmp_path / "half")
    assert resumed == pytest.approx(uninterrupted[3:], rel=2e-2)


def test_a_format_that_the_chip_lacks_is_refused():
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("the chip has the format")
    with pytest.raises(ParallelPlanError, match="capability 10.0"):
        tiny_fit(MegatronStrategy(linear={"backend": "te"}, fp8="mxfp8"), precision="bf16-mixed")
