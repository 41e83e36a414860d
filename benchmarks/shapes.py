"""Models and layouts that several benchmarks measure."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.models.config import GPTConfig

SHAPES: dict[str, GPTConfig] = {
    "llama8b_half": GPTConfig.llama(
        vocab_size=131072,
        max_seq_length=4096,
        num_layers=16,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
    ),
    "gpt2_1_2b": GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=1024, num_layers=40, hidden_size=1536, num_heads=16
    ),
    "gpt2_2_5b": GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=1024, num_layers=54, hidden_size=1920, num_heads=20
    ),
    "gpt2_4_2b": GPTConfig.gpt2(
        vocab_size=51200, max_seq_length=1024, num_layers=64, hidden_size=2304, num_heads=24
    ),
    "mixtral_s": GPTConfig.llama(
        vocab_size=32768,
        max_seq_length=4096,
        num_layers=4,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        experts={"num_experts": 8, "top_k": 2, "ffn_hidden_size": 14336, "aux_loss": 0.01},
    ),
    "qwen3_30b_s": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=12,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "qwen3_12": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=12,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "qwen3_48": GPTConfig.llama(
        vocab_size=151552,
        max_seq_length=4096,
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_hidden_size=6144,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.01},
    ),
    "tiny": GPTConfig.llama(
        vocab_size=51200,
        max_seq_length=1024,
        num_layers=12,
        hidden_size=768,
        num_heads=12,
        ffn_hidden_size=3072,
    ),
    "tiny_moe": GPTConfig.llama(
        vocab_size=51200,
        max_seq_length=1024,
        num_layers=12,
        hidden_size=1024,
        num_heads=16,
        ffn_hidden_size=2816,
        experts={"num_experts": 32, "top_k": 4, "ffn_hidden_size": 704, "aux_loss": 0.01},
    ),
    "tiny_llama": GPTConfig.llama(
        vocab_size=512,
        max_seq_length=64,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=96,
    ),
    "tiny_mixtral": GPTConfig.llama(
        vocab_size=512,
        max_seq_length=64,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=96,
        experts={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, "aux_loss": 0.01},
    ),
    "tiny_gpt2": GPTConfig.gpt2(
        vocab_size=512, max_seq_length=64, num_layers=2, hidden_size=64, num_heads=4
    ),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout, and samples per data-parallel rank and step for each family of models.

    With pipeline stages a microbatch has one sample.
    """

    devices: int
    tp: int
    llama_batch: int
    gpt2_batch: int = 8
    ep: int = 1
    pp: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.devices // (self.tp * self.pp)

    def batch(self, model: str) -> int:
        """Return the samples per data-parallel rank and step."""
        return self.gpt2_batch if "gpt2" in model else self.llama_batch


LAYOUTS = {
    "single": Layout(1, 1, 1),
    "dp2": Layout(2, 1, 1),
    "dp4": Layout(4, 1, 1),
    "tp2": Layout(2, 2, 2),
    "tp4": Layout(4, 4, 4),
    "ep2": Layout(2, 1, 1, ep=2),
    "ep4": Layout(4, 1, 1, ep=4),
    "ep8": Layout(8, 1, 1, ep=8),
    "pp2": Layout(2, 1, 8, pp=2),
    "pp4": Layout(4, 1, 16, pp=4),
    "tp2_pp2": Layout(4, 2, 8, pp=2),
    "pp2_ep2": Layout(4, 1, 8, ep=2, pp=2),
}
