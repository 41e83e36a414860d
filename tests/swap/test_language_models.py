"""Hugging Face models replaced in place keep their logits, losses and gradients in every layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.context_transport import ContextLinks, ContextTransport
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM
from lightning_megatron.swap.hugging_face.packed_rows import PackedRow, span_of
from tests.oracles import assert_equal, assert_same_gradients, float32_as_float64
from tests.swap.families import CASES, V, twin_of
from tests.swap.parts import check_call, expected_gradients
from tests.sweeps import all_run, chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")
eager_mask = pytest.importorskip("transformers.masking_utils").eager_mask

B, S = 3, 10
#: Cases and model types whose attention scores fall with the distance of tokens.
WITH_SLOPES = ("bloom", "mpt")
#: Logits, loss and gradients by name.
Reference = tuple[Tensor, Tensor, dict[str, Tensor]]


class ExactNorm(nn.Module):
    """Normalise like a family's RMSNorm, but in the dtype of the input; Hugging Face's module rounds
    float64 to float32.
    """

    def __init__(self, source: nn.Module, eps: float, offset: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.offset = source.weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight + self.offset, self.eps)


class ExactGelu(nn.Module):
    """Approximate gelu with all digits of its constants; BLOOM's module has eight digits."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


def exact_twin(case: str, **changes: Any) -> nn.Module:
    """Return a float64 model of a case that computes in float64 throughout."""
    changes["attn_implementation"] = attention_of(case)
    twin = normalise_exactly(twin_of(case, torch.float64, **changes).eval())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.1)
    return twin


