"""Wrong input is refused with its values and a remedy, if possible before any process starts, and
ranks that disagree are refused together.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import (
    CausalLM,
    GPTConfig,
    HuggingFaceCausalLM,
    MegatronStrategy,
    ParallelLayout,
    TokenDataModule,
)
from lightning_megatron.cli.main import main
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import (
    CorruptDataError,
    ParallelPlanError,
    RankMismatchError,
    UnsupportedError,
)
from lightning_megatron.strategy.options.sizes import check_last_batch
from tests.fits import Job, strategy_with, trainer_of
from tests.refusals import check_refusals
from tests.world import run_world

SIZES = {
    "vocab_size": 257, "max_seq_length": 16, "num_layers": 2, "hidden_size": 36, "num_heads": 6,
}  # fmt: skip


def model_of(**sizes: Any) -> CausalLM:
    return CausalLM(GPTConfig.gpt2(**(SIZES | sizes)), schedule="constant")


def loader_of(
    batch_size: int = 4, num_samples: int = 12, token: int = 1, seq_length: int = 8
) -> DataLoader:
    """Return windows that repeat a single token."""
    window = torch.full((seq_length,), token)
    rows: Any = [{"tokens": window, "labels": window}] * num_samples
    return DataLoader(rows, batch_size=batch_size)


def tokens_of(seq_length: int = 8, batch_size: int = 4) -> TokenDataModule:
    return TokenDataModule(train="none", seq_length=seq_length, batch_size=batch_size)


def fit(
    module: Any = None, data: Any = None, size: int = 1, trainer: Any = None, **layout: Any
) -> Any:
    options = {"microbatch_size": None, "job.check_microbatches": True, **layout}
    limits = {"gradient_clip_val": None, **(trainer or {})}
    job = Job(strategy=options, steps=1, trainer=limits, precision="32-true")
    fitted = trainer_of(job, size)
    fitted.fit(module or model_of(), data or loader_of())
    return fitted


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


NINE_HEADS = "num_attention_heads (9) must be a multiple of tp (2)"
UNEQUAL = "batch_size (3) of the training dataloader must be a multiple of microbatch_size (2)"
EXPERTS = {"bias": False, "experts": {"num_experts": 6, "top_k": 2, "ffn_hidden_size": 10}}
#: Sizes of the model, data, number of processes, layout, and a phrase of the error.
REFUSED: list[tuple[dict[str, Any], Any, int, dict[str, Any], str]] = [
    ({"num_heads": 9}, None, 4, {"tp": 2}, NINE_HEADS),
    ({}, None, 4, {"pp": 4}, "num_layers (2) must be at least pp x vpp (4 x 1 = 4)"),
    ({}, None, 4, {"tp": 3}, "world_size (4) must be a multiple of tp x cp x pp"),
    ({"num_layers": 3}, None, 2, {"pp": 2, "vpp": 2}, "Use pp x vpp of at most 3."),
    (
        {"num_layers": 4}, None, 2, {"pp": 2, "vpp": 2, "pipeline.microbatch_group_size": 5},
        "microbatch groups must have at least pp (2) microbatches, also the last one",
    ),
    ({}, loader_of(3), 2, {"tp": 2, "microbatch_size": 2}, UNEQUAL),
    ({}, tokens_of(batch_size=3), 2, {"tp": 2, "microbatch_size": 2}, UNEQUAL),
    (
        {"num_layers": 8}, loader_of(6), 4, {"pp": 4, "vpp": 2, "schedule": "dualpipe-v"},
        "Use 8 microbatches or more, or schedule 'zb-v'.",
    ),
    ({}, tokens_of(9), 2, {"tp": 2}, "Use 8 or 10, or sequence_parallel=False."),
    ({}, tokens_of(32), 2, {"tp": 2}, "seq_length (32) must not exceed max_seq_length (16)"),
    ({}, tokens_of(10), 2, {"cp": 2}, "seq_length (10) must be a multiple of 2 cp (4)"),
    ({"attention_dropout": 0.1}, None, 2, {"cp": 2, "context.transport": "ring"}, "cannot be used with attention dropout"),
    ({}, None, 4, {"ep": 2}, "ep (2) needs a model with experts"),
    (EXPERTS, None, 4, {"ep": 4}, "num_experts (6) must be a multiple of ep (4)"),
]  # fmt: skip


@pytest.mark.usefixtures("no_process")
def test_sizes_that_do_not_fit_are_refused_before_any_process_is_started() -> None:
    errors = (ParallelPlanError, UnsupportedError)
    for sizes, data, size, layout, phrase in REFUSED:
        with pytest.raises(errors, match=re.escape(phrase)):
            fit(model_of(**sizes), data, size, **layout)
    manual = model_of()
    manual.automatic_optimization = False
    with pytest.raises(errors, match=r"manual optimization cannot be used with pp \(2\) above 1"):
        fit(manual, size=2, pp=2)
    with pytest.raises(errors, match=re.escape(NINE_HEADS)):
        trainer_of(Job(strategy={"tp": 2}), 4).validate(model_of(num_heads=9), loader_of())


@pytest.mark.usefixtures("no_process")
def test_a_hugging_face_folder_that_does_not_fit_is_refused_before_any_process(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 257, "n_positions": 16, "n_embd": 36, "n_head": 9, "n_layer": 2}
    transformers.GPT2Config(**sizes).save_pretrained(tmp_path)
    module = HuggingFaceCausalLM(str(tmp_path), from_scratch=True)
    with pytest.raises(ParallelPlanError, match=re.escape(NINE_HEADS)):
        fit(module, size=4, tp=2)
    with pytest.raises(ParallelPlanError, match=re.escape("must not exceed max_seq_length (16)")):
        fit(module, tokens_of(17), 3, tp=3)


BROKEN = "{% for message in messages %}\n{% generation %}{{ message }{% endgeneration %}"
CPU = "--trainer.accelerator cpu --trainer.devices 2 --trainer.precision 32-true"
TEXTS = f"fit -c recipe:pretrain_text {CPU} --data.train FOLDER/text.txt"
TOKENS = f"fit -c recipe:pretrain_text {CPU} --data lightning_megatron.TokenDataModule --data.train"
CHAT = (
    f"fit -c recipe:sft_hf {CPU} --model.path FOLDER --data.train FOLDER/rows.jsonl "
    "--data.val FOLDER/rows.jsonl"
)
#: Commands on the files of a test's folder, and a phrase of their error.
INPUTS = {
    f"{TEXTS} --data.tokenizer nobody": "tokenizer 'nobody' does not exist. Use 'bytes',",
    f"{TEXTS} --data.tokenizer bytes --model.config.vocab_size 256": "another tokenizer.",
    f"{TOKENS} FOLDER/intact --data.tokenizer bytes --model.config.vocab_size 256": "another tokenizer.",
    f"{TEXTS} --data.val FOLDER/none": "FOLDER/none' names none of these. Give such a path.",
    f"{TOKENS} FOLDER/intact --data.tokenizer nobody": "tokenizer 'nobody' does not exist",
    f"{TOKENS} FOLDER/intact": "intact was written with 'bytes' (62b6f2e28672) but 'gpt2' (e8796d364601)",
    f"{TOKENS} FOLDER/none": "FOLDER/none.idx cannot be read: No such file",
    f"{TOKENS} FOLDER/odd": "FOLDER/odd.idx is not a token index: it starts with",
    f"{TOKENS} FOLDER/intact --data.val FOLDER/cut": "FOLDER/cut.bin is truncated: cut.idx describes",
    f"{TOKENS} FOLDER/alone": "FOLDER/alone.bin is missing: alone.idx describes",
    f"{CHAT} --data.tokenizer FOLDER/none": "must be a local folder with tokenizer.json:",
    CHAT: "the tokenizer of FOLDER must have one chat template: it has none or several.",
    f"{CHAT} --data.chat_template FOLDER/none.jinja": "FOLDER/none.jinja cannot be read: No such",
    f"{CHAT} --data.chat_template FOLDER/broken": "FOLDER/broken is not Jinja: unexpected '}' in its line 2.",
}  # fmt: skip


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Write a model's folder without its weights, text, conversations and damaged token files."""
    sizes = {"vocab_size": 257, "n_positions": 2048, "n_embd": 36, "n_head": 4, "n_layer": 2}
    texts = {
        "config.json": json.dumps({"model_type": "gpt2", **sizes}),
        "tokenizer.json": "{}",
        "text.txt": "we the people",
        "rows.jsonl": json.dumps({"prompt": "why", "completion": "so"}),
        "broken": BROKEN,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name in ("intact", "odd", "cut", "alone"):
        write_corpus(tmp_path / name)
    (tmp_path / "odd.idx").write_bytes(b"x" * 100)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-2])
    (tmp_path / "alone.bin").unlink()
    return tmp_path


