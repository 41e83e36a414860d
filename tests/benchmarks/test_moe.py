"""The benchmark of experts draws and measures its routings on CPUs, and writes its tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import headline
from benchmarks.routing import Popularity, RankLoad, popularity_of
from lightning_megatron.experts.transport.rank_rows import StepRows
from lightning_megatron.plan.clone_cost import CloneCost


def test_the_headline_benchmark_estimates_memory_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def peak(*options: str) -> float:
        headline.main(["--estimate-only", *options])
        estimate = re.search(r"estimate: (\d+\.\d) GiB a GPU", capsys.readouterr().out)
        assert estimate is not None
        return float(estimate.group(1))

    # 131,072 and 40,960 rows of 48 layers have 2 * 768 numbers in bfloat16 and a probability each.
    # Rows that are kept have 2,048 more numbers.
    rows, row = 48 * (131_072 - 40_960), 2 * 2 * 768 + 4
    limited = peak()
    assert peak("--expert-rows", "0") - limited == pytest.approx(rows * row / 2**30, rel=0.02)
    assert limited < headline.MOST_GIB
    without_recomputation = ("--recompute", "none")
    saved = peak("--expert-rows", "0", *without_recomputation) - peak(*without_recomputation)
    assert saved == pytest.approx(rows * (row + 2 * 2_048) / 2**30, rel=0.02)
    assert peak("--layers", "2") < limited / 4
    with pytest.raises(SystemExit, match="nothing was run"):
        headline.main(["--most", "100", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def test_choices_of_experts_follow_the_popularity_without_repeats() -> None:
    popularity = popularity_of("zipf:1.0:ordered")
    assert popularity == Popularity(1.0, is_ordered=True)
    shares = popularity.shares(16, layer=3)
    assert shares[0] / shares[3] == pytest.approx(4.0)
    single = popularity.choices(20_000, 1, 16, 3, 0, "cpu")
    assert torch.allclose(single.flatten().bincount() / 20_000, shares.float(), atol=0.01)
    several = popularity.choices(200, 5, 16, 3, 0, "cpu")
    assert all(len(set(row)) == 5 for row in several.tolist())
    assert torch.equal(several, popularity.choices(200, 5, 16, 3, 0, "cpu"))
    assert not torch.equal(several, popularity.choices(200, 5, 16, 3, 1, "cpu"))
    drawn = Popularity(1.0, is_ordered=False)
    assert torch.allclose(drawn.shares(16, 3).sort().values, shares.sort().values)
    assert not torch.equal(drawn.shares(16, 3), drawn.shares(16, 4))


@pytest.mark.parametrize("name", ["uniform", "zipf:1.0", "zipf:1.0:sorted"])
def test_unknown_routings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"routing must be balanced.*zipf:EXPONENT:random"):
        popularity_of(name)
    assert popularity_of("natural") is None


def test_the_predicted_gain_is_the_gain_of_the_busiest_rank() -> None:
    # Two microbatches have 10 rows fewer and one clone each: 60 operations a parameter take 6
    # seconds, and 16 bytes take 4.
    cost = CloneCost(products=10, bandwidth=4)
    rows = StepRows(
        before=torch.tensor([30.0, 10.0]),
        after=torch.tensor([20.0, 20.0]),
        moved=torch.tensor(0.25),
        clones=torch.tensor(1.0),
        away=torch.tensor([1.0, 0.0]),
        num_microbatches=torch.tensor(2.0),
        needed=torch.tensor(11.0),
    )
    figures = RankLoad(1, cost).figures([rows])
    assert figures["predicted_gain_ms"] == 2000.0
    assert (figures["max_over_mean"], figures["max_over_mean_after"]) == (1.5, 1.0)
    assert figures["rows_needed"] == 11


def test_a_drawn_routing_is_measured_on_two_ranks(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks.moe", "--devices", "2", "--accelerator", "cpu"]
    line += ["--shapes", "tiny_mixtral", "--routing", "zipf:1.0:ordered", "--steps", "2"]
    line += ["--clones", "0", "1"]
    subprocess.run([*line, "--out", str(tmp_path)], check=True, capture_output=True)
    result = json.loads((tmp_path / "tiny_mixtral_zipf_1.0_ordered.json").read_text())
    ranks = result["RankLoad"]
    # Each of 64 tokens of a rank has two of four experts. The first two are on the first rank.
    popularity = Popularity(1.0, is_ordered=True)
    busiest = [
        sum(int((popularity.choices(64, 2, 4, layer, rank, "cpu") < 2).sum()) for rank in range(2))
        for layer in range(2)
    ]
    assert ranks["rows_needed"] == max(busiest)
    assert ranks["max_over_mean"] == pytest.approx(sum(busiest) / 2 / (2 * 64), abs=1e-3)
    assert (ranks["moved"], ranks["clones"]) == (0, 0)
    cloned = json.loads((tmp_path / "tiny_mixtral_zipf_1.0_ordered_clones1.json").read_text())
    assert cloned["RankLoad"]["max_over_mean"] == ranks["max_over_mean"]
    assert cloned["RankLoad"]["max_over_mean_after"] < 1.02
    assert cloned["RankLoad"]["clones"] == 1.0
    assert cloned["losses"] == pytest.approx(result["losses"], rel=1e-3)
    table = (tmp_path / "table.md").read_text()
    assert "| ours | tiny_mixtral, zipf:1.0:ordered, 1 clones | ep2 |" in table
    assert "| ours | tiny_mixtral, zipf:1.0:ordered | ep2 |" in table
    assert f"| {ranks['max_over_mean']} | {ranks['max_over_mean']} | 0.0% |" in table
