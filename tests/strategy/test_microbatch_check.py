"""Steps that couple samples are refused with microbatches and train on complete batches."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.pipeline.microbatch import Microbatch
from tests.fits import Job, trainer_of

SIZE, FEATURES, CLASSES = 4, 6, 4


class Samples(Dataset):
    """Features, labels, ragged token labels and a paired view."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
        tokens = torch.randint(CLASSES, (5,), generator=generator)
        tokens[1 + index % 4 :] = -100
        return {"x": x, "view": x + 0.1, "y": torch.tensor(index % CLASSES), "tokens": tokens}


class Step(LightningModule):
    """Run a function as the training step."""

    def __init__(
        self, step: Callable[..., Any], net: nn.Module | None = None, **attributes: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh()) if net is None else net
        self.head = nn.Linear(16, CLASSES)
        self.step, self.losses = step, []
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logits(module: Step, batch: Any) -> Tensor:
    return module.head(module.net(batch["x"]))


def mean(module: Step, batch: Any) -> Tensor:
    return F.cross_entropy(logits(module, batch), batch["y"])


def contrast(module: Step, batch: Any) -> Tensor:
    similarity = module.net(batch["x"]) @ module.net(batch["view"]).T
    return F.cross_entropy(similarity, torch.arange(len(similarity)))


def ragged(module: Step, batch: Any) -> Tensor:
    token_logits = logits(module, batch)[:, :, None].expand(-1, -1, 5)
    return F.cross_entropy(token_logits + torch.arange(5) * token_logits.sin(), batch["tokens"])


def counted(module: Step, batch: Any) -> dict[str, Tensor]:
    return {"loss": ragged(module, batch), "num_tokens": (batch["tokens"] != -100).sum()}


def miscounted(module: Step, batch: Any) -> dict[str, Any]:
    return {"loss": ragged(module, batch), "num_tokens": 7}


def logs_other_values(module: Step, batch: Any) -> Tensor:
    loss = mean(module, batch)
    module.log("ppl", (9 * loss).exp())
    module.log("size", len(batch["x"]))
    for name in ("f1", "accuracy"):
        metric = getattr(module, name)
        metric(logits(module, batch), batch["y"])
        module.log(name, metric)
    module.log("all", float(len(batch["x"])), reduce_fx="sum")
    return loss


def counts_calls(module: Step, batch: Any) -> Tensor:
    module.calls += 1
    return mean(module, batch)


def updates_average(module: Step, batch: Any) -> Tensor:
    module.level.mul_(0.9).add_(batch["x"].mean())
    return mean(module, batch)


def writes_weights(module: Step, batch: Any) -> Tensor:
    with torch.no_grad():
        module.net[0].weight.data = 0.9 * module.net[0].weight.data
    return mean(module, batch)


def mixes_with(share: Callable[[], float], order: Callable[[int], Any]) -> Callable[..., Any]:
    """Return a step that mixes each sample with another one."""

    def step(module, batch):
        part, places = share(), torch.as_tensor(order(len(batch["x"])))
        return mean(module, {**batch, "x": part * batch["x"] + (1 - part) * batch["x"][places]})

    return step


def shuffled(count: int) -> list[int]:
    places = list(range(count))
    random.shuffle(places)
    return places


mixes_by_numpy_and_torch = mixes_with(lambda: np.random.beta(2, 2), torch.randperm)


COUPLED: dict[str, tuple[Callable[..., Any], str]] = {
    "a sum": (lambda module, batch: mean(module, batch) * len(batch["x"]), "the loss of two microbatches"),
    "wrong token counts": (miscounted, "num_tokens of two microbatches is 7 in one call and 14 in separate calls"),
    # The median of two samples is their mean.
    "a median of single samples": (lambda module, batch: logits(module, batch).norm(dim=1).quantile(0.5), "the loss of t"),
    "samples mixed by Python": (mixes_with(lambda: random.betavariate(2, 2), shuffled), "the loss"),
    "samples mixed by NumPy and torch": (mixes_by_numpy_and_torch, "the loss"),
    "counted calls": (counts_calls, "training_step must not depend on the number of its calls.*self.calls changes"),
    "weights that a step writes": (writes_weights, "must not write weights.*'net.0.weight' has changed"),
    "an average in a buffer": (updates_average, "self.level changes at every call"),
}  # fmt: skip


def derivative(module: Step, batch: Any) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(module.head(module.net(x)).sum(), x, create_graph=True)
    return mean(module, batch) + slope.pow(2).sum(1).mean()