@pytest.mark.usefixtures("no_process")
def test_missing_and_damaged_inputs_end_a_command_before_any_process(inputs, monkeypatch, capfd):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    for command, phrase in INPUTS.items():
        with pytest.raises(SystemExit):
            main(command.replace("FOLDER", str(inputs)).split())
        lines = capfd.readouterr().err.splitlines()
        [told] = [line for line in lines if "error" in line or "rank" in line]
        # A remedy may have a line of its own.
        assert phrase.replace("FOLDER", str(inputs)) in "".join(lines[-2:]), (command, lines)
        assert told in lines[-2:], (command, lines)


class WritesItsText(TokenDataModule):
    """Data module that writes its token file after the processes have started."""

    def prepare_data(self) -> None:
        raise LookupError("it would write the token file")


def test_inputs_that_the_user_writes_later_are_not_refused_before_launch(tmp_path):
    with pytest.raises(LookupError, match="would write"):
        fit(data=WritesItsText(train=str(tmp_path / "later"), seq_length=8, batch_size=4))
    data = TokenDataModule(train="none", val=write_corpus(tmp_path / "val"), tokenizer="bytes")
    data.check_before_launch("validate")
    # A name on the Hub needs a download.
    on_hub = TokenDataModule(train=write_corpus(tmp_path / "train"), tokenizer="nobody/nothing")
    on_hub.check_before_launch("fit")
    with pytest.raises(CorruptDataError, match=r"none\.idx cannot be read"):
        data.check_before_launch("fit")


