"""A plan that cannot be honoured is refused with the reason, before anything is swapped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.blocks.builders import BlockRequest
from lightning_megatron.swap.blocks.rules import (
    BlockRule,
    TensorRule,
    build_target,
    fill_target,
    rules_of,
)
from lightning_megatron.swap.decide.model_plan import describe_unsharded, suggest_tensor_plan
from tests.swap.cases import CLASSIFIER_PLAN, MLP_PLAN, AttentionOnly, Classifier, TiedDecoder, mlp


def mesh_of(tp: int = 2, pp: int = 1, cp: int = 1) -> ParallelMesh:
    """Return a mesh with sizes but without processes, for code that does not communicate."""
    layout = ParallelLayout(tp * pp * cp, tp=tp, pp=pp, cp=cp)
    axes = {
        name: MeshAxis(name, tuple(range(size)))
        for name, size in {"tp": tp, "pp": pp, "cp": cp}.items()
    }
    return replace(ParallelMesh.single(), layout=layout, **axes)


def refusal(
    module: nn.Module,
    plan: dict[str, str] | None,
    error: type[ValueError] = ParallelPlanError,
    **sizes: int,
) -> str:
    before = {name: id(child) for name, child in module.named_modules()}
    with pytest.raises(error) as caught:
        parallelize(module, mesh_of(**sizes), plan)
    assert before == {name: id(child) for name, child in module.named_modules()}, (
        "a refused plan swaps nothing"
    )
    return str(caught.value)


def kinds_of(module: nn.Module, plan: dict[str, str] | None, **sizes: int) -> dict[str, str]:
    return {record.name: record.kind for record in parallelize(module, mesh_of(**sizes), plan)}


def test_a_pattern_that_matches_nothing_is_refused_with_similar_names() -> None:
    message = refusal(Classifier(), {"embeding": "vocab"})
    assert "'embeding'" in message
    assert "Did you mean 'embedding'?" in message


def test_a_pattern_that_matches_only_other_types_is_refused() -> None:
    message = refusal(Classifier(), {"embedding": "column"})
    assert "type Embedding" in message
    assert "nn.Linear" in message
    assert "head.0" in message


def test_kinds_for_parts_of_a_block_that_is_swapped_as_a_unit_are_refused() -> None:
    message = refusal(Classifier(), {"encoder.layers.*.linear1": "column"})
    assert "{'encoder.layers.0': 'auto'}" in message


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    assert "'column', 'column_gather', 'row'" in refusal(mlp(), {"0": "colum"})


def test_outputs_that_do_not_divide_are_refused_with_legal_sizes() -> None:
    message = refusal(Classifier(num_labels=7), {"head.2": "column_gather"})
    assert "out_features (7) of 'head.2' must be a multiple of tp (2)" in message
    assert "Use tp of 1 or 7" in message
    assert "'vocab'" in message


def test_inputs_that_do_not_divide_are_refused_with_legal_sizes() -> None:
    message = refusal(nn.Sequential(nn.Linear(9, 4)), {"0": "row"}, tp=2)
    assert "in_features (9) of '0' must be a multiple of tp (2)" in message
    assert "1, 3 or 9" in message


def test_heads_that_do_not_divide_are_refused_with_legal_sizes() -> None:
    message = refusal(nn.Sequential(nn.TransformerEncoderLayer(12, 3, 24)), None)
    assert "num_heads (3) of '0' must be a multiple of tp (2)" in message
    assert "Use tp of 1 or 3" in message


def test_the_last_pattern_of_a_plan_wins() -> None:
    assert kinds_of(mlp(), {"*": "column_gather", "5": "vocab", "2": "replicate"}) == {
        "0": "column_gather",
        "3": "column_gather",
        "5": "vocab",
    }
    assert kinds_of(mlp(), {"0": "replicate", "[03]": "column_gather"}) == {
        "0": "column_gather",
        "3": "column_gather",
    }


def test_auto_and_replicate_apply_to_all_modules_inside() -> None:
    plan = {"encoder": "auto", "encoder.layers.1": "replicate"}
    assert kinds_of(Classifier(), plan) == {"encoder": "auto", "encoder.layers.0": "auto"}
    assert kinds_of(Classifier(), {"*": "auto", "encoder": "replicate"}) == {}


def test_without_a_plan_encoder_layers_and_attention_are_swapped() -> None:
    module = nn.Sequential(Classifier(), AttentionOnly())
    assert list(kinds_of(module, None)) == [
        "0.encoder",
        "0.encoder.layers.0",
        "0.encoder.layers.1",
        "1.attention",
    ]


def test_subclasses_of_known_classes_are_not_swapped() -> None:
    class Residual(nn.TransformerEncoderLayer):
        pass

    module = nn.Sequential(Residual(16, 4, 24), nn.Linear(2, 2))
    assert kinds_of(module, None) == {}
    assert "type Residual" in refusal(module, {"0": "auto"})


def test_one_tensor_rank_swaps_nothing_but_still_checks_the_plan() -> None:
    assert kinds_of(Classifier(), CLASSIFIER_PLAN, tp=1) == {}
    assert "'embeding'" in refusal(Classifier(), {"embeding": "vocab"}, tp=1)


def test_a_shared_weight_that_is_cut_in_one_place_only_is_refused() -> None:
    message = refusal(TiedDecoder(), {"embedding": "vocab"})
    assert "'embedding.weight' is 'vocab', 'decoder.weight' is 'replicate'" in message
    assert "cut it alike" in refusal(
        TiedDecoder(num_tokens=24), {"embedding": "vocab", "decoder": "column_gather"}
    )


def test_a_module_with_two_names_and_two_kinds_is_refused() -> None:
    linear = nn.Linear(4, 4)
    assert "'0' has the kind 'column_gather', '1' has 'replicate'" in refusal(
        nn.Sequential(linear, linear), {"0": "column_gather"}
    )


def test_hooks_that_would_be_lost_are_refused() -> None:
    module = mlp()
    module[0].register_forward_hook(lambda *_: None)
    assert "'0' has hooks" in refusal(module, {"0": "column"}, UnsupportedError)


@pytest.mark.parametrize(
    ("module", "plan", "word"),
    [
        (nn.Embedding(8, 4, max_norm=1.0), {"0": "vocab"}, "max_norm"),
        (nn.Embedding(8, 4, sparse=True), {"0": "vocab"}, "sparse"),
        (nn.Embedding(8, 4, scale_grad_by_freq=True), {"0": "vocab"}, "scale_grad_by_freq"),
        (nn.MultiheadAttention(8, 2, kdim=4), None, "kdim"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), None, "add_bias_kv"),
        (nn.MultiheadAttention(8, 2, add_zero_attn=True), None, "add_zero_attn"),
        (nn.TransformerEncoderLayer(8, 2, 8, activation=nn.PReLU(8)), None, "activation"),
        (nn.TransformerEncoderLayer(8, 2, 8, activation=nn.Softmax(-1)), None, "activation"),
    ],
)
def test_settings_that_a_cut_cannot_keep_are_refused(
    module: nn.Module, plan: dict[str, str] | None, word: str
) -> None:
    message = refusal(nn.Sequential(module), plan, UnsupportedError)
    assert word in message
    assert "'0'" in message


def test_unsupported_calls_of_a_cut_block_are_refused() -> None:
    module = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    parallelize(module, mesh_of())
    with pytest.raises(UnsupportedError, match="is_causal=True needs attn_mask"):
        module[0](torch.randn(2, 3, 8), is_causal=True)


def test_pipeline_stages_for_torch_modules_are_refused() -> None:
    assert "pipeline stages" in refusal(mlp(), MLP_PLAN, UnsupportedError, pp=2)


def test_a_root_module_without_a_parent_is_refused() -> None:
    config = GPTConfig.gpt2(
        vocab_size=8, max_seq_length=4, num_layers=1, hidden_size=8, num_heads=2
    )
    for root in (nn.TransformerEncoderLayer(8, 2, 8), GPT(config)):
        assert "nothing holds it" in refusal(root, None, UnsupportedError)


def test_a_gpt_that_differs_from_its_config_is_refused() -> None:
    config = GPTConfig.gpt2(
        vocab_size=8, max_seq_length=4, num_layers=1, hidden_size=8, num_heads=2
    )
    module = nn.Sequential(GPT(config))
    module[0].adapter = nn.Linear(2, 2)
    assert "'adapter.bias'" in refusal(module, None, UnsupportedError)
    shared = nn.Sequential(GPT(config), nn.Linear(8, 8))
    shared[1].weight = shared[0].embedding.position.weight
    assert "share one weight across the border of a model" in refusal(shared, None)


def test_a_record_describes_a_swap_in_one_line() -> None:
    record = parallelize(mlp(), mesh_of(), {"0": "column"})[0]
    assert str(record) == "0: Linear -> ColumnParallelLinear (column, 104 of 208 elements here)"


def test_only_modules_without_a_sharded_weight_are_listed_as_whole() -> None:
    root = nn.ModuleDict(
        {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    )
    parallelize(root, mesh_of(tp=2), {"up": "column", "down": "row"})
    assert describe_unsharded(root) == "Whole on every rank: norm."


def test_suggested_plans_pair_the_layers_of_attention_and_of_mlps() -> None:
    def linear(**sizes: tuple[int, int]) -> dict[str, nn.Module]:
        return {name: nn.Linear(*size) for name, size in sizes.items()}

    attention = nn.ModuleDict(linear(q=(8, 8), k=(8, 4), v=(8, 4), out=(8, 8)))
    mlp = nn.ModuleDict({"norm": nn.LayerNorm(8), **linear(gate=(8, 12), up=(8, 12), down=(12, 8))})
    chain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    blocks = nn.ModuleList(nn.ModuleDict({"att": attention, "mlp": mlp}) for _ in range(2))
    root = nn.ModuleDict({"first": nn.Linear(3, 8), "blocks": blocks, "chain": chain})
    assert suggest_tensor_plan(root, 2) == {
        "blocks.*.att.q": "column",
        "blocks.*.att.k": "column",
        "blocks.*.att.v": "column",
        "blocks.*.att.out": "row",
        "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "chain.2": "column",
        "chain.4": "row",
    }
    single = nn.ModuleDict({"head": nn.Linear(8, 4), "odd": nn.Linear(5, 3)})
    assert suggest_tensor_plan(single, 2) == {"head": "column_gather"}
    assert suggest_tensor_plan(nn.ModuleDict({"norm": nn.LayerNorm(8)}), 2) == {}


def test_a_rule_joins_several_source_tensors_into_one() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)

    def build(request: BlockRequest) -> nn.Module:
        return ColumnParallelLinear(4, 12, request.mesh, bias=False)

    source = Split()
    rule = BlockRule("gated", Split, build, (TensorRule("weight", ("gate.weight", "up.weight")),))
    request = BlockRequest("block", source, mesh_of(), 0)
    target = build_target(rule, request)
    fill_target(rule, request, target)
    assert torch.equal(target.weight, source.gate.weight)


def test_rules_apply_to_exact_classes_only() -> None:
    class MyLinear(nn.Linear):
        pass

    assert "column" in rules_of(nn.Linear(2, 2))
    assert "column" not in rules_of(MyLinear(2, 2))
