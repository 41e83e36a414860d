"""A LightningModule around a Hugging Face model, without code for this package, trains in every
layout as by Hugging Face's own code; adapters of peft and experts are exported as transformers
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.cli.main import main
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from tests.fits import BATCH, Job, Module, Report, check_equal, loader_of, run_job, trainer_of
from tests.oracles import float32_as_float64
from tests.swap.families import exact_twin
from tests.world import run_world

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

V, LENGTH, LABELS = 61, 12, 3
_SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
_SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ENCODER = {**_SIZES, "pad_token_id": 1, "hidden_dropout_prob": 0.0, "num_labels": LABELS}
_ENCODER |= {"attention_probs_dropout_prob": 0.0}
_GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_EXPERTS = {**_GROUPED, "intermediate_size": 24, "num_hidden_layers": 2}
_BALANCE = {"aux_loss": 0.1, "aux_loss_scope": "global", "z_loss": 0.01}
#: Configuration, its settings, and the class that loads a folder.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", _GROUPED, "AutoModelForCausalLM"),
    "gpt2": ("GPT2Config", _GPT2, "AutoModelForCausalLM"),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "sliding_window_pattern": 2}
        | {"pad_token_id": None},
        "AutoModelForCausalLM",
    ),
    # No family computes this activation, so that the model keeps its own code.
    "starcoder2": (
        "Starcoder2Config",
        {**_GROUPED, "pad_token_id": None, "sliding_window": 5, "hidden_act": "tanh"}
        | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
        "AutoModelForCausalLM",
    ),
    "bert classes": ("BertConfig", _ENCODER, "AutoModelForSequenceClassification"),
    "bert spans": ("BertConfig", {**_ENCODER, "num_labels": 2}, "AutoModelForQuestionAnswering"),
    # The body of an encoder gets a head of the user's module.
    "bert body": ("BertConfig", _ENCODER, "AutoModel"),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
        "AutoModelForCausalLM",
    ),
    "mixtral, balanced": (
        "MixtralConfig", {**_EXPERTS, "num_local_experts": 4, "expert_settings": _BALANCE}, "AutoModelForCausalLM",
    ),
}  # fmt: skip
TP_PP = {"tp": 2, "pp": 2}
#: Layouts by model.
FITS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "tp2+sp pp2, logits in chunks"): {**TP_PP, "loss_chunk": 7},
    ("llama", "cp2 tp2+sp"): {"cp": 2, "tp": 2},
    ("gpt2", "pp2 vpp2 dp2"): {"pp": 2, "vpp": 2},
    ("gemma3", "tp2+sp pp2"): TP_PP,
    ("starcoder2", "pp2, none in the first stage"): {"pp": 2, "pipeline.stage_layers": "E|t*4L"},
    ("starcoder2", "tp2+sp pp2, zb-h1"): {**TP_PP, "schedule": "zb-h1"},
    ("bert classes", "pp2, none in the last stage"): {"pp": 2, "pipeline.stage_layers": [4, 0]},
    ("bert spans", "pp2 vpp2, uneven"): {"pp": 2, "vpp": 2, "pipeline.stage_layers": [0, 1, 2, 1]},
    ("bert body", "tp4+sp"): {"tp": 4, "microbatch_size": 4},
    ("qwen3_moe", "tp2+sp ep2, clones"): {"tp": 2, "ep": 2, "etp": 1, "experts.clones": 1},
    ("qwen3_moe", "tp2 etp2 ep2"): {"tp": 2, "ep": 2, "sequence_parallel": False},
    ("mixtral, balanced", "pp2 ep2, clones"): {"pp": 2, "ep": 2, "experts.clones": {"places": 2, "min_rows": 1}},
}  # fmt: skip
#: Models of Hugging Face that compute in float64 throughout.
EXACT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**TP_PP, "sequence_parallel": False},
    "deepseek_v3": {"ep": 2},
    "gpt_oss": {"tp": 2, "ep": 2, "etp": 1},
}
#: Targets of adapters, layers that are trained in full, and a layout.
ADAPTED: dict[str, tuple[list[str], list[str] | None, dict[str, Any]]] = {
    "llama": (["q_proj", "v_proj", "o_proj", "up_proj"], ["lm_head"], {"pp": 2, "vpp": 2}),
    "mixtral": (["q_proj", "v_proj", "o_proj"], None, {"tp": 2, "ep": 2, "etp": 1}),
}


class Texts(Dataset):
    """Tokens with two tokens of padding at one end; all samples have equally many labels, and all
    steps have the same samples.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % BATCH)
        tokens = torch.randint(2, V, (LENGTH,), generator=generator)
        positions = torch.arange(LENGTH)
        mask = (positions < LENGTH - 2 if index % 2 else positions > 1).long()
        ids = tokens.masked_fill((mask == 0) | (positions == 4), 1)
        sample = {"input_ids": ids, "attention_mask": mask}
        if self.kind.endswith(("classes", "body")):
            return {**sample, "labels": torch.tensor(index % LABELS)}
        if self.kind.endswith("spans"):
            return {**sample, "start_positions": tokens[0] % 4, "end_positions": tokens[1] % 4}
        # A decoder has no context for the first token after padding.
        is_label = (positions != 2) | (mask[0] == 1)
        return {**sample, "labels": tokens.masked_fill((mask == 0) | ~is_label, -100)}


