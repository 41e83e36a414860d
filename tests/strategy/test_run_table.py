"""Slow choices of a fit cause warnings with a remedy, and kernels are chosen where they exist."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.layers import rotary
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.fused.choose_kernels import KernelChoice, warn_of_slow_path
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.budget import GIB, StageMemory
from lightning_megatron.plan.grouped_gemm import MAX_GROUPS
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.logs import run_table
from lightning_megatron.strategy.logs.run_table import (
    TableRow,
    picture_of,
    table_of,
    warn_of_slow,
)
from lightning_megatron.swap import parallelize
from tests.swap.parts import mesh_of
from tests.worlds.test_own_modules import Around, ResidualAround

GPU = torch.device("cuda", 0)


def test_choice_with_a_remedy_causes_a_warning():
    slow = TableRow("products of experts", "loop", "torch.float32: for bfloat16", "Use bfloat16.")
    fast = TableRow("attention", "cudnn", "half type")
    expected = "products of experts by loop is slow: torch.float32: for bfloat16. Use bfloat16."
    with pytest.warns(SpeedWarning) as caught:
        warn_of_slow([fast, slow])
    assert [str(warning.message) for warning in caught] == [expected]
    assert table_of([fast, slow]).splitlines()[1:] == [
        "  attention            cudnn  half type",
        "  products of experts  loop   torch.float32: for bfloat16",
    ]


def test_picture_of_a_large_layout_fits_a_screen():
    layout = ParallelLayout(16, tp=2, pp=2)
    sizes = {"moment": "forward", "in_flight": 1, "num_parameters": 1, "gradients": 0}
    stage = StageMemory(
        stage=0, parameters=2 * GIB, main_parameters=0, optimizer=GIB, activations=GIB, **sizes
    )
    picture = picture_of(layout, ["0-3", "4-7"], [stage, stage], 80 * GIB, "1 microbatch")
    assert picture.splitlines() == [
        "           replica 0  replica 1  replica 2  ...  layers  held  in a step  peak    of",
        "  stage 0      [0 1]      [2 3]      [4 5]  ...     0-3  3.00       1.00  4.00  80.0",
        "  stage 1      [8 9]    [10 11]    [12 13]  ...     4-7  3.00       1.00  4.00  80.0",
        "  [ranks that share layers]; memory of a rank in GiB, estimated: 1 microbatch",
    ]
    static = replace(stage, activations=0, parameters=2**20, optimizer=0)
    large = ParallelLayout(4096, tp=8, pp=32, cp=2, order="cp-tp-dp-pp")
    lines = picture_of(large, [], [static] * 32, None, "").splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) <= 100
    assert lines[1].split()[:4] == ["stage", "0", "[0-15]", "[16-31]"]
    assert lines[5].split() == ["..."]
    assert lines[-2].split()[1] == "31"
    assert lines[1].split()[-3:] == ["1.00", "n/a", "1.00"]


def test_long_reasons_are_wrapped_below_their_column():
    rows = [TableRow("layout", "tp 2", "word " * 30), TableRow("precision", "64-true", "float64")]
    first, *lines = table_of(rows).splitlines()[1:]
    assert first.startswith("  layout     tp 2     word word")
    assert max(map(len, [first, *lines])) <= 100
    assert lines[0].startswith(" " * 22 + "word")
    assert lines[-1] == "  precision  64-true  float64"


def test_table_names_the_axes_between_hosts(monkeypatch):
    found = [(f"node{rank // 4}", "H200", 139 * GIB) for rank in range(8)]
    monkeypatch.setattr(run_table, "gather_objects", lambda own, axis: found)
    mesh = Mock(device=torch.device("cpu"), layout=ParallelLayout(8, tp=2, pp=2))
    mesh.world_cpu.ranks = range(8)
    devices, links = run_table._device_choices(mesh, None)
    assert (devices.value, devices.reason) == ("8 x H200", "on 2 hosts, 139.0 GiB each")
    assert (links.value, links.reason) == ("pp between hosts", "tp, dp inside hosts; gloo")


def test_slow_products_of_experts_on_a_gpu_have_a_remedy(monkeypatch):
    half = torch.bfloat16
    for backend, dtype, groups, capability, remedy in (
        ("bundled", half, 8, (9, 0), None),
        ("loop", torch.float32, 8, (9, 0), "the host waits .*precision='bf16-mixed'"),
        ("grouped_mm", half, 8, (9, 0), "lightning-megatron kernels build"),
        ("grouped_mm", half, MAX_GROUPS + 1, (9, 0), "raise ep"),
        ("grouped_mm", half, 8, (10, 0), None),
        ("loop", half, 8, (8, 0), "H100 or H200"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
        actual = run_table.product_remedy(backend, GPU, dtype, groups)
        assert actual is None if remedy is None else re.search(remedy, actual or "")


def test_missing_fused_kernels_on_a_gpu_have_a_remedy(monkeypatch):
    missing = KernelChoice(None, "Triton cannot be imported (no module)")
    monkeypatch.setattr(run_table, "choose_kernels", lambda device: missing)
    choice = run_table._kernel_choice(GPU, torch.bfloat16)
    assert choice.remedy is not None
    assert "CUDA build of torch" in choice.remedy
    # No fused kernel exists for float32, so no faster choice was missed.
    assert run_table._kernel_choice(GPU, torch.float32).remedy is None


def test_context_parallel_attention_that_stores_scores_has_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sizes = {"head_dim": 64, "value_dim": 64, "dropout": 0.0, "uses_engine": False}
    layer = Mock(**sizes, span=AttentionSpan(soft_cap=50.0))
    layer.mesh.cp.size = 2
    for transport, dtype, value in (
        ("ring", torch.bfloat16, "FlexAttention"),
        ("ring", torch.float64, "operators of torch"),
        ("all_to_all", torch.bfloat16, "FlexAttention"),
    ):
        layer.context.transport = layer.mesh.context.transport = transport
        choice = run_table._attention_choice(layer, GPU, dtype)
        assert choice.value == value
        assert ("parts of the keys" in choice.reason) == (transport == "ring")
        assert (choice.remedy is not None) == (dtype == torch.float64)
    layer.uses_engine = True
    assert run_table._attention_choice(layer, GPU, torch.bfloat16).value == "Transformer Engine"


def test_rotary_embeddings_without_the_fused_kernel_warn_once(monkeypatch):
    monkeypatch.setattr(rotary, "fused_kernels", lambda tensor: object())
    warn_of_slow_path.cache_clear()
    tables = rotary.position_tables(torch.arange(5)[None], 8)
    norms = (torch.relu, torch.relu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            qkv = torch.randn(5, 2, 24)
            rotary.split_heads(qkv, [8, 8, 8], 8, tables, norms, norms_layer=True)
    (warning,) = caught
    assert warning.category is SpeedWarning
    assert "all heads are normalised together" in str(warning.message)


@pytest.mark.parametrize("case", ["positions", "norms", "part", "interleaved"])
def test_one_kernel_normalises_and_rotates_heads(case, monkeypatch):
    kernels = Mock()
    monkeypatch.setattr(rotary, "fused_kernels", lambda tensor: kernels)
    warn_of_slow_path.cache_clear()
    positions = torch.arange(5).repeat(2 if case == "positions" else 1, 1)
    tables = rotary.position_tables(positions, 4 if case == "part" else 8)
    norm = Mock(eps=1e-6)
    norms = (norm, norm) if case == "norms" else None
    qkv = torch.randn(5, 2, 24)
    heads = torch.zeros(5, 2, 1, 8)
    kernels.norm_and_rotate_qkv.return_value = (heads, heads, heads)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        actual = rotary.split_heads(
            qkv, [8, 8, 8], 8, tables, norms, interleaved=case == "interleaved"
        )
    assert actual == (heads, heads, heads)
    scales = (norm.scale(), norm.scale()) if case == "norms" else None
    eps = 1e-6 if case == "norms" else 0.0
    kernels.norm_and_rotate_qkv.assert_called_once_with(
        qkv, tables, (1, 1, 8), scales, eps, case == "interleaved"
    )


def test_table_names_blocks_whose_backward_pass_is_not_split_into_halves():
    module = Around(ResidualAround)
    module.configure_model()
    parallelize(module, mesh_of(pp=2), None, {"body.blocks": "blocks"})
    (choice,) = run_table.whole_backward_choices(module)
    assert (choice.subject, choice.value) == ("backward of body.blocks", "not split into halves")
    assert choice.reason == "Linear computes the gradients of its inputs and its weights at once"
    sizes = {"vocab_size": 8, "max_seq_length": 4, "hidden_size": 8, "num_heads": 2}
    with torch.device("meta"):
        assert not run_table.whole_backward_choices(GPT(GPTConfig.gpt2(**sizes, num_layers=1)))
