"""Modules that no table of this package describes train in stages as on one process: with a user's
own code around a list of blocks, with a user's plans, or with the plan that refusals name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.transformer import Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from lightning_megatron import UnsupportedError
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.microbatch import split_batch
from lightning_megatron.pipeline.step_plans import Trial
from lightning_megatron.strategy.checks.run_checks import pipelined_module
from lightning_megatron.swap import parallelize
from tests.fits import Job, Module, Report, check_equal, run_job, run_jobs_on
from tests.swap.parts import mesh_of
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")

D, NUM_BLOCKS = 8, 4
BLOCKS = {"body.blocks": "blocks"}
CUT: dict[str, Any] = {"pp": 2, "pipeline_plan": BLOCKS}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
}


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


class ResidualInLoop(Body):
    def middle(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x) * (number + 1)
        return x


class ResidualAround(Body):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=False) + super().middle(x.tanh())


class SkipFromInput(Body):
    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        return self.head(F.gelu(first[..., :4]).repeat(1, 2) * self.middle(first)) + (
            first * self.shift
        ).sum(-1, True)


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
    def __init__(self) -> None:
        super().__init__(TwoInputs)

    def middle(self, x: Tensor) -> Tensor:
        states, bias = x.sin(), None
        for block in self.blocks:
            x, bias = block(x, states=states, bias=bias)
        return x + bias


class EarlyLoss(Body):
    def middle(self, x: Tensor) -> Tensor:
        self.penalty: Any = 0.0
        for block in self.blocks:
            x = block(x)
            self.penalty = self.penalty + x.pow(2).mean()
        return x


class Checkpointed(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks.children():
            x = checkpoint(block, x, use_reentrant=False)
        return x


@dataclass(frozen=True)
class HiddenAndTerm:
    """Hidden state and loss term."""

    hidden: Tensor
    term: Tensor


class BlockWithTerm(nn.Module):
    """Block that returns a dataclass, and stores a loss term in its layer."""

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


# ---- code that is refused


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


class ReadByTheHost(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 1e6:
                raise FloatingPointError
        return x


class DropoutBeside(Body):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5, training=True) + super().middle(x)


REFUSED: dict[type[Body], tuple[str, ...]] = {
    NormsBetween: (
        "'body.norms.0' is called between the blocks 'body.blocks'",
        "Wrap every block together",
    ),
    WrittenInPlace: ("the result of 'body.blocks.0'", "__setitem__ uses it", "x[:, 0] = 0.0"),
    ReadByTheHost: ("the result of 'body.blocks.0'", "if x.abs().max() > 1e6"),
    Reentrant: ("with use_reentrant=False", "x = checkpoint(block, x, use_reentrant=True)"),
    TermsOfModules: (
        "the modules of 'body.blocks' cannot be listed in a step",
        "for part in self.modules()",
    ),
    WeightsOfBlocks: ("the parameter 'body.blocks.0.0.weight'", "block[0].weight.norm()"),
    TermsInAList: ("'body.blocks.0' must return all its results", "changes a list"),
    OnBothSides: ("'body.enter' is called before and after the blocks",),
    InnerLists: ("'body.blocks.0.0' is called outside of its block", "x = part(x)"),
    WrittenByABlock: ("'body.blocks.0' has changed it in place", "return x + super().middle(x)"),
    DropoutBeside: ("the result of 'body.enter'", "it depends on random numbers"),
}


class Numbers(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index % 4)
        return torch.randn(D, dtype=torch.float64, generator=generator)


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


EQUAL: dict[str, Callable[[], Around]] = {
    kind.__name__: partial(Around, kind)
    for kind in (
        ResidualInLoop, ResidualAround, SkipFromInput, SkipsBetween, TwoStreams, EarlyLoss,
        Checkpointed, TermsOfBlocks, BlocksInPlace,
    )
} | {"CalledTwice": partial(CalledTwice, ResidualAround)}  # fmt: skip
#: The few cases contain every kind and every layout.
AROUND = chosen(
    [(kind, name) for kind in EQUAL for name in LAYOUTS],
    ("ResidualInLoop", "pp2"),
    ("ResidualAround", "pp2 vpp2"),
    ("SkipFromInput", "pp2 zb-v"),
    ("SkipsBetween", "pp2 vpp2"),
    ("TwoStreams", "pp2 zb-v"),
    ("EarlyLoss", "pp2"),
    ("CalledTwice", "pp2 zb-v"),
    ("Checkpointed", "pp2 zb-v"),
    ("TermsOfBlocks", "pp2 vpp2"),
    ("BlocksInPlace", "pp2 vpp2"),
)


def around(make: Callable[[], Around], layout: dict[str, Any] | None) -> Job:
    return Job(make, layout, data=Numbers, validation=Numbers, batch=4)


# ---- models of others, with the plans to which refusals lead


V = 31
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
TEXT = {**SIZES, "vocab_size": V, "max_position_embeddings": 16}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pooler_dropout": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "ElectraForQuestionAnswering": {**TEXT, **UNDROPPED},
    "T5ForConditionalGeneration": {
        "vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "dropout_rate": 0.0, "decoder_start_token_id": 0,
    },
    "CLIPModel": {
        "text_config": {**TEXT, "eos_token_id": 2, "projection_dim": 8},
        "vision_config": {**SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 8},
        "projection_dim": 8,
    },
    "DebertaV2ForSequenceClassification": {
        **TEXT, **UNDROPPED, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4, "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 16,
    },
}  # fmt: skip
PLANNED = ("Transformer", *SETTINGS)
CLIP_STAGES = {"model.vision_model.encoder.layers": "blocks", "model.text_model": "last"}
CLIP_MLPS = {"*.mlp.fc1": "column", "*.mlp.fc2": "row"}


class Texts(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(2, V, (6,), generator=torch.Generator().manual_seed(index % 4))


class Other(Module):
    """Train a model of random weights of any kind; CLIP's loss couples the samples of a batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        torch.manual_seed(0)
        if self.kind == "Transformer":
            self.model: Any = Transformer(V, ninp=16, nhead=2, nhid=24, nlayers=2, dropout=0.0)
        else:
            kind = getattr(transformers, self.kind)
            self.model = kind(kind.config_class(**SETTINGS[self.kind]))
        self.model.double().train()

    def loss(self, tokens: Tensor) -> Tensor:
        if self.kind == "Transformer":
            return F.nll_loss(self.model(tokens, tokens.flip(1)), tokens.flatten())
        if self.kind == "CLIPModel":
            pixels = (tokens[:, :1, None, None] / 40).sin().expand(-1, 3, 8, 8).double()
            return self.model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
        if self.kind == "ElectraForQuestionAnswering":
            spans = {"start_positions": tokens[:, 0] % 4, "end_positions": tokens[:, 1] % 4}
            return self.model(tokens, **spans).loss
        labels = tokens[:, 0] % 2 if "Sequence" in self.kind else tokens % 2
        return self.model(tokens, labels=labels).loss


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
            (part,) = split_batch(torch.stack([Texts()[0], Texts()[1]]), None)
            executor.plans.of(Trial(), executor.model, module.loss, part)
        except UnsupportedError as error:
            *_, named = re.findall(r"pipeline_plan (\{.*?\})", str(error))
            plan = ast.literal_eval(named)
        else:
            assert plan is not None, "a table or the model itself has stages"
            return plan
    raise AssertionError(f"refusals lead to no end: {plan}")