class FineTune(Module):
    """Fine-tune a local folder, without code for this package."""

    def __init__(self, folder: str, kind: str = "llama") -> None:
        super().__init__()
        self.folder, self.kind = folder, kind

    def configure_model(self) -> None:
        builder = getattr(transformers, MODELS[self.kind][2])
        # Fused experts do not support float64.
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        self.model = builder.from_pretrained(self.folder, **options)
        if self.kind == "bert body":
            torch.manual_seed(2)
            self.own = nn.Linear(2 * self.model.config.hidden_size, LABELS)
        # Router losses need training mode.
        self.model.train()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.kind != "bert body":
            return self.model(**batch).loss
        labels, mask = batch.pop("labels"), batch["attention_mask"].unsqueeze(-1)
        states = self.model(**batch)
        mean = (states.last_hidden_state * mask).sum(1) / mask.sum(1)
        return F.cross_entropy(self.own(torch.cat([mean, states.pooler_output], -1)), labels)

    def on_train_end(self) -> None:
        self.outcomes["swapped"] = any(
            isinstance(part, (ReplacedModel, StagedBlocks)) for part in self.modules()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-4, eps=1e-3)


class Exact(Module):
    """Train a model of Hugging Face that computes in float64."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.model = exact_twin(case, vocab_size=V)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Adapt(FineTune):
    """Fine-tune a given adapter."""

    def __init__(self, folder: str, adapter: str) -> None:
        super().__init__(folder)
        self.adapter = adapter

    def configure_model(self) -> None:
        super().configure_model()
        self.model = peft.PeftModel.from_pretrained(self.model, self.adapter, is_trainable=True)

    def on_train_end(self) -> None:
        super().on_train_end()
        strategy: Any = self.trainer.strategy
        self.outcomes["counts"] = self.model.get_nb_trainable_parameters()
        if hasattr(strategy, "run"):
            trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
            held = sum(piece.main.numel() for piece in strategy.run.state.main.slices.values())
            assert 0 < held <= trained, "frozen parameters have no main parameter and no state"


def job_of(folder: Path, kind: str, layout: Mapping[str, Any] | None, **options: Any) -> Job:
    model = partial(FineTune, str(folder / kind), kind)
    return Job(model, layout, data=partial(Texts, kind), **{"steps": 2, **options})


def exact_job(case: str, layout: Mapping[str, Any] | None) -> Job:
    return Job(partial(Exact, case), layout, data=partial(Texts, "llama"), steps=2)


def adapter_job(folder: Path, kind: str, layout: Any, save: str | None = None) -> Job:
    adapters = folder / f"lora {kind}"
    adapt = partial(Adapt, str(adapters / "base"), str(adapters / "given"))
    return Job(
        adapt, layout and {"microbatch_size": 1, **layout}, save=save,
        data=partial(Texts, "llama"),
    )  # fmt: skip


def evaluate(
    base: str, adapter: str, layout: dict[str, Any] | None, path: str | None, size: int = 1
) -> float:
    trainer = trainer_of(Job(strategy=layout), size)
    loader = loader_of(Texts("llama"), BATCH, trainer)
    [metrics] = trainer.validate(Adapt(base, adapter), loader, ckpt_path=path, verbose=False)
    return float(metrics["val_loss"])


def run_all(rank: int, size: int, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for (kind, name), layout in FITS.items():
        found[kind, name] = run_job(job_of(folder, kind, layout), size)
    found |= {case: run_job(exact_job(case, layout), size) for case, layout in EXACT.items()}
    for kind, (*_, layout) in ADAPTED.items():
        paths = [str(folder / f"lora {kind}" / part) for part in ("base", "given", "trained.ckpt")]
        report = run_job(adapter_job(folder, kind, layout, paths[-1]), size)
        found[f"lora {kind}"] = report, evaluate(*paths[:2], layout, paths[-1], size)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small model of every kind as Hugging Face does, and adapters of random numbers."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    for kind, (name, settings, builder) in MODELS.items():
        config = getattr(transformers, name)(**settings)
        getattr(transformers, builder).from_config(config).save_pretrained(path / kind)
    for kind, (targets, heads, _) in ADAPTED.items():
        config = transformers.AutoConfig.for_model(kind, **_GROUPED)
        base = path / f"lora {kind}" / "base"
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
        model = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(base),
            peft.LoraConfig(
                r=4, target_modules=targets, task_type="CAUSAL_LM", modules_to_save=heads
            ),
        )
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(path / f"lora {kind}" / "given")
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    return run_world(run_all, 4, folder)


@cache
def twins(folder: Path, kind: str) -> tuple[Report, Report]:
    """Train by Hugging Face's code, and under the strategy, in this process."""
    return run_job(job_of(folder, kind, None)), run_job(job_of(folder, kind, {}))


