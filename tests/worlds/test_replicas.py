"""Parameters that several ranks hold train as on one device, or the fit is refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_megatron.errors import ReplicaMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.replicas import check_frozen_copies
from lightning_megatron.plan.layout import ParallelLayout
from tests.fits import Job, Regress, Report, Vectors, joined, run_job
from tests.oracles import assert_equal
from tests.world import run_world

transformers = pytest.importorskip("transformers")

BATCH, V = 4, 61
PLAN = {"net.up": "column", "net.down": "row"}
EXTRA_PLANS = {"features": {"net.between": "features"}}


class Predict(Regress):
    """Train a language model on random tokens."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(input_ids=batch[0]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def sequences() -> Dataset:
    return TensorDataset(torch.randint(2, V, (12, 9), generator=torch.Generator().manual_seed(3)))


def train(
    make: Callable[[], Regress], size: int = 1, layout: dict[str, Any] | None = None
) -> Report | str:
    """Return the report of three steps, or the error that ends them."""
    module = make()
    num_data_ranks = 1 if {"tp", "pp"} & (layout or {}).keys() else size
    options = {"microbatch_size": BATCH // num_data_ranks, "job.check_microbatches": True}
    data = sequences if isinstance(module, Predict) else Vectors
    job = Job(
        lambda: module, layout and {**options, **layout}, data=data, batch=BATCH, norms=False,
        trainer={"gradient_clip_val": None},
    )  # fmt: skip
    try:
        return run_job(job, size)
    except (ValueError, RuntimeError, AssertionError) as error:
        notes = getattr(error, "__notes__", [])
        return " ".join([f"{type(error).__name__}: {error}", *notes])


class Net(nn.Module):
    """Two layers with an activation between them that has weights."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))


class Scale(nn.Module):
    """Normalise groups of three features, and multiply by a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.tensor(1.5)), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(-1, (-1, 3))).flatten(-2) * self.scale


class PerFeature(nn.Tanh):
    """Multiply every feature by its own learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.linspace(0.5, 2.0, 12))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scales)


SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
SIZES |= {"num_hidden_layers": 2}


def language_model(name: str, changes: dict[str, Any]) -> Callable[[], nn.Module]:
    kind = getattr(transformers, name)
    return lambda: kind(kind.config_class(**SIZES | changes))


_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    # The tables of families lack these positions, so that the models stay Hugging Face's own.
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    # Other kernels of experts do not take float64.
    "experts_implementation": "eager",
}  # fmt: skip
#: Language models of Hugging Face that keep their own code.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Cohere": ("CohereForCausalLM", {"use_qk_norm": True}),
    "LFM2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "one key head": ("GraniteForCausalLM", {"num_key_value_heads": 1, "hidden_act": "tanh"}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", _LATENT),
}  # fmt: skip
MODULES: dict[str, Callable[[], Regress]] = {
    "PReLU": lambda: Regress(lambda: Net(nn.PReLU())),
    "norm of heads": lambda: Regress(lambda: Net(Scale())),
    "features": lambda: Regress(lambda: Net(PerFeature())),
    "teacher": lambda: Teacher(plain_net),
    "attack": lambda: Attack(plain_net),
    **{name: partial(Predict, language_model(*case)) for name, case in MODELS.items()},
}


class ByHand(Regress):
    """Run the backward pass without the strategy's knowledge."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        super().training_step(batch, index).backward()
        optimizer.step()


class Penalty(Regress):
    """Add a penalty over all weights to the loss."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        penalty = sum(1e-3 * p.pow(2).sum() for p in self.parameters())
        return super().training_step(batch, index) + penalty


class CompiledPenalty(Penalty):
    """Hold a compiled module, which a guard would disturb."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.aside = torch.compile(nn.Identity(), backend="eager")


