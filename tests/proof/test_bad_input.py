"""Tests that wrong input is refused with rule, values, reason and remedy, if possible before any
process starts.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import (
    CausalLM,
    CorruptDataError,
    GPTConfig,
    HuggingFaceCausalLM,
    MegatronStrategy,
    ParallelLayout,
    ParallelPlanError,
    RankMismatchError,
    TokenDataModule,
    UnsupportedError,
)
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.strategy.options.sizes import check_last_batch
from tests.world import run_world

SIZES = {
    "vocab_size": 257,
    "max_seq_length": 16,
    "num_layers": 2,
    "hidden_size": 36,
    "num_heads": 6,
}


class Windows(Dataset):
    """Windows that repeat a single token."""

    def __init__(self, num_samples: int = 12, token: int = 1, seq_length: int = 8) -> None:
        self.num_samples = num_samples
        self.sample = torch.full((seq_length,), token)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.sample, "labels": self.sample}


class ManualLM(CausalLM):
    """Module with manual optimization."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.automatic_optimization = False


def make_model(**sizes: Any) -> CausalLM:
    return CausalLM(GPTConfig.gpt2(**(SIZES | sizes)), schedule="constant")


def make_loader(batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Windows(**options), batch_size=batch_size)


def make_trainer(devices: int, strategy: MegatronStrategy, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_steps": 1}
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, **(quiet | options))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid to start a process and to join a process group."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("too late: the Trainer has begun to start processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)


def write_corpus(prefix: Path) -> str:
    with TokenFileWriter(prefix, tokenizer=ByteTokenizer()) as writer:
        for _ in range(8):
            writer.add_document(list(b"we the people of the united states"), num_bytes=34)
    return str(prefix)


NINE_HEADS = (
    "num_attention_heads (9) must be a multiple of tp (2), because each rank holds whole heads. "
    "Use tp of 1, 3 or 9."
)

#: devices, strategy, model, data, message
SIZES_THAT_DO_NOT_FIT = {
    "heads": (4, {"tp": 2}, make_model(num_heads=9), make_loader(), NINE_HEADS),
    "inner features": (
        2,
        {"tp": 2},
        make_model(ffn_hidden_size=15),
        make_loader(),
        "ffn_hidden_size (15) must be a multiple of tp (2), because each rank holds an equal part. "
        "Use tp of 1, 3, 5 or 15.",
    ),
    "layers": (
        4,
        {"pp": 4},
        make_model(),
        make_loader(),
        "num_layers (2) must be at least pp x vpp (4 x 1 = 4), because every virtual stage holds at least one layer. "
        "Use pp of 1 or 2 with vpp 1.",
    ),
    "layers of virtual stages": (
        2,
        {"pp": 2, "vpp": 2},
        make_model(num_layers=3),
        make_loader(),
        "num_layers (3) must be at least pp x vpp (2 x 2 = 4), because every virtual stage holds at least one layer. "
        "Use pp of 1 with vpp 2, or vpp of 1 with pp 2.",
    ),
    "batch": (
        2,
        {"tp": 2, "microbatch_size": 2},
        make_model(),
        make_loader(batch_size=3),
        "batch_size (3) of the training dataloader must be a multiple of microbatch_size (2), because a step is cut "
        "into equal microbatches; only the last batch of an epoch may be smaller. Use a microbatch_size of 1, 3, or a "
        "batch_size of 4.",
    ),
    "batch of token files": (
        2,
        {"tp": 2, "microbatch_size": 2},
        make_model(),
        TokenDataModule(train="none", seq_length=8, batch_size=3),
        "batch_size (3) of the training dataloader must be a multiple of microbatch_size (2), because a step is cut "
        "into equal microbatches; only the last batch of an epoch may be smaller. Use a microbatch_size of 1, 3, or a "
        "batch_size of 4.",
    ),
    "microbatches": (
        4,
        {"pp": 4, "vpp": 2, "microbatch_size": 2},
        make_model(num_layers=8),
        make_loader(batch_size=4),
        "schedule 'interleaved' needs at least as many microbatches as stages: num_microbatches is 2, pp is 4. A "
        "chunk would run its next microbatches before their inputs exist. Use 4 microbatches or more, or schedule "
        "'1f1b' with vpp of 1.",
    ),
    "microbatches of a V": (
        4,
        {"pp": 4, "vpp": 2, "schedule": "dualpipe-v"},
        make_model(num_layers=8),
        make_loader(batch_size=6),
        "schedule 'dualpipe-v' needs at least two microbatches per stage: num_microbatches is 6, pp is 4. With fewer, "
        "the two directions of the V would not overlap. Use 8 microbatches or more, or schedule 'zb-v'.",
    ),
    "groups of microbatches": (
        2,
        {"pp": 2, "vpp": 2, "microbatch_group_size": 5},
        make_model(num_layers=4),
        make_loader(batch_size=4),
        "microbatch groups must have at least pp microbatches and at most all: microbatch_group_size is 5, pp is 2, "
        "num_microbatches is 4; a smaller group would wait for its own output, and a larger one would never fill. Use "
        "microbatch_group_size of 2 or 4, or 4 microbatches.",
    ),
    "sequence under sequence parallelism": (
        2,
        {"tp": 2},
        make_model(),
        TokenDataModule(train="none", seq_length=9, batch_size=4),
        "seq_length (9) must be a multiple of tp (2) under sequence parallelism, because each rank holds an equal part "
        "of the sequence. Use 8 or 10, or sequence_parallel=False.",
    ),
    "sequence": (
        2,
        {"tp": 2},
        make_model(),
        TokenDataModule(train="none", seq_length=32, batch_size=4),
        "seq_length (32) must not exceed max_seq_length (16), because the model has no later positions. Use at most "
        "16 tokens or a larger max_seq_length.",
    ),
}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("case", SIZES_THAT_DO_NOT_FIT)
def test_sizes_that_do_not_fit_are_refused_before_any_process_is_started(case: str) -> None:
    devices, sizes, module, data, message = SIZES_THAT_DO_NOT_FIT[case]
    trainer = make_trainer(devices, MegatronStrategy(**sizes))
    with pytest.raises(ParallelPlanError) as caught:
        trainer.fit(module, data)
    assert str(caught.value) == message


