"""The benchmark of context parallelism trains the cases that its rows name."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from benchmarks import context_parallel, context_steps
from benchmarks.context_parallel import ContextCase, case_of, flop_rule, parser, run_ours
from benchmarks.context_steps import document_lengths, seen_length
from tests.sweeps import chosen


def test_a_case_has_the_ranks_and_the_transport_of_its_name() -> None:
    assert case_of("4") == ContextCase(4, "auto")
    assert case_of("2:ring") == ContextCase(2, "ring")
    assert str(case_of("2:ring")) == "2 ring"


@pytest.mark.parametrize("name", ["0", "ring", "4:bus", "-2:ring"])
def test_unknown_cases_are_refused(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match="a number of ranks and a transport"):
        case_of(name)


@pytest.mark.parametrize("length", [64, 4096, 131072])
def test_documents_fill_rows_with_mixed_lengths(length: int) -> None:
    lengths = document_lengths(length)
    assert sum(lengths) == length
    assert min(lengths) > 0
    assert max(lengths) < length or length == 64
    assert 0 < seen_length(lengths) <= length


def test_packed_and_masked_rows_have_the_same_losses_with_any_transport(tmp_path: Path) -> None:
    line = ["--model", "tiny_llama", "--lengths", "256", "--accelerator", "cpu", "--steps", "2"]
    line += ["--warmup", "1", "--cases", "1", "2:ring", "--out", str(tmp_path)]
    line += ["--profile-steps", "1"]
    args = parser().parse_args(line)
    single, ring = args.cases
    runs = {
        "1_auto_256_packed": (single, "packed"),
        "1_auto_256_mask": (single, "mask"),
        "2_ring_256_packed": (ring, "packed"),
    }
    runs = chosen(runs, "1_auto_256_mask", "2_ring_256_packed")
    rows = [run_ours(args, case, 256, kind) for case, kind in runs.values()]
    results = [json.loads((tmp_path / f"tiny_llama_{name}.json").read_text()) for name in runs]
    assert results[0]["documents"] > 1
    for result in results[1:]:
        assert result["losses"][:3] == pytest.approx(results[0]["losses"][:3], rel=1e-2), rows
    assert rows[-1].startswith("| ours | 2 ring | 256 | packed |")
    assert len(results[-1]["losses"]) == 4, "one further step is profiled"
    assert (tmp_path / "tiny_llama_2_ring_256_packed.trace.json.gz").exists()
    assert rows[-1].split(" | ")[-2] == "", "without a GPU, no time of communication is claimed"
    assert len({row.count("|") for row in rows}) == 1
    full, packed = flop_rule(args)[-1].split(" in whole rows, ")
    assert float(full.split()[-1]) > float(packed.split()[0])


def test_rows_of_transformers_name_their_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")

    def train_here(line: list[str], *arguments: object) -> str:
        module, *options = line[1:]
        assert module == "benchmarks.context_steps"
        context_steps.train_transformers(context_steps.parser().parse_args(options))
        return ""

    monkeypatch.setattr(context_parallel, "launch", train_here)
    line = ["--model", "tiny_llama", "--lengths", "256", "--accelerator", "cpu", "--steps", "1"]
    line += ["--warmup", "1", "--cases", "1", "2:ring", "--out", str(tmp_path)]
    monkeypatch.setattr(
        "sys.argv", ["benchmark", *line, "--rows", "transformers", "--attention", "auto", "sdpa"]
    )
    context_parallel.main()
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("| trans")]
    assert [row.split(" | ")[:4] for row in rows] == [
        ["| transformers (sdpa)", "1", "256", "transformers"]
    ] * 2
    assert {row.count("|") for row in rows} == {context_parallel.TABLE[0].count("|")}