class LogsNorm(Regress):
    """Log the norms of a weight that all ranks hold and of a cut weight."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        assert self.net.down.weight.dtype == torch.float64
        self.log("replicated", self.net.norm.weight.norm())
        self.log("size", self.net.down.weight.data.norm())
        return super().training_step(batch, index)


class Gated(Net):
    """Multiply a part of the features by a value that does not come from a column layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return self.down(self.between(self.up(hidden)) * hidden.mean(-1, keepdim=True))


class WritesAlone(Regress):
    """Write into a weight on one rank, after a step."""

    def __init__(self, make: Callable[[], nn.Module], step: int, key: str) -> None:
        super().__init__(make)
        self.step, self.key = step, key

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1 and self.global_step == self.step:
            with torch.no_grad():
                self.get_parameter(self.key).mul_(1.1)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def module_with(function: Callable[[Tensor], Tensor]) -> Callable[[], Regress]:
    """Return a function that makes a module with ``function`` between two cut layers."""
    return lambda: Regress(lambda: Net(Function(function)))


class GradientPenalty(Regress):
    """Add a penalty on the gradient of the inputs to the loss."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return super().training_step(batch, index) + gradient.square().mean()


class Attack(Regress):
    """Train on inputs that a step has changed by their gradient."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).square().mean(), x)
        return super().training_step([batch[0] + 0.1 * gradient.sign(), batch[1]], index)


class StoresMean(nn.Tanh):
    """Store the mean absolute value of the input."""

    def forward(self, x: Tensor) -> Tensor:
        self.size = x.abs().mean()
        return super().forward(x)


class UsesActivations(Regress):
    """Add to the loss, or log, the mean that an activation between two cut layers stores."""

    def __init__(self, logs: bool) -> None:
        super().__init__(lambda: Net(StoresMean()))
        self.logs = logs

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss, size = super().training_step(batch, index), self.net.between.size
        if self.logs:
            self.log("size", size)
        return loss if self.logs else loss + 0.1 * size