def noisy(module: Step, batch: Any) -> Tensor:
    x = batch["x"] + torch.randn_like(batch["x"]) + torch.randint(3, (len(batch["x"]), 1))
    hidden = F.dropout(module.net(F.dropout(x, 0.3)), 0.5, training=True)
    keep = 0.8 + torch.rand(len(x), 1)
    module.log("noise", hidden.std() * 0 + float(np.random.rand()))
    return F.cross_entropy(module.head(hidden * keep.floor() / 0.8), batch["y"])


def python_draws(module: Step, batch: Any) -> Tensor:
    x = torch.stack([row * random.random() for row in batch["x"]])
    return mean(module, {**batch, "x": x})


def draws_once(module: Step, batch: Any) -> Tensor:
    factor = random.choice([0.5, 1.0, 2.0]) * np.random.uniform(0.5, 1.5)
    flipped = batch["x"].flip(1) if random.random() < 0.5 else batch["x"]
    return mean(module, {**batch, "x": factor * flipped[:, np.random.permutation(FEATURES)]})


def stores_values(module: Step, batch: Any) -> Tensor:
    loss = mean(module, batch)
    module.accuracy(logits(module, batch), batch["y"])
    module.log("accuracy", module.accuracy)
    module.outputs.append(loss.detach())
    module.total += loss.item() * len(batch["x"])
    module.num_samples += len(batch["x"])
    module.last = loss.item()
    return loss


SOUND: dict[str, Callable[..., Any]] = {
    "derivatives in the step": derivative,
    "noise and dropout": noisy,
    "draws of Python for each sample": python_draws,
    "draws of Python and NumPy once a call": draws_once,
    "metrics and lists": stores_values,
}


def fit(
    step: Any, strategy: Any, net: nn.Module | None = None, collate: Any = None, precision: Any = "64-true",
    **attributes: Any,
) -> Step:  # fmt: skip
    """Fit two batches; the strategy checks microbatches unless its options say otherwise."""
    module, checked = Step(step, net, **attributes), None
    if strategy is not None:
        checked = {"microbatch_size": None, "job.check_microbatches": True, **strategy}
    options = {"max_epochs": 1, "gradient_clip_val": None}
    trainer = trainer_of(Job(strategy=checked, steps=-1, precision=precision, trainer=options))
    trainer.fit(module, DataLoader(Samples(), batch_size=SIZE, collate_fn=collate))
    return module


def attributes_of(step: Any) -> dict[str, Any]:
    if step is counts_calls:
        return {"calls": 0}
    if step is updates_average:
        return {"level": nn.Buffer(torch.zeros(1, dtype=torch.float64))}
    if step is stores_values:
        zeros = {"last": 0.0, "total": 0.0, "num_samples": 0}
        return {"accuracy": MulticlassAccuracy(CLASSES), "outputs": [], **zeros}
    return {}


def weighted(module: Step, batch: Any) -> Tensor:
    return F.cross_entropy(logits(module, batch), batch["y"], weight=batch["weights"])