@pytest.mark.parametrize(("kind", "name"), FITS)
def test_every_layout_trains_as_the_code_of_hugging_face(kind, name, folder, ranks):
    plain, single = twins(folder, kind)
    assert not plain.outcomes["swapped"]
    if "balanced" not in kind:
        # Hugging Face's code computes norms and losses in float32.
        assert single.losses == pytest.approx(plain.losses, abs=1e-4)
    reports = [rank[kind, name] for rank in ranks]
    assert all(report.outcomes["swapped"] for report in reports)
    if kind == "starcoder2":
        for report in reports:
            assert report.losses == pytest.approx(plain.losses, abs=1e-5)
    else:
        check_equal(reports, single, 1e-9, learns=False)
        whole = sum(piece.numel() for piece, _ in single.pieces.values())
        for report in reports:
            own = sum(piece.numel() for piece, _ in report.pieces.values())
            assert own < whole, "a part on each rank"


@pytest.mark.parametrize("name", EXACT)
def test_exact_models_have_the_losses_and_norms_of_hugging_face(name: str, ranks: Any) -> None:
    with float32_as_float64():
        expected = run_job(exact_job(name, None))
    for rank in ranks:
        assert rank[name].losses == pytest.approx(expected.losses, rel=0, abs=1e-9)
        assert rank[name].norms == pytest.approx(expected.norms, rel=0, abs=1e-9)


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_train_as_by_peft_and_are_exported(kind, folder, ranks, tmp_path):
    plain, out = run_job(adapter_job(folder, kind, None)), folder / f"lora {kind}" / "trained.ckpt"
    base, initial = (str(folder / f"lora {kind}" / part) for part in ("base", "given"))
    assert plain.losses[-1] < plain.losses[0]
    for rank in ranks:
        report, evaluated = rank[f"lora {kind}"]
        assert report.outcomes["swapped"]
        assert report.outcomes["counts"] == plain.outcomes["counts"]
        assert report.losses == pytest.approx(plain.losses, abs=1e-4)
    exported, merged, file = tmp_path / "adapter", tmp_path / "merged", tmp_path / "file.ckpt"
    with pytest.raises(SystemExit):
        main(["convert", str(out), str(exported), "--verify"])
    main(["convert", str(out), str(exported)])
    main(["convert", str(out), str(merged), "--merge", "--verify"])
    before, after = (
        safetensors.load_file(Path(path, "adapter_model.safetensors"))
        for path in (initial, exported)
    )
    assert before.keys() == after.keys()
    assert not any(torch.equal(after[name].float(), before[name]) for name in before)
    assert peft.LoraConfig.from_pretrained(exported) == peft.LoraConfig.from_pretrained(initial)
    losses = [evaluate(base, str(exported), None, None), evaluate(base, initial, {}, str(out))]
    if ADAPTED[kind][1]:
        with pytest.raises(UnsupportedError, match="cannot be written as one file: lm_head"):
            consolidate(str(out), file, weights_only=True)
    else:
        consolidate(str(out), file, weights_only=True)
        losses += [evaluate(base, initial, layout, str(file)) for layout in (None, {})]
    assert losses == pytest.approx([evaluated] * len(losses), abs=1e-5)


def test_fully_trained_heads_cannot_be_switched_off(folder: Path) -> None:
    job = adapter_job(folder, "llama", {})
    module = Adapt(*job.model.args)  # type: ignore[union-attr]
    run_job(replace(job, model=lambda: module, steps=1))
    with (
        pytest.raises(UnsupportedError, match="modules_to_save cannot be switched off"),
        module.model.disable_adapter(),
    ):
        pass


def test_logits_of_a_call_with_labels_are_computed_again_without_gradients(folder: Path) -> None:
    results: dict[str, Any] = {}

    class ReadsLogits(FineTune):
        def loss(self, batch: Any) -> Tensor:
            call = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
            with pytest.raises(UnsupportedError, match="loss_chunk .7. stores no logits"):
                _ = self.model(**call).logits
            output = self.model(**call)
            with torch.no_grad():
                results["logits"] = output.logits
                results["expected"] = self.model(input_ids=batch["input_ids"]).logits
            return output.loss

    def make() -> FineTune:
        return ReadsLogits(str(folder / "llama"))

    run_job(Job(make, {"loss_chunk": 7}, data=partial(Texts, "llama"), steps=1))
    assert torch.equal(results["logits"], results["expected"])


def test_losses_in_forward_chunks_are_those_of_stored_logits(folder: Path) -> None:
    report = run_job(job_of(folder, "llama", {"loss_chunk": "forward"}))
    check_equal([report], twins(folder, "llama")[1], 1e-9)