def test_invalid_arguments_of_the_strategy_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"context.transport": "ring"}, "Use cp of 2 or more, or leave context.transport out."),
        ({"job.order": "tp-cp-xp-dp-pp"}, "it is 'tp-cp-xp-dp-pp'. Use each of tp"),
        ({"job.order": "tp-cp-tp-dp-pp"}, "each at most once: it is 'tp-cp-tp-dp-pp'"),
        ({"job.nccl": {"pipeline": {"max_ctas": 4}}}, "'pipeline' is not one of them"),
        ({"tp": 2, "job.order": "cp-dp-pp"}, "'cp-dp-pp' leaves out tp (2)"),
        ({"schedule": "zb-h3"}, "a function or None: it is 'zb-h3'"),
    ]
    check_refusals(strategy_with, cases)


def test_a_last_batch_with_too_few_microbatches_is_refused_before_the_first_step() -> None:
    options, layout = MegatronStrategy(pp=4, vpp=2).options, ParallelLayout(4, pp=4, vpp=2)
    check_last_batch(0, options, layout)
    check_last_batch(4, options, layout)
    with pytest.raises(ParallelPlanError, match=r"3 microbatches. Use drop_last=True"):
        check_last_batch(3, options, layout)


def row(*shape: int, **more: Any) -> dict[str, Any]:
    name = "tokens" if "lengths" in more else "input_ids"
    ones = torch.ones(*shape, dtype=torch.int64)
    return {name: ones, "labels": ones, **more}


#: Batches whose documents do not fit their rows.
DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    (row(2, 8, lengths=torch.tensor([[3, 5], [5, 4]])), "row 1 has [5, 4], which is 9"),
    (
        row(1, 8, cu_seq_lens_q=torch.tensor([0, 3, 9])),
        "cu_seq_lens_q must rise from 0 to at most the 8 tokens of the row: it is [0, 3, 9]",
    ),
    (
        row(1, 8, cu_seq_lens_q=torch.tensor([0, 5, 3])),
        "must rise from 0 to at most the 8 tokens of the row: it is [0, 5, 3]",
    ),
    (
        row(1, 8, cu_seq_lens_q=torch.tensor([0, 5, 8]), max_length_q=4),
        "the length of a document must be from 0 to 4 tokens: row 0 has [5, 3]",
    ),
    (
        row(1, 8, cu_seq_lens_q=torch.tensor([0, 8]), attention_mask=torch.ones(1, 8)),
        "a batch must have either attention_mask or cu_seq_lens_q",
    ),
]