@pytest.mark.usefixtures("no_process")
def test_validation_refuses_a_layout_as_training_does() -> None:
    with pytest.raises(ParallelPlanError, match=re.escape(NINE_HEADS)):
        make_trainer(4, MegatronStrategy(tp=2)).validate(make_model(num_heads=9), make_loader())


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("sizes", "experts", "message"),
    [
        (
            {"ep": 2},
            None,
            "ep (2) needs a model with experts, because it divides experts among ranks.",
        ),
        ({"tp": 2, "etp": 1}, None, "etp (1) needs a model with experts"),
        ({"ep": 4}, {"num_experts": 6}, "num_experts (6) must be a multiple of ep (4)"),
        (
            {"etp": 4},
            {"num_experts": 8},
            "ffn_hidden_size of experts (10) must be a multiple of etp (4)",
        ),
    ],
)
def test_axes_that_do_not_divide_the_experts_are_refused(
    sizes: Any, experts: Any, message: str
) -> None:
    mixture = None if experts is None else {"top_k": 2, "ffn_hidden_size": 10, **experts}
    with pytest.raises(ParallelPlanError, match=re.escape(message)):
        make_trainer(4, MegatronStrategy(**sizes)).fit(
            make_model(bias=False, experts=mixture), make_loader()
        )