def with_weights(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add one weight for each class; there are as many classes as samples."""
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "weights": torch.arange(1.0, 5.0, dtype=torch.float64)}


def time_major(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put four time steps first."""
    batch = torch.utils.data.default_collate(samples)
    x = batch["x"]
    return {"x": torch.stack([x, x.sin(), x.cos(), -x]), "y": batch["y"]}


def recurrent(module: Step, batch: Any) -> Tensor:
    hidden, _ = module.net(batch["x"])
    return F.cross_entropy(module.head(hidden).flatten(0, 1), batch["y"].repeat(len(batch["x"])))


SHAPED: dict[str, tuple[Callable[..., Any], Any, Any, str]] = {
    "weights of as many classes": (
        weighted, None, with_weights, "tried on 2 of 4 samples.*the first dimension of a tensor in the batch does not count samples",
    ),
    "time first": (
        recurrent, lambda: nn.LSTM(FEATURES, 16), time_major, "tried on 2 of 4 samples|the loss of two"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPED)
def test_tensors_whose_first_dimension_is_not_samples_are_refused_with_microbatches(name):
    step, net, collate, words = SHAPED[name]

    def run(strategy):
        return fit(step, strategy, net() if net else None, collate)

    torch.manual_seed(1)
    plain = run(None)
    torch.manual_seed(1)
    assert run({}).losses == pytest.approx(plain.losses, rel=1e-12)
    remedy = f"(?s){words}.*microbatch_size='batch'"
    with pytest.raises((UnsupportedError, RuntimeError, ValueError), match=remedy):
        run({"microbatch_size": 2})


def cut_by_hand(samples: list[dict[str, Tensor]]) -> list[Microbatch]:
    """Cut a batch into microbatches in the collate function."""
    parts = samples[:1], samples[1:]
    return [Microbatch(torch.utils.data.default_collate(part), len(part)) for part in parts]


def test_batch_norm_is_refused_by_name_with_microbatches_unless_frozen():
    def net(is_frozen=False):
        norm = nn.BatchNorm1d(16)
        if is_frozen:
            norm.eval().train = lambda mode=True: norm
        return nn.Sequential(nn.Linear(FEATURES, 16), norm)

    words = "batch statistics need the whole batch"
    for size in (1, 2):
        with pytest.raises(UnsupportedError, match=rf"{words}, .* net\.1 would use"):
            fit(mean, {"microbatch_size": size}, net())
        fit(mean, {"microbatch_size": size}, net(is_frozen=True))
    with pytest.raises(UnsupportedError, match=words):
        fit(mean, {}, net(), cut_by_hand)
    assert fit(mean, {}, net()).losses == fit(mean, None, net()).losses


@pytest.mark.parametrize("name", COUPLED)
def test_steps_that_couple_samples_are_refused_with_microbatches_and_train_on_complete_batches(
    name,
):
    step, words = COUPLED[name]
    size = 1 if name == "a median of single samples" else 2
    remedies = f"(?s){words}.*microbatch_size='batch'.*job.check_microbatches=False"
    with pytest.raises(UnsupportedError, match=remedies):
        fit(step, {"microbatch_size": size}, **attributes_of(step))
    # The draws of two generators are those of one process only with one seed.
    if step not in (miscounted, mixes_by_numpy_and_torch):
        plain, ours = (fit(step, strategy, **attributes_of(step)) for strategy in (None, {}))
        assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
        if step is counts_calls:
            assert (ours.calls, plain.calls) == (2, 2)


def test_half_precision_warns_of_uneven_labels_unless_the_step_counts_tokens(caplog):
    for step, warns in ((counted, False), (ragged, True)):

        def small(module, batch, step=step):
            return step(module, {**batch, "x": 0.01 * batch["x"]})

        with caplog.at_level(logging.WARNING):
            fit(small, {"microbatch_size": 1}, precision="bf16-mixed")
        assert ("different numbers of labels of -100" in caplog.text) == warns


def test_disabled_check_accepts_steps_that_couple_samples():
    for step in (contrast, counts_calls, writes_weights):
        fit(step, {"microbatch_size": 2, "job.check_microbatches": False}, **attributes_of(step))


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 1) for name in SOUND), ("metrics and lists", SIZE)]
)
def test_steps_that_treat_samples_equally_are_accepted_and_unchanged_by_the_trial(
    name, size, caplog
):
    step, cut = SOUND[name], {"microbatch_size": size}
    with caplog.at_level(logging.WARNING):
        checked = fit(step, cut, **attributes_of(step))
        unchecked = fit(step, {**cut, "job.check_microbatches": False}, **attributes_of(step))
    assert checked.losses == unchecked.losses
    for actual, expected in zip(checked.parameters(), unchecked.parameters(), strict=True):
        assert torch.equal(actual, expected)
    if step is stores_values:
        assert len(checked.outputs) == len(unchecked.outputs) == 8 // size
        assert size == SIZE or "training_step stores values in the module, and" in caplog.text
        assert "self._hparams" not in caplog.text
    else:
        assert "stores values" not in caplog.text
    if step is python_draws:
        assert "cannot compare the loss of training_step" in caplog.text


def test_logged_values_that_depend_on_the_cut_are_named_in_a_warning(caplog):
    metrics = MulticlassF1Score(CLASSES), MulticlassAccuracy(CLASSES, average="micro")
    with caplog.at_level(logging.WARNING):
        fit(logs_other_values, {"microbatch_size": 2}, f1=metrics[0], accuracy=metrics[1])
    (warning,) = [record.getMessage() for record in caplog.records if "is cut" in record.message]
    assert warning.startswith("training_step logs values that depend on how a batch is cut")
    assert "log 'ppl' of two microbatches is" in warning
    assert "log 'size' of two microbatches is 4 in one call and 2 in separate calls" in warning
    assert "log 'f1' by step of" in warning
    assert not any(name in warning for name in ("'all'", "'accuracy'"))
    assert "reduce_fx='sum'" in warning


def test_a_trial_calls_the_step_seldom():
    """The joined microbatches overlap, and every microbatch runs once alone."""
    for num_parts, num_calls in ((1, 0), (2, 3), (4, 6)):
        calls: list[int] = []

        def step(module, batch, calls=calls):
            calls.append(len(batch["x"]))
            return mean(module, batch)

        fit(step, {"microbatch_size": SIZE // num_parts})
        assert len(calls) == num_calls + num_parts * 8 // SIZE
