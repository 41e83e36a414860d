"""Modules with code of their own, and what a CPU holds of them beside what is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron import BERTPretraining, EncoderConfig
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.memory.chunk_costs import ChunkTrace
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.memory.lone_stage import LoneStage, ModulePlans, put_into_buffers
from lightning_megatron.memory.module_copy import step_of
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.optimizer.reduction import GradientReducer
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.custom_schedule import build_order
from lightning_megatron.swap import parallelize
from lightning_megatron.swap.decide.automatic import automatic_pipeline_plan, automatic_tensor_plan
from tests.memory.measured import PatientMemory

WIDTH, LENGTH, VOCABULARY, SAMPLES = 64, 64, 256, 4
#: A step in single precision, with the optimizer on the parameters themselves.
STEP = TrainingShape(
    seq_length=1, microbatch_size=SAMPLES, num_microbatches=4,
    parameter_bytes=4, gradient_bytes=4, main_bytes=0, activation_bytes=4,
)  # fmt: skip


class PlainBlock(nn.Module):
    """Block of nanoGPT, with the scores of attention and their mask written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(1, 1, LENGTH, LENGTH)))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).split(WIDTH, 2)
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1) / 4.0).masked_fill(self.bias == 0, float("-inf"))
        x = x + self.drop(self.proj((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.out(F.gelu(self.fc(self.norms[1](x)))))


class Nano(L.LightningModule):
    """Decoder of plain blocks, which counts its calls, reads its loss and may recompute."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.num_calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_calls += 1
        tokens, labels = batch
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=self.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        self.log("loss", loss)
        return loss


class VisionBlock(nn.Module):
    """Block of timm's vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Vision(L.LightningModule):
    """Vision transformer whose step looks for losses that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 10)
        self.blocks = nn.Sequential(*(VisionBlock() for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.blocks(self.patches(batch["image"]).flatten(2).transpose(1, 2))
        loss = F.cross_entropy(self.head(x.mean(1)), batch["label"])
        if torch.isnan(loss) or not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {loss.item()}")
        return {"loss": loss}


class TorchEncoder(nn.Module):
    """Blocks of torch, without a training step."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, **changes))


def own_llama() -> Any:
    """A Llama that keeps Hugging Face's code, because of its dropout, and recomputes its layers."""
    model = llama(attention_dropout=0.1)
    model.gradient_checkpointing_enable()
    return model


def adapted_llama() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def bert() -> BERTPretraining:
    return BERTPretraining(
        EncoderConfig.bert(vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=3, num_heads=4)
    )


TOKENS = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH) % VOCABULARY
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
#: Makers of modules, with their batches.
MODULES: dict[str, tuple[Callable[[], Any], Any]] = {
    "nano": (Nano, (TOKENS, TOKENS)),
    "recomputed": (lambda: Nano(recomputes=True), (TOKENS, TOKENS)),
    "vision": (Vision, {"image": torch.ones(SAMPLES, 3, 32, 32), "label": torch.ones(SAMPLES).long()}),
    "torch": (TorchEncoder, torch.ones(SAMPLES, LENGTH, WIDTH)),
    "llama": (llama, TEXT),
    "own llama": (own_llama, TEXT),
    "adapters": (adapted_llama, TEXT),
    "bert": (bert, {
        "tokens": TOKENS, "labels": torch.where(TOKENS % 5 == 0, TOKENS, -100), "token_types": TOKENS * 0,
        "valid": TOKENS >= 0, "order": torch.zeros(SAMPLES).long(),
    }),
}  # fmt: skip


def built(name: str, mesh: ParallelMesh | None = None) -> Any:
    """Return a module for training; a mesh is published as the strategy does."""
    torch.manual_seed(0)
    module = MODULES[name][0]()
    module._device_mesh = mesh
    if name == "bert":
        module.configure_model()
    return module.train()


def held_of(name: str, mesh: ParallelMesh) -> dict[str, int]:
    """Return what the passes of a module hold on the CPU, and its permanent memory."""
    module = built(name, mesh)
    tensor_plan = automatic_tensor_plan(module, mesh)
    parallelize(module, mesh, tensor_plan, automatic_pipeline_plan(module, mesh.layout))
    main = put_into_buffers(module, mesh, STEP)
    reducer = GradientReducer(main)
    reducer.watch(main.buffers)
    memory = LiveMemory() if mesh.world.size == 1 else PatientMemory()
    for buffer in main.buffers:
        memory.leave_out([buffer.parameters, buffer.gradients])
    memory.leave_out([*module.buffers(), *module.parameters()])
    pipelined = next((model for _, model in pipelined_modules(module)), None)
    schedule = build_order("1f1b", mesh.pp.size, STEP.num_microbatches, 1, None)
    microbatch = Microbatch(MODULES[name][1], SAMPLES)
    models = layered_modules(module)
    stage: Any = LoneStage(memory, mesh, models, pipelined, None, main, reducer, step_of(module), microbatch, schedule)  # type: ignore[arg-type]  # fmt: skip
    return _costs_of(stage)


def traced_of(name: str, mesh: ParallelMesh, kind: str = "cpu") -> dict[str, int]:
    """Return what the same passes need according to a trace without the other ranks."""
    rank = mesh.pp.rank
    return _costs_of(
        LoneStage.of_module(
            built(name), MODULES[name][1], mesh.layout, STEP, rank, kind, ModulePlans()
        )
    )


def _costs_of(stage: LoneStage) -> dict[str, int]:
    with stage.batch(shares_casts=False):
        trace = ChunkTrace(stage, 0)
        trace.run()
        costs = asdict(trace.run())
    return costs | stage.main.memory() | {"crossing": trace.crossing}
