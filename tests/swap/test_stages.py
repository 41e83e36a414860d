"""Lists of blocks are cut into stages by their plan, and plans that cannot be followed are refused
before anything is changed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.stage import StageCursor, StepPlan
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.swap import parallelize
from tests.swap.families import transformers, twin_of
from tests.swap.parts import mesh_of


class Model(nn.Module):
    """Run blocks between an embedding and a head; the norm runs after the blocks."""

    def __init__(self, tied: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if shared:
            self.blocks[3].weight = self.blocks[0].weight
        self.skips: tuple[int, ...] = ()

    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.words(tokens)
        for number, block in enumerate(self.blocks):
            if number not in self.skips:
                hidden = block(hidden)
        return self.head(self.norm(hidden)) + first.sum()


def stage_of(
    model: nn.Module, plan: dict[str, str] | None, pp_rank: int = 0, **layout: Any
) -> StagedBlocks:
    """Cut a model into stages, and return the blocks of one rank."""
    root = nn.ModuleDict({"model": model})
    parallelize(root, mesh_of(**{"pp": 2, **layout, "pp_rank": pp_rank}), None, plan)
    (staged,) = (part for part in root.modules() if isinstance(part, StagedBlocks))
    return staged


def refusal(
    model: nn.Module, plan: dict[str, str] | None, error: type[Exception], **layout: Any
) -> str:
    """Return the message of a refusal, and check that it has changed nothing."""
    before = [type(part) for part in model.modules()]
    with pytest.raises(error) as caught:
        stage_of(model, plan, **layout)
    assert [type(part) for part in model.modules()] == before
    return str(caught.value)


BLOCKS = {"model.blocks": "blocks"}


def test_each_stage_keeps_its_modules_under_the_names_of_the_full_model():
    first, last = Model(tied=True), Model(tied=True)
    stage_of(first, BLOCKS, stage_layers=(3, 1))
    stage_of(last, {**BLOCKS, "*.norm": "last"}, 1, stage_layers=(3, 1))
    names = [f"blocks.{index}.{kind}" for index in range(4) for kind in ("weight", "bias")]
    norm = ["norm.weight", "norm.bias"]
    assert [name for name, _ in first.named_parameters()] == ["words.weight", *norm, *names[:6]]
    assert [name for name, _ in last.named_parameters()] == [*norm, *names[6:], "head.weight"]
    assert last.head.weight.shard_spec.tied_to == "model.words.weight"
    assert len(last.blocks) == 4
    assert last.blocks[0].in_features == 8


def test_plans_that_do_not_fit_are_refused_with_the_legal_values():
    norm_last = {**BLOCKS, "*.norm": "last"}
    for plan, layout, message in (
        ({"model.block": "blocks"}, {}, "Did you mean 'model.blocks'"),
        # With one stage nothing is cut, but a misspelt name is still refused.
        ({"model.block": "blocks"}, {"pp": 1}, "matches no module"),
        ({"model.blocks": "middle"}, {}, "Use 'blocks', 'first' or 'last'"),
        ({"model.head": "blocks"}, {}, "'model.head' (Linear) has this kind"),
        ({**BLOCKS, "model.blocks.1": "last"}, {}, "Use 'model.words', 'model.norm' or"),
        (BLOCKS, {"pp": 8}, "must be at least pp x vpp"),
        (BLOCKS, {"stage_layers": (4, 1)}, "are 5 layers, and the model has 4"),
        (norm_last, {"stage_layers": (4, 0)}, "the stage of 'model.norm' must have a block"),
    ):
        assert message in refusal(Model(), plan, ParallelPlanError, **layout)
    shared = refusal(Model(shared=True), BLOCKS, UnsupportedError)
    assert "'model.blocks.0.weight' and 'model.blocks.3.weight' share one weight across" in shared


def test_unsupported_calls_of_a_stage_are_refused():
    model, tokens = Model(), torch.zeros(2, 3, dtype=torch.long)
    staged = stage_of(model, BLOCKS, 1)
    with pytest.raises(UnsupportedError, match="cannot be called outside of steps"):
        model(tokens)
    for skips, message in (
        ((), "'model.norm' is called after .*'model.norm': 'last'"),
        ((1,), "block 2 was called instead of block 1"),
    ):
        model.skips, received = skips, [torch.zeros(2, 3, 8)]
        staged.cursor = StageCursor(chunk=0, received=received, plan=StepPlan(1, {(1, 1): (0,)}))
        with pytest.raises(UnsupportedError, match=message), staged.without_other_stages():
            model(tokens)


def test_hugging_face_models_declare_their_blocks_and_refuse_unsupported_calls():
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": None}
    sizes |= {"num_hidden_layers": 2}
    # No family computes this activation, so the model keeps its own code.
    config = transformers.Olmo2Config(**sizes, num_attention_heads=2, hidden_act="tanh")
    model = transformers.Olmo2ForCausalLM(config)
    staged = stage_of(model, None)
    assert (staged.name, len(staged)) == ("model.model.layers", 2)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    for options in ({"output_hidden_states": True}, {"use_cache": True}):
        with pytest.raises(UnsupportedError, match="set by the call, cannot be used with pp above"):
            model(tokens, **options)
    calls: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda *given: calls.append(given[2]), with_kwargs=True)
    with pytest.raises(UnsupportedError, match="outside of steps"):
        model(tokens, position_ids=torch.tensor([[0, 1, 0]]))
    # Without a cache and a mask, the model would separate sequences by their positions.
    assert (calls[0]["use_cache"], calls[0]["attention_mask"].tolist()) == (False, [[1, 1, 1]])
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    own_stages = refusal(llama, {"model.model.layers": "blocks"}, ParallelPlanError)
    assert "with its own stages" in own_stages
    config.output_hidden_states = True
    assert "the configuration of Olmo2" in refusal(
        transformers.Olmo2ForCausalLM(config), None, UnsupportedError
    )


def test_blocks_are_compiled_on_their_own_stage():
    model = twin_of("llama", num_hidden_layers=2)
    parallelize(nn.ModuleDict({"model": model}), mesh_of(pp=2))
    for block in model.model.layers:
        block.compile(backend="eager")
    assert [layer._compiled_call_impl is None for layer in model.body.layers.values()] == [False]