@pytest.mark.usefixtures("no_process")
def test_a_hugging_face_folder_that_does_not_fit_is_refused_before_any_process(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(
        vocab_size=257, n_positions=16, n_embd=36, n_head=9, n_layer=2
    ).save_pretrained(tmp_path)
    module = HuggingFaceCausalLM(str(tmp_path), from_scratch=True)
    with pytest.raises(ParallelPlanError, match=re.escape(NINE_HEADS)):
        make_trainer(4, MegatronStrategy(tp=2)).fit(module, make_loader())
    data = TokenDataModule(train="none", seq_length=17, batch_size=4)
    with pytest.raises(
        ParallelPlanError, match=re.escape("seq_length (17) must not exceed max_seq_length (16)")
    ):
        make_trainer(3, MegatronStrategy(tp=3)).fit(module, data)


@pytest.mark.usefixtures("no_process")
def test_manual_optimization_is_refused_with_several_stages() -> None:
    message = (
        "manual optimization cannot be used with pp (2) above 1, because the schedule runs backward passes "
        "between forward passes. Use automatic optimization, or pp=1."
    )
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        make_trainer(2, MegatronStrategy(pp=2)).fit(
            ManualLM(GPTConfig.gpt2(**SIZES)), make_loader()
        )


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (
            {"cp_transport": "ring"},
            ParallelPlanError,
            "cp_transport ('ring') needs cp above 1, because only ranks that share a sequence exchange keys and values. "
            "Use cp of 2 or more, or leave cp_transport out.",
        ),
        (
            {"order": "tp-cp-xp-dp-pp"},
            ParallelPlanError,
            "order must name parallel axes joined by dashes: 'tp-cp-xp-dp-pp' names 'xp'. Use each of tp, cp, ep, dp "
            "or pp at most once.",
        ),
        (
            {"order": "tp-cp-tp-dp-pp"},
            ParallelPlanError,
            "order must name every axis at most once: 'tp-cp-tp-dp-pp' names tp 2 times, so its place is ambiguous. "
            "Use for example 'tp-cp-dp-pp'.",
        ),
        (
            {"tp": 2, "order": "cp-dp-pp"},
            ParallelPlanError,
            "order must name every axis of size above 1: 'cp-dp-pp' leaves out tp (2), so the order of its ranks "
            "is undefined. Use for example 'tp-cp-ep-dp-pp'.",
        ),
        (
            {"schedule": "zb-h3"},
            ParallelPlanError,
            "schedule must be 1f1b, interleaved, gpipe, zb-h1, zb-h2, zb-v, dualpipe-v, auto, a path that ends in .csv, "
            "a function or None: it is 'zb-h3'. A YAML file cannot name a function: pass the function itself in Python, "
            "or write its schedule into a file with plan.format_schedule.",
        ),
        (
            {"nccl_options": {"pipeline": {"max_ctas": 4}}},
            ParallelPlanError,
            "nccl_options must be given for axes with a group: 'pipeline' is not such an axis. Use world, "
            "tp, cp, dp, pp, data, model, embedding, position_embedding, etp, ep, edp.",
        ),
    ],
    ids=[
        "cp",
        "unknown axis",
        "axis twice",
        "axis left out",
        "unknown schedule",
        "options of no group",
    ],
)
def test_invalid_arguments_of_the_strategy_are_refused(
    sizes: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        MegatronStrategy(**sizes)
    assert str(caught.value) == message


@pytest.mark.usefixtures("no_process")
def test_a_world_that_the_layout_does_not_divide_is_refused_by_the_trainer() -> None:
    message = (
        "world_size (4) must be a multiple of tp x cp x pp (3 x 1 x 1 = 3), because every copy of the dense layers "
        "takes that many ranks. Use tp of 1, 2 or 4, or a multiple of 3 ranks (devices x num_nodes of the Trainer)."
    )
    with pytest.raises(ParallelPlanError) as caught:
        make_trainer(4, MegatronStrategy(tp=3))
    assert str(caught.value) == message


def test_a_layout_whose_grids_disagree_on_stages_is_refused() -> None:
    with pytest.raises(
        ParallelPlanError,
        match="the dense and the expert grid must have the same stages.*Put pp last",
    ):
        ParallelLayout(16, tp=4, pp=2, etp=1, ep=2, order="tp-cp-ep-pp-dp")


def test_token_ids_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(IndexError, match=re.escape("[0, 257): an id is 257")):
        make_trainer(1, MegatronStrategy()).fit(make_model(), make_loader(token=257))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    data = TokenDataModule(train=write_corpus(tmp_path / "text"), seq_length=8, batch_size=4)
    message = (
        "vocab_size (256) of the model must be at least the vocab_size of the data (257), because every token id "
        "selects a row of the embedding. Use a vocab_size of 257 or more, or the tokenizer of the model."
    )
    with pytest.raises(ParallelPlanError, match=re.escape(message)):
        make_trainer(1, MegatronStrategy()).fit(make_model(vocab_size=256), datamodule=data)


def test_too_long_sequences_of_a_dataloader_are_refused_at_their_first_use() -> None:
    with pytest.raises(
        ParallelPlanError, match=r"seq_length \(32\) must not exceed max_seq_length \(16\)"
    ):
        make_trainer(1, MegatronStrategy()).fit(make_model(), make_loader(seq_length=32))


ADD_UP = (
    "the lengths of the documents of a row must not exceed its 8 tokens: row 1 has [5, 4], which is 9. A document "
    "must end in its row. Use lengths with a sum of at most 8."
)
#: Batch without labels, and class and message of the error.
DOCUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lengths": (
        {"tokens": torch.ones(2, 8, dtype=torch.int64), "lengths": torch.tensor([[3, 5], [5, 4]])},
        ParallelPlanError,
        ADD_UP,
    ),
    "borders": (
        {
            "input_ids": torch.ones(1, 8, dtype=torch.int64),
            "cu_seq_lens_q": torch.tensor([0, 3, 9]),
        },
        ParallelPlanError,
        "cu_seq_lens_q must rise from 0 to at most the 8 tokens of the row: it is [0, 3, 9]. Each number is the end "
        "of a document and the start of the next one. Use the cumulative lengths of the documents, starting with 0.",
    ),
    "falling borders": (
        {
            "input_ids": torch.ones(1, 8, dtype=torch.int64),
            "cu_seq_lens_q": torch.tensor([0, 5, 3]),
        },
        ParallelPlanError,
        "must rise from 0 to at most the 8 tokens of the row: it is [0, 5, 3]",
    ),
    "longest": (
        {
            "input_ids": torch.ones(1, 8, dtype=torch.int64),
            "cu_seq_lens_q": torch.tensor([0, 5, 8]),
            "max_length_q": 4,
        },
        ParallelPlanError,
        "the length of a document must be from 0 to 4 tokens: row 0 has [5, 3]. The kernel is launched for the "
        "longest document. Cut the document, or raise its bound (span.longest, max_length_q).",
    ),
    "mask": (
        {
            "input_ids": torch.ones(1, 8, dtype=torch.int64),
            "cu_seq_lens_q": torch.tensor([0, 8]),
            "attention_mask": torch.ones(1, 8),
        },
        UnsupportedError,
        "a batch must have either attention_mask or cu_seq_lens_q: both were given. Packed rows have padding only at "
        "their end. Leave one of them out.",
    ),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_documents_that_do_not_fit_their_rows_are_refused_before_a_batch_moves(case: str) -> None:
    batch, error, message = DOCUMENTS[case]
    labels = torch.ones(len(next(iter(batch.values()))), 8, dtype=torch.int64)
    with pytest.raises(error, match=re.escape(message)):
        make_trainer(1, MegatronStrategy()).fit(
            make_model(), DataLoader([batch | {"labels": labels}], batch_size=None)
        )


