"""Modules that no table of this package describes train in stages as on one process: with a user's
own code around a list of blocks, or with the plan that refusals name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron import GPT, GPTConfig
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.pipeline.step_plans import Trial
from lightning_megatron.pipeline.step_run import BackwardPasses
from lightning_megatron.strategy.checks.run_checks import pipelined_module
from lightning_megatron.swap import parallelize
from tests.fits import Job, Module, Report, run_job
from tests.swap.parts import mesh_of
from tests.world import run_world

transformers = pytest.importorskip("transformers")

D, NUM_BLOCKS = 8, 4
PP: dict[str, Any] = {"pp": 2, "pipeline_plan": {"body.blocks": "blocks"}}
VPP = {**PP, "vpp": 2}
ZB_V = {**VPP, "schedule": "zb-v"}


class Body(nn.Module):
    """Four blocks between a layer and a head; a subclass defines the code around the blocks."""

    def __init__(self, make: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.enter, self.shift = nn.Linear(D, D), nn.Parameter(torch.randn(D) / 4)
        make = make or (lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()))
        self.blocks, self.head = nn.ModuleList(make() for _ in range(NUM_BLOCKS)), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.enter(x)))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ResidualAround(Body):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=False) + super().middle(x.tanh())


class SkipsBetween(Body):
    def middle(self, x: Tensor) -> Tensor:
        hiddens: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x + hiddens[NUM_BLOCKS - 1 - number] if number >= NUM_BLOCKS // 2 else x)
            hiddens.append(x)
        return torch.stack(hiddens).sum(0)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * D, D)

    def forward(
        self, x: Tensor, *, states: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        bias = states.mean(-1, keepdim=True) if bias is None else bias
        return self.layer(torch.cat([x, states], -1)).tanh() + bias, bias


class TwoStreams(Body):
    """Recompute blocks in the backward pass."""

    def __init__(self) -> None:
        super().__init__(TwoInputs)

    def middle(self, x: Tensor) -> Tensor:
        states, bias = x.sin(), None
        for block in self.blocks.children():
            x, bias = checkpoint(block, x, states=states, bias=bias, use_reentrant=False)
        return x + bias


@dataclass
class HiddenAndTerm:
    hidden: Tensor
    term: Tensor


class BlockWithTerm(nn.Module):
    """Return a dataclass, and store a loss term in the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, inputs: HiddenAndTerm) -> HiddenAndTerm:
        hidden = self.inner(inputs.hidden).tanh()
        self.inner.term = hidden.pow(2).mean()
        return HiddenAndTerm(hidden, inputs.term + hidden.mean())


