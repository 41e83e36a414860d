"""Weight averages of Lightning train, save, validate and resume as with its own strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import GPTConfig, MegatronStrategy
from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import CURRENT, MODEL, consolidate
from tests.oracles import assert_equal, full_weights
from tests.proof.training import KINDS, Tokens
from tests.strategy.checkpoint_runs import Trained, trainer_of
from tests.world import run_world

State = dict[str, Any]


class ValidatedModel(Trained):
    """Store the weights at the start of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.at_validation: list[Tensor] = []

    def on_validation_epoch_start(self) -> None:
        self.at_validation.append(flat_weights(self))

    def validation_step(self, batch: State, batch_idx: int) -> None:
        pass


STEPS, SAVED_STEP = 8, 5


def flat_weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def fit(
    layout: State | None,
    size: int,
    steps: int,
    folder: str | Path,
    resume: Any = None,
    every: int = SAVED_STEP,
    **options: Any,
) -> tuple[ValidatedModel, EMAWeightAveraging]:
    """Train two steps an epoch, validate after each epoch, save every ``every`` steps."""
    averaging = EMAWeightAveraging(decay=0.5)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = trainer_of(
        layout, size, steps, callbacks=[averaging, saver], num_sanity_val_steps=0, **options
    )
    module, data = ValidatedModel(), Tokens()
    sampler = DistributedSampler(data, size, trainer.global_rank, shuffle=False)
    loader = DataLoader(data, batch_size=8 // size, sampler=sampler)
    trainer.fit(module, loader, DataLoader(data, batch_size=8), ckpt_path=resume)
    return module, averaging


def validated_weights(path: str | Path, layout: State | None, size: int) -> Tensor:
    """Return the weights that a checkpoint is validated with."""
    module = ValidatedModel()
    trainer_of(layout, size, 1).validate(
        module, DataLoader(Tokens(), batch_size=8), ckpt_path=path, verbose=False
    )
    return module.at_validation[0]


def saved_tensors(path: str | Path, prefix: str) -> dict[str, Tensor]:
    tensors = read_full(path)
    return {
        name.removeprefix(prefix): tensor.double()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def test_averages_equal_those_of_lightning_and_resume_from_a_checkpoint(tmp_path: Path) -> None:
    plain, _ = fit(None, 1, STEPS, tmp_path / "plain")
    ours, _ = fit({}, 1, STEPS, tmp_path / "ours")
    tolerances: State = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(flat_weights(ours), flat_weights(plain), **tolerances)
    assert len(ours.at_validation) == len(plain.at_validation) > 1
    torch.testing.assert_close(
        torch.stack(ours.at_validation), torch.stack(plain.at_validation), **tolerances
    )
    resumed, _ = fit(
        {}, 1, STEPS, tmp_path / "rest", resume=tmp_path / "ours" / f"step={SAVED_STEP}.ckpt"
    )
    assert torch.equal(flat_weights(resumed), flat_weights(ours))
    assert resumed.losses == ours.losses[SAVED_STEP:]
    for path, layout in (("plain", None), ("ours", {})):
        weights = validated_weights(tmp_path / path / f"step={SAVED_STEP}.ckpt", layout, 1)
        expected = torch.load(tmp_path / "plain" / f"step={SAVED_STEP}.ckpt")["state_dict"]
        torch.testing.assert_close(
            weights,
            torch.cat([tensor.double().flatten() for tensor in expected.values()]),
            **tolerances,
        )


def test_averages_resume_from_single_files_and_from_directories(tmp_path: Path) -> None:
    plain, _ = fit(None, 1, STEPS, tmp_path / "plain")
    fit({}, 1, SAVED_STEP, tmp_path / "ours")
    consolidate(tmp_path / "ours" / f"step={SAVED_STEP}.ckpt", tmp_path / "file.ckpt")
    consolidate(
        tmp_path / "ours" / f"step={SAVED_STEP}.ckpt", tmp_path / "weights.ckpt", weights_only=True
    )
    assert (
        not {"current_model_state", "averaging_state"}
        & torch.load(tmp_path / "weights.ckpt").keys()
    )
    tolerances: State = {"rtol": 0, "atol": 1e-12}
    # Lightning itself rounds double precision when it resumes such a module.
    expected, _ = fit(
        None, 1, STEPS, tmp_path / "again", resume=tmp_path / "plain" / f"step={SAVED_STEP}.ckpt"
    )
    resumed_by_lightning, _ = fit(None, 1, STEPS, tmp_path / "there", resume=tmp_path / "file.ckpt")
    torch.testing.assert_close(
        flat_weights(resumed_by_lightning), flat_weights(expected), rtol=0, atol=1e-9
    )
    resumed_by_us, _ = fit(
        {}, 1, STEPS, tmp_path / "here", resume=tmp_path / "plain" / f"step={SAVED_STEP}.ckpt"
    )
    torch.testing.assert_close(flat_weights(resumed_by_us), flat_weights(plain), **tolerances)
    assert resumed_by_us.losses == pytest.approx(plain.losses[SAVED_STEP:], abs=1e-12)


def test_averages_begin_at_a_resume_from_a_checkpoint_without_averages(tmp_path: Path) -> None:
    trainer, module = trainer_of({}, 1, 2, precision="32-true"), Trained()
    trainer.fit(module, DataLoader(Tokens(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "start")
    modules = [fit({}, 1, 4, tmp_path / "a", resume=tmp_path / "start", precision="32-true")[0]]
    consolidate(tmp_path / "start", tmp_path / "start.ckpt")
    modules.append(
        fit(None, 1, 4, tmp_path / "b", resume=tmp_path / "start.ckpt", precision="32-true")[0]
    )
    torch.testing.assert_close(
        flat_weights(modules[0]), flat_weights(modules[1]), rtol=0, atol=1e-6
    )


def _assert_averages(folder: str | Path, steps: int) -> None:
    """Compare saved averages with averages of the saved weights, in full precision."""
    expected: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        current = saved_tensors(f"{folder}/step={step}.ckpt", CURRENT)
        expected = {
            name: (expected[name] + weight) / 2 if expected else weight
            for name, weight in current.items()
        }
        averages = saved_tensors(f"{folder}/step={step}.ckpt", MODEL)
        assert averages.keys() == current.keys()
        for name, actual in averages.items():
            torch.testing.assert_close(actual, expected[name], rtol=0, atol=1e-6)


def test_mixed_precision_averages_in_full_precision(tmp_path: Path) -> None:
    ours, averaging = fit({}, 1, STEPS, tmp_path / "ours", every=1, precision="bf16-mixed")
    assert "_swap_models" not in vars(averaging), "the run restores the callback"
    _assert_averages(tmp_path / "ours", STEPS)
    last = saved_tensors(tmp_path / "ours" / f"step={STEPS}.ckpt", MODEL)
    assert any(not torch.equal(tensor, tensor.bfloat16().double()) for tensor in last.values())
    resumed, _ = fit(
        {},
        1,
        STEPS,
        tmp_path / "r",
        tmp_path / "ours" / f"step={SAVED_STEP}.ckpt",
        every=1,
        precision="bf16-mixed",
    )
    assert resumed.losses == ours.losses[SAVED_STEP:]
    resumed_last = saved_tensors(tmp_path / "r" / f"step={STEPS}.ckpt", MODEL)
    assert all(torch.equal(resumed_last[name], tensor) for name, tensor in last.items())


LAYOUTS: dict[str, State] = {
    "parts": {"zero": 1},
    "whole": {"zero": 0},
    "whole parameters": {"optimizer_slices": "parameters"},
}


def _run_two_ranks(rank: int, size: int, folder: str) -> State:
    results: State = {}
    for name, layout in LAYOUTS.items():
        module, _ = fit(layout, size, STEPS, f"{folder}/{name}")
        resumed, _ = fit(
            layout, size, STEPS, f"{folder}/rest", resume=f"{folder}/{name}/step={SAVED_STEP}.ckpt"
        )
        results[name] = (
            flat_weights(module),
            torch.equal(flat_weights(resumed), flat_weights(module)),
        )
        fit(layout, size, 4, f"{folder}/half {name}", every=1, precision="bf16-mixed")
    return results


def test_two_data_ranks_average_as_one_process(tmp_path: Path) -> None:
    plain, _ = fit(None, 1, STEPS, tmp_path / "plain")
    for results in run_world(_run_two_ranks, 2, str(tmp_path)):
        for weights, resumes_exactly in results.values():
            torch.testing.assert_close(weights, flat_weights(plain), rtol=0, atol=1e-9)
            assert resumes_exactly
    for name in LAYOUTS:
        _assert_averages(tmp_path / f"half {name}", 4)


#: Layout and model of each run on two ranks.
PARTS: dict[str, tuple[State, str]] = {
    "tp": ({"tp": 2}, "gpt2-tied"),
    "pp": ({"pp": 2}, "gpt2-tied"),
    "ep": ({"ep": 2}, "experts"),
}
#: Runs that resume, and the runs whose checkpoints they resume from.
RESUMED = (("tp", "pp"), ("pp", "pp"), ("ep", "ep"), ("tp", "gpt2-tied"), ("pp", "gpt2-tied"))


class Losses(Trained):
    """Keep the losses of the validation and the full weights at its start and after the fit."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.validated: list[float] = []
        self.weights: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        super().configure_model()
        if self.trainer.precision == "64-true":
            # Lightning's callback copies the model before Lightning converts it.
            self.double()

    def keep_weights(self) -> None:
        strategy = self.trainer.strategy
        self.weights.append(
            full_weights(self, strategy.mesh)
            if isinstance(strategy, MegatronStrategy)
            else {name: weight.detach().clone() for name, weight in self.named_parameters()}
        )

    def on_validation_epoch_start(self) -> None:
        self.keep_weights()

    def validation_step(self, batch: State, batch_idx: int) -> None:
        assert self.model is not None, "configure_model has run"
        loss = self.model(batch["tokens"], batch["labels"]).mean()
        self.log("validated", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["validated"]))

    def on_train_end(self) -> None:
        self.keep_weights()


def fit_in_parts(
    layout: State | None,
    kind: str,
    size: int,
    folder: str,
    resume: str | None = None,
    every: int = SAVED_STEP,
    **options: Any,
) -> tuple[list[float], list[float], list[dict[str, Tensor]]]:
    """Return the losses of steps and validations, and the weights of validations and the end."""
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    callbacks = [EMAWeightAveraging(decay=0.5), saver]
    trainer = trainer_of(layout, size, STEPS, callbacks, num_sanity_val_steps=0, **options)
    module, data = Losses(KINDS[kind]), Tokens()
    num_data_ranks = size if layout and "ep" in layout else 1
    rank = trainer.global_rank if num_data_ranks > 1 else 0
    sampler = DistributedSampler(data, num_data_ranks, rank, shuffle=False)
    loader = DataLoader(data, batch_size=8 // num_data_ranks, sampler=sampler)
    trainer.fit(module, loader, DataLoader(data, batch_size=8), ckpt_path=resume)
    return module.losses, module.validated, module.weights


def _run_parts(rank: int, size: int, folder: str) -> State:
    runs: State = {}
    for name, (layout, kind) in PARTS.items():
        runs[name, ""] = fit_in_parts(layout, kind, size, f"{folder}/{name}")
    for name, source in RESUMED:
        path = f"{folder}/{source}/step={SAVED_STEP}.ckpt"
        runs[name, source] = fit_in_parts(*PARTS[name], size, f"{folder}/rest", path)
    fit_in_parts(*PARTS["ep"], size, f"{folder}/half", every=1, precision="bf16-mixed")
    return runs


def test_divided_models_average_as_one_process(tmp_path: Path) -> None:
    kinds = {kind for _, kind in PARTS.values()}
    one = {kind: fit_in_parts(None, kind, 1, str(tmp_path / kind)) for kind in kinds}
    for runs in run_world(_run_parts, 2, str(tmp_path)):
        for (name, source), (losses, validated, weights) in runs.items():
            case = f"{name} from {source or 'the start'}"
            all_losses, all_validated, all_weights = one[PARTS[name][1]]
            assert losses == pytest.approx(all_losses[SAVED_STEP if source else 0 :], abs=1e-9), (
                case
            )
            assert validated == pytest.approx(all_validated[-len(validated) :], abs=1e-9), case
            for ours, expected in zip(weights, all_weights[-len(weights) :], strict=True):
                for key, weight in ours.items():
                    # The tied head of the last stage is a copy. One process also has the padding
                    # rows of the vocabulary.
                    full = expected.get(key, expected["model.embedding.word.weight"])
                    full = full[tuple(map(slice, weight.shape))]
                    assert_equal(weight, full, f"{case}: {key}")
    _assert_averages(tmp_path / "half", STEPS)