def planned(kind: str, layout: dict[str, Any] | None) -> Job:
    return Job(partial(Other, kind), layout, data=Texts, batch=4)


def run_two(rank: int, size: int, plans: dict[str, dict[str, str]]) -> dict[Any, Report]:
    found: dict[Any, Report] = {}
    for kind, name in AROUND:
        job = around(EQUAL[kind], {**LAYOUTS[name], "pipeline_plan": BLOCKS})
        found[kind, name] = run_job(job, size)
    layer = ("enter", "head")[rank]
    for body, message in (
        (NormsBetween, "'body.norms.0' is called between the blocks"),
        (WritesWeights, f"must not write weights.*'body.{layer}.weight'"),
    ):
        job = around(partial(Around, body), {**CUT, "check_microbatches": True})
        with pytest.raises(UnsupportedError, match=message):
            run_job(job, size)
    for kind, plan in plans.items():
        layout = {"pp": 2, "pipeline_plan": plan, "check_microbatches": True}
        if kind == "CLIPModel":
            with pytest.raises(UnsupportedError, match="mixes its samples.*='batch'"):
                run_job(planned(kind, layout), size)
            layout["microbatch_size"] = "batch"
        found[kind] = run_job(planned(kind, layout), size)
    layout = {"tp": 2, "tensor_parallel_plan": CLIP_MLPS, "microbatch_size": "batch"}
    return found | {"CLIP tp2": run_job(planned("CLIPModel", layout), size)}