class TermsOfBlocks(Body):
    """Read loss terms of blocks, a list of parameters, and a weight of the first stage after the
    blocks.
    """

    def __init__(self) -> None:
        super().__init__(BlockWithTerm)
        self.scales = nn.ParameterList(nn.Parameter(torch.full((D,), 1.5)) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        state = HiddenAndTerm(x, x.mean())
        for block in self.blocks:
            state = block(state)
        terms = sum(block.inner.term for block in self.blocks)
        self.penalty = state.term + terms + self.enter.weight.norm()
        for scale in self.scales:
            self.penalty = self.penalty + scale.pow(2).sum()
        return state.hidden * self.scales[-1]


class BlocksInPlace(Body):
    """Blocks write into their inputs; an input from another stage is a leaf of the graph."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D)))


class NormsBetween(Body):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(NUM_BLOCKS))

    def middle(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return x


class Reentrant(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class TermsOfModules(TermsOfBlocks):
    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        self.penalty = sum(part.term for part in self.modules() if hasattr(part, "term"))
        return x


class WeightsOfBlocks(Body):
    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        self.penalty = sum(block[0].weight.norm() for block in self.blocks)
        return x


class AppendingLinear(nn.Linear):
    def forward(self, x: Tensor, terms: list[Tensor]) -> Tensor:
        terms.append(x.pow(2).mean())
        return super().forward(x)


class TermsInAList(Body):
    def __init__(self) -> None:
        super().__init__(lambda: AppendingLinear(D, D))

    def middle(self, x: Tensor) -> Tensor:
        terms: list[Tensor] = []
        for block in self.blocks:
            x = block(x, terms)
        self.penalty = sum(terms)
        return x


class OnBothSides(Body):
    def middle(self, x: Tensor) -> Tensor:
        return self.enter(super().middle(x))


class InnerLists(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for part in block:
                x = part(x)
        return x


class WrittenByABlock(BlocksInPlace):
    def middle(self, x: Tensor) -> Tensor:
        return x + super().middle(x)


class ReadByTheHost(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 1e6:
                raise FloatingPointError
        return x


class WritesWeights(Body):
    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in (*self.enter.parameters(), *self.head.parameters()):
                weight.mul_(0.9)
        return super().middle(x)


class WrittenInPlace(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x[:, 0] = 0.0
        return x


class DropoutBeside(Body):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5, training=True) + super().middle(x)


REFUSED: dict[type[Body], str] = {
    NormsBetween: "'body.norms.0' is called between the blocks 'body.blocks'.*Wrap every block together",
    WrittenInPlace: r"the result of 'body.blocks.0'.*__setitem__ uses it.*x\[:, 0\] = 0.0",
    ReadByTheHost: "the result of 'body.blocks.0'.*if x.abs\\(\\).max\\(\\) > 1e6",
    TermsOfModules: r"the modules of 'body.blocks' cannot be listed in a step.*for part in self.modules\(\)",
    InnerLists: r"'body.blocks.0.0' is called outside of its block.*x = part\(x\)",
    WrittenByABlock: r"'body.blocks.0' has changed it in place.*return x \+ super\(\).middle\(x\)",
    Reentrant: r"with use_reentrant=False.*x = checkpoint\(block, x, use_reentrant=True\)",
    WeightsOfBlocks: r"the parameter 'body.blocks.0.0.weight'.*block\[0\].weight.norm\(\)",
    TermsInAList: "'body.blocks.0' must return all its results.*changes a list",
    OnBothSides: "'body.enter' is called before and after the blocks",
    DropoutBeside: "the result of 'body.enter'.*it depends on random numbers",
}


def numbers() -> Any:
    """Return three equal batches of random vectors."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(4, D, dtype=torch.float64, generator=generator)) * 3


class Around(Module):
    """Train a body on numbers; the loss is a mean over samples."""

    def __init__(self, kind: type[Body]) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        if not hasattr(self, "body"):
            torch.manual_seed(3)
            self.body: Any = self.kind().double()

    def loss(self, batch: Tensor) -> Tensor:
        loss = (self.body(batch).squeeze(-1) - batch.sum(-1)).pow(2).mean()
        return loss + getattr(self.body, "penalty", 0.0)


class CalledTwice(Around):
    """Compare the outputs of a body for inputs of different lengths and scales."""

    def loss(self, batch: Tensor) -> Tensor:
        near, far = self.body(batch), self.body(torch.cat([batch, batch[:1] * 2], 0))
        first, second = (self.body(batch * factor) for factor in (0.5, 2.0))
        apart = (near - far[:-1].detach() * 2).pow(2).mean()
        return apart + (first * second).mean() + near.mean()


#: Modules that train as on one process, and their layouts.
AROUND: dict[str, tuple[Callable[[], Around], dict[str, Any]]] = {
    kind.__name__: (partial(Around, kind), layout)
    for kind, layout in (
        (ResidualAround, PP), (SkipsBetween, VPP), (TwoStreams, ZB_V), (TermsOfBlocks, VPP),
        (BlocksInPlace, VPP),
    )
} | {"CalledTwice": (partial(CalledTwice, ResidualAround), ZB_V)}  # fmt: skip


def around(make: Callable[[], Around], layout: dict[str, Any] | None) -> Job:
    return Job(make, layout, data=numbers, validation=numbers, batch=4)


V = 31
SIZES = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
SIZES |= {"hidden_size": 16, "intermediate_size": 24}
#: Hugging Face's classes and their settings.
SETTINGS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {
        "vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "dropout_rate": 0.0, "decoder_start_token_id": 0,
    },
    "CLIPModel": {
        "text_config": {**SIZES, "vocab_size": V, "max_position_embeddings": 16, "eos_token_id": 2, "projection_dim": 8},
        "vision_config": {**SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 8},
        "projection_dim": 8,
    },
}  # fmt: skip
CLIP_STAGES = {"model.vision_model.encoder.layers": "blocks", "model.text_model": "last"}


def texts() -> Any:
    """Return three equal batches of random tokens."""
    return list(torch.randint(2, V, (4, 6), generator=torch.Generator().manual_seed(0))) * 3