@pytest.mark.usefixtures("no_process")
def test_context_parallelism_that_does_not_fit_is_refused_before_any_process() -> None:
    data = TokenDataModule(train="none", seq_length=10, batch_size=4)
    message = re.escape("seq_length (10) must be a multiple of 2 cp (4)")
    with pytest.raises(ParallelPlanError, match=message):
        make_trainer(2, MegatronStrategy(cp=2)).fit(make_model(), data)
    with pytest.raises(UnsupportedError, match="cannot be used with attention dropout"):
        make_trainer(2, MegatronStrategy(cp=2, cp_transport="ring")).fit(
            make_model(attention_dropout=0.1), make_loader()
        )
    # Any transport shares any number of heads over cp, after tp has cut them.
    with pytest.raises(ParallelPlanError, match=re.escape(NINE_HEADS)):
        make_trainer(4, MegatronStrategy(tp=2, cp=2)).fit(make_model(num_heads=9), make_loader())


def test_a_truncated_index_is_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "text")
    path = tmp_path / "text.idx"
    num_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    message = (
        f"text.idx is truncated: {num_bytes} bytes expected for 8 sequences and 9 document entries, "
        f"{num_bytes - 5} found."
    )
    with pytest.raises(CorruptDataError, match=re.escape(message)):
        make_trainer(1, MegatronStrategy()).fit(
            make_model(), TokenDataModule(train=prefix, seq_length=8, batch_size=4)
        )


def test_the_wrong_tokenizer_for_a_corpus_is_refused(tmp_path: Path) -> None:
    class OtherBytes(ByteTokenizer):
        name, fingerprint = "other", "0123456789abcdef"

    data = TokenDataModule(train=write_corpus(tmp_path / "text"), seq_length=8, batch_size=4)
    data.tokenizer = OtherBytes()
    message = r"the tokenizer of a run must be the one with which the corpus was written, .*'bytes' .* but 'other' \(0123456789ab\) was "
    with pytest.raises(
        CorruptDataError,
        match=message + r"given\..* Use tokenizer 'bytes' or write the corpus again",
    ):
        make_trainer(1, MegatronStrategy()).fit(make_model(), data)


class NeverBuiltLM(CausalLM):
    """Module whose model must not be built."""

    def configure_model(self) -> None:
        raise AssertionError("ranks that disagree must not build a model")


class SlowerHeadLM(CausalLM):
    """Train the output head, the copy of the embedding on the last stage, in a separate parameter
    group.
    """

    def configure_optimizers(self) -> Any:
        heads = [parameter for name, parameter in self.named_parameters() if "head" in name]
        bodies = [parameter for name, parameter in self.named_parameters() if "head" not in name]
        return torch.optim.SGD([{"params": bodies}, {"params": heads, "lr": 0.01}], lr=0.1)


class UnevenLM(CausalLM):
    """Give the embedding's stage a parameter group that the stage of its copy does not have."""

    def configure_optimizers(self) -> Any:
        embeddings = [
            parameter for name, parameter in self.named_parameters() if "embedding" in name
        ]
        bodies = [
            parameter for name, parameter in self.named_parameters() if "embedding" not in name
        ]
        slower_groups = [{"params": embeddings, "lr": 0.01}] if embeddings else []
        return torch.optim.SGD([{"params": bodies}, *slower_groups], lr=0.1)