class Teacher(Regress):
    """Count steps, and update an average of the inputs in the step; both change the loss."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.calls = 0
        self.teacher = nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.teacher.mul_(0.5)
            self.teacher.data.add_(batch[0].mean((0, 1)))
        return super().training_step(batch, index) * self.calls + self.teacher.square().mean()


def random_noise(x: Tensor) -> Tensor:
    drawn = torch.from_numpy(np.random.randn(x.shape[-1])) + random.random()
    return F.dropout(x + torch.randn_like(x), 0.5) + drawn


def asserts_sizes(x: Tensor) -> Tensor:
    assert x.shape[-1] == 12
    return x.tanh()


def plain_net() -> nn.Module:
    return Net(nn.GELU())


def plain() -> Regress:
    return Regress(plain_net)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


#: Functions whose random numbers cannot differ between the ranks of tp, and the reason.
DRAWS_WITHOUT_OWN_STREAM: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "of a generator": (
        lambda x: x * torch.rand(x.shape, generator=torch.Generator(), dtype=x.dtype), "passes a generator",
    ),
    "for parts and for all features": (
        lambda x: x + 0 * sum(F.dropout(v, 0.5).mean() for v in (x, x.new_ones(3))), "also draws for all features",
    ),
    "for sizes of one rank": (
        lambda x: F.dropout(x.view(4, 6, 6), 0.5), "could not be tried with all features",
    ),
}  # fmt: skip

STAGES: dict[str, Any] = {"pp": 2, "pipeline_plan": {"net": "blocks"}, "microbatch_size": 2}
TP: dict[str, Any] = {"tp": 2, "tensor_parallel_plan": PLAN}


def planned(**plan: str) -> dict[str, Any]:
    return {"tp": 2, "tensor_parallel_plan": {f"net.{name}": kind for name, kind in plan.items()}}


LINE = r"test_replicas.py:\d+"
OTHER = r"([\d.]+), and (?!\1)[\d.]+ with all features"
#: Module, layout, and a phrase of the error.
REFUSED: dict[str, tuple[Callable[[], Regress], dict[str, Any], str]] = {
    "raw backward": (lambda: ByHand(lambda: Net(nn.PReLU())), TP, r"gradients 'net.between.weight' \(gradient norm"),
    "partial where all features are": (
        plain, planned(up="column", down="row", norm="partial"), r"'net.norm.(weight|bias)' is used on all features",
    ),
    "not from a column layer": (lambda: Regress(lambda: Gated(nn.GELU())), TP, "'net.norm.(weight|bias)' is used there"),
    "penalty": (lambda: Penalty(plain_net), TP, rf"'net.up.weight' is cut over tp \(2\), and .*{LINE} reads it: 'penalty"),
    "penalty that a compiler hides": (lambda: CompiledPenalty(plain_net), TP, r"'net.(up|down).(weight|bias)' is read by other code"),
    "norm of a cut weight": (lambda: LogsNorm(plain_net), TP, r"'net.down.weight' .* reads it: 'self.log\(\"size\""),
    "a norm of all features, by hand": (
        lambda: ByHand(lambda: Net(nn.LayerNorm(12))), TP, r"came up in 'net.between'\. .*'net.up' \('column'\).* norm of all features after the 'row' .*'column_gather'",
    ),
    "an assertion of sizes": (module_with(asserts_sizes), TP, r"AssertionError: .*'net.up' \('column'\).*x.shape\[-1\]"),
    "a row for every feature": (lambda: Regress(lambda: Net(nn.PReLU(12))), TP, r"1/2 of them.* for every feature the kind 'features'"),
    "a layer that sums": (plain, planned(up="column"), r"'net.up' \('column'\).*follows a 'column' layer the kind 'row'"),
    "a penalty of activations": (
        lambda: UsesActivations(logs=False), TP | {"job.check_microbatches": False},
        r"same loss.* it is ([\d.]+) on rank 0, (?!\1)[\d.]+ on rank 1",
    ),
    "a log of activations": (lambda: UsesActivations(logs=True), TP, f"log 'size' is {OTHER}"),
    "a softmax of all features": (
        module_with(softmax), TP, f"the loss is {OTHER}; .*the input of 'net.down' differs.*'column_gather' and 'row_split'",
    ),
    "a view of fixed sizes": (
        module_with(lambda x: x.view(4, 6, 4, 3).tanh().flatten(-2)), TP, r"RuntimeError: shape .* is invalid .*'net.up' \('column'\)",
    ),
    "a linear layer without a plan": (lambda: Regress(lambda: nn.Linear(8, 8)), {"tp": 2}, r"tensor_parallel_plan \{'net': 'column_gather'\}"),
    "a row layer that splits a part": (plain, planned(up="column", down="row_split"), r"'net.up' \('column'\).*the kind 'row'"),
    "a row layer without a column layer": (plain, planned(down="row"), r"'net.down' \('row'\).*'row_split'"),
    "two column layers": (plain, planned(**{"*": "column"}), r"'net.up' \('column'\), .*'net.down' \('column'\).*'column_gather'"),
    **{
        f"random numbers {name}": (module_with(function), TP, rf"tp \(2\).*{LINE} \(.*\), which {reason}.*the kind 'dropout'")
        for name, (function, reason) in DRAWS_WITHOUT_OWN_STREAM.items()
    },
    "a Hugging Face model that is not cut": (
        lambda: Predict(language_model("GPTNeoForCausalLM", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]})), {"tp": 2},
        r"Predict has none\..*'net.transformer.h.\*.mlp.c_fc': 'column_full'",
    ),
    "an attack over stages": (
        lambda: Attack(lambda: nn.Sequential(plain_net(), plain_net())), STAGES, rf"derivatives itself with pp \(2\).*{LINE} ",
    ),
    "a penalty on gradients": (lambda: GradientPenalty(plain_net), TP, rf"not differentiate twice .*tp \(2\) cuts.*{LINE} "),
    "a penalty on gradients over stages": (
        lambda: GradientPenalty(lambda: nn.Sequential(plain_net(), plain_net())), STAGES,
        rf"not take derivatives itself with pp \(2\).*{LINE} ",
    ),
    "nothing, for the noise is drawn": (module_with(random_noise), TP, r"^$"),
    "nothing, for it is meant": (module_with(softmax), TP | {"job.check_microbatches": False}, r"^$"),
    "written on one of dp": (
        lambda: WritesAlone(plain_net, 1, "net.up.weight"), {"optimizer.zero": 0}, r"ranks of data .*'net.up.weight' \(parameter norm",
    ),
    "written on one of tp, later": (
        lambda: WritesAlone(plain_net, 2, "net.norm.weight"), TP | {"job.replica_check_interval": 1},
        r"ranks of tp .*parameters 'net.norm.weight'",
    ),
}  # fmt: skip


def train_all(rank: int, size: int) -> dict[tuple[str, str], Report | str]:
    reports = {}
    for name, make in MODULES.items():
        plan = None if name in MODELS else {**PLAN, **EXTRA_PLANS.get(name, {})}
        reports[name, "tp"] = train(make, size, {"tp": 2, "tensor_parallel_plan": plan})
        if name in ("PReLU", "DeepSeek-V3"):
            reports[name, "dp"] = train(make, size, {"optimizer.zero": 1})
    return reports


def errors_of_refused_fits(rank: int, size: int) -> dict[str, str]:
    # Without the shape checks of the tests, the errors are those that users get.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        results = {name: train(make, size, layout) for name, (make, layout, _) in REFUSED.items()}
    return {name: result if isinstance(result, str) else "" for name, result in results.items()}


def compare_frozen(rank: int, size: int) -> list[str]:
    """Compare frozen weights of two stages before and after one of them writes its own."""
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2))
    weights = {"teacher.up": torch.ones(3), "teacher.down": torch.ones(2)}
    main: Any = SimpleNamespace(
        mesh=mesh, on_several_stages=frozenset(weights), parameter=weights.__getitem__, holds=weights.__contains__,
    )  # fmt: skip
    check_frozen_copies(main)
    if rank == 1:
        weights["teacher.down"].mul_(2)
    with pytest.raises(ReplicaMismatchError) as caught:
        check_frozen_copies(main)
    return [name for name in weights if repr(name) in str(caught.value)]


def world_of_two(rank: int, size: int) -> tuple[dict[Any, Any], dict[str, str], list[str]]:
    return train_all(rank, size), errors_of_refused_fits(rank, size), compare_frozen(rank, size)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_world(world_of_two, 2)


@pytest.mark.parametrize("name", MODULES)
def test_parameters_used_on_parts_of_the_features_train_as_on_one_device(name, ranks):
    twin = train(MODULES[name])
    assert isinstance(twin, Report), twin
    expected = joined([twin])
    for layout in ("tp", "dp"):
        reports = [results[name, layout] for results, *_ in ranks if (name, layout) in results]
        for report in reports:
            assert isinstance(report, Report), report
            is_cut = any(not spec.is_whole for _, spec in report.pieces.values())
            assert is_cut == (layout == "tp")
            assert report.losses == pytest.approx(twin.losses, rel=1e-6)
        for key, weight in joined(reports).items() if reports else ():
            assert_equal(weight, expected[key], f"{name}, {layout}: {key}", 1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_unequal_copies_and_uses_that_a_sum_cannot_correct_are_refused_by_name(name, ranks):
    for _, errors, _ in ranks:
        assert re.search(REFUSED[name][2], errors[name]), errors[name]


def test_frozen_weights_that_differ_between_stages_are_named(ranks: list[Any]) -> None:
    assert [names for *_, names in ranks] == [["teacher.down"]] * 2