class Other(Module):
    """Train a model of random weights of any kind; CLIP's loss couples the samples of a batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        torch.manual_seed(0)
        kind = getattr(transformers, self.kind)
        self.model: Any = kind(kind.config_class(**SETTINGS[self.kind])).double().train()

    def loss(self, tokens: Tensor) -> Tensor:
        if self.kind == "CLIPModel":
            pixels = (tokens[:, :1, None, None] / 40).sin().expand(-1, 3, 8, 8).double()
            return self.model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
        return self.model(tokens, labels=tokens % 2).loss


def plan_of_refusals(kind: str) -> dict[str, str]:
    """Return the plan to which refusals lead."""
    plan: dict[str, str] | None = None
    for _ in range(5):
        module, mesh = Other(kind), mesh_of(pp=2)
        module.configure_model()
        try:
            parallelize(module, mesh, None, plan)
            executor = PipelineExecutor(mesh, pipelined_module(module, mesh))
            assert executor.model is not None
            (part,) = split_batch(torch.stack(texts()[:2]), None)
            executor.plans.of(Trial(), executor.model, module.loss, part)
        except UnsupportedError as error:
            *_, named = re.findall(r"pipeline_plan (\{.*?\})", str(error))
            plan = ast.literal_eval(named)
        else:
            assert plan is not None, "a table or the model itself has stages"
            return plan
    raise AssertionError(f"refusals lead to no end: {plan}")


def planned(kind: str, layout: dict[str, Any] | None) -> Job:
    return Job(partial(Other, kind), layout, data=texts, batch=4)


def run_two(rank: int, size: int, plans: dict[str, dict[str, str]]) -> dict[Any, Report]:
    found: dict[Any, Report] = {}
    for name, case in AROUND.items():
        found[name] = run_job(around(*case), size)
    job = around(partial(Around, WritesWeights), {**PP, "job.check_microbatches": True})
    with pytest.raises(
        UnsupportedError, match=r"must not write weights.*'body.(enter|head).weight'"
    ):
        run_job(job, size)
    for kind, plan in plans.items():
        layout = {"pp": 2, "pipeline_plan": plan, "job.check_microbatches": True}
        if kind == "CLIPModel":
            with pytest.raises(UnsupportedError, match="mixes its samples.*='batch'"):
                run_job(planned(kind, layout), size)
            layout["microbatch_size"] = "batch"
        found[kind] = run_job(planned(kind, layout), size)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Report]]:
    plans = {kind: plan_of_refusals(kind) for kind in SETTINGS}
    assert plans["CLIPModel"] == CLIP_STAGES
    return run_world(run_two, 2, plans)


@pytest.mark.parametrize("name", AROUND)
def test_code_around_blocks_trains_as_on_one_process(name: str, ranks: Any) -> None:
    twin = run_job(around(AROUND[name][0], None))
    for rank in ranks:
        report = rank[name]
        assert report.losses == pytest.approx(twin.losses, abs=1e-12)
        assert report.metrics == pytest.approx(twin.metrics, abs=1e-12)
        for key, (value, _) in report.pieces.items():
            torch.testing.assert_close(value, twin.pieces[key][0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", REFUSED)
def test_code_that_cannot_be_cut_into_stages_is_refused_on_every_stage(kind: type[Body]) -> None:
    for pp_rank in (0, 1):
        module, mesh = Around(kind), mesh_of(pp=2, pp_rank=pp_rank)
        module.configure_model()
        parallelize(module, mesh, None, PP["pipeline_plan"])
        executor = PipelineExecutor(mesh, module.body.blocks)
        batch = torch.stack(numbers()[:4])
        with pytest.raises(UnsupportedError, match=f"(?s){REFUSED[kind]}"):
            executor.run(module.loss, split_batch(batch, 2), BackwardPasses())


@pytest.mark.parametrize("kind", SETTINGS)
def test_plans_that_refusals_name_train_as_one_process(kind: str, ranks: Any) -> None:
    twin = run_job(planned(kind, None))
    for rank in ranks:
        # Norms of some models compute in float32.
        assert rank[kind].losses == pytest.approx(twin.losses, abs=1e-6)
        assert rank[kind].norms == pytest.approx(twin.norms, abs=1e-6)
    assert len(set(twin.losses)) == 3


def test_a_module_without_blocks_is_asked_for_blocks_of_one_kind() -> None:
    with pytest.raises(UnsupportedError, match="at least 2 blocks of one kind, and this module"):
        pipelined_module(BoringModel(), mesh_of(pp=2))


def test_models_that_stay_in_stages_when_frozen_are_not_said_to_be_frozen() -> None:
    module = BoringModel()
    config = GPTConfig.gpt2(vocab_size=10, num_layers=2, hidden_size=8, num_heads=2)
    module.first = GPT(config, mesh_of())
    module.second = GPT(config, mesh_of())
    with pytest.raises(UnsupportedError, match=r"BoringModel has first, second\. Use pp=1\.$"):
        pipelined_module(module, mesh_of(pp=2))