class LateFrozenLM(CausalLM):
    """Freeze the embedding by its name when the fit starts."""

    def on_fit_start(self) -> None:
        self.before = {
            name: parameter.detach().clone() for name, parameter in self.named_parameters()
        }
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("embedding.word" not in name)


def _check_embedding_frozen_at_fit_start(rank: int, size: int) -> None:
    frozen = LateFrozenLM(GPTConfig.gpt2(**SIZES))
    make_trainer(2, MegatronStrategy(pp=2)).fit(frozen, make_loader())
    tied = "model.embedding.word.weight" if rank == 0 else "model.head.weight"
    unchanged = {
        name
        for name, parameter in frozen.named_parameters()
        if torch.equal(parameter, frozen.before[name])
    }
    assert unchanged == {tied}, "the copy on the last stage is trained as the embedding is"


def _check_refusal_of_ranks_that_disagree(rank: int, size: int) -> None:
    differs = rank == 1
    with pytest.raises(
        RankMismatchError, match=r"configuration, versions and data: rank 1 has tp=1, the others 2"
    ):
        make_trainer(2, MegatronStrategy(tp=1 if differs else 2)).fit(
            NeverBuiltLM(GPTConfig.gpt2(**SIZES)), make_loader()
        )
    with pytest.raises(
        RankMismatchError, match=r"rank 1 has strategy.microbatch_size='2', the others '1'\."
    ):
        make_trainer(2, MegatronStrategy(tp=2, microbatch_size=2 if differs else 1)).fit(
            NeverBuiltLM(GPTConfig.gpt2(**SIZES)), make_loader()
        )
    with pytest.raises(
        RankMismatchError, match=r"rank 1 has trainer.gradient_clip_val='1.0', the others 'None'\."
    ):
        make_trainer(2, MegatronStrategy(pp=2), gradient_clip_val=1.0 if differs else None).fit(
            NeverBuiltLM(GPTConfig.gpt2(**SIZES)), make_loader()
        )
    with pytest.raises(
        RankMismatchError, match=r"rank 1 has train dataloader 0: batches='2', the others '3'"
    ):
        make_trainer(2, MegatronStrategy(tp=2)).fit(
            make_model(), make_loader(num_samples=8 if differs else 12)
        )
    with pytest.raises(
        RankMismatchError,
        match="rank 1 has training batch 1 of its data-parallel rank=.*Call seed_everything",
    ):
        make_trainer(2, MegatronStrategy(tp=2)).fit(
            make_model(), make_loader(token=2 if differs else 1)
        )


def _check_refusal_of_different_groups_of_tied_copies(rank: int, size: int) -> None:
    message = (
        "a tied embedding must be trained alike on the first and the last stage: 'model.embedding.word.weight' is in "
        "group 1 with"
    )
    with pytest.raises(
        UnsupportedError, match=re.escape(message) + r".*Build the same number of groups"
    ):
        make_trainer(2, MegatronStrategy(pp=2)).fit(
            UnevenLM(GPTConfig.gpt2(**SIZES)), make_loader()
        )


def _check_tied_head_in_a_separate_group(rank: int, size: int) -> None:
    module = SlowerHeadLM(GPTConfig.gpt2(**SIZES))
    fitted = make_trainer(2, MegatronStrategy(pp=2))
    fitted.fit(module, make_loader())
    slower = [len(group["params"]) for group in fitted.optimizers[0].param_groups][1]
    assert slower == 0, "one process has no head of its own to train more slowly"


def _run_on_two_ranks(rank: int, size: int) -> None:
    _check_refusal_of_ranks_that_disagree(rank, size)
    _check_refusal_of_different_groups_of_tied_copies(rank, size)
    _check_tied_head_in_a_separate_group(rank, size)
    _check_embedding_frozen_at_fit_start(rank, size)


def test_two_ranks_refuse_disagreements_and_train_tied_copies_together() -> None:
    run_world(_run_on_two_ranks, 2)


def test_a_last_batch_with_too_few_microbatches_is_refused_before_the_first_step():
    options = MegatronStrategy(pp=4, vpp=2).options
    layout = ParallelLayout(4, pp=4, vpp=2)
    check_last_batch(0, options, layout)
    check_last_batch(4, options, layout)
    with pytest.raises(
        ParallelPlanError, match=r"it has 3 samples, which are 3 microbatches. Use drop_last=True"
    ):
        check_last_batch(3, options, layout)