def eager_in_float64(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Return the result of the eager attention of a module's own code, in float64 throughout."""
    with float32_as_float64():
        return sys.modules[type(module).__module__].eager_attention_forward(
            module, *inputs, **options
        )


def attention_of(case: str) -> str:
    """Return the name of an attention that computes a family's attention in float64."""
    if case in WITH_SLOPES:
        return "eager"
    if case not in ("gemma2",):
        return "sdpa"
    transformers.AttentionInterface.register("eager_in_float64", eager_in_float64)
    transformers.AttentionMaskInterface.register("eager_in_float64", eager_mask)
    return "eager_in_float64"


def normalise_exactly(twin: nn.Module) -> nn.Module:
    """Replace all norms of a model by norms that compute in the dtype of their input."""
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                eps = getattr(child, "variance_epsilon", None) or child.eps
                kind = type("Exact", (ExactNorm, type(child)), {})
                setattr(
                    module, name, kind(child, eps, 1.0 if "Gemma" in type(child).__name__ else 0.0)
                )
            if type(child).__name__ == "BloomGelu":
                setattr(module, name, type("Exact", (ExactGelu, type(child)), {})())
    return twin


def inputs() -> dict[str, dict[str, Any]]:
    """Return calls of every kind: full rows, padding on either side, packed sequences and odd
    lengths.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, S), generator=generator)
    labels = tokens.clone()
    labels[0, 4:6] = -100
    right, left = torch.ones(B, S, dtype=torch.long), torch.ones(B, S, dtype=torch.long)
    right[1, 7:], left[2, :3] = 0, 0
    packed = torch.cat([torch.arange(4), torch.arange(6)]).expand(B, S)
    gaps = torch.tensor([0, 2, 4, 5, 6, 9, 11, 12, 20, 21]).expand(B, S)
    return {
        "whole": {"input_ids": tokens, "labels": labels},
        "padded right": {
            "input_ids": tokens,
            "attention_mask": right,
            "labels": labels.masked_fill(right == 0, -100),
        },
        "padded right, with labels there": {
            "input_ids": tokens,
            "attention_mask": right,
            "labels": labels,
        },
        "padded left": {
            "input_ids": tokens,
            "attention_mask": left,
            # The first token follows padding and cannot be predicted.
            "labels": labels.masked_fill(F.pad(left, (1, 0), value=1)[:, :-1] * left == 0, -100),
            "position_ids": (left.cumsum(-1) - 1).clamp(min=0),
        },
        "packed": {
            "input_ids": tokens,
            "position_ids": packed,
            "labels": labels,
            "use_cache": False,
        },
        # Positions cut rows only where Hugging Face's model fills no cache.
        "restarting positions": {"input_ids": tokens, "position_ids": packed, "labels": labels},
        "positions with gaps": {"input_ids": tokens, "position_ids": gaps, "labels": labels},
        "positions with gaps, without a cache": {
            "input_ids": tokens,
            "position_ids": gaps,
            "labels": labels,
            "use_cache": False,
        },
        "odd": {"input_ids": tokens[:, :7], "labels": labels[:, :7]},
    }


def expected_of(twin: nn.Module, call: Mapping[str, Any]) -> Reference:
    """Return Hugging Face's logits, the loss in float64 and the gradients by name."""
    twin.zero_grad()
    logits = logits_of(twin, {name: tensor for name, tensor in call.items() if name != "labels"})
    shifted = F.pad(call["labels"], (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    loss.backward()
    return (
        logits.detach(),
        loss.detach(),
        {name: p.grad for name, p in twin.named_parameters() if p.grad is not None},
    )


def logits_of(twin: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Return Hugging Face's logits, in float64 throughout."""
    if twin.config.model_type not in WITH_SLOPES:
        logits: Tensor = twin(**call).logits
        return logits
    with float32_as_float64():
        if call.get("use_cache", True) or "position_ids" not in call:
            return twin(**call).logits
        # Hugging Face's models with slopes do not support packed sequences.
        starts = [
            *(call["position_ids"][0].diff(prepend=call["position_ids"][0, :1]) != 1)
            .nonzero()
            .flatten()
            .tolist(),
            S,
        ]
        parts = call["input_ids"].split([end - start for start, end in pairwise(starts)], 1)
        return torch.cat([twin(input_ids=part).logits for part in parts], 1)


def compare(case: str, *meshes: ParallelMesh) -> None:
    # The padding token occurs in the input, and some families do not train its vector.
    changes = {"pad_token_id": int(inputs()["whole"]["input_ids"][0, 1])}
    twin = exact_twin(case, **changes)
    references = {kind: expected_of(twin, call) for kind, call in inputs().items()}
    vectors = twin.get_input_embeddings()(inputs()["whole"]["input_ids"]).detach()
    from_vectors = logits_of(twin, {"inputs_embeds": vectors})
    for mesh in meshes:
        root = nn.ModuleDict({"model": exact_twin(case, **changes)})
        parallelize(root, mesh)
        compare_with(references, case, root["model"], mesh)
        assert_equal(
            root["model"](inputs_embeds=vectors).logits, from_vectors, f"{case}: vectors", 1e-9
        )


def compare_with(
    references: Mapping[str, Reference], case: str, model: HuggingFaceLM, mesh: ParallelMesh
) -> None:
    assert isinstance(model, HuggingFaceLM)
    for kind, call in inputs().items():
        label = f"{case}, {kind}, tp={mesh.tp.size} sp={mesh.sequence_parallel}"
        logits, loss, gradients = references[kind]
        check_call(model, call, logits, loss, label)
        assert_same_gradients(model, mesh, expected_gradients(model, gradients), label)


def check_generation(mesh: ParallelMesh, case: str = "llama", **changes: Any) -> None:
    changes |= {"pad_token_id": 0, "eos_token_id": None}
    twin, root = (
        twin_of(case, **changes).eval(),
        nn.ModuleDict({"model": twin_of(case, **changes)}),
    )
    parallelize(root, mesh)
    prompts = torch.randint(1, V, (2, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 7}):
        outputs = []
        for model in (twin, root["model"].eval()):
            torch.manual_seed(5)
            call = {"input_ids": prompts, "attention_mask": mask, "max_new_tokens": 7, **options}
            outputs.append(model.generate(**call))
        assert torch.equal(*outputs), f"{options}, tp={mesh.tp.size} sp={mesh.sequence_parallel}"


TWO_RANK_CASES = chosen(
    list(CASES),
    "gpt2",
    "llama with one key head",
    "mistral",
    "phi3",
    "gemma2",
    "olmo2",
    "bloom",
    "mpt",
    "gpt_neox in sequence without biases",
)
THREE_RANK_CASES = chosen(
    [
        *(case for case in CASES if "tied" in case),
        *("gpt2", "gpt_neox", "llama with one key head"),
    ],
    "llama tied with biases",
    "llama with one key head",
)


def check_twins(rank: int, size: int) -> None:
    layout = ParallelLayout(world_size=size, tp=size)
    meshes = [ParallelMesh.create(layout, sequence_parallel=parallel) for parallel in (False, True)]
    for case in TWO_RANK_CASES if size == 2 else THREE_RANK_CASES:
        compare(case, *meshes)
    for mesh in meshes:
        check_generation(mesh, num_hidden_layers=4)
        mesh.destroy()


#: Layouts of four ranks with pipeline stages, and the cases that run in them.
STAGES: tuple[tuple[dict[str, Any], Any], ...] = (
    ({"tp": 2, "pp": 2}, chosen(("llama", "gpt2", "qwen2"), "llama")),
    ({"pp": 2, "vpp": 2}, chosen(("llama", "gpt2", "qwen2"), "gpt2")),
    ({"pp": 2, "vpp": 2, "shape": "v"}, chosen(("llama", "gpt2", "qwen2"), "qwen2")),
)


def check_stages(rank: int, size: int) -> None:
    for sizes, cases in STAGES:
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, sequence_parallel=layout.tp > 1)
        for case in cases:
            changes = {"n_layer": 4} if case == "gpt2" else {"num_hidden_layers": 4}
            twin, root = (
                exact_twin(case, **changes),
                nn.ModuleDict({"model": exact_twin(case, **changes)}),
            )
            parallelize(root, mesh)
            with pytest.raises(
                UnsupportedError, match="2 pipeline stages cannot be called outside of steps"
            ):
                root["model"](**inputs()["whole"])
            with torch.no_grad():
                for kind, call in inputs().items():
                    unpadded = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
                    output = root["model"](**call)
                    with torch.enable_grad():
                        expected = expected_of(twin, call)
                    assert_equal(
                        output.logits[unpadded],
                        expected[0][unpadded],
                        f"{case}, {kind}, {layout}: logits",
                        1e-9,
                    )
                    assert_equal(output.loss, expected[1], f"{case}, {kind}, {layout}: loss", 1e-9)
        if all_run() or layout.tp > 1:
            check_generation(mesh, num_hidden_layers=4)
        mesh.destroy()


def test_models_in_stages_match_hugging_face() -> None:
    run_world(check_stages, 4)


def test_models_on_one_process_match_hugging_face() -> None:
    for case in CASES:
        compare(case, ParallelMesh.single())
    for case in ("llama", *WITH_SLOPES):
        check_generation(ParallelMesh.single(), case)


def test_models_on_two_ranks_match_hugging_face() -> None:
    run_world(check_twins, 2)


def test_models_on_three_ranks_match_hugging_face() -> None:
    run_world(check_twins, 3)


@pytest.mark.parametrize("case", WITH_SLOPES)
def test_slopes_over_padding_between_tokens_match_hugging_face(case: str) -> None:
    call = inputs()["whole"]
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, 3:5], mask[1, :2], mask[1, 6], mask[2, 8:] = 0, 0, 0, 0
    ignored = mask * F.pad(mask, (1, 0), value=1)[:, :-1] == 0
    call |= {"attention_mask": mask, "labels": call["labels"].masked_fill(ignored, -100)}
    root = nn.ModuleDict({"model": exact_twin(case)})
    logits, loss, gradients = expected_of(exact_twin(case), call)
    parallelize(root, ParallelMesh.single())
    check_call(root["model"], call, logits, loss, case)
    model = root["model"]
    expected = expected_gradients(model, gradients)
    assert_same_gradients(model, ParallelMesh.single(), expected, case)


def check_slopes(rank: int, size: int) -> None:
    """Compare models with slopes in stages and with every transport of attention."""
    layouts: tuple[tuple[dict[str, int], ContextTransport], ...] = (
        ({"pp": 2}, "auto"),
        *(({"cp": 2}, name) for name in ("ring", "all_gather", "all_to_all")),
    )
    for sizes, transport in layouts:
        layout = ParallelLayout(size, **sizes)
        mesh = ParallelMesh.create(layout, context=ContextLinks.of(transport, layout, size))
        for case in chosen(WITH_SLOPES, "mpt" if transport == "all_gather" else "bloom"):
            twin, root = exact_twin(case), nn.ModuleDict({"model": exact_twin(case)})
            parallelize(root, mesh)
            for kind in ("whole", "padded left", "packed"):
                call, label = inputs()[kind], f"{case}, {kind}, {sizes}, {transport}"
                logits, loss, gradients = expected_of(twin, call)
                model = root["model"]
                if mesh.pp.size > 1:
                    unpadded = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
                    with torch.no_grad():
                        output = model(**call)
                    assert_equal(output.logits[unpadded], logits[unpadded], label, 1e-9)
                    assert_equal(output.loss, loss, label, 1e-9)
                    continue
                check_call(model, call, logits, loss, label)
                for parameter in model.parameters():
                    # Ranks of cp are data ranks, so gradients are means over them.
                    dist.all_reduce(parameter.grad, group=mesh.cp.group)
                    parameter.grad /= mesh.cp.size
                assert_same_gradients(model, mesh, expected_gradients(model, gradients), label)
        mesh.destroy()


def test_models_with_slopes_match_hugging_face_in_stages_and_every_transport() -> None:
    run_world(check_slopes, 2)


def test_padding_uses_a_mask_only_where_lengths_do_not_suffice() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    labels = torch.tensor([[5, 6, -100, -100], [1, 2, 3, -100]])
    assert span_of(mask, None, PackedRow(), mask.shape, labels) is None
    assert span_of(mask, None, PackedRow(), mask.shape) is None
    left_padded = span_of(mask.flip(1), None, PackedRow(), mask.shape, labels.flip(1))
    assert left_padded is not None
    assert left_padded.mask is None
    assert torch.equal(left_padded.lengths, torch.tensor([[1, 3], [0, 4]]))
    # Labels at padding count, so padding must attend to the same tokens as in Hugging Face's models.
    labels_at_padding = labels.clone()
    labels_at_padding[0, 3] = 4
    scattered = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])
    for padding_mask, padding_labels in ((mask, labels_at_padding), (scattered, None)):
        span = span_of(padding_mask, None, PackedRow(), mask.shape, padding_labels)
        assert span is not None
        assert span.lengths is None
        assert torch.equal(span.mask, padding_mask.bool()[:, None, None])
    with pytest.raises(UnsupportedError, match="either attention_mask or cu_seq_lens_q: both"):
        span_of(mask, None, PackedRow(torch.tensor([0, 2, 4])), mask.shape)


def test_a_model_with_a_wrapped_layer_is_refused_with_and_without_weights(
    tmp_path: Path,
) -> None:
    twin_of("llama").save_pretrained(tmp_path)
    for build in (nullcontext, build_on_meta):
        root = nn.Module()
        with build():
            root.model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        root.model.model.layers[0].self_attn.q_proj = nn.Sequential(
            root.model.model.layers[0].self_attn.q_proj
        )
        with pytest.raises(
            UnsupportedError, match=r"q_proj' is a Sequential, but its class builds a Linear"
        ):
            parallelize(root, ParallelMesh.single())
