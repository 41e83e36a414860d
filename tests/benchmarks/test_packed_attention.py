"""transformers trains packed documents equally by torch's flash attention and by a dense mask."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import context_steps, packed_attention
from benchmarks.packed_attention import ATTENTIONS, choose_attention, packed_inputs, register

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
LENGTHS = [5, 1, 9, 3]


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Stand-in for ``varlen_attn`` of torch 2.11: a loop over the documents."""
    assert window_size == (-1, 0), "the documents are causal"
    assert cu_seq_q is cu_seq_k, "queries and keys are the same tokens"
    assert cu_seq_q.dtype == torch.int32, "the kernel reads borders of 32 bits"
    assert max_q == max_k == int(cu_seq_q.diff().max()), "the longest document is known"
    parts = []
    for start, stop in pairwise(cu_seq_q.tolist()):
        heads = [tensor[start:stop].transpose(0, 1) for tensor in (query, key, value)]
        attended = F.scaled_dot_product_attention(
            *heads, is_causal=True, scale=scale, enable_gqa=True
        )
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


def attend_documents_2_12(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    """Stand-in for ``varlen_attn`` since torch 2.12, which must know of fewer key/value heads."""
    query, key, *_ = args
    assert enable_gqa or query.shape[1] == key.shape[1], "fewer key/value heads are announced"
    return attend_documents(*args, **options)


def tiny_llama(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM._from_config(
        config, dtype=torch.float64, attn_implementation=ATTENTIONS[attention]
    )


def set_package(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: is_installed)


@pytest.mark.parametrize("product", [attend_documents, attend_documents_2_12])
def test_torch_flash_equals_sdpa_with_a_block_diagonal_mask(
    product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attn", product)
    register()
    tokens = torch.randint(64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    inputs = packed_inputs(LENGTHS, CPU)
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    mask = (documents[:, None] == documents).tril()[None, None]
    dense, flash = tiny_llama("sdpa"), tiny_llama("torch_flash")
    expected = dense(tokens, attention_mask=mask, position_ids=inputs["position_ids"]).logits
    actual = flash(tokens, use_cache=False, **inputs).logits
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)
    by_positions = dense(tokens, use_cache=False, **inputs).logits
    torch.testing.assert_close(by_positions, expected, atol=1e-12, rtol=1e-10)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weight).sum().backward()
    (actual * weight).sum().backward()
    for parameter, reference in zip(flash.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, atol=1e-11, rtol=1e-9)


def test_padding_and_several_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attn", attend_documents)
    register()
    model = tiny_llama("torch_flash")
    inputs = {**packed_inputs(LENGTHS, CPU), "use_cache": False}
    tokens = torch.zeros(1, sum(LENGTHS), dtype=torch.long)
    padding = torch.ones_like(tokens)
    padding[0, -1] = 0
    with pytest.raises(ValueError, match=r"has 1 rows, dropout 0\.0, a mask and no further"):
        model(tokens, attention_mask=padding, **inputs)
    with pytest.raises(ValueError, match=r"has 2 rows, dropout 0\.0, no mask and no further"):
        model(tokens.expand(2, -1), **inputs)
    attend = packed_attention.attention_by(attend_documents)
    heads = torch.zeros(1, 4, 3, 8)
    with pytest.raises(
        ValueError, match=r"no mask and \{'sliding_window': 2\}.*attention \"sdpa\""
    ):
        attend(
            *(model, heads, heads, heads, None),
            cu_seq_lens_q=torch.tensor([0, 3], dtype=torch.int32),
            max_length_q=3,
            sliding_window=2,
        )


def test_packed_inputs_equal_those_of_the_collator_of_transformers() -> None:
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    theirs = collate([{"input_ids": [7] * length} for length in LENGTHS])
    ours = packed_inputs(LENGTHS, CPU)
    assert ours.keys() == theirs.keys() - {"input_ids", "labels"}
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


@pytest.mark.parametrize(
    ("device", "has_package", "expected"),
    [
        ("cpu", False, "sdpa"),
        ("cuda", False, "torch_flash"),
        ("cuda", True, "flash_attention_2"),
    ],
)
def test_the_fastest_attention_is_chosen(
    device: str, has_package: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_package(monkeypatch, has_package)
    assert choose_attention("auto", torch.device(device)) == expected
    for name in ATTENTIONS:
        assert choose_attention(name, torch.device(device)) == name


def options(tmp_path: Path, attention: str) -> argparse.Namespace:
    line = ["--model", "tiny_llama", "--length", "256", "--accelerator", "cpu", "--steps", "2"]
    line += ["--warmup", "1", "--rows", "transformers", "--attention", attention]
    return context_steps.parser().parse_args([*line, "--out", str(tmp_path / f"{attention}.json")])


def test_trainings_by_torch_flash_and_by_a_dense_mask_have_equal_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attn", attend_documents)
    flash, dense = (
        context_steps.train_transformers(options(tmp_path, name))
        for name in ("torch_flash", "sdpa")
    )
    assert (flash["attention"], dense["attention"]) == ("torch_flash", "sdpa")
    assert flash["documents"] > 1
    assert flash["losses"] == pytest.approx(dense["losses"], rel=5e-3)
    assert len(flash["losses"]) == 3