@cache
def plans() -> dict[str, dict[str, str]]:
    return {kind: plan_of_refusals(kind) for kind in PLANNED}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Report]]:
    return run_world(run_two, 2, plans())


@pytest.mark.parametrize(("kind", "name"), AROUND)
def test_code_around_blocks_trains_as_on_one_process(kind: str, name: str, ranks: Any) -> None:
    twin = run_job(around(EQUAL[kind], None))
    for rank in ranks:
        report = rank[kind, name]
        assert report.losses == pytest.approx(twin.losses, abs=1e-12)
        assert report.metrics == pytest.approx(twin.metrics, abs=1e-12)
        for key, (value, _) in report.pieces.items():
            torch.testing.assert_close(value, twin.pieces[key][0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", REFUSED)
def test_code_that_cannot_be_cut_into_stages_is_refused_on_every_stage(kind: type[Body]) -> None:
    for pp_rank in (0, 1):
        module, mesh = Around(kind), mesh_of(pp=2, pp_rank=pp_rank)
        module.configure_model()
        parallelize(module, mesh, None, BLOCKS)
        executor = PipelineExecutor(mesh, module.body.blocks)
        batch = torch.stack([Numbers()[index] for index in range(4)])
        with pytest.raises(UnsupportedError) as caught:
            executor.run(module.loss, split_batch(batch, 2), backward=True)
        for part in REFUSED[kind]:
            assert part in str(caught.value)


@pytest.mark.parametrize("kind", PLANNED)
def test_plans_that_refusals_name_train_as_one_process(kind: str, ranks: Any) -> None:
    assert kind != "CLIPModel" or plans()[kind] == CLIP_STAGES
    twin = run_job(planned(kind, None))
    for rank in ranks:
        for report in [rank[kind], *([rank["CLIP tp2"]] if kind == "CLIPModel" else [])]:
            # Norms of some models compute in float32.
            assert report.losses == pytest.approx(twin.losses, abs=1e-6)
            assert report.norms == pytest.approx(twin.norms, abs=1e-6)
    assert len(set(twin.losses)) == 3


def test_a_module_without_blocks_is_asked_for_blocks_of_one_kind() -> None:
    with pytest.raises(UnsupportedError, match="at least 2 blocks of one kind, and this module"):
        pipelined_module(BoringModel(), mesh_of(pp=2))


# ---- a user's own language model with plans of both kinds


PLANS = {
    "pipeline_plan": {"model.body.blocks": "blocks"},
    "tensor_parallel_plan": {
        "*.up": "column", "*.down": "row", "*.norm": "sequence", "*.words": "vocab", "*.head": "vocab",
    },
}  # fmt: skip


class Block(nn.Module):
    """Return the hidden state and a second value, as blocks of older models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden)))) * weight, None


class WordBody(nn.Module):
    """Blocks between an embedding with an additional parameter and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, 16), nn.Parameter(torch.randn(6, 16) / 4)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(16)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places
        for number, block in enumerate(self.blocks):
            hidden, _ = block(hidden * (1 + number / 8), mask[..., None].to(hidden.dtype))
        return self.norm(hidden)


class Words(nn.Module):
    """Language model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = WordBody(), nn.Linear(16, V, bias=False)
        self.head.weight = self.body.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens, tokens % 3 > 0))


class OwnLM(Module):
    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = Words().double()

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def on_train_end(self) -> None:
        self.outcomes["staged"] = any(isinstance(part, StagedBlocks) for part in self.modules())


OWN: dict[str, Job] = chosen(
    {
        name: Job(OwnLM, {**layout, **PLANS, "microbatch_size": 1}, data=Texts, batch=4)
        for name, layout in {
            "tp2 pp2": {"tp": 2, "pp": 2},
            "tp2 zb-h1": {"tp": 2, "pp": 2, "schedule": "zb-h1"},
            "dp2 pp2 vpp2": {"pp": 2, "vpp": 2},
            "dp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
            "uneven": {"pp": 2, "vpp": 2, "stage_layers": [0, 1, 2, 1]},
            "none in the last chunk": {"pp": 2, "vpp": 2, "stage_layers": [1, 2, 1, 0]},
        }.items()
    },
    "tp2 pp2",
    "dp2 zb-v",
    "uneven",
)


def test_a_users_language_model_trains_in_stages_and_parts_as_on_one_process() -> None:
    twin = run_job(next(iter(OWN.values())).twin())
    for reports in run_jobs_on(4, OWN).values():
        assert all(report.outcomes["staged"] for report in reports)
        check_equal(reports, twin)