def test_documents_that_do_not_fit_their_rows_are_refused_before_a_batch_moves() -> None:
    for batch, phrase in DOCUMENTS:
        with pytest.raises((ParallelPlanError, UnsupportedError), match=re.escape(phrase)):
            fit(data=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match=re.escape("[0, 257): an id is 257")):
        fit(data=loader_of(token=257))
    data = TokenDataModule(train=write_corpus(tmp_path / "text"), seq_length=8, batch_size=4)
    with pytest.raises(ParallelPlanError, match="Use a vocab_size of 257 or more"):
        fit(model_of(vocab_size=256), data)
    with pytest.raises(ParallelPlanError, match=r"\(32\) must not exceed max_seq_length \(16\)"):
        fit(data=loader_of(seq_length=32))


def test_a_corpus_of_another_tokenizer_or_with_a_truncated_index_is_refused(tmp_path: Path) -> None:
    class OtherBytes(ByteTokenizer):
        name, fingerprint = "other", "0123456789abcdef"

    data = TokenDataModule(train=write_corpus(tmp_path / "text"), seq_length=8, batch_size=4)
    data.tokenizer = OtherBytes()
    with pytest.raises(CorruptDataError, match="Use tokenizer 'bytes' or write the corpus again"):
        fit(data=data)
    path = tmp_path / "text.idx"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptDataError, match=r"text.idx is truncated: \d+ bytes expected"):
        fit(data=TokenDataModule(train=str(tmp_path / "text"), seq_length=8, batch_size=4))


class NeverBuiltLM(CausalLM):
    """Module whose model must not be built."""

    def __init__(self) -> None:
        super().__init__(GPTConfig.gpt2(**SIZES))

    def configure_model(self) -> None:
        raise AssertionError("ranks that disagree must not build a model")


class GroupedLM(CausalLM):
    """Train parameters of a name in a separate group, if there are any or always."""

    def __init__(self, part: str, is_always: bool) -> None:
        super().__init__(GPTConfig.gpt2(**SIZES))
        self.part, self.is_always = part, is_always

    def configure_optimizers(self) -> Any:
        groups: tuple[list[Any], list[Any]] = ([], [])
        for name, parameter in self.named_parameters():
            groups[self.part in name].append(parameter)
        kept = [group for group in groups if group or self.is_always]
        return torch.optim.SGD([{"params": group} for group in kept], lr=0.1)


class LateFrozenLM(CausalLM):
    """Freeze the embedding by its name when the fit starts."""

    def on_fit_start(self) -> None:
        self.before = {name: p.detach().clone() for name, p in self.named_parameters()}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("embedding.word" not in name)


def run_two(rank: int, size: int) -> None:
    differs = rank == 1
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tp": 1 if differs else 2}, "configuration, versions and data: rank 1 has tp=1"),
        (
            {"tp": 2, "microbatch_size": 2 if differs else 1},
            r"rank 1 has strategy.microbatch_size='2', the others '1'\.",
        ),
        (
            {"pp": 2, "trainer": {"gradient_clip_val": 1.0 if differs else None}},
            r"rank 1 has trainer.gradient_clip_val='1.0', the others 'None'\.",
        ),
    ]
    for options, message in cases:
        with pytest.raises(RankMismatchError, match=message):
            fit(NeverBuiltLM(), size=2, **options)
    with pytest.raises(RankMismatchError, match="train dataloader 0: batches='2', the others '3'"):
        fit(data=loader_of(num_samples=8 if differs else 12), size=2, tp=2)
    with pytest.raises(RankMismatchError, match="rank 1 has training batch 1 .*Call seed_every"):
        fit(data=loader_of(token=2 if differs else 1), size=2, tp=2)
    # Copies of a tied weight are trained as one parameter.
    with pytest.raises(UnsupportedError, match="trained alike on the first and the last stage"):
        fit(GroupedLM("embedding", False), size=2, pp=2)
    fitted = fit(GroupedLM("head", True), size=2, pp=2)
    slower = fitted.optimizers[0].param_groups[1]["params"]
    assert not slower, "one process has no head of its own to train more slowly"
    frozen = LateFrozenLM(GPTConfig.gpt2(**SIZES))
    fit(frozen, size=2, pp=2)
    tied = "model.embedding.word.weight" if rank == 0 else "model.head.weight"
    unchanged = {n for n, p in frozen.named_parameters() if torch.equal(p, frozen.before[n])}
    assert unchanged == {tied}, "the copy on the last stage is trained as the embedding is"


def test_two_ranks_refuse_disagreements_and_train_tied_copies_together() -> None:
    run_world(run_two, 2)
